"""Evaluation on held-out prompts: does the discriminator still tell teacher from student, and how does the student do."""

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from rouge_score.rouge_scorer import RougeScorer

from trl_gad.batch import Rollout
from trl_gad.metrics import rollout_metrics, sample_table
from trl_gad.rollouts import sampling_seed


if TYPE_CHECKING:
    from trl_gad.trainer import GADTrainer


def run_evaluation(trainer: "GADTrainer", dataset: Any, prefix: str) -> dict[str, float]:
    """
    One evaluation by the trainer's policy and discriminator; nothing is updated.

    Two evaluations of equal weights with equal settings are equal: the samples' seed is that of the run.

    Returns:
        `dict[str, float]`: Metrics over all usable rows, `prefix` and an underscore before each name.
    """
    accelerator, args, begin = trainer.accelerator, trainer.args, time.perf_counter()
    rows = trainer.rows_for_evaluation(dataset)
    own = rows[accelerator.process_index :: accelerator.num_processes]
    per_batch = max(args.per_device_eval_batch_size // trainer.num_generations_eval, 1)
    tables, rouge, losses = [], [], []
    scorer = RougeScorer(["rougeL"])
    # Every process runs the same number of forwards, the last perhaps without rows
    for index in range(-(-len(rows) // (per_batch * accelerator.num_processes))):
        chosen = own[index * per_batch : (index + 1) * per_batch]
        groups = [trainer.reader.read(row, dataset[row]) for row in chosen]
        seed = sampling_seed(args.seed + 1, index, accelerator.process_index)
        samples = trainer.sampler.sample(trainer.model_wrapped, groups, trainer.num_generations_eval, seed)
        rollout = Rollout(index, groups, samples)
        scores, loss_sum, num_pairs = trainer.adversary.score(rollout)
        losses.append((loss_sum, num_pairs))
        if groups:
            tables.append(sample_table(rollout, scores.teacher, scores.students))
        for group, row in zip(groups, samples, strict=True):
            texts = trainer.reader.tokenizer.batch_decode([s.ids for s in row], skip_special_tokens=True)
            rouge += [scorer.score(group.teacher_text, text)["rougeL"].fmeasure for text in texts]
    metrics = rollout_metrics(torch.cat(gather_object(tables)))
    rouge, losses = gather_object(rouge), gather_object(losses)
    metrics["rouge_l"] = sum(rouge) / len(rouge)
    metrics["discriminator/loss"] = sum(loss for loss, _ in losses) / max(sum(pairs for _, pairs in losses), 1)
    metrics["runtime"] = time.perf_counter() - begin
    # A metric of nothing (no sample ended by itself, say) is NaN: left out
    return {f"{prefix}_{name}": value for name, value in metrics.items() if not math.isnan(value)}
