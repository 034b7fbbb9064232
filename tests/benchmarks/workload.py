"""The benchmark's work: prompts like those of a Qwen3-VL distillation run (a picture, a question, a long answer), and a
random model of Qwen3-VL-2B's shape. Everything follows from a seed; nothing is read or written.

Response lengths are log-normal, 620 tokens in the mean and 3072 at most, as answers of a chat model are. Ids and pixels
are random: what a token says does not change what it costs.
"""

import math
import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tests import tiny
from trl_gad.batch import Group, Picture, Rollout, Sample


@dataclass(frozen=True)
class Scale:
    """How large the work is. Pictures are (rows, columns) of patches, lengths in tokens."""

    pictures: tuple[tuple[int, int], ...]
    question: tuple[int, int]  # shortest and longest
    response: tuple[float, float, int, int]  # median, sigma, shortest, longest
    text: dict
    vision: dict


# 448 x 448 to 1344 x 1024 pixels: 196 to 1344 image tokens
FULL = Scale(
    pictures=((28, 28), (56, 42), (64, 64), (64, 84)),
    question=(64, 512),
    response=(500.0, 0.7, 16, 3072),
    text=dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=262144,
        rope_parameters=dict(rope_type="default", rope_theta=5e6, mrope_section=[24, 20, 20], mrope_interleaved=True),
    ),
    vision=dict(
        depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, patch_size=16, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=2048, num_position_embeddings=2304,
        deepstack_visual_indexes=[5, 11, 17], in_channels=3,
    ),
)  # fmt: skip
SMALL = Scale(
    pictures=((4, 4), (8, 6)),
    question=(4, 12),
    response=(12.0, 0.5, 2, 40),
    text=dict(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=4096,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1], mrope_interleaved=True),
    ),
    vision=dict(
        depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=8, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=32, num_position_embeddings=64, deepstack_visual_indexes=[0],
        in_channels=3,
    ),
)  # fmt: skip


def build_model(scale: Scale, device: str) -> PreTrainedModel:
    """A random float32 model on `device`; its image tokens are those of the tests' processor."""
    text = scale.text | dict(tie_word_embeddings=True, bos_token_id=None, eos_token_id=tiny.TOKEN_ID["<|im_end|>"])
    config = Qwen3VLConfig(
        text_config=text, vision_config=scale.vision, tie_word_embeddings=True, **tiny.VISION_TOKENS
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3VLForConditionalGeneration(config)


def make_rollout(scale: Scale, num_prompts: int, num_generations: int, seed: int = 0) -> Rollout:
    """`num_prompts` groups with their samples. More prompts, or more samples a prompt, keep what was there."""
    groups, samples = [], []
    for row in range(num_prompts):
        draw = random.Random(seed * 100_003 + row)
        generator = torch.Generator().manual_seed(seed * 100_003 + row)
        height, width = draw.choice(scale.pictures)
        vision = scale.vision
        patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
        picture = Picture(torch.randn(height * width, patch, generator=generator), (1, height, width))
        num_image_tokens = height * width // vision["spatial_merge_size"] ** 2
        image = [tiny.VISION_TOKENS["vision_start_token_id"]]
        image += [tiny.VISION_TOKENS["image_token_id"]] * num_image_tokens
        image += [tiny.VISION_TOKENS["vision_end_token_id"]]
        question = _ids(draw, scale, draw.randint(*scale.question))
        groups.append(Group(row, image + question, _ids(draw, scale, _length(draw, scale)), [picture]))
        samples.append([Sample(_ids(draw, scale, _length(draw, scale))) for _ in range(num_generations)])
    return Rollout(0, groups, samples)


def _length(draw: random.Random, scale: Scale) -> int:
    median, sigma, shortest, longest = scale.response
    return min(longest, max(shortest, int(draw.lognormvariate(math.log(median), sigma))))


def _ids(draw: random.Random, scale: Scale, length: int) -> list[int]:
    first = max(tiny.TOKEN_ID.values()) + 1  # behind the special tokens
    return [draw.randrange(first, scale.text["vocab_size"]) for _ in range(length)]


def operations(scale: Scale, model: PreTrainedModel, rows: list[tuple[int, list[int], int]]) -> float:
    """Floating-point operations of one forward by arithmetic; a forward and backward take three times as many.

    Args:
        rows: (prompt tokens, response lengths, patches) of each packed row.

    Two per weight of a layer and token, two per weight of the head and response token, and four times the width per
    pair of query and visible key; the same for the tower over its patches, but for its mergers, which read one image
    token in place of `spatial_merge_size**2` patches, and its position table, which is looked up.
    """
    text, vision = scale.text, scale.vision
    layers = sum(p.numel() for p in model.model.language_model.layers.parameters())
    tower = mergers = 0
    for name, parameter in model.model.visual.named_parameters():
        if "merger" in name:
            mergers += parameter.numel()
        elif "pos_embed" not in name:
            tower += parameter.numel()
    per_patch = tower + mergers / vision["spatial_merge_size"] ** 2
    width = text["num_attention_heads"] * text["head_dim"]
    total = 0.0
    for prompt, responses, patches in rows:
        tokens = prompt + sum(responses)
        pairs = prompt**2 / 2 + sum(length * (prompt + length / 2) for length in responses)
        total += 2 * layers * tokens + 4 * width * text["num_hidden_layers"] * pairs
        total += 2 * text["hidden_size"] * text["vocab_size"] * sum(responses)
        total += 2 * per_patch * patches + 4 * vision["hidden_size"] * vision["depth"] * patches**2
    return total
