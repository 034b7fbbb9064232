"""Batches of conversations and a fast forward and update of the student over them: for `pretrain.py` and `probe.py`.

All pictures have one size and one place in the conversation, so that nothing loops over them in Python.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextRMSNorm,
    Qwen3VLVisionAttention,
    apply_rotary_pos_emb_vision,
)

from .lessons import Lesson, lesson
from .student import NUM_IMAGE_TOKENS, PATCH, SPECIAL_TOKENS
from .world import IMAGE_SIZE, Scene, draw, random_scene


LENGTH = 96  # tokens of a padded conversation
FIRST_IMAGE_TOKEN = 4  # after <|im_start|> user \n <|vision_start|>
WEIGHT = {"caption": 1.0, "question": 3.0, "statement": 8.0, "check": 8.0}  # of an answer's tokens in the loss
SIDE = IMAGE_SIZE // PATCH["patch_size"]  # patches a side


# Conversations -> token ids


@dataclass
class Batch:
    """Conversations about pictures, padded on the right. No padding mask is needed: attention is causal."""

    scenes: np.ndarray  # [P] int32: the pictures; each is that of B / P conversations, in order
    ids: np.ndarray  # [B, LENGTH] int16
    weights: np.ndarray  # [B, LENGTH] float16: of each token as a target, 0 where nothing is learned
    verdict: np.ndarray  # [B] int16: place of the verdict token, 0 where there is none


class Encoder:
    """Writes conversations in the chat format, with the picture first."""

    def __init__(self, processor: Qwen3VLProcessor):
        self.tokenizer = processor.tokenizer
        # A copy: padding that someone asks of the tokenizer stays switched on in it.
        self.raw = Tokenizer.from_str(processor.tokenizer.backend_tokenizer.to_str())
        self.raw.no_padding()
        image = "<|vision_start|>" + "<|image_pad|>" * NUM_IMAGE_TOKENS + "<|vision_end|>"
        self.start = self._ids("<|im_start|>user\n" + image)
        self.answer = self._ids("<|im_end|>\n<|im_start|>assistant\n")
        self.again = self._ids("\n<|im_start|>user\n")
        self.end = self._ids("<|im_end|>")
        self.true, self.false = self._ids("true")[0], self._ids("false")[0]
        read = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
        self.never_read = self.tokenizer.convert_tokens_to_ids([t for t in SPECIAL_TOKENS if t not in read])
        rng = random.Random(0)
        answers = [lesson(random_scene(rng), 0.0, rng).answer for _ in range(20_000)]
        spoken = {i for e in self.raw.encode_batch(answers) for i in e.ids} | set(self.end)
        self.never_spoken = [i for i in range(len(self.tokenizer)) if i not in spoken]
        assert self.start[FIRST_IMAGE_TOKEN] == self.tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    def batch(self, scenes: list[int], lessons: list[Lesson]) -> Batch:
        texts = [t for one in lessons for t in (one.question, one.answer, one.check_question, one.verdict)]
        encoded = iter([e.ids for e in self.raw.encode_batch(texts)])
        size = len(lessons)
        ids = np.full((size, LENGTH), self.tokenizer.pad_token_id, dtype=np.int16)
        weights, verdict = np.zeros((size, LENGTH), dtype=np.float16), np.zeros(size, dtype=np.int16)
        for row, one in enumerate(lessons):
            question, answer, asked, judged = next(encoded), next(encoded), next(encoded), next(encoded)
            tokens = self.start + question + self.answer + answer + self.end
            learned = len(answer) + 1
            if judged:
                tokens = tokens + self.again + asked + self.answer + judged + self.end
                learned = len(judged) + 1
            assert len(tokens) <= LENGTH, (len(tokens), one)
            ids[row, : len(tokens)] = tokens
            weights[row, len(tokens) - learned : len(tokens)] = WEIGHT[one.kind]
            if one.kind in ("statement", "check"):
                verdict[row] = len(tokens) - 2
        return Batch(np.array(scenes, dtype=np.int32), ids, weights, verdict)


def pixels(scenes: list[Scene]) -> np.ndarray:
    """[B, IMAGE_SIZE, IMAGE_SIZE, 3] uint8"""
    return np.stack([np.asarray(draw(scene)) for scene in scenes])


# One forward over a batch of pictures of one size


def _batched_attention(
    self: Qwen3VLVisionAttention,
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_: Any,
) -> torch.Tensor:
    """The vision attention for pictures of one size: the library's own loops over them in Python."""
    qkv = self.qkv(hidden_states).reshape(len(hidden_states), 3, self.num_heads, -1).permute(1, 0, 2, 3)
    query, key = apply_rotary_pos_emb_vision(qkv[0], qkv[1], *position_embeddings)
    shape = (-1, SIDE * SIDE, self.num_heads, query.shape[-1])
    query, key, value = (x.reshape(shape).transpose(1, 2) for x in (query.to(qkv.dtype), key.to(qkv.dtype), qkv[2]))
    out = F.scaled_dot_product_attention(query, key, value)
    return self.proj(out.transpose(1, 2).reshape(len(hidden_states), -1))


