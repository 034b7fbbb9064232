"""The discriminator: the policy's network with a scalar head, and its own folder."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import HFValidationError
from peft import PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, PreTrainedModel

from trl_gad.models import own_parameters


HEAD_FILE = "score_head.safetensors"
CONFIG_FILE = "discriminator_config.json"


class Discriminator(nn.Module):
    """
    D(x, y) of GAD (arXiv 2511.10643, section 3): a language model without its LM head and a linear head that scores a
    response at its last token.

    The head and the score are float32, outside autocast. Any causal language model of transformers will do, vision
    ones included: what it needs is the model's backbone (`model.base_model`).

    Args:
        backbone ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The network without LM head, e.g. a `Qwen3VLModel`.

    Example:

    ```python
    >>> from trl_gad import Discriminator

    >>> discriminator = Discriminator.from_pretrained("out/discriminator")
    ```
    """

    def __init__(self, backbone: "PreTrainedModel | PeftModel"):
        super().__init__()
        self.backbone = backbone
        hidden_size = self.config.get_text_config().hidden_size
        self.score = nn.Linear(hidden_size, 1, bias=False, dtype=torch.float32)
        nn.init.normal_(self.score.weight, std=hidden_size**-0.5)

    @property
    def config(self):
        """The backbone's configuration."""
        return self.backbone.config

    @property
    def base(self) -> Any:
        """The backbone without adapters around it."""
        return self.backbone.get_base_model() if isinstance(self.backbone, PeftModel) else self.backbone

    def forward(self, last: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """
        Args:
            last (`torch.Tensor` of shape `(R,)`): Place of each response's last token in the sequence.
            inputs: The backbone's inputs for one sequence (batch size 1), see `forward.model_inputs`.

        Returns:
            `torch.Tensor` of shape `(R,)`, float32: One score per response.
        """
        hidden = self.backbone(**inputs).last_hidden_state[0, last]
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(self.score.weight.dtype), self.score.weight)[:, 0]

    @classmethod
    def from_policy(
        cls, model: "PreTrainedModel | PeftModel", peft_config: PeftConfig | None = None, share_base: bool = False
    ) -> "Discriminator":
        """
        A discriminator that starts from the policy's weights, with a new head.

        Args:
            model: A structural copy of the untouched policy (see `models.structural_copy`): its modules are taken over.
            peft_config: Train adapters only.
            share_base: Keep the policy's own parameters under the adapters, for a policy that does not train them.
        """
        backbone: Any
        if isinstance(model, PeftModel):
            own_parameters(model)  # merging writes into the base weights
            backbone = model.merge_and_unload().base_model
        else:
            backbone = model.base_model
            if not share_base:
                own_parameters(backbone)
        if peft_config is None:
            backbone.requires_grad_(True)
            return cls(backbone)
        peft_config = copy.copy(peft_config)
        peft_config.task_type = None  # a backbone writes no text, whatever the policy's configuration says
        return cls(get_peft_model(backbone, peft_config))

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """
        Save into a folder of its own: the backbone as transformers saves it (or the adapter as PEFT saves it), the
        head, and what `from_pretrained` must know.

        Args:
            folder: Where to.
            state_dict: The weights, when they are not this module's own (sharded training).
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state_dict = self.state_dict() if state_dict is None else state_dict
        of_backbone = {k.removeprefix("backbone."): v for k, v in state_dict.items() if k.startswith("backbone.")}
        self.backbone.save_pretrained(str(folder), state_dict=of_backbone)
        save_file({"weight": state_dict["score.weight"].contiguous()}, folder / HEAD_FILE)
        base_model = self.base.config._name_or_path if isinstance(self.backbone, PeftModel) else None
        (folder / CONFIG_FILE).write_text(json.dumps({"base_model": base_model}, indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        subfolder: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        base_model: str | Path | None = None,
        dtype: Any = torch.float32,
        **kwargs: Any,
    ) -> "Discriminator":
        """
        Load what `save_pretrained` wrote; the class and the configuration are found in the folder.

        Args:
            folder: A local folder, or the name of a repository on the Hub.
            subfolder: Where in it, `"discriminator"` in what `trainer.push_to_hub()` uploaded.
            revision, token: Of the repository.
            base_model: Where the frozen base of a LoRA discriminator is, if not where it was at the time.
            dtype: Of the backbone. The head is float32. The model comes in evaluation mode.
            kwargs: Passed to `from_pretrained` of the backbone.

        Raises:
            ValueError: the folder holds no discriminator, or the base model of its adapter is not known.
        """
        folder = _local_folder(folder, subfolder, revision, token)
        if not is_discriminator(folder):
            raise ValueError(
                f"{folder} holds no discriminator: {HEAD_FILE} is not there. Pass the folder that "
                "`Discriminator.save_pretrained` or `trainer.save_model()` wrote (`.../discriminator`)."
            )
        if (folder / "adapter_config.json").exists():
            base_model = base_model or json.loads((folder / CONFIG_FILE).read_text())["base_model"]
            if not base_model:
                raise ValueError(
                    f"{folder} holds an adapter and does not say of which base model, which had no path when it was "
                    "saved. Pass `base_model=`."
                )
            backbone = AutoModel.from_pretrained(base_model, dtype=dtype, **kwargs)
            backbone = PeftModel.from_pretrained(backbone, folder, is_trainable=True)
        else:
            backbone = AutoModel.from_pretrained(folder, dtype=dtype, **kwargs)
        discriminator = cls(backbone)
        discriminator.score.load_state_dict(load_file(folder / HEAD_FILE))
        return discriminator.eval()


def is_discriminator(folder: str | Path) -> bool:
    """Whether `folder` was written by `Discriminator.save_pretrained`."""
    return (Path(folder) / HEAD_FILE).is_file()


def _local_folder(name: str | Path, subfolder: str | None, revision: str | None, token: str | bool | None) -> Path:
    """A local folder as it is; of a repository on the Hub, `subfolder` is downloaded."""
    root = Path(name)
    if not root.is_dir():
        try:
            # First, and small: without it nothing else is downloaded
            hf_hub_download(str(name), HEAD_FILE, subfolder=subfolder, revision=revision, token=token)
            pattern = f"{subfolder}/*" if subfolder else None
            root = Path(snapshot_download(str(name), allow_patterns=pattern, revision=revision, token=token))
        except (HFValidationError, RepositoryNotFoundError, EntryNotFoundError) as error:
            raise ValueError(
                f"{name} is no folder here, and no repository on the Hub has {HEAD_FILE} under that name"
                f"{f' in {subfolder}/' if subfolder else ''}. Pass the folder that `Discriminator.save_pretrained` or "
                '`trainer.save_model()` wrote, or a repository with subfolder="discriminator".'
            ) from error
    return root / subfolder if subfolder else root
