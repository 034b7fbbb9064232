"""The vision tower, made cheap: its patch embedding as a matrix product, and a frozen tower that reads a picture once.

A tower that trains runs once per forward, as transformers wrote it. One that is frozen gives the same features of a
picture in every forward of policy, reference and discriminator, so all models that have the very same frozen tensors
read them from one `FeatureCache`.
"""

import types
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from trl_gad.batch import Group, Picture
from trl_gad.forward import vision_tower


# ---- The patch embedding ----


class PatchConv3d(nn.Conv3d):
    """
    A convolution over one patch at a time: kernel, stride and input have one size, so it is a matrix product.

    As a convolution, torch 2.9 and later are 10 to 60 times slower at it, on CUDA in bfloat16. Parameters, their names
    and the result are those of `Conv3d`.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[N, channels, *kernel]` -> `[N, out, 1, 1, 1]`; inputs of other sizes as in `Conv3d`."""
        if input.dim() != 5 or tuple(input.shape[2:]) != self.kernel_size:
            return super().forward(input)
        return F.linear(input.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None, None]


def use_matrix_patches(model: PreTrainedModel | PeftModel) -> int:
    """
    Make matrix products of the convolutions in the patch embedding of `model`'s vision tower, in place. Convolutions
    whose patches overlap or leave gaps stay as they are.

    Returns:
        `int`: convolutions that changed; 0 for text models.
    """
    tower = vision_tower(model)
    num_changed = 0
    for module in tower.patch_embed.modules() if tower is not None else ():
        # Their class is changed, not their `forward`: a deep copy, a file and PEFT see the same module with other code
        if type(module) is nn.Conv3d and _has_patches_apart(module):
            module.__class__ = PatchConv3d
            num_changed += 1
    return num_changed


def _has_patches_apart(conv: nn.Conv3d) -> bool:
    return (conv.stride, conv.padding, conv.dilation, conv.groups) == (conv.kernel_size, (0, 0, 0), (1, 1, 1), 1)


# ---- One frozen tower for several models ----


def share_vision_tower(source: PreTrainedModel | PeftModel, target: PreTrainedModel | PeftModel) -> bool:
    """
    Give `target` the frozen vision tower of `source`: the same tensors, so that they are held and run once. From then
    on, loading other values into `target`'s tower is an error: `source` would read them.

    Returns:
        `bool`: Whether it was done. Towers of other parameters (adapters inside one of them) keep their own.
    """
    towers = vision_tower(source), vision_tower(target)
    if towers[0] is None or towers[1] is None:
        return False
    theirs, own = (dict(tower.named_parameters()) for tower in towers)
    if theirs.keys() != own.keys():
        return False
    assert not any(p.requires_grad for p in (*theirs.values(), *own.values())), "a tower that trains is not shared"
    assert all(torch.equal(own[name], value) for name, value in theirs.items()), "towers of different weights"
    for module_name, module in towers[1].named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, theirs[f"{module_name}.{name}" if module_name else name])
    towers[1].register_load_state_dict_pre_hook(_refuse_other_weights)
    return True


