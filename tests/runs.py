"""Tiny runs: a dataset of a few rows, arguments for the CPU, and a trainer in one line. Any field can be overridden."""

import functools
from pathlib import Path
from typing import Any

from datasets import Dataset
from PIL import Image

from tests import tiny
from trl_gad import GADConfig, GADTrainer
from trl_gad.planner import plan


def rows(num_rows: int = 12, images: bool = True) -> Dataset:
    """Row i asks "What i?", its teacher says "abc " 1 to 3 times, and it has i % 3 pictures (none in text datasets)."""
    table = []
    for i in range(num_rows):
        row: dict[str, Any] = {
            "prompt": [{"role": "user", "content": f"What {i}?"}],
            "completion": [{"role": "assistant", "content": "abc " * (1 + i % 3)}],
        }
        if images:
            row["images"] = [Image.new("RGB", (32 + 16 * (i % 2), 32), (i * 20, 10, 50)) for _ in range(i % 3)]
        table.append(row)
    return Dataset.from_list(table)


def config(tmp_path: Path, **overrides: Any) -> GADConfig:
    """Four prompts a step, two samples each, float32 on the CPU, 5 steps: 1 of D alone, 1 of warm-up, 3 of GAD."""
    fields: dict[str, Any] = dict(
        output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=2,
        max_completion_length=12, max_steps=5, gad_warmup_steps=2, discriminator_only_steps=1, learning_rate=1e-3,
        gad_warmup_learning_rate=1e-3, discriminator_learning_rate=1e-3, beta=0.01, use_cpu=True, bf16=False,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        dataloader_num_workers=0,
    )  # fmt: skip
    return GADConfig(**(fields | overrides))


def trainer(tmp_path: Path, model: Any = None, dataset: Dataset | None = None, **overrides: Any) -> GADTrainer:
    """A trainer of a tiny Qwen3-VL. Arguments of the trainer and fields of the configuration may both be overridden."""
    of_trainer = (
        "discriminator", "eval_dataset", "processing_class", "reward_funcs", "reward_processing_classes", "callbacks",
        "optimizers", "quantization_config", "peft_config", "discriminator_peft_config",
    )  # fmt: skip
    given = {name: overrides.pop(name) for name in of_trainer if name in overrides}
    given.setdefault("processing_class", tiny.processor())
    return GADTrainer(
        model=tiny.qwen3_vl() if model is None else model,
        args=config(tmp_path, **overrides),
        train_dataset=rows() if dataset is None else dataset,
        **given,
    )


@functools.cache
def budget(
    lengths: tuple[tuple[int, tuple[int, ...]], ...], num_micro_batches: int, share_prompt: bool, num_repeated: int = 0
) -> int:
    """The largest token budget that cuts groups of these lengths (of `plan`) into `num_micro_batches`."""
    groups = [(prompt, list(responses)) for prompt, responses in lengths]
    budgets = range(sum(p * len(r) + sum(r) for p, r in groups), 0, -1)

    def number(budget: int) -> int:
        return len(plan(groups, budget, share_prompt=share_prompt, num_repeated=num_repeated))

    return next(budget for budget in budgets if number(budget) == num_micro_batches)
