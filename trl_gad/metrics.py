"""The names of all metrics, the clock of a step's phases, and how the metrics of micro-batches become one.

TRL's own metrics (`reward`, `kl`, `entropy`, `completions/clipped_ratio`, ...) keep their names.
"""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator

import torch

from trl_gad.batch import Rollout
from trl_gad.losses import length_auc


PHASES = {
    "data": "waiting for rows, decoded and processed",
    "rollout": "sampling from the student",
    "discriminator": "discriminator: forward, backward, update",
    "rewards": "extra reward functions and advantages",
    "old_logps": "old log-probs, with several policy steps per rollout batch",
    "reference": "reference log-probs",
    "policy": "policy: forward and backward",
    "optimizer": "policy: gradient clip and optimizer step",
}

# name -> what it is; `eval_` stands before those of an evaluation
METRICS = {
    "stage": "0 discriminator alone, 1 warm-up, 2 adversarial",
    "discriminator/loss": "Bradley-Terry loss per pair, before the update",
    "discriminator/accuracy": "share of fresh pairs with the teacher ahead, before the update on them",
    "discriminator/accuracy_uncut": "the same over pairs whose student response ended by itself",
    "discriminator/margin": "mean of teacher score minus student score",
    "discriminator/teacher_score/mean": "mean score of the teacher's responses",
    "discriminator/teacher_score/std": "their standard deviation",
    "discriminator/student_score/mean": "mean score of the samples",
    "discriminator/student_score/std": "their standard deviation",
    "discriminator/grad_norm": "gradient norm of the discriminator before clipping",
    "discriminator/learning_rate": "learning rate of this update",
    "discriminator/skipped": "updates left out for a loss or gradient that is not finite, since the start",
    "length_auc": "share of pairs in which the teacher's response is longer, ties half: 0.5 is no hint",
    "completions/mean_length": "tokens of the samples",
    "completions/min_length": "shortest sample",
    "completions/max_length": "longest sample",
    "completions/teacher_mean_length": "tokens of the teacher's responses",
    "completions/clipped_ratio": "share of samples cut by max_completion_length",
    "completions/empty": "samples without a token, left out of the losses",
    "warmup/cross_entropy": "cross-entropy per token of the teacher's response (stage 1)",
    "policy/loss": "GRPO loss of the step (stage 2), KL included",
    "policy/skipped": "policy updates left out for a loss or gradient that is not finite, since the start",
    "kl": "mean k3 estimate of the KL to the snapshot (stage 2)",
    "entropy": "mean entropy per token (stage 2)",
    "grad_norm": "gradient norm of the policy before clipping",
    "reward": "weighted sum of the rewards (stage 2)",
    "reward_std": "its standard deviation",
    "frac_reward_zero_std": "share of groups whose rewards are all equal",
    "tokens/discriminator": "packed tokens of the discriminator's pass",
    "tokens/policy": "packed tokens of the policy's pass",
    "rouge_l": "ROUGE-L of student against teacher (evaluation): a health check, not an aim",
    **{f"time/{name}": f"seconds: {what}" for name, what in PHASES.items()},
    "time/step": "seconds of the whole optimizer step",
}


class Clock:
    """Seconds of each phase since the last `reset`. Kernels are waited for, so that a phase pays for its own work."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self.begin = time.perf_counter()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside as phase `name` of `PHASES`."""
        assert name in PHASES, name
        begin = self._now()
        try:
            yield
        finally:
            self.seconds[name] += self._now() - begin

    def mark(self, name: str) -> None:
        """Phase `name` begins; `close` ends it."""
        assert name in PHASES, name
        self._marked = self._now()

    def close(self, name: str) -> None:
        """Phase `name` ends."""
        self.seconds[name] += self._now() - self._marked

    def restart(self) -> None:
        """Leave what ran since the last step (an evaluation, a checkpoint) out of the next step."""
        self.begin = self._now()
        self.seconds.clear()

    def reset(self) -> dict[str, float]:
        """The phases and the whole step as metrics; starts the next step."""
        now = self._now()
        result = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        result["time/step"] = now - self.begin
        self.seconds.clear()
        self.begin = now
        return result