def _fused_norm(self: Qwen3VLTextRMSNorm, hidden_states: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def patches(images: torch.Tensor) -> torch.Tensor:
    """[B, side, side, 3] uint8 -> [B * patches, values of a patch] as the image processor orders them."""
    size, merge, patch = len(images), PATCH["merge_size"], PATCH["patch_size"]
    x = (images.float() / 127.5 - 1).permute(0, 3, 1, 2)
    x = x.reshape(size, 3, SIDE // merge, merge, patch, SIDE // merge, merge, patch)
    x = x.permute(0, 2, 5, 3, 6, 1, 4, 7)  # picture, block row, block column, row, column, channel, y, x
    x = x.unsqueeze(6).expand(*x.shape[:6], PATCH["temporal_patch_size"], *x.shape[6:])
    return x.reshape(size * SIDE * SIDE, -1)


def hidden_states(
    model: Qwen3VLForConditionalGeneration, images: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """[B, T, hidden]: what the model's forward computes, for pictures at one fixed place, without its Python loops.

    `images` may be fewer than the conversations: then each serves the same number of them, in order. They go through the tower as frames of one clip: each frame is a sequence of its own there.
    """
    grid = torch.tensor([[len(images), SIDE, SIDE]], device=ids.device)
    seen = model.model.visual(patches(images), grid_thw=grid)
    image = slice(FIRST_IMAGE_TOKEN, FIRST_IMAGE_TOKEN + NUM_IMAGE_TOKENS)
    embeds = model.get_input_embeddings()(ids)

    def per_row(features: torch.Tensor) -> torch.Tensor:
        features = features.reshape(len(images), NUM_IMAGE_TOKENS, -1)
        return features.repeat_interleave(len(ids) // len(images), dim=0)

    picture = per_row(seen.pooler_output).to(embeds.dtype)
    embeds = torch.cat([embeds[:, : image.start], picture, embeds[:, image.stop :]], dim=1)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, image] = True
    return model.model.language_model(
        inputs_embeds=embeds, position_ids=positions[:, : ids.shape[1]].unsqueeze(1).expand(-1, len(ids), -1),
        visual_pos_masks=mask, deepstack_visual_embeds=[per_row(f).flatten(0, 1) for f in seen.deepstack_features], use_cache=False,
    ).last_hidden_state  # fmt: skip


def fixed_positions(model: Qwen3VLForConditionalGeneration, encoder: Encoder) -> torch.Tensor:
    """[3, LENGTH]: M-RoPE positions, the same for all conversations."""
    ids = torch.tensor([encoder.start + encoder.end * (LENGTH - len(encoder.start))])
    grid, image = torch.tensor([[1, SIDE, SIDE]]), model.config.image_token_id
    return model.model.get_rope_index(ids, (ids == image).int(), image_grid_thw=grid)[0][:, 0]


def assert_same_forward(
    model: Qwen3VLForConditionalGeneration, processor: Qwen3VLProcessor, encoder: Encoder, positions: torch.Tensor
) -> None:
    """The fast forward of this file equals the library's, pixels included. Leaves `speed_up` in force."""
    rng = random.Random(0)
    scenes = [random_scene(rng) for _ in range(3)]
    batch = encoder.batch([0, 1, 2], [lesson(scene, 0.0, rng) for scene in scenes])
    ids = torch.from_numpy(batch.ids).long()
    seen = processor.image_processor(images=[draw(scene) for scene in scenes], return_tensors="pt")
    with torch.no_grad():
        theirs = model(
            input_ids=ids, pixel_values=seen["pixel_values"], image_grid_thw=seen["image_grid_thw"],
            mm_token_type_ids=(ids == model.config.image_token_id).int(), use_cache=False,
        ).logits  # fmt: skip
        speed_up()
        ours = model.lm_head(hidden_states(model, torch.from_numpy(pixels(scenes)), ids, positions))
    assert torch.allclose(ours, theirs, atol=1e-3), (ours - theirs).abs().max()


def speed_up() -> None:
    """Replace two slow parts of the library in this process: vision attention and RMSNorm. The results are equal."""
    Qwen3VLVisionAttention.forward = _batched_attention
    Qwen3VLTextRMSNorm.forward = _fused_norm


class Learner:
    """AdamW with a cosine schedule over weighted cross-entropy."""

    def __init__(
        self,
        model: Qwen3VLForConditionalGeneration,
        positions: torch.Tensor,
        lr: float,
        fade: bool,
        never: list[int] | None = None,
    ):
        """`fade`: the rate rises and falls with the progress. `never`: tokens to push below a log-probability of -18."""
        self.model, self.positions, self.lr, self.fade, self.never = model, positions, lr, fade, never
        fused = positions.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)

    def step(self, batch: Batch, images: torch.Tensor, progress: float) -> torch.Tensor:
        """One update; `progress` is the share of the run that is done. Returns the loss, a scalar on the device."""
        device = images.device
        for group in self.optimizer.param_groups:
            falling = 0.5 * (1 + math.cos(math.pi * progress)) * 0.98 + 0.02
            group["lr"] = self.lr * (min(progress / 0.03 + 0.01, falling) if self.fade else 1.0)
        ids = torch.from_numpy(batch.ids).to(device).long()
        weights = torch.from_numpy(batch.weights).to(device).float()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = hidden_states(
                self.model, images[torch.from_numpy(batch.scenes).to(device).long()], ids, self.positions
            )
            learned = (weights[:, 1:] > 0).nonzero(as_tuple=True)
            logits = self.model.lm_head(hidden[:, :-1][learned])
        losses = F.cross_entropy(logits.float(), ids[:, 1:][learned], reduction="none")
        weights = weights[:, 1:][learned]
        loss = (losses * weights).sum() / weights.sum()
        if self.never:
            unwanted = logits[:, self.never].float().logsumexp(1) - logits.float().logsumexp(1)
            loss = loss + 0.02 * F.relu(unwanted + 18).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()
