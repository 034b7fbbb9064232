"""The mathematics of a step, without models: Bradley-Terry loss, advantages, and the normalisers of TRL's losses.

Letters in shapes: P pairs of a teacher's response and a sample, N samples of all groups.
"""

import torch
import torch.nn.functional as F
from trl.trainer.utils import nanstd


def bradley_terry(teacher: torch.Tensor, students: torch.Tensor) -> torch.Tensor:
    """
    Sum over pairs of `softplus(D(x, s) - D(x, t))`, i.e. of `-log sigmoid(D(x, t) - D(x, s))` (GAD, eq. 3).

    Args:
        teacher (`torch.Tensor` of shape `(P,)`): Score of each pair's teacher response.
        students (`torch.Tensor` of shape `(P,)`): Score of each pair's sample.

    Returns:
        `torch.Tensor`: A scalar; divide it by the number of pairs of the whole step.
    """
    return F.softplus(students - teacher).sum()


def length_auc(teacher: list[int], students: list[list[int]]) -> float:
    """
    How well length alone tells teacher from student: the share of pairs in which the teacher's response is the longer
    one, ties counted half. 0.5: length says nothing; near 0 or 1: a discriminator could read the length only.

    >>> length_auc([5], [[4, 5, 6, 3]])  # wins of the teacher: 1 + 0.5 + 0 + 1 of 4
    0.625
    """
    wins = [(t > s) + 0.5 * (t == s) for t, row in zip(teacher, students, strict=True) for s in row]
    return sum(wins) / max(len(wins), 1)


def advantages(
    rewards: torch.Tensor, weights: torch.Tensor, num_generations: int, scale_rewards: str, aggregation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Advantages as TRL's `GRPOTrainer` computes them: `(r - mean) / (std + 1e-4)` within the group.

    Args:
        rewards (`torch.Tensor` of shape `(N, F)`):
            One column per reward function, NaN where a function said nothing. N counts the samples of all processes,
            group by group.
        weights (`torch.Tensor` of shape `(F,)`): `reward_weights`.
        num_generations (`int`): G.
        scale_rewards (`str`): `"group"`, `"batch"` or `"none"`: over what the standard deviation is taken.
        aggregation (`str`): `"sum_then_normalize"` or `"normalize_then_sum"`.

    Returns:
        `(advantages, rewards)`, both of shape `(N,)`. A sample without any reward has advantage 0 and reward NaN and
        takes no part in its group's mean.
    """
    unscored = rewards.isnan().all(dim=1)
    total = (rewards * weights).nansum(dim=1).masked_fill(unscored, torch.nan)
    if aggregation == "sum_then_normalize":
        groups = total.view(-1, num_generations)
        mean = groups.nanmean(dim=1).repeat_interleave(num_generations)
        result = total - mean
        if scale_rewards == "group":
            result = result / (nanstd(groups, dim=1).repeat_interleave(num_generations) + 1e-4)
        elif scale_rewards == "batch":
            result = result / (nanstd(total) + 1e-4)
        elif scale_rewards != "none":
            raise ValueError(f"`scale_rewards` must be group, batch or none, got {scale_rewards!r}.")
    elif aggregation == "normalize_then_sum":
        groups = rewards.view(-1, num_generations, rewards.size(1))
        normal = (groups - groups.nanmean(dim=1, keepdim=True)) / (nanstd(groups, dim=1, keepdim=True) + 1e-4)
        normal = (normal.view_as(rewards) * weights).nansum(dim=1).masked_fill(unscored, torch.nan)
        result = (normal - normal.nanmean()) / (nanstd(normal) + 1e-4)
    else:
        raise ValueError(
            f"`multi_objective_aggregation` must be sum_then_normalize or normalize_then_sum, got {aggregation!r}."
        )
    return result.nan_to_num(nan=0.0), total


def accumulation_factor(
    loss_type: str, *, micro_rows: int, micro_tokens: int, step_rows: int, step_tokens: int, num_processes: int
) -> float:
    """
    What stands in for TRL's `current_gradient_accumulation_steps`, so that the micro-batches of all processes add up
    to the loss of the step taken as one micro-batch.

    TRL divides a micro-batch's loss by its own rows (`grpo`, `sapo`, `dr_grpo`, `luspo`) or tokens (`bnpo`), then by
    this factor; data-parallel training then averages over the processes:

        sum over processes and micro-batches of  loss_sum / (micro_rows * factor) / num_processes
          = loss_sum_of_the_step / step_rows      with   factor = step_rows / (micro_rows * num_processes)

    `dapo`, `cispo` and `vespo` divide by the step's tokens already (`num_items_in_batch`); for them the factor only
    scales the entropy bonus, a token mean, as it does for `bnpo`.

    >>> accumulation_factor("grpo", micro_rows=2, micro_tokens=9, step_rows=8, step_tokens=50, num_processes=2)
    2.0
    """
    if loss_type in ("grpo", "sapo", "dr_grpo", "luspo"):
        return step_rows / (micro_rows * num_processes)
    if micro_tokens == 0:  # all its responses are masked: its loss is 0 whatever it is divided by
        return 1.0
    return step_tokens / (micro_tokens * num_processes)
