"""No test may reach a model hub: a run that needs one must fail here, not on the first machine without a network."""

import os

from hypothesis import settings


# Read when huggingface_hub is imported, so it is set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"

# The same examples everywhere, and no time limit for one: test machines are shared
settings.register_profile("trl_gad", deadline=None, derandomize=True)
settings.load_profile("trl_gad")
