"""Copies of the policy that share its parameters, the frozen reference, and the check of the parameters' precision.

TRL and accelerate replace the `forward` of the policy they train, and a deep copy made after that would still run the
policy's weights. So every copy is made here from the untouched model, before the trainer is built. A copy costs no
memory: it has modules of its own and the policy's very parameters until they are replaced.
"""

import copy
import logging
from typing import Any

import torch
from torch import nn


logger = logging.getLogger(__name__)

SPARED_SHARE = 0.5  # more rounded-away parameters than this are an error


def structural_copy(model: Any) -> Any:
    """The same modules anew, with the same `Parameter` objects. Buffers are copied, for they do not move together."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def own_parameters(model: nn.Module, *, trainable_only: bool = False) -> None:
    """
    Replace the parameters of a structural copy by clones of their present values, frozen ones included unless
    `trainable_only`. Tied parameters stay tied.
    """
    clones: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if trainable_only and not parameter.requires_grad:
                continue
            if id(parameter) not in clones:
                clones[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            module.register_parameter(name, clones[id(parameter)])


def snapshot(skeleton: Any) -> Any:
    """
    Turn a structural copy of the policy into the frozen reference: what the policy trains is cloned as it is now, what
    is frozen anyway (the base model under LoRA) stays shared.
    """
    own_parameters(skeleton, trainable_only=True)
    return skeleton.requires_grad_(False).eval()  # of the shared ones, all are frozen already


def rounded_away_share(parameters: list[nn.Parameter], learning_rate: float) -> float:
    """
    The share of parameters that an AdamW update of size `learning_rate` cannot move, because it is less than half the
    distance to the next number their dtype can hold.

    At most a few thousand values of each parameter are looked at. bf16 keeps 8 significant bits, so a weight of 0.02
    moves only in steps of about 1e-4.
    """
    lost = seen = 0
    for parameter in parameters:
        values = parameter.detach().flatten()[:4096].abs()
        half_step = torch.finfo(parameter.dtype).eps / 2 * 2 ** torch.floor(torch.log2(values.float()))
        lost += int((half_step > learning_rate).sum())
        seen += values.numel()
    return lost / max(seen, 1)


def check_precision(model: nn.Module, learning_rate: float, name: str) -> None:
    """
    Refuse trainable parameters in half precision that the learning rate cannot move; warn where it moves only some.

    Raises:
        ValueError: more than half of them would stay where they are.
    """
    halves = [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    share = rounded_away_share(halves, learning_rate)
    if share > SPARED_SHARE:
        raise ValueError(
            f"The {name} has trainable parameters in {halves[0].dtype}: at a learning rate of {learning_rate} about "
            f"{share:.0%} of their updates would round to nothing. Load it in float32 (dtype='float32') and keep "
            "bf16=True, which computes in bfloat16 and keeps the master weights in float32."
        )
    if share > 0.01:
        logger.warning(
            "About %.0f%% of the updates of the %s's %s parameters round to nothing at a learning rate of %s; float32 "
            "parameters with bf16=True avoid that.", 100 * share, name, halves[0].dtype, learning_rate,
        )  # fmt: skip