def sample_table(rollout: Rollout, teacher: torch.Tensor, students: torch.Tensor) -> torch.Tensor:
    """
    `[B, G, 5]` float32, for `rollout_metrics`: of each sample its score, the teacher's score, its length, whether it
    was cut, the teacher's length.

    Args:
        rollout: Groups and samples.
        teacher (`torch.Tensor` of shape `(B,)`): Scores of the teacher's responses.
        students (`torch.Tensor` of shape `(B, G)`): Scores of the samples, NaN for an empty one.
    """
    lengths = torch.tensor([[float(len(sample.ids)) for sample in row] for row in rollout.samples])
    cut = torch.tensor([[float(sample.cut) for sample in row] for row in rollout.samples])
    teacher_lengths = torch.tensor([float(len(group.teacher_ids)) for group in rollout.groups])
    repeated = [column[:, None].expand_as(students) for column in (teacher, teacher_lengths)]
    return torch.stack([students, repeated[0], lengths, cut, repeated[1]], dim=-1)


def rollout_metrics(table: torch.Tensor) -> dict[str, float]:
    """Scores and lengths of the samples in a `sample_table`, that of all processes."""
    students, teacher, lengths, cut, teacher_lengths = table.unbind(-1)
    present = lengths > 0
    uncut = present & (cut == 0)
    ahead = (teacher > students).float()
    one_teacher, samples, sizes = teacher[:, 0], students[present], lengths[present]
    return {
        "discriminator/accuracy": _mean(ahead[present]),
        "discriminator/accuracy_uncut": _mean(ahead[uncut]),
        "discriminator/margin": _mean((teacher - students)[present]),
        "discriminator/teacher_score/mean": _mean(one_teacher),
        "discriminator/teacher_score/std": float(one_teacher.std(correction=0)),
        "discriminator/student_score/mean": _mean(samples),
        "discriminator/student_score/std": float(samples.std(correction=0)),
        "length_auc": length_auc(teacher_lengths[:, 0].tolist(), lengths.tolist()),
        "completions/mean_length": _mean(sizes),
        "completions/min_length": float(sizes.min()) if sizes.numel() else math.nan,
        "completions/max_length": float(sizes.max()) if sizes.numel() else math.nan,
        "completions/teacher_mean_length": _mean(teacher_lengths[:, 0]),
        "completions/clipped_ratio": _mean(cut),
        "completions/empty": float((~present).sum()),
    }


def _mean(values: torch.Tensor) -> float:
    """NaN where there is nothing to average, which the log leaves out."""
    return float(values.mean()) if values.numel() else math.nan


def merge_micro_batches(parts: list[tuple[dict[str, list[float]], float]]) -> dict[str, float]:
    """
    One value per metric from those of the micro-batches: the weighted mean; for names that end in `min` or `max` the
    smallest or largest.

    Args:
        parts: (metrics, weight) of each micro-batch, the weight being its number of tokens.

    >>> merge_micro_batches([({"kl": [1.0], "clip_ratio/high_max": [0.1]}, 3), ({"kl": [5.0]}, 1)])
    {'kl': 2.0, 'clip_ratio/high_max': 0.1}
    """
    merged = {}
    for name in dict.fromkeys(name for metrics, _ in parts for name in metrics):
        values = [
            (value, weight) for metrics, weight in parts for value in metrics.get(name, []) if not math.isnan(value)
        ]
        if not values:
            continue
        if name.endswith("min"):
            merged[name] = min(value for value, _ in values)
        elif name.endswith("max"):
            merged[name] = max(value for value, _ in values)
        else:
            total = sum(weight for _, weight in values)
            merged[name] = sum(value * weight for value, weight in values) / total if total else values[-1][0]
    return merged
