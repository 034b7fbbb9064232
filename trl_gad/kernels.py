"""Fused kernels for the text layers, and the dtype of their residual stream.

RMSNorm, SwiGLU and rotary positions come from Liger Kernel where it is installed, on CUDA and for packs that are long
enough to gain from it. Parameters and their names stay as they are.
"""

import functools
import importlib
import logging
import types
from importlib.util import find_spec
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from trl_gad.attention import base_model


logger = logging.getLogger(__name__)

# In short packs the launch costs more than the fusion saves. Where the border lies is not measured.
MIN_TOKENS = 2048


def is_liger_available() -> bool:
    """Whether `liger-kernel` is installed."""
    return find_spec("liger_kernel") is not None


@functools.cache
def _liger() -> Any:
    """Imported when it runs: it needs a GPU's compiler."""
    return importlib.import_module("liger_kernel.ops")


def use_fused_kernels(model: PreTrainedModel | PeftModel) -> int:
    """Run RMSNorms, gated MLPs and rotary positions by Liger's kernels wherever that gives the same numbers.

    Whether it does is tried once for every class of modules: a norm that adds one to its weights, or another activation,
    keeps its own forward.

    Args:
        model (`PreTrainedModel` or `PeftModel`): on its device.

    Returns:
        `int`: modules that changed; 0 without CUDA or without `liger-kernel`.
    """
    base = base_model(model)
    device = next(base.parameters()).device
    if device.type != "cuda" or not is_liger_available():
        return 0
    found: dict[type, Any] = {}
    num_changed = 0
    for module in base.modules():
        if type(module) not in found:
            found[type(module)] = _fused_forward(module, device)
        forward = found[type(module)]
        if forward is not None:
            # Bound, so that a deep copy of the module runs its own weights
            module.forward = types.MethodType(forward, module)
            num_changed += 1
    logger.info("Liger kernels run %d modules of %s", num_changed, type(base).__name__)
    return num_changed


def _fused_forward(module: Any, device: torch.device) -> Any:
    """The fused forward of a class of modules, else None."""
    children, own = dict(module.named_children()), vars(module)
    if type(module).__name__.endswith("RMSNorm") and "variance_epsilon" in own:
        return _rms_norm if _is_same(module, _rms_norm, module.weight.shape[-1], device) else None
    if {"gate_proj", "up_proj", "down_proj"} <= set(children):
        return _gated_mlp if _is_same(module, _gated_mlp, module.gate_proj.in_features, device) else None
    for name, rotate in (("apply_rotary_pos_emb", _rotate), ("apply_rotary_pos_emb_vision", _rotate_vision)):
        code = type(module).forward
        if isinstance(code, types.FunctionType) and name in code.__code__.co_names:
            plain = code.__globals__[name]
            return _calling(code, name, rotate, plain) if _is_same_rotation(plain, rotate, device) else None
    return None


def _rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if hidden_states.numel() < MIN_TOKENS * hidden_states.shape[-1]:
        return type(self).forward(self, hidden_states)
    weight, epsilon = self.weight, self.variance_epsilon
    return _liger().LigerRMSNormFunction.apply(hidden_states, weight, epsilon, 0.0, "llama", False)


def _gated_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.numel() < MIN_TOKENS * x.shape[-1]:
        return type(self).forward(self, x)
    return self.down_proj(_liger().LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


def _rotate(plain: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **kwargs: Any) -> Any:
    """`[1, heads, T, D]` queries and keys, `[1, T, D]` cosines and sines."""
    if kwargs or cos.dim() != 3 or q.shape[2] < MIN_TOKENS:
        return plain(q, k, cos, sin, **kwargs)
    return _liger().LigerRopeFunction.apply(q, k, cos, sin)


def _rotate_vision(plain: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """`[patches, heads, D]` queries and keys, `[patches, D]` cosines and sines, in float32 as the tower wants them."""
    if len(q) < MIN_TOKENS:
        return plain(q, k, cos, sin)
    # The kernel works in place: on copies, for these are views of one projection
    rows = [states.contiguous()[None].transpose(1, 2) for states in (q, k)]
    return tuple(
        states.transpose(1, 2)[0] for states in _liger().LigerRopeFunction.apply(*rows, cos.float(), sin.float())
    )


def _calling(function: types.FunctionType, name: str, replacement: Any, plain: Any) -> types.FunctionType:
    """`function` with another function behind one of the global names it calls: an attention's own forward, that is."""
    names = {**function.__globals__, name: functools.partial(replacement, plain)}
    other = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    other.__kwdefaults__ = function.__kwdefaults__
    return other


def _is_same(module: Any, forward: Any, width: int, device: torch.device) -> bool:
    """Compares the two forwards on random numbers."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(MIN_TOKENS, width, device=device, dtype=next(module.parameters()).dtype, generator=generator)
    with torch.no_grad():
        plain, fused = type(module).forward(module, x), forward(module, x)
    return _close(plain, fused)


def _is_same_rotation(plain: Any, rotate: Any, device: torch.device) -> bool:
    """The same for rotations, of 4 query and 2 key heads."""
    generator = torch.Generator(device).manual_seed(0)
    angles = torch.rand(MIN_TOKENS, 32, device=device, generator=generator).repeat(1, 2)
    q, k = (torch.randn(MIN_TOKENS, heads, 64, device=device, generator=generator) for heads in (4, 2))
    args = [q, k, angles.cos(), angles.sin()]
    if rotate is _rotate:
        args = [q.transpose(0, 1)[None], k.transpose(0, 1)[None], angles.cos()[None], angles.sin()[None]]
    with torch.no_grad():
        expected = plain(*args)  # first: the kernel works in place
        found = rotate(plain, *args)
    return all(_close(one, other) for one, other in zip(expected, found, strict=True))


def _close(plain: torch.Tensor, fused: torch.Tensor) -> bool:
    return bool(torch.allclose(plain, fused, rtol=1e-2, atol=1e-2 * float(plain.abs().mean())))


def follow_autocast(model: PreTrainedModel | PeftModel) -> None:
    """Let the text layers' residual stream have autocast's dtype, as in a model whose weights have it.

    Autocast leaves embeddings in the dtype of their float32 weights, and everything added to them: norms and residuals
    of all layers then move twice the bytes, and a server that holds the weights in bfloat16 computes something else.
    """
    base_model(model).get_input_embeddings().register_forward_hook(_in_autocast_dtype)


def _in_autocast_dtype(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    device = output.device.type
    return output.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else output
