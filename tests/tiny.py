"""Tiny models and processors, built from explicit configs: no hub, no download, float32, a few seconds in all.

The tokenizer knows single bytes and Qwen's special tokens. The vision towers have a DeepStack index inside their depth
(Qwen3-VL) and a window (Qwen2.5-VL), so that those paths run.
"""

from importlib.resources import files

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)


SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
PATCH = dict(patch_size=8, temporal_patch_size=2, merge_size=2)
MAX_PIXELS = 64 * 64
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
TOKEN_ID = {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
TEXT = dict(
    vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=4096, tie_word_embeddings=True,
    bos_token_id=None, eos_token_id=TOKEN_ID["<|im_end|>"], pad_token_id=TOKEN_ID["<|endoftext|>"],
)  # fmt: skip
VISION_TOKENS = dict(
    image_token_id=TOKEN_ID["<|image_pad|>"], video_token_id=TOKEN_ID["<|video_pad|>"],
    vision_start_token_id=TOKEN_ID["<|vision_start|>"], vision_end_token_id=TOKEN_ID["<|vision_end|>"],
)  # fmt: skip


def tokenizer(chat_template: str = "qwen3_vl") -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
        additional_special_tokens=SPECIAL_TOKENS,
        chat_template=(files("trl") / "chat_templates" / f"{chat_template}.jinja").read_text(),
    )  # fmt: skip


def _image_processor() -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(
        size={"shortest_edge": 16 * 16, "longest_edge": MAX_PIXELS}, image_mean=[0.5] * 3, image_std=[0.5] * 3, **PATCH
    )


def processor(chat_template: str = "qwen3_vl") -> Qwen3VLProcessor:
    tok = tokenizer(chat_template)
    return Qwen3VLProcessor(
        image_processor=_image_processor(), tokenizer=tok, video_processor=Qwen3VLVideoProcessor(**PATCH),
        chat_template=tok.chat_template,
    )  # fmt: skip


def processor_2_5() -> Qwen2_5_VLProcessor:
    tok = tokenizer("qwen2_5_vl")
    return Qwen2_5_VLProcessor(
        image_processor=_image_processor(), tokenizer=tok, video_processor=Qwen3VLVideoProcessor(**PATCH),
        chat_template=tok.chat_template,
    )  # fmt: skip


def _finish(model: PreTrainedModel, scale: float) -> PreTrainedModel:
    """Larger weights than the default, so that attention is far from uniform and a mistake shows in the output."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.mul_(scale)
    model.generation_config.eos_token_id = TOKEN_ID["<|im_end|>"]
    model.generation_config.pad_token_id = TOKEN_ID["<|endoftext|>"]
    return model.eval()


def qwen3_vl(seed: int = 0, scale: float = 4.0) -> PreTrainedModel:
    text = TEXT | dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1], mrope_interleaved=True)
    )
    vision = dict(
        depth=3, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=8, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=32, num_position_embeddings=64, deepstack_visual_indexes=[0, 1],
    )  # fmt: skip
    torch.manual_seed(seed)
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **VISION_TOKENS)
    return _finish(Qwen3VLForConditionalGeneration(config), scale)


def qwen2_5_vl(seed: int = 0, scale: float = 4.0) -> PreTrainedModel:
    text = {k: v for k, v in TEXT.items() if k != "head_dim"} | dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
    )
    vision = dict(
        depth=3, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=8, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=32, window_size=32, fullatt_block_indexes=[1],
    )  # fmt: skip
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **VISION_TOKENS)
    return _finish(Qwen2_5_VLForConditionalGeneration(config), scale)


def qwen3_text(seed: int = 0, scale: float = 4.0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return _finish(Qwen3ForCausalLM(Qwen3Config(**TEXT)), scale)
