"""The oracle of the step engine: every sequence alone, with the model's own attention and head, without packing.

Nothing here uses the packing, the planner, the cutter or the packed forward.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_vl import modeling_qwen3_vl

from tests import tiny
from trl_gad.attention import native_attention
from trl_gad.batch import Group, Picture, Rollout, Sample
from trl_gad.discriminator import Discriminator
from trl_gad.packed_grpo import Share


IMAGE = tiny.TOKEN_ID["<|image_pad|>"]
END = tiny.TOKEN_ID["<|im_end|>"]
GRIDS = [(1, 4, 6), (1, 2, 2), (1, 8, 4)]  # patches: 6, 1 and 8 tokens
MODELS: dict[str, Callable[[], PreTrainedModel]] = dict(
    qwen3_vl=tiny.qwen3_vl, qwen2_5_vl=tiny.qwen2_5_vl, qwen3=tiny.qwen3_text
)
MAX_LENGTH = 20  # tokens of the longest response


def _norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def _rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return tuple(
        states * cos
        + torch.cat((-states[..., states.shape[-1] // 2 :], states[..., : states.shape[-1] // 2]), -1) * sin
        for states in (q, k)
    )


def compute_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen's norms and the vision tower's rotation go through float32 whatever the dtype, which would round a sum of
    1e-16 to one of 1e-7: here they keep the dtype of their input, in the oracle and in the engine alike."""
    for module in (modeling_qwen3_vl, modeling_qwen2_5_vl, modeling_qwen3):
        norms = [value for name, value in vars(module).items() if name.endswith("RMSNorm")]
        assert norms
        for norm in norms:
            monkeypatch.setattr(norm, "forward", _norm)
    for module in (modeling_qwen3_vl, modeling_qwen2_5_vl):
        monkeypatch.setattr(module, "apply_rotary_pos_emb_vision", _rotate)


def make_groups(pictures: list[int], num_generations: int, seed: int = 0) -> tuple[list[Group], list[list[Sample]]]:
    """A group per number of pictures, of mixed sizes. Responses have 1 to `MAX_LENGTH` tokens, both ends occur."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return [draw.randrange(256) for _ in range(length)]

    groups, samples = [], []
    for number, count in enumerate(pictures):
        prompt, shown = text(draw.randint(2, 5)), []
        for grid in draw.sample(GRIDS, count):
            size = grid[1] * grid[2]
            shown.append(Picture(torch.randn(size, 3 * 2 * 8 * 8, generator=generator), grid))
            prompt += [tiny.TOKEN_ID["<|vision_start|>"], *[IMAGE] * (size // 4), tiny.TOKEN_ID["<|vision_end|>"]]
            prompt += text(draw.randrange(3))
        lengths = [1, MAX_LENGTH, *(draw.randint(1, MAX_LENGTH) for _ in range(num_generations - 2))]
        draw.shuffle(lengths)
        groups.append(Group(number, prompt + text(2), [*text(draw.randint(1, 9)), END], shown))
        samples.append([Sample(text(length)) for length in lengths])
    return groups, samples


def whole(rollout: Rollout) -> Share:
    """All groups of a rollout batch, for one optimizer step."""
    return Share.of(rollout, list(range(len(rollout.groups))))


def inputs_alone(group: Group, ids: list[int]) -> dict[str, Any]:
    """What a processor gives for [prompt | response]."""
    tokens = torch.tensor([group.prompt_ids + ids])
    inputs: dict[str, Any] = dict(input_ids=tokens)
    if group.pictures:
        inputs["mm_token_type_ids"] = (tokens == IMAGE).int()
        inputs["pixel_values"] = torch.cat([picture.pixel_values for picture in group.pictures])
        inputs["image_grid_thw"] = torch.tensor([picture.grid_thw for picture in group.pictures])
    return inputs


def log_probs_alone(
    model: Any, group: Group, ids: list[int], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of one response, `[tokens]` each, with a graph."""
    with native_attention(model):
        logits = model(**inputs_alone(group, ids), use_cache=False).logits[0, -len(ids) - 1 : -1]
    table = torch.log_softmax(logits / temperature, -1)
    return table[torch.arange(len(ids)), torch.tensor(ids)], -(table.exp() * table).sum(-1)


def score_alone(discriminator: Discriminator, group: Group, ids: list[int]) -> torch.Tensor:
    """D of one response, a scalar with a graph: the head on the last hidden state of [prompt | response]."""
    with native_attention(discriminator.backbone):
        hidden = discriminator.backbone(**inputs_alone(group, ids), use_cache=False).last_hidden_state[0, -1]
    return discriminator.score.weight[0] @ hidden


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of all that is trained; zeros where nothing arrived. Takes them off the model."""
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return found


def assert_close(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor], tolerance: float) -> None:
    """Every tensor to `tolerance` of its own size, or of a thousandth of the largest: some are 0 in theory."""
    assert found.keys() == expected.keys()
    found, expected = ({name: value.detach() for name, value in values.items()} for values in (found, expected))
    largest = max(float(value.abs().max()) for value in expected.values())
    assert largest > 0
    for name, value in expected.items():
        difference = float((found[name] - value).abs().max())
        size = max(float(value.abs().max()), 1e-3 * largest)
        assert difference <= tolerance * size, f"{name}: {difference:.3g} of {size:.3g}"
