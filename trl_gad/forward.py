"""Rows -> log-probs, entropies and hidden states. What is known of Qwen's vision-language models is here and in
`vision.py`.

Everything goes through the model's normal forward, the vision tower included: distributed wrappers gather weights
there, and nowhere else.
"""

import functools
import types
from itertools import groupby
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedConfig, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from trl_gad.attention import base_model, layout
from trl_gad.batch import Group, Pack, Row
from trl_gad.packing import pack


# They share M-RoPE for images, the names of the inputs and of the config fields.
VISION_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def text_config(config: PreTrainedConfig) -> Any:
    """The config of the language model: a part of a vision-language config, or `config` itself."""
    return config.get_text_config()


def is_vision_model(config: PreTrainedConfig) -> bool:
    """Whether the model reads pictures.

    Raises:
        ValueError: a model of several parts that is none of `VISION_MODELS`.
    """
    if config.model_type in VISION_MODELS:
        return True
    if text_config(config) is not config:
        raise ValueError(
            f"Supported are text models and {', '.join(VISION_MODELS)}; this model is of type {config.model_type!r}. "
            "Its positions and inputs are unknown here. Use one of those."
        )
    return False


def prompt_positions(
    config: PreTrainedConfig, prompt_ids: list[int], grids: list[tuple[int, int, int]]
) -> torch.Tensor:
    """M-RoPE positions of a prompt, counted on the CPU: `[3, len(prompt_ids)]` int64 (time, height, width).

    Equal to the model's own `get_rope_index`. Text counts up in all three; an image of `h x w` tokens takes the
    positions `start + (0, row, column)`, and the text after it goes on from `start + max(h, w)`.

    Args:
        config (`PreTrainedConfig`): of the model or its backbone.
        prompt_ids (`list[int]`): after image expansion.
        grids (`list[tuple[int, int, int]]`): `grid_thw` of each picture, in patches.

    Raises:
        ValueError: placeholders and pictures that do not match in number or size.
    """
    if not is_vision_model(config):
        if grids:
            raise ValueError(
                f"A row has {len(grids)} pictures, but {config.model_type!r} reads text only. Use a vision-language "
                "model, or remove the images from the dataset."
            )
        return torch.arange(len(prompt_ids)).expand(3, -1)
    values: Any = config
    merge = values.vision_config.spatial_merge_size
    pieces, start, num_images = [torch.empty(3, 0, dtype=torch.int64)], 0, 0
    for is_image, run in groupby(prompt_ids, key=lambda token: token == values.image_token_id):
        length = len(list(run))
        if not is_image:
            pieces.append(start + torch.arange(length).expand(3, -1))
            start += length
            continue
        num_images += 1
        if num_images <= len(grids):
            time, height, width = grids[num_images - 1]
            height, width = height // merge, width // merge
            if time * height * width != length:
                raise ValueError(
                    f"A picture of {time} x {height} x {width} tokens needs as many placeholders: picture "
                    f"{num_images} of the prompt has {length}. Use the processor that belongs to the model."
                )
            pieces.append(start + torch.cartesian_prod(*(torch.arange(n) for n in (time, height, width))).T)
            start += max(height, width)
    if num_images != len(grids):
        raise ValueError(
            f"Every image placeholder needs its picture: the prompt has {num_images} and the row {len(grids)}. The "
            "model would read the placeholder as a text token in silence. Give one image per placeholder."
        )
    return torch.cat(pieces, dim=1)


def make_pack(config: PreTrainedConfig, rows: list[Row]) -> Pack:
    """Positions and packing of `rows` for a model with this `config`.

    Raises:
        ValueError: an empty prompt, a prompt that ends in a visual token, placeholders without pictures, pictures
            that do not match their placeholders, a visual token in a response, a video.
    """
    if is_vision_model(config):
        for row in rows:
            _check_visual_tokens(config, row)
    return pack(
        rows,
        [prompt_positions(config, row.prompt_ids, [picture.grid_thw for picture in row.pictures]) for row in rows],
    )


def _check_visual_tokens(config: Any, row: Row) -> None:
    image, video = config.image_token_id, config.video_token_id
    if row.prompt_ids and row.prompt_ids[-1] in (image, video):
        raise ValueError(
            f"A prompt must not end in a visual token (id {row.prompt_ids[-1]}): its last token is copied before "
            "every response, and the copies would have no picture. Use a chat template with a generation prompt."
        )
    if video in row.prompt_ids:
        raise ValueError(f"Video is not supported: the prompt holds the video token (id {video}). Use images.")
    for number, response in enumerate(row.responses):
        if image in response or video in response:
            raise ValueError(
                f"A response must not hold a visual token (id {image} or {video}): response {number} does, and the "
                "model would look for its picture. Keep the sampler from drawing them, or leave the response out."
            )
    for picture in row.pictures:
        num_patches = picture.grid_thw[0] * picture.grid_thw[1] * picture.grid_thw[2]
        assert len(picture.pixel_values) == num_patches, f"{len(picture.pixel_values)} != {num_patches} patches"


def model_inputs(pack: Pack, device: torch.device | str) -> dict[str, Any]:
    """Keywords of the model's forward, without labels. There is no `attention_mask`: `pack_layout` stands for it.

    `position_ids` is `[3, 1, T]` where there are pictures. Without any, the three rows are equal, and `[1, T]` serves
    text models and vision-language models alike. `picture_ids` names the pictures for a vision tower that knows some of
    them (`vision.FeatureCache`); others ignore it. A pack that several models read is brought to the device once.
    """
    key = str(device)
    if key not in pack.inputs:
        pack.inputs[key] = _model_inputs(pack, device)
    if not pack.pictures:
        return dict(pack.inputs[key])
    # Joined for each forward: kept, all packs' pixels would take the memory of one more copy
    pixels = torch.cat([picture.pixel_values.to(device) for picture in pack.pictures])
    return pack.inputs[key] | dict(pixel_values=pixels)


