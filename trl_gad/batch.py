"""The records that cross module borders: read this first.

A training step is a list of `Group`s on its way through the modules:

    data.py      dataset rows         -> Group           (token ids and processed pictures, once per step)
    rollouts.py  Group                -> list[Sample]    (what the student answered, as token ids)
    packing.py   Group + responses    -> Pack            (tensors of one forward of policy, reference or discriminator)
    forward.py   Pack                 -> log-probs, entropies, scores

Letters in shapes: T tokens of a pack, R responses of a pack, L the longest response of a pack, G samples of a group.
This module imports nothing of the package.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image


@dataclass
class Picture:
    """One processed image: what the vision tower reads.

    `grid_thw` counts patches (frames, rows, columns); the prompt holds `t * h * w / merge_size**2` image tokens.
    """

    # [t * h * w, channels * temporal_patch * patch * patch]; float32 on the CPU until its rollout batch is in work, then
    # on the device in the dtype that the tower computes in
    pixel_values: torch.Tensor
    grid_thw: tuple[int, int, int]


@dataclass
class Group:
    """One prompt with its teacher response: one dataset row, tokenized, its pictures decoded and processed.

    `teacher_ids` are the tokens of the teacher's text and exactly one end token (none where the text was cut).
    """

    row: int  # index in the dataset
    prompt_ids: list[int]  # after image expansion, ends with the generation prompt
    teacher_ids: list[int]
    pictures: list[Picture] = field(default_factory=list)  # in the order of their placeholders
    teacher_cut: bool = False
    # For reward functions and logs only:
    prompt: list[dict[str, Any]] = field(default_factory=list)  # messages, image blocks hold the decoded picture
    teacher_text: str = ""
    images: list[Image.Image] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)  # the row's other columns


@dataclass
class Sample:
    """One answer of the student, as the sampler returned it."""

    ids: list[int]
    logps: list[float] | None = None  # of the sampler, one per id; None where the sampler is the trainer's own model
    cut: bool = False  # ended by `max_completion_length`, not by an end token


@dataclass
class Row:
    """What one row of a pack holds: a prompt (stored once) and the responses that see it."""

    prompt_ids: list[int]
    responses: list[list[int]]
    pictures: list[Picture] = field(default_factory=list)


@dataclass
class Segment:
    """Where a row's tokens lie in the pack, [start, stop) each.

    `prompt` leaves the prompt's last token out: every response starts with a copy of it, so that the logits at a
    response's position k predict its token k, as label shifting expects.
    """

    prompt: tuple[int, int]
    responses: list[tuple[int, int]]


@dataclass
class Pack:
    """The tensors of one forward. Rows lie one after the other in a single sequence without padding.

    Example: prompt [1, 2, 3] with responses [7, 8] and [9]:

        input_ids = [1, 2,  3, 7, 8,  3, 9]
        labels    = [-,  -,  -, 7, 8,  -, 9]    (- is -100)
        positions = [0, 1,  2, 3, 4,  2, 3]
        first     = [2, 5]   lengths = [2, 1]
    """

    input_ids: torch.Tensor  # [T] int64
    labels: torch.Tensor  # [T] int64, -100 where nothing is predicted
    positions: torch.Tensor  # [3, T] int64: temporal, height, width (equal in text)
    first: torch.Tensor  # [R] int64: place of the copy of the prompt's last token, before each response
    lengths: torch.Tensor  # [R] int64: tokens of each response
    segments: list[Segment]
    image_grid_thw: torch.Tensor | None = None  # [pictures, 3] int64
    pictures: list[Picture] = field(default_factory=list)  # whose pixels these are, in order
    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the model's forward, by device, once made

    @property
    def last(self) -> torch.Tensor:
        """[R] int64: place of each response's last token, where the discriminator's score is read."""
        return self.first + self.lengths


@dataclass
class Rollout:
    """One rollout batch of this process: B groups, G samples each, and what was computed from them before training.

    It lives for all optimizer steps that are taken on it and is part of a checkpoint taken between them (all but the
    groups, which are read again from the dataset).
    """

    index: int  # counts the run's rollout batches
    groups: list[Group]
    samples: list[list[Sample]]  # [B][G]
    advantages: torch.Tensor | None = None  # [B, G] float32, stage 2 only
    old_logps: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # (group, sample) -> [tokens] float32
    ref_logps: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # (group, sample) -> [tokens] float32

    def part(self, index: int, num_parts: int) -> list[int]:
        """The groups of one optimizer step: a contiguous, equal share."""
        size = len(self.groups) // num_parts
        return list(range(index * size, (index + 1) * size))