def _refuse_other_weights(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    for name, parameter in module.named_parameters():
        value = state_dict.get(prefix + name)
        if value is not None and not torch.equal(value.to(parameter.device, parameter.dtype), parameter):
            raise ValueError(
                "With freeze_vision=True the discriminator has the policy's vision tower, and the weights to be "
                f"loaded have another one ({prefix + name} differs). Resume with the `freeze_vision` that the run was "
                "started with, or start a new run with `discriminator=` set to the saved folder."
            )


# ---- Features of pictures ----


@dataclass
class _Entry:
    picture: Picture  # held, so that its id is no other picture's
    features: list[torch.Tensor] = field(default_factory=list)  # pooled, then DeepStack's; [tokens, hidden] each


class FeatureCache:
    """
    What a frozen vision tower said of the pictures of one rollout batch, for all models that have this very tower.

    A forward names its pictures (`picture_ids`, see `forward.model_inputs`). Those of the batch go through the tower
    in the first forward that has them, without gradient, and are read from here in all others: micro-batches, models,
    steps on the same batch. Other pictures (an evaluation's) and `generate` run the tower as ever.

    Memory, on the device, from the first forward of a rollout batch to `clear`: image tokens x hidden size x (1 +
    DeepStack layers) x 2 bytes in bfloat16. For Qwen3-VL-2B (2048, 3 layers) that is 16 kB a token: 0.5 GB for 32
    pictures of 1000 tokens. Every process holds its own pictures only.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The policy, on its device and with its final `requires_grad`. Where its tower trains, nothing is cached.
    """

    def __init__(self, model: PreTrainedModel | PeftModel):
        tower = vision_tower(model)
        self._parameters: dict[str, nn.Parameter] = {} if tower is None else dict(tower.named_parameters())
        self._entries: dict[int, _Entry] = {}
        if tower is None or not _is_fixed(tower):
            self._parameters = {}

    def attach(self, model: PreTrainedModel | PeftModel) -> bool:
        """
        Let `model` read from the cache, if its tower is the one: the same frozen parameter objects.

        Returns:
            `bool`: Whether it does.
        """
        tower = vision_tower(model)
        if tower is None or not self._parameters or not _is_fixed(tower):
            return False
        own = dict(tower.named_parameters())
        if own.keys() != self._parameters.keys() or any(own[n] is not p for n, p in self._parameters.items()):
            return False
        tower.feature_cache = self
        # Bound to the module and no closure: a deep copy of the module runs its own weights
        tower.forward = types.MethodType(_read_or_run, tower)
        return True

    def hold(self, groups: list[Group]) -> None:
        """From now on these are the pictures to keep features of; features of all others are dropped."""
        pictures = {id(picture): picture for group in groups for picture in group.pictures}
        self._entries = {key: self._entries.get(key) or _Entry(picture) for key, picture in pictures.items()}

    def clear(self) -> None:
        """Drop everything."""
        self._entries = {}

    def entries(self, picture_ids: list[int]) -> list[_Entry] | None:
        """Of each picture, in order; None unless all are held."""
        if not all(key in self._entries for key in picture_ids):
            return None
        return [self._entries[key] for key in picture_ids]


def _is_fixed(tower: nn.Module) -> bool:
    """Whether nothing of the tower trains or is a matter of chance."""
    return not any(p.requires_grad for p in tower.parameters()) and not any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in tower.modules()
    )


def _read_or_run(
    self: Any,
    hidden_states: torch.Tensor,
    grid_thw: torch.Tensor,
    picture_ids: list[int] | None = None,
    **kwargs: Any,
) -> Any:
    """
    The forward of an attached tower.

    Args:
        hidden_states (`torch.Tensor`): `[patches, patch size]`, of all pictures in order.
        grid_thw (`torch.Tensor`): `[pictures, 3]`.
        picture_ids (`list[int]`, *optional*): `id` of each `Picture`.

    Returns:
        The tower's output: `pooler_output` `[image tokens, hidden]`, for Qwen3-VL `deepstack_features`. Nobody reads
        `last_hidden_state`, which is left out where features come from the cache.
    """
    entries = None if picture_ids is None else self.feature_cache.entries(picture_ids)
    if entries is None:
        return type(self).forward(self, hidden_states, grid_thw=grid_thw, **kwargs)
    sizes = [time * height * width for time, height, width in (entry.picture.grid_thw for entry in entries)]
    assert sum(sizes) == len(hidden_states), f"{sum(sizes)} patches of these pictures, {len(hidden_states)} given"
    places = {id(entry): place for place, entry in enumerate(entries) if not entry.features}
    if places:  # one place of each picture that is new
        new = list(places.values())
        pieces = hidden_states.split(sizes)
        with torch.no_grad():
            output = type(self).forward(
                self, torch.cat([pieces[place] for place in new]), grid_thw=grid_thw[new], **kwargs
            )
        features = [output.pooler_output]
        if isinstance(output, BaseModelOutputWithDeepstackFeatures):
            features += output.deepstack_features or []
        num_tokens = [sizes[place] // self.spatial_merge_size**2 for place in new]
        for place, *parts in zip(new, *(feature.detach().split(num_tokens) for feature in features), strict=True):
            entries[place].features = parts
    pooled, *deepstack = (torch.cat(parts) for parts in zip(*(entry.features for entry in entries), strict=True))
    if not deepstack:
        return BaseModelOutputWithPooling(pooler_output=pooled)
    return BaseModelOutputWithDeepstackFeatures(pooler_output=pooled, deepstack_features=deepstack)
