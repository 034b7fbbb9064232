"""Cuts a list of groups into the packs of its forwards, for policy, reference and discriminator alike."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from trl_gad.batch import Group, Pack, Row
from trl_gad.forward import make_pack
from trl_gad.packing import unshared
from trl_gad.planner import plan


@dataclass
class Cut:
    """One micro-batch: its pack, and which (group, response) each of the pack's R responses is."""

    pack: Pack
    members: list[tuple[int, int]]  # [R]
    last: bool  # the last forward of the pass, on which gradients are shared
    filler: bool = False  # of no effect: runs beside a micro-batch of another process that has more of them


class Cutter:
    """
    Makes micro-batches under the token budget. Every process runs the same number of them.

    Args:
        config: The model's configuration, for M-RoPE and the image tokens.
        budget: `max_tokens_per_micro_batch`.
        share_prompt: Store a group's prompt once. False: one row per sequence.
        accelerator: For the largest number of micro-batches over the processes.
    """

    def __init__(self, config: PretrainedConfig, budget: int, share_prompt: bool, accelerator: Any):
        self.config = config
        self.budget = budget
        self.share_prompt = share_prompt
        self.accelerator = accelerator

    def cut(self, groups: list[Group], responses: list[list[list[int]]], num_repeated: int = 0) -> list[Cut]:
        """
        Args:
            groups: B prompts.
            responses: Token ids, `[B][responses of the group]`.
            num_repeated: The first responses of every group that each part of a split group needs (1 for the
                discriminator's pass: the teacher).

        Raises:
            ValueError: one response with its prompt is over the budget.
        """
        lengths = [
            (len(group.prompt_ids), [len(r) for r in rows]) for group, rows in zip(groups, responses, strict=True)
        ]
        kwargs = {"num_repeated": num_repeated, "share_prompt": self.share_prompt}
        batches = plan(lengths, self.budget, **kwargs)
        most = len(batches)
        if self.accelerator.num_processes > 1:
            most = int(self.accelerator.gather(torch.tensor([most], device=self.accelerator.device)).max())
            if most > len(batches):
                batches = plan(lengths, self.budget, min_micro_batches=most, **kwargs)
        cuts = []
        for batch in batches:
            rows = [
                Row(groups[g].prompt_ids, [responses[g][r] for r in chosen], groups[g].pictures) for g, chosen in batch
            ]
            rows = rows if self.share_prompt else unshared(rows)
            members = [(g, r) for g, chosen in batch for r in chosen]
            cuts.append(Cut(make_pack(self.config, rows), members, last=len(cuts) == most - 1))
        while len(cuts) < most:  # too few responses to cut further
            shortest = min(groups, key=lambda group: len(group.prompt_ids) + len(group.teacher_ids))
            row = Row(shortest.prompt_ids, [shortest.teacher_ids], shortest.pictures)
            cuts.append(Cut(make_pack(self.config, [row]), [], last=len(cuts) == most - 1, filler=True))
        return cuts
