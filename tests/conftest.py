"""No test may reach a model hub: a run that needs one must fail here, not on the first machine without a network."""

import os


# Read when huggingface_hub is imported, so it is set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
