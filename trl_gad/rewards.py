"""Rewards of a rollout batch: the discriminator's scores and those of further reward functions, and their advantages."""

from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import nanstd, strip_images_from_messages

from trl_gad.adversary import Scores
from trl_gad.batch import Rollout
from trl_gad.losses import advantages


if TYPE_CHECKING:
    from trl_gad.trainer import GADTrainer


def set_advantages(trainer: "GADTrainer", rollout: Rollout, scores: Scores, metrics: dict[str, float]) -> torch.Tensor:
    """
    Call TRL's reward functions (the discriminator is the first) and set `rollout.advantages`; scores that are no
    numbers leave it None. Adds to `metrics`.

    Returns:
        `torch.Tensor` of shape `(B * G, functions)`: This process's rewards.
    """
    accelerator, num_generations = trainer.accelerator, trainer.num_generations
    pairs = [(group, s) for group, row in zip(rollout.groups, rollout.samples, strict=True) for s in row]
    texts = trainer.reader.tokenizer.batch_decode([sample.ids for _, sample in pairs], skip_special_tokens=True)
    rewards = trainer._calculate_rewards(
        # TRL takes the names of the first row for those of all, so a row without images has an empty list
        [{**group.columns, "images": group.images} for group, _ in pairs],
        [group.prompt for group, _ in pairs],
        [[{"role": "assistant", "content": text}] for text in texts],
        [sample.ids for _, sample in pairs],
    ).cpu()  # of all processes: (N, functions)
    _collect_logs_of_functions(trainer, len(pairs), metrics)
    empty = torch.tensor([not sample.ids for _, sample in pairs], device=accelerator.device)
    rewards[accelerator.gather(empty).cpu()] = torch.nan
    values, total = advantages(
        rewards, trainer.reward_weights.cpu(), num_generations, trainer.scale_rewards,
        trainer.multi_objective_aggregation,
    )  # fmt: skip
    own = slice(accelerator.process_index * len(pairs), (accelerator.process_index + 1) * len(pairs))
    if trainer.mean_over_processes(torch.tensor(float(scores.finite), device=accelerator.device)) == 1.0:
        rollout.advantages = values[own].view(len(rollout.groups), num_generations)
    groups = total.view(-1, num_generations)
    metrics["reward"] = float(total.nanmean())
    metrics["reward_std"] = float(nanstd(total))
    metrics["frac_reward_zero_std"] = float((groups - groups[:, :1]).abs().nansum(dim=1).eq(0).float().mean())
    for name, column in zip(trainer.reward_func_names, rewards.T, strict=True):
        metrics[f"rewards/{name}/mean"] = float(column.nanmean())
        metrics[f"rewards/{name}/std"] = float(nanstd(column))
    return rewards[own]


def _collect_logs_of_functions(trainer: "GADTrainer", num_samples: int, metrics: dict[str, float]) -> None:
    """What reward functions gave to TRL's `log_extra` (columns of the completions) and `log_metric` (means)."""
    # Sorted, so that all processes gather the same name at the same time
    for column in sorted(set(gather_object(list(trainer._pending_extra_logs)))):
        values = trainer._pending_extra_logs.get(column, [None] * num_samples)
        trainer._logs["extra"][column].extend(gather_object(values))
    for name in sorted(set(gather_object(list(trainer._pending_metrics)))):
        values = gather_object(trainer._pending_metrics.get(name, []))
        metrics[name] = sum(values) / len(values)
    trainer._pending_extra_logs.clear()
    trainer._pending_metrics.clear()


def log_rollout(trainer: "GADTrainer", rollout: Rollout, scores: Scores, rewards: torch.Tensor) -> None:
    """
    What `log_completions` shows: one row per sample with its prompt, picture, teacher's response and scores.

    Args:
        rewards (`torch.Tensor` of shape `(B * G, functions)`): One column per reward function that was called.
    """
    count = trainer.num_generations
    values = torch.zeros_like(scores.students) if rollout.advantages is None else rollout.advantages
    ids = [sample.ids for row in rollout.samples for sample in row]
    texts = trainer.reader.tokenizer.batch_decode(ids, skip_special_tokens=True)
    columns = {
        "prompt": [p for group in rollout.groups for p in [strip_images_from_messages(group.prompt)] * count],
        "completion": [[{"role": "assistant", "content": text}] for text in texts],
        "advantages": values.flatten().tolist(),
        "teacher": [group.teacher_text for group in rollout.groups for _ in range(count)],
        "teacher_score": scores.teacher.repeat_interleave(count).tolist(),
    }
    if trainer.log_multimodal:
        columns["images"] = [group.images for group in rollout.groups for _ in range(count)]
    gathered = {name: gather_object(column) for name, column in columns.items()}
    logs = trainer._logs
    for name in ("prompt", "completion", "advantages"):
        logs[name].extend(gathered[name])
    for name in ("teacher", "teacher_score"):
        logs["extra"][name].extend(gathered[name])
    for name, column in zip(trainer.reward_func_names, rewards.T, strict=False):
        logs["rewards"][name].extend(gather_object(column.tolist()))
    logs["images"].clear()  # or a batch without pictures would be shown with those of an earlier one
    if trainer.log_multimodal and any(gathered["images"]):
        logs["images"].extend(gathered["images"])
