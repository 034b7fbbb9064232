"""Samples of the student: groups in, token ids out. Everything later works on these ids, never on re-tokenised text."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from trl.models.utils import unwrap_model_for_generation

from trl_gad.attention import native_attention
from trl_gad.batch import Group, Sample


# Tokens of the key-value cache in one call of `generate`: about 15 GB for Qwen3-VL-2B in bfloat16
MAX_CACHED_TOKENS = 131_072
PART_SEED_STEP = 2**32  # more than any `sampling_seed`


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of torch from `seed` inside, and as if nothing had been drawn outside."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


class TransformersSampler:
    """
    Rollouts by transformers' `generate`, on the policy itself.

    Args:
        accelerator: Unwraps the policy.
        generation_kwargs: Fields of `GenerationConfig`: sampling parameters, length limit, token ids.
        banned_ids: Tokens that are never sampled: a sampled image token would ask for an image that is not there.
        image_token_ids: Placeholders of images and videos, for the token types that M-RoPE needs; None for text models.
        gradient_checkpointing_kwargs: As in the trainer's arguments.
    """

    def __init__(
        self, accelerator: Any, generation_kwargs: dict[str, Any], banned_ids: list[int],
        image_token_ids: tuple[int, int] | None, gradient_checkpointing_kwargs: dict | None,
    ):  # fmt: skip
        self.accelerator = accelerator
        suppressed = sorted({*banned_ids, *(generation_kwargs.get("suppress_tokens") or [])})
        self.generation_kwargs = {**generation_kwargs, "suppress_tokens": suppressed or None}
        self.image_token_ids = image_token_ids
        self.gradient_checkpointing_kwargs = gradient_checkpointing_kwargs

    def sample(
        self, model: nn.Module, groups: list[Group], num_generations: int, seed: int, greedy: bool = False
    ) -> list[list[Sample]]:
        """
        Args:
            model: The (wrapped) policy; its weights are those of this call.
            groups: B prompts.
            num_generations: G.
            seed: The same seed, weights and groups give the same samples. Parts of a long list have seeds of their own.
            greedy: The most probable answer instead of a sampled one.

        Returns:
            `[B][G]` samples. A sample ends with its end token, or is `cut`.
        """
        kwargs = {**self.generation_kwargs, "num_return_sequences": num_generations}
        if greedy:
            kwargs = {**kwargs, "do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
        samples = []
        for number, part in enumerate(self._parts(groups, num_generations)):
            samples += self._generate(model, part, kwargs, seed + number * PART_SEED_STEP)
        return [samples[i : i + num_generations] for i in range(0, len(samples), num_generations)]

    def _parts(self, groups: list[Group], num_generations: int) -> list[list[Group]]:
        """Groups in order, as many in one call of `generate` as its cache may hold."""
        length = max((len(group.prompt_ids) for group in groups), default=0) + self.generation_kwargs["max_new_tokens"]
        size = max(MAX_CACHED_TOKENS // (length * num_generations), 1)
        return [groups[i : i + size] for i in range(0, len(groups), size)]

    def _generate(self, model: nn.Module, groups: list[Group], kwargs: dict[str, Any], seed: int) -> list[Sample]:
        inputs = self._inputs(groups)
        with (
            unwrap_model_for_generation(
                model, self.accelerator, generation_kwargs=kwargs,
                gradient_checkpointing_kwargs=self.gradient_checkpointing_kwargs,
            ) as unwrapped,
            native_attention(unwrapped),
            seeded(seed),
            torch.no_grad(),
        ):  # fmt: skip
            ids = unwrapped.generate(**inputs, generation_config=GenerationConfig(**kwargs, disable_compile=True))
        answers = ids[:, inputs["input_ids"].size(1) :].tolist()
        return [self._sample(answer) for answer in answers]

    def _sample(self, answer: list[int]) -> Sample:
        """Cut behind the first end token; what follows is padding."""
        for place, token in enumerate(answer):
            if token in self.generation_kwargs["eos_token_id"]:
                return Sample(answer[: place + 1])
        return Sample(answer, cut=True)

    def _inputs(self, groups: list[Group]) -> dict[str, torch.Tensor]:
        """Prompts padded on the left, pictures of all prompts in order."""
        device = self.accelerator.device
        width = max(len(group.prompt_ids) for group in groups)
        pad = self.generation_kwargs["pad_token_id"]
        ids = torch.tensor([[pad] * (width - len(g.prompt_ids)) + g.prompt_ids for g in groups])
        mask = torch.tensor([[0] * (width - len(g.prompt_ids)) + [1] * len(g.prompt_ids) for g in groups])
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        pictures = [picture for group in groups for picture in group.pictures]
        if self.image_token_ids is not None and pictures:
            image, video = self.image_token_ids
            inputs["mm_token_type_ids"] = ((ids == image).int() + 2 * (ids == video).int()).to(device)
            inputs["pixel_values"] = torch.cat([p.pixel_values for p in pictures]).to(device)
            inputs["image_grid_thw"] = torch.tensor([p.grid_thw for p in pictures], device=device)
        return inputs


def sampling_seed(seed: int, rollout: int, process: int) -> int:
    """A seed of its own for each rollout batch and process of a run, the same when the run is resumed."""
    return ((seed * 1_000_003 + rollout) * 1_009 + process) % 2**31
