"""What a trainer finds out before its first step, and the processes that read its rows."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests import runs
from trl_gad.messages import RowError


# Without pictures, row 0 of `runs.rows` is the shortest and row 2, with three times "abc ", the longest
TEXTS: dict[str, Any] = dict(max_completion_length=13)


def test_a_row_over_the_token_budget_is_refused_when_the_trainer_is_built(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, dataset=runs.rows(3, images=False), **TEXTS)
    group = trainer.reader.read(2, trainer.train_dataset[2])
    # The prompt without its last token, then its copies before the teacher's response and the longest of the student's
    needed = len(group.prompt_ids) - 1 + (1 + len(group.teacher_ids)) + (1 + 13)
    runs.trainer(tmp_path, dataset=runs.rows(3, images=False), max_tokens_per_micro_batch=needed, **TEXTS)
    with pytest.raises(
        ValueError, match=f"row 2 needs {needed} tokens.*Raise `max_tokens_per_micro_batch` to {needed}"
    ):
        runs.trainer(tmp_path, dataset=runs.rows(3, images=False), max_tokens_per_micro_batch=needed - 1, **TEXTS)


def test_rows_of_an_evaluation_are_held_to_the_budget_as_well(tmp_path: Path) -> None:
    fits = runs.rows(1, images=False)
    trainer = runs.trainer(tmp_path, dataset=fits, **TEXTS)
    group = trainer.reader.read(0, trainer.train_dataset[0])
    budget = len(group.prompt_ids) - 1 + (1 + len(group.teacher_ids)) + (1 + 13)
    with pytest.raises(ValueError, match="row 2 needs"):
        runs.trainer(
            tmp_path, dataset=fits, eval_dataset=runs.rows(3, images=False), max_tokens_per_micro_batch=budget, **TEXTS
        )


def test_workers_change_nothing_and_none_is_left(tmp_path: Path) -> None:
    losses = []
    for num_workers in (0, 2):
        trainer = runs.trainer(tmp_path, max_steps=4, dataloader_num_workers=num_workers, temperature=0.8)
        trainer.train()
        losses.append([entry["discriminator/loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert not multiprocessing.active_children()
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_a_row_that_breaks_later_ends_the_run_with_its_number_and_no_worker_is_left(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    runs.rows(2)[1]["images"][0].save(picture)
    question = [{"role": "user", "content": "What?"}]
    answer = [{"role": "assistant", "content": "abc"}]
    rows = [{"prompt": question, "completion": answer, "images": [str(picture)]} for _ in range(4)]
    trainer = runs.trainer(tmp_path / "run", dataset=Dataset.from_list(rows), dataloader_num_workers=2)
    picture.unlink()
    with pytest.raises(RowError, match=r"[Rr]ow \d"):
        trainer.train()
    assert not multiprocessing.active_children()
