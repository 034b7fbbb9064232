"""Which step does what, and at which learning rate. Pure: knows numbers, no models.

Stages: `discriminator` (D alone), `warmup` (stage 1: cross-entropy on the teacher + D), `gad` (stage 2: GRPO + D).
A rollout batch serves one step in the first stage, `steps_per_rollout` in the second and `steps_per_rollout *
num_iterations` in the third. D takes one step per rollout batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler


DISCRIMINATOR, WARMUP, GAD = "discriminator", "warmup", "gad"


@dataclass(frozen=True)
class Step:
    """One optimizer step: its stage, its rollout batch and the share of that batch it trains on."""

    stage: str
    rollout: int
    part: int  # share of the rollout batch, of `steps_per_rollout`
    first: bool  # the step that generates the rollout batch and updates the discriminator
    last: bool  # no later step uses this rollout batch


@dataclass(frozen=True)
class StepPlan:
    """The run's steps in order.

    Example: 2 discriminator-only rollouts, 1 warm-up rollout, 2 steps a rollout, 7 steps in all:

    >>> plan = StepPlan(2, 1, steps_per_rollout=2, num_iterations=1, max_steps=7)
    >>> [(s.stage[0], s.rollout, s.part) for s in map(plan.at, range(7))]
    [('d', 0, 0), ('d', 1, 0), ('w', 2, 0), ('w', 2, 1), ('g', 3, 0), ('g', 3, 1), ('g', 4, 0)]
    """

    num_discriminator_rollouts: int
    num_warmup_rollouts: int
    steps_per_rollout: int
    num_iterations: int
    max_steps: int

    @property
    def num_warmup_steps(self) -> int:
        """Policy steps of stage 1."""
        return self.num_warmup_rollouts * self.steps_per_rollout

    @property
    def gad_start(self) -> int:
        """The first step of stage 2."""
        return self.num_discriminator_rollouts + self.num_warmup_steps

    @property
    def num_rollouts(self) -> int:
        """Rollout batches of the run, which is the number of discriminator steps."""
        return self.at(self.max_steps - 1).rollout + 1

    def at(self, step: int) -> Step:
        """What step `step` (from 0) does."""
        if step < self.num_discriminator_rollouts:
            return Step(DISCRIMINATOR, step, 0, True, True)
        step -= self.num_discriminator_rollouts
        stage, start, length = WARMUP, self.num_discriminator_rollouts, self.steps_per_rollout
        if step >= self.num_warmup_steps:
            step -= self.num_warmup_steps
            stage, start = GAD, start + self.num_warmup_rollouts
            length = self.steps_per_rollout * self.num_iterations
        turn = step % length
        return Step(stage, start + step // length, turn % self.steps_per_rollout, turn == 0, turn == length - 1)

    def steps_of(self, num_rollouts: int) -> int:
        """Steps that `num_rollouts` rollout batches give."""
        alone = min(num_rollouts, self.num_discriminator_rollouts)
        warmup = min(num_rollouts - alone, self.num_warmup_rollouts)
        rest = num_rollouts - alone - warmup
        return alone + self.steps_per_rollout * (warmup + rest * self.num_iterations)

    def with_warmup_ended(self, num_rollouts: int) -> "StepPlan":
        """The same plan when the warm-up ends after the run's first `num_rollouts` rollout batches; stage 2 keeps its
        length."""
        num_warmup = min(max(num_rollouts - self.num_discriminator_rollouts, 0), self.num_warmup_rollouts)
        saved = (self.num_warmup_rollouts - num_warmup) * self.steps_per_rollout
        return replace(self, num_warmup_rollouts=num_warmup, max_steps=self.max_steps - saved)


def make_plan(
    *, num_rows: int, prompts_per_rollout: int, steps_per_rollout: int, num_iterations: int, max_steps: int,
    num_train_epochs: float, warmup_steps: int | None, warmup_epochs: float | None, discriminator_only_steps: int,
) -> StepPlan:  # fmt: skip
    """The plan of a run over `num_rows` usable rows. Stage 1 is rounded up to whole rollout batches.

    `max_steps` > 0 stands over `num_train_epochs`; both count all stages. An epoch is `num_rows` prompts; rows left
    over at its end open the next rollout batch.
    """
    if warmup_steps is not None:
        num_warmup = math.ceil(max(warmup_steps - discriminator_only_steps, 0) / steps_per_rollout)
    else:
        epochs = 1.0 if warmup_epochs is None else warmup_epochs
        num_warmup = max(math.ceil(epochs * num_rows / prompts_per_rollout) - discriminator_only_steps, 0)
    plan = StepPlan(discriminator_only_steps, num_warmup, steps_per_rollout, num_iterations, max_steps)
    if max_steps <= 0:
        num_rollouts = max(int(num_train_epochs * num_rows / prompts_per_rollout), 1)
        plan = StepPlan(*list(vars(plan).values())[:-1], max_steps=plan.steps_of(num_rollouts))
    return plan


class StageLR(LambdaLR):
    """
    A learning rate schedule that starts anew in every stage, stays where it is for steps that did not update its
    model (`hold`), and whose stages can become shorter while it runs.

    Args:
        stages: (learning rate, number of steps) of each stage in order; the last one goes on for ever.
        base_lr: The learning rate of the optimizer, which the stages' are relative to.
        name: One of transformers' schedules that are a function of the step.
        warmup_steps: Of each stage, a number of steps or (below 1) a share of the stage, as in transformers.
        kwargs: `lr_scheduler_kwargs`.
    """

    hold = False

    def __init__(
        self, optimizer: Optimizer, stages: list[tuple[float, int]], base_lr: float, name: str, warmup_steps: float,
        kwargs: dict | None,
    ):  # fmt: skip
        self.stages = list(stages)
        self._base_lr, self._name, self._warmup_steps, self._kwargs = base_lr, name, warmup_steps, kwargs
        self._functions = [self._function(steps) for _, steps in stages]
        super().__init__(optimizer, self._factor)

    def step(self, epoch: int | None = None) -> None:
        if self.hold:
            self.hold = False
            return
        super().step(epoch)

    def shorten(self, stage: int, num_steps: int) -> None:
        """Stage `stage` ends after `num_steps`. The last stage's curve is fitted to it; an earlier one's is cut off."""
        lr, _ = self.stages[stage]
        self.stages[stage] = (lr, num_steps)
        if stage == len(self.stages) - 1:
            self._functions[stage] = self._function(num_steps)
        # The next step's learning rate was set by the stages as they were
        self._last_lr = [base_lr * self._factor(self.last_epoch) for base_lr in self.base_lrs]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr

    def _factor(self, step: int) -> float:
        for (lr, num_steps), function in zip(self.stages[:-1], self._functions, strict=False):
            if step < num_steps:
                return lr / self._base_lr * function(step)
            step -= num_steps
        return self.stages[-1][0] / self._base_lr * self._functions[-1](step)

    def _function(self, num_steps: int) -> Callable[[int], float]:
        """The factor that transformers' schedule gives at each step of a stage of `num_steps`."""
        share = 0 < self._warmup_steps < 1
        rise = math.ceil(self._warmup_steps * num_steps) if share else min(int(self._warmup_steps), num_steps)
        schedule = get_scheduler(
            self._name, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), num_warmup_steps=rise,
            num_training_steps=max(num_steps, 1), scheduler_specific_kwargs=self._kwargs,
        )  # fmt: skip
        if not isinstance(schedule, LambdaLR):
            raise ValueError(
                f"GAD needs a learning rate schedule that is a function of the step, got lr_scheduler_type="
                f"{self._name!r}. Use for example `linear`, `cosine` or `constant`."
            )
        return schedule.lr_lambdas[0]

    def state_dict(self) -> dict:
        """The place in the schedule; the lengths of the stages are part of the run's plan."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count, "_last_lr": self._last_lr}

    def load_state_dict(self, state_dict: dict) -> None:
        """The place that `state_dict` gave."""
        vars(self).update(state_dict)