def _model_inputs(pack: Pack, device: torch.device | str) -> dict[str, Any]:
    """All but the pixels."""
    inputs: dict[str, Any] = dict(
        input_ids=pack.input_ids[None].to(device),
        pack_layout=layout(pack.segments, device),
        use_cache=False,
    )
    if pack.image_grid_thw is None:
        return inputs | dict(position_ids=pack.positions[:1].to(device))
    return inputs | dict(
        position_ids=pack.positions[:, None].to(device),
        image_grid_thw=pack.image_grid_thw.to(device),
        # Numbers, because wrappers of distributed training may copy what holds tensors
        picture_ids=[id(picture) for picture in pack.pictures],
    )


def pictures_to(groups: list[Group], device: torch.device, dtype: torch.dtype | None) -> None:
    """Bring the pixels of these groups to the device, once for all passes, in `dtype` (None: as they are).

    The tower casts them to autocast's dtype anyway: in it they take half the memory, 3 kB a patch for Qwen3-VL, 12 MB
    for a picture of 1000 image tokens.
    """
    for group in groups:
        for picture in group.pictures:
            picture.pixel_values = picture.pixel_values.to(device, dtype)


def per_response(values: torch.Tensor, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """Regroup values of next tokens: `[T - 1]`, where index j belongs to token j + 1, to `[R, L]`, 0 where padded.

    Returns:
        The values and the mask `[R, L]` bool, True where a token of the response stands.
    """
    offsets = torch.arange(int(pack.lengths.max()))
    mask = offsets < pack.lengths[:, None]
    # The copy of the prompt's last token predicts the first token of the response.
    places = torch.where(mask, pack.first[:, None] + offsets, 0).to(values.device)
    mask = mask.to(values.device)
    return torch.where(mask, values[places], 0), mask


def log_probs(
    model: torch.nn.Module, pack: Pack, *, compute_entropy: bool = True, at_temperature_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Log-probs of every response token, from one forward of `model`, as it is wrapped for training.

    Args:
        model (`torch.nn.Module`): with a fused head (TRL's `add_fused_lm_head`, or `add_heads`).
        compute_entropy (`bool`): whether to return entropies; the head must compute them.
        at_temperature_one (`bool`): needs `add_warmup_head` or `add_heads`.

    Returns:
        log-probs `[R, L]` float32, entropies `[R, L]` float32 or None, mask `[R, L]` bool; 0 where padded.
    """
    device = next(model.parameters()).device
    options = dict(at_temperature_one=True) if at_temperature_one else {}
    labels = pack.labels[None].to(device)
    outputs = model(**model_inputs(pack, device), labels=labels, fused_lm_head=True, **options)
    logps, mask = per_response(outputs.log_probs[0], pack)
    if not compute_entropy:
        return logps, None, mask
    assert outputs.entropy is not None, "the model's fused head was added without `entropy` in `outputs`"
    return logps, per_response(outputs.entropy[0], pack)[0], mask


def hidden_states(backbone: torch.nn.Module, pack: Pack, device: torch.device | str) -> torch.Tensor:
    """`[T, H]`: the last hidden state of every token. `backbone` is a model without a head, such as `model.model`."""
    return backbone(**model_inputs(pack, device)).last_hidden_state[0]


def add_heads(model: PreTrainedModel | PeftModel, temperature: float, cast_lm_head_to_fp32: bool = False) -> None:
    """Give `model` TRL's fused head at `temperature`, and at 1 on request: for a model that TRL's trainer did not patch.

    `model(..., labels=labels, fused_lm_head=True)` divides the logits by `temperature`; with
    `at_temperature_one=True` it does not.
    """
    add_fused_lm_head(base_model(model), temperature, cast_lm_head_to_fp32, outputs=("log_probs", "entropy"))
    add_warmup_head(model, cast_lm_head_to_fp32)


def add_warmup_head(model: PreTrainedModel | PeftModel, cast_lm_head_to_fp32: bool = False) -> None:
    """Add the head at temperature 1 beside the one that TRL's trainer put on `model`.

    The cross-entropy of the warm-up must not be divided by the sampling temperature.
    """
    base = base_model(model)
    assert "forward" in vars(base), "TRL's `add_fused_lm_head` comes first"
    at_temperature = base.forward
    # TRL wraps whatever `forward` finds; without its own patch that is the class's.
    del base.forward
    add_fused_lm_head(base, 1.0, cast_lm_head_to_fp32, outputs=("log_probs", "entropy"))
    at_one = base.forward

    # `generate` checks its arguments against this signature.
    @functools.wraps(type(base).forward)
    def forward(self: PreTrainedModel, *args: Any, at_temperature_one: bool = False, **kwargs: Any) -> Any:
        return at_one(*args, **kwargs) if at_temperature_one else at_temperature(*args, **kwargs)

    base.forward = types.MethodType(forward, base)


def vision_tower(model: PreTrainedModel | PeftModel) -> Any:
    """The vision tower of a model or of its backbone; None where there is none, or none that is known here."""
    base = base_model(model)
    if base.config.model_type not in VISION_MODELS:
        return None
    backbone: Any = base.base_model  # of a backbone: itself
    return backbone.visual


def freeze_vision_tower(model: PreTrainedModel | PeftModel) -> None:
    """Take the vision tower of a model, or of its backbone, out of training. Text models have none."""
    if is_vision_model(base_model(model).config):
        vision_tower(model).requires_grad_(False)
