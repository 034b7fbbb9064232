"""The demo's student: a Qwen3-VL of about a million parameters, its processor, and its pretrained weights.

Everything is built from explicit values, without a download. `pretrain.py` made the weights in `weights/`.
"""

import random
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from .lessons import lesson
from .world import IMAGE_SIZE, random_scene


WEIGHTS = Path(__file__).parent / "weights"
SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
PATCH = dict(patch_size=8, temporal_patch_size=2, merge_size=2)
NUM_IMAGE_TOKENS = (IMAGE_SIZE // (PATCH["patch_size"] * PATCH["merge_size"])) ** 2  # 64 pixels: 4 x 4
# Qwen's chat format: a picture wherever a message has an image block, in the order of the blocks.
CHAT_TEMPLATE = """
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for block in message.content -%}
            {%- if block.type == 'image' -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif block.type == 'text' -%}
                {{- block.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def _words() -> list[str]:
    """Every word that the world's texts use, with its leading space, as the tokenizer will split them."""
    rng, words = random.Random(0), {"system", "user", "assistant", "\n"}
    for _ in range(20_000):
        one = lesson(random_scene(rng), 0.0, rng)
        for text in (one.question, one.answer, one.check_question, one.verdict):
            words.update(re.findall(r" ?[A-Za-z]+|[^\sA-Za-z]+", text))
    return sorted(words)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word of the world; any other text in single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = [split.pre_tokenize_str(word)[0][0] for word in _words()]  # a space is written as another letter
    vocabulary = dict.fromkeys(alphabet + words)
    # `ignore_merges`: a word of the vocabulary is one token although no merges lead to it.
    bpe = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(vocabulary)}, merges=[], ignore_merges=True))
    bpe.pre_tokenizer = split
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
        additional_special_tokens=SPECIAL_TOKENS, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def build_processor() -> Qwen3VLProcessor:
    """Tokenizer, image processor (a picture of the world is `NUM_IMAGE_TOKENS` tokens) and chat template."""
    size = {"shortest_edge": IMAGE_SIZE**2 // 4, "longest_edge": IMAGE_SIZE**2}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3, **PATCH),
        tokenizer=build_tokenizer(), video_processor=Qwen3VLVideoProcessor(**PATCH), chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    ids = tokenizer.get_vocab()
    text = dict(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=320, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"],
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[6, 5, 5], mrope_interleaved=True),
    )  # fmt: skip
    vision = dict(
        depth=3, hidden_size=96, intermediate_size=256, num_heads=3, patch_size=PATCH["patch_size"],
        spatial_merge_size=PATCH["merge_size"], temporal_patch_size=PATCH["temporal_patch_size"], out_hidden_size=128,
        num_position_embeddings=64, deepstack_visual_indexes=[1],
    )  # fmt: skip
    return Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip


def build_model(seed: int) -> Qwen3VLForConditionalGeneration:
    """The student with random weights, float32."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(build_config(tokenizer))
    # The library's 0.02 suits networks 20 times as wide; with it this one does not begin to learn.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "pos_embed" in name:
                parameter.mul_(30)
            elif parameter.dim() > 1:
                parameter.mul_(3)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def load_student(folder: Path | str = WEIGHTS) -> tuple[Qwen3VLForConditionalGeneration, Qwen3VLProcessor]:
    """The pretrained student in float32 and its processor."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model, Qwen3VLProcessor.from_pretrained(folder)
