"""Attention of a pack: a token sees its prompt and its own response up to itself, nothing else.

Registered with transformers under the name "trl_gad". The model's forward is given `pack_layout`, built once per pack,
and hands it on to every layer. The vision tower keeps its own attention.

Back ends: `varlen_attn` (one call for the pack, on CUDA in bfloat16 or float16) or
`scaled_dot_product_attention` (one call per row, everywhere else).
"""

import inspect
import logging
from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from trl_gad.batch import Segment


logger = logging.getLogger(__name__)

NAME = "trl_gad"
# torch 2.10 has no `window_size` and no `scale`; `enable_gqa` came with 2.12.
_VARLEN_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)
_VARLEN_USABLE = {"window_size", "scale"} <= _VARLEN_PARAMETERS
_VARLEN_OPTIONS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _VARLEN_PARAMETERS else {}
_MAX_VARLEN_HEAD_DIM = 256
_NAMES = {True: "varlen_attn, one call a pack", False: "scaled_dot_product_attention, one call a row"}
# The implementation that a model had before `use_packed_attention`.
_native: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()


class PackLayout:
    """Where the tokens of a pack lie, as index tensors on `device`, so that no layer waits for the host.

    A plain class and no dataclass: wrappers of distributed training copy or cast the tensors inside a dataclass.

    Example: prompt [1, 2, 3] with responses [7, 8] and [9], stored as [1, 2,  3, 7, 8,  3, 9]:

        keys  = [0, 1,  0, 1, 2, 3, 4,  0, 1, 5, 6]    (the prompt; prompt + first; prompt + second)
        cu_q  = [0, 2, 5, 7]
        cu_k  = [0, 2, 7, 11]
    """

    def __init__(self, segments: list[Segment], device: torch.device):
        self.segments = segments
        self.device = device
        self.rows = [(segment.prompt[0], segment.responses[-1][1]) for segment in segments]  # [start, stop) of each
        self.num_tokens = self.rows[-1][1]
        keys, lengths_q, lengths_k = [], [], []
        for segment in segments:
            prompt = torch.arange(*segment.prompt)
            if len(prompt):  # of one token, it is stored in its copies only: no query of its own
                keys.append(prompt)
                lengths_q.append(len(prompt))
                lengths_k.append(len(prompt))
            for start, stop in segment.responses:
                keys += [prompt, torch.arange(start, stop)]
                lengths_q.append(stop - start)
                lengths_k.append(len(prompt) + stop - start)
        self.keys = torch.cat(keys).to(device)  # [K] int64
        self.cu_q = torch.tensor([0, *lengths_q], device=device).cumsum(0, dtype=torch.int32)  # [sequences + 1]
        self.cu_k = torch.tensor([0, *lengths_k], device=device).cumsum(0, dtype=torch.int32)
        self.max_q, self.max_k = max(lengths_q), max(lengths_k)

    @cached_property
    def masks(self) -> list[torch.Tensor | None]:
        """`[n, n]` bool for each row of n tokens, True where the query (first axis) sees the key; None: plain causal."""
        return [self._mask(segment, *row) for segment, row in zip(self.segments, self.rows, strict=True)]

    def _mask(self, segment: Segment, start: int, stop: int) -> torch.Tensor | None:
        if len(segment.responses) == 1:
            return None
        mask = torch.ones(stop - start, stop - start, dtype=torch.bool, device=self.device).tril()
        num_prompt = segment.prompt[1] - start
        for begin, end in segment.responses:
            mask[begin - start : end - start, num_prompt : begin - start] = False
        return mask


def layout(segments: list[Segment], device: torch.device | str) -> PackLayout:
    """The layout of a pack with these `segments` (`pack.segments`), for `pack_layout` of the model's forward."""
    return PackLayout(segments, torch.device(device))


