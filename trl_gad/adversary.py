"""The discriminator's side of a step: one forward per micro-batch gives the rewards and its own gradient."""

import contextlib
import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer

from trl_gad.batch import Rollout
from trl_gad.config import GADConfig
from trl_gad.discriminator import Discriminator
from trl_gad.engine import Cut, Cutter
from trl_gad.forward import model_inputs
from trl_gad.losses import bradley_terry
from trl_gad.schedule import StageLR


MAX_SKIPPED_IN_A_ROW = 5


@dataclass
class Scores:
    """What the discriminator said of a rollout batch, on the CPU, float32."""

    teacher: torch.Tensor  # [B]
    students: torch.Tensor  # [B, G], NaN for an empty sample
    finite: bool = True  # whether every score that was computed is a number


class Adversary:
    """
    Owns the discriminator, its optimizer, its schedule and its clip.

    Args:
        discriminator: D.
        accelerator: Prepares it.
        args: Learning rate, clip and the optimizer's kind.
        cutter: Makes the micro-batches.
    """

    def __init__(self, discriminator: Discriminator, accelerator: Any, args: GADConfig, cutter: Cutter):
        self.module = discriminator  # unwrapped
        self.wrapped: torch.nn.Module = discriminator
        self.accelerator = accelerator
        self.args = args
        self.cutter = cutter
        self.prepared = False
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0

    def prepare(self, decay_parameters: list[str], num_steps: int) -> None:
        """Optimizer and schedule over the run's `num_steps` discriminator steps; wraps the module for training."""
        args: Any = copy.copy(self.args)
        args.learning_rate = args.discriminator_learning_rate
        optimizer_cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, self.module.base)
        if {"params", "model", "optimizer_dict"} & set(kwargs) or not isinstance(optimizer_cls, type):
            raise ValueError(
                f"GAD trains two models, which optim={args.optim!r} does not allow. Use an optimizer that takes a list "
                "of parameters, such as `adamw_torch`."
            )
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for n, p in named if n in decay_parameters], "weight_decay": args.weight_decay},
            {"params": [p for n, p in named if n not in decay_parameters], "weight_decay": 0.0},
        ]
        if args.gradient_checkpointing:
            self.module.base.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
            if self.module.base is not self.module.backbone:
                self.module.base.enable_input_require_grads()
        optimizer = optimizer_cls(groups, **kwargs)
        self.wrapped, self.optimizer = self.accelerator.prepare(self.module, optimizer)
        self.prepared = True
        self.schedule = StageLR(
            self.optimizer, [(args.learning_rate, num_steps)], args.learning_rate, args.lr_scheduler_type,
            args.warmup_steps, args.lr_scheduler_kwargs,
        )  # fmt: skip

    def score(self, rollout: Rollout) -> tuple[Scores, float, int]:
        """Scores without an update, the sum of the loss over the pairs of this process, and their number."""
        self.wrapped.eval()
        with torch.no_grad():
            scores, loss, num_pairs, _ = self._pass(rollout, update=False)
        return scores, loss, num_pairs

    def score_and_update(self, rollout: Rollout) -> tuple[Scores, dict[str, float]]:
        """
        One pass: the scores of every response by the present discriminator, and one optimizer step on the mean of the
        Bradley-Terry loss over all pairs of all processes.

        Raises:
            RuntimeError: the loss or its gradient was not finite several times in a row.
        """
        self.wrapped.train()
        scores, loss, num_pairs, num_tokens = self._pass(rollout, update=True)
        max_norm = self.args.discriminator_max_grad_norm or math.inf
        grad_norm = float(self.accelerator.clip_grad_norm_(self.wrapped.parameters(), max_norm))
        sums = torch.tensor([loss, num_pairs, num_tokens], dtype=torch.float64, device=self.accelerator.device)
        loss, num_pairs, num_tokens = self.accelerator.reduce(sums, reduction="sum").tolist()
        metrics = {
            "discriminator/loss": loss / max(num_pairs, 1),
            "discriminator/grad_norm": grad_norm,
            "discriminator/learning_rate": self.schedule.get_last_lr()[0],
            "tokens/discriminator": num_tokens,
        }
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):  # equal on all processes
            self.num_skipped += 1
            self.num_skipped_in_a_row += 1
        elif num_pairs:  # none where every sample is empty
            self.optimizer.step()
            self.schedule.step()
            self.num_skipped_in_a_row = 0
        self.optimizer.zero_grad(set_to_none=True)
        metrics["discriminator/skipped"] = self.num_skipped
        if self.num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RuntimeError(
                f"The discriminator's loss or gradient was not finite {MAX_SKIPPED_IN_A_ROW} times in a row (loss "
                f"{loss / max(num_pairs, 1)}, gradient norm {grad_norm}). Resume from the last checkpoint with a lower "
                "`discriminator_learning_rate` or `discriminator_max_grad_norm`."
            )
        return scores, metrics

    def _pass(self, rollout: Rollout, update: bool) -> tuple[Scores, float, int, int]:
        """(scores, loss sum, pairs, tokens) of this process; with `update`, leaves the gradient of the mean."""
        present = [[i for i, sample in enumerate(samples) if sample.ids] for samples in rollout.samples]
        responses = [
            [group.teacher_ids] + [samples[i].ids for i in kept]
            for group, samples, kept in zip(rollout.groups, rollout.samples, present, strict=True)
        ]
        num_pairs = sum(map(len, present))
        scale = 1.0
        if update:
            all_pairs = self.accelerator.reduce(
                torch.tensor(float(num_pairs), device=self.accelerator.device), reduction="sum"
            )
            # Data-parallel training averages the gradients of the processes
            scale = self.accelerator.num_processes / max(float(all_pairs), 1.0)
        num_groups = len(rollout.groups)
        num_generations = max((len(samples) for samples in rollout.samples), default=0)
        scores = Scores(torch.full((num_groups,), torch.nan), torch.full((num_groups, num_generations), torch.nan))
        num_tokens = 0
        members: list[tuple[int, int]] = []
        all_values, losses = [], []  # left on the device until the end: reading one would wait for its micro-batch
        for cut in self.cutter.cut(rollout.groups, responses, num_repeated=1):
            num_tokens += cut.pack.input_ids.numel()
            sync = contextlib.nullcontext() if cut.last or not update else self.accelerator.no_sync(self.wrapped)
            with sync:
                values = self._forward(cut)
                teacher, students = _pairs(cut)
                # A filler's scores are in the graph, and count for nothing
                loss = values.sum() * 0.0 if cut.filler else bradley_terry(values[teacher], values[students])
                if update:
                    self.accelerator.backward(loss * scale)
            losses.append(loss.detach())
            members += cut.members
            all_values.append(values.detach()[: len(cut.members)])
        loss_sum = sum(float(loss) for loss in losses)
        values = torch.cat(all_values).float().cpu() if all_values else torch.zeros(0)
        scores.finite = bool(values.isfinite().all())
        for (group, response), value in zip(members, values.tolist(), strict=True):
            if response == 0:
                scores.teacher[group] = value
            else:
                scores.students[group, present[group][response - 1]] = value
        return scores, loss_sum, num_pairs, num_tokens

    def _forward(self, cut: Cut) -> torch.Tensor:
        device = self.accelerator.device
        return self.wrapped(last=cut.pack.last.to(device), **model_inputs(cut.pack, device))

    def state_dict(self) -> dict[str, Any]:
        """All but the weights, for a checkpoint."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "num_skipped": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The state that `state_dict` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.num_skipped = state["num_skipped"]
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"]


def _pairs(cut: Cut) -> tuple[list[int], list[int]]:
    """Places of the teacher and of the sample of each pair. The teacher (response 0) stands in every part of a group."""
    teachers = {}
    teacher, students = [], []
    for place, (group, response) in enumerate(cut.members):
        if response == 0:
            teachers[group] = place
        else:
            teacher.append(teachers[group])
            students.append(place)
    return teacher, students