class _Gather(torch.autograd.Function):
    """`states[index]` whose gradient is summed in float32: a prompt's key collects one term per response."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_states = states.shape[0]
        return states.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.num_states, *grad.shape[1:], dtype=torch.float32, device=grad.device)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackLayout, scale: float | None
) -> torch.Tensor:
    """`[1, heads, T, D]` query, `[1, key heads, T, D]` key and value -> `[1, T, heads, D]`, one call for the pack."""
    key, value = (_Gather.apply(states[0].transpose(0, 1), layout.keys) for states in (key, value))
    if not _VARLEN_OPTIONS:
        num_groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(num_groups, dim=1), value.repeat_interleave(num_groups, dim=1)
    # Causal, aligned at the end where a response has fewer queries than keys: its query i sees the prompt and i + 1.
    output = varlen_attn(
        query[0].transpose(0, 1),
        key,
        value,
        layout.cu_q,
        layout.cu_k,
        layout.max_q,
        layout.max_k,
        scale=scale,
        window_size=(-1, 0),
        **_VARLEN_OPTIONS,
    )
    assert isinstance(output, torch.Tensor)
    return output[None]


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackLayout, scale: float | None
) -> torch.Tensor:
    """The same with `scaled_dot_product_attention`, one call per row."""
    num_groups = query.shape[1] // key.shape[1]
    outputs = []
    for (start, stop), mask in zip(layout.rows, layout.masks, strict=True):
        q, k, v = (states[:, :, start:stop] for states in (query, key, value))
        # With a mask and grouped keys, torch takes its slowest kernel.
        repeat = mask is not None and num_groups > 1
        if repeat:
            k, v = k.repeat_interleave(num_groups, dim=1), v.repeat_interleave(num_groups, dim=1)
        outputs.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=num_groups > 1 and not repeat
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


@lru_cache(maxsize=16)
def _use_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Cached, so that the choice is said once."""
    use = (
        device.type == "cuda"
        and _VARLEN_USABLE
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim <= _MAX_VARLEN_HEAD_DIM
        and head_dim % 8 == 0
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
    logger.info("Packed attention on %s in %s with head size %d: %s", device, dtype, head_dim, _NAMES[use])
    return use


def what_attends(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The function that computes packed attention there, in words."""
    return _NAMES[_use_varlen(device, dtype, head_dim)]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    pack_layout: PackLayout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in each text layer.

    Args:
        query (`torch.Tensor`): `[1, heads, T, D]`; `key` and `value` may have fewer heads.
        pack_layout (`PackLayout`): given to the model's forward as a keyword.

    Returns:
        `[1, T, heads, D]`, and None for the weights.

    Raises:
        RuntimeError: called without a layout, as `generate` does.
        ValueError: the model asks for something that a pack has not (dropout, a window, a cap, sinks).
    """
    if pack_layout is None:
        raise RuntimeError(
            "The model's attention is set up for packs, but its forward was called without `pack_layout`. Call "
            "`generate`, or any forward of padded rows, inside `with trl_gad.attention.native_attention(model):`."
        )
    wanted = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    wanted += [f"dropout {dropout}"] if dropout else []
    if wanted:
        raise ValueError(
            f"Packed attention is plain full attention, but {type(module).__name__} asks for {', '.join(wanted)}. "
            "Set `attention_dropout` to 0 in the model's config, or use a model with plain full attention."
        )
    assert query.shape[0] == 1, f"a pack is one sequence, not {query.shape[0]}"
    assert query.shape[2] == pack_layout.num_tokens, f"{query.shape[2]} != {pack_layout.num_tokens} tokens of the pack"
    if torch.is_autocast_enabled(query.device.type):
        # Norms and rotary positions leave queries and keys in float32, the projection of the values does not
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    attend = varlen if _use_varlen(query.device, query.dtype, query.shape[-1]) else dense
    return attend(query, key, value, pack_layout, scaling), None


def _no_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Who sees whom is in the layout. A mask would be ignored in silence, so it is refused."""
    if attention_mask is not None:
        raise ValueError("A pack has no padding: call the model without `attention_mask`.")


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _no_mask)


def base_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The transformers model inside a PEFT model, or `model` itself."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel), type(base)
    return base


def _set(base: PreTrainedModel, name: str) -> None:
    is_text_only = base.config.get_text_config() is base.config
    base.set_attn_implementation(name if is_text_only else {"text_config": name})


def use_packed_attention(model: PreTrainedModel | PeftModel) -> None:
    """Set the attention of the model's text layers, for good; the vision tower keeps its own.

    Raises:
        ValueError: a text layer that is not full attention, or a model that takes no attention from outside.
    """
    base = base_model(model)
    text = base.config.get_text_config()
    if text._attn_implementation == NAME:
        return
    values = text.to_dict()
    layer_types = values.get("layer_types") or [
        "sliding_attention" if values.get("sliding_window") else "full_attention"
    ]
    others = sorted(set(layer_types) - {"full_attention"})
    if others:
        raise ValueError(
            "Packing needs full attention in every text layer: a response must see its whole prompt across the other "
            f"responses. {type(base).__name__} has {', '.join(others)} in `layer_types`. Use a model with "
            "full attention, such as Qwen3-VL."
        )
    native = text._attn_implementation
    _set(base, NAME)
    if text._attn_implementation != NAME:
        raise ValueError(
            f"Packing needs a model that takes its attention from transformers' AttentionInterface; "
            f"{type(base).__name__} does not. Use a model such as Qwen3-VL, Qwen2.5-VL or Qwen3."
        )
    _native[base] = native or "sdpa"


@contextmanager
def native_attention(model: PreTrainedModel | PeftModel) -> Generator[None]:
    """The model's own attention inside, for `generate` and padded rows; the packed one again afterwards.

    That is the implementation which `use_packed_attention` replaced; "sdpa" for a copy of such a model.
    """
    base = base_model(model)
    current = base.config.get_text_config()._attn_implementation
    assert current is not None
    if current == NAME:
        _set(base, _native.get(base, "sdpa"))
    try:
        yield
    finally:
        _set(base, current)
