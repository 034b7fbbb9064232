"""`train(resume_from_checkpoint=True)` in every kind of step: the run goes on as if it had never stopped."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from tests import runs, tiny
from trl_gad import GADTrainer


# 2 steps of D alone, 4 of warm-up on rollouts 2 and 3, 8 of GAD on rollouts 4 and 5 (2 shares, 2 iterations each).
# 10 rows at 4 prompts a rollout: epochs end within rollouts 2 and 5 and after rollout 4.
PLAN: dict[str, Any] = dict(
    per_device_train_batch_size=4, gradient_accumulation_steps=1, generation_batch_size=8, num_iterations=2,
    discriminator_only_steps=2, gad_warmup_steps=6, max_steps=14, max_completion_length=13, logging_steps=1,
    lr_scheduler_type="cosine", warmup_steps=2, beta=0.05,
)  # fmt: skip
WHERE = {
    1: "in the steps of D alone",
    3: "in warm-up, in the middle of the rollout batch in which the first epoch ends",
    6: "before the first step of stage 2",
    7: "after the first step of stage 2, in the first iteration",
    9: "in the second iteration",
    10: "between two rollout batches of stage 2",
}
LORA_AT = (1, 3, 7, 10)


@dataclass
class Run:
    """A finished run."""

    trainer: GADTrainer
    folder: Path
    rows: list[list[int]]  # dataset rows of every rollout batch it generated

    @property
    def policy(self) -> dict[str, torch.Tensor]:
        return self.trainer.policy.state_dict()

    @property
    def discriminator(self) -> dict[str, torch.Tensor]:
        return self.trainer.discriminator.state_dict()

    def logs(self, after: int) -> list[dict[str, float]]:
        """The logs of the steps after `after`, without times."""
        return [
            {name: value for name, value in entry.items() if not name.startswith("time/")}
            for entry in self.trainer.state.log_history
            if entry["step"] > after and "loss" in entry
        ]


def start(folder: Path, resume: bool = False, **overrides: Any) -> Run:
    trainer = runs.trainer(folder, dataset=runs.rows(10), **(PLAN | overrides))
    rows: list[list[int]] = []
    generate = trainer._start_rollout

    def start_rollout(step: Any, groups: Any) -> None:
        rows.append([group.row for group in groups])
        generate(step, groups)

    trainer._start_rollout = start_rollout
    trainer.train(resume_from_checkpoint=resume)
    return Run(trainer, folder, rows)


def resumed(whole: Run, at: int, folder: Path, **overrides: Any) -> Run:
    """A new trainer in a folder that holds the whole run's checkpoint of step `at` only."""
    shutil.copytree(whole.folder / f"checkpoint-{at}", folder / f"checkpoint-{at}")
    return start(folder, resume=True, save_strategy="steps", save_steps=100, **overrides)


def lora() -> dict[str, Any]:
    kwargs: dict[str, Any] = dict(r=4, lora_alpha=16, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"])
    return dict(peft_config=LoraConfig(**kwargs), discriminator_peft_config=LoraConfig(**kwargs))


def assert_same_logs(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            if value is None or other[name] is None:
                assert value is other[name], (name, mine["step"])
                continue
            assert math.isclose(value, other[name], rel_tol=1e-6, abs_tol=1e-6), (name, mine["step"])


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def largest_change(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(float((value - theirs[name]).abs().max()) for name, value in ours.items())


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return start(tmp_path_factory.mktemp("full"), save_strategy="steps", save_steps=1)


@pytest.fixture(scope="module")
def with_lora(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return start(tmp_path_factory.mktemp("lora"), save_strategy="steps", save_steps=1, **lora())


def check(whole: Run, again: Run, at: int) -> None:
    assert_same_logs(again.logs(at), whole.logs(at))
    assert_same_weights(again.policy, whole.policy)
    assert_same_weights(again.discriminator, whole.discriminator)
    begun = {1: 1, 3: 3, 6: 4, 7: 5, 9: 5, 10: 5}[at]  # rollout batches generated before the checkpoint
    assert again.rows == whole.rows[begun:]
    assert len(whole.rows) == 6


@pytest.mark.parametrize("at", WHERE, ids=WHERE.get)
def test_full_fine_tuning_goes_on(full: Run, tmp_path: Path, at: int) -> None:
    check(full, resumed(full, at, tmp_path), at)


@pytest.mark.parametrize("at", LORA_AT, ids=WHERE.get)
def test_lora_on_both_goes_on(with_lora: Run, tmp_path: Path, at: int) -> None:
    check(with_lora, resumed(with_lora, at, tmp_path, **lora()), at)


def test_saving_changes_nothing(full: Run, tmp_path: Path) -> None:
    unsaved = start(tmp_path)
    assert_same_logs(full.logs(0), unsaved.logs(0))
    assert_same_weights(full.policy, unsaved.policy)


def test_the_runs_above_can_tell_a_wrong_resume(full: Run, tmp_path: Path) -> None:
    """Without the saved state of D's optimizer and schedule the numbers differ by far more than the tolerance."""
    shutil.copytree(full.folder / "checkpoint-7", tmp_path / "checkpoint-7")
    file = tmp_path / "checkpoint-7" / "gad_state.pt"
    state = torch.load(file, weights_only=True)
    for moments in state["adversary"]["optimizer"]["state"].values():
        moments["exp_avg"].zero_()
    torch.save(state, file)
    again = start(tmp_path, resume=True)
    assert largest_change(again.discriminator, full.discriminator) > 1e-4
    assert len({entry["learning_rate"] for entry in full.logs(0)}) > 6  # the schedule moves


def test_the_reference_is_the_snapshot_of_stage_two(full: Run, tmp_path: Path) -> None:
    """Not the policy of the checkpoint, nor that of the run's start."""
    again = resumed(full, 9, tmp_path)
    assert full.trainer.reference is not None
    assert again.trainer.reference is not None
    snapshot = full.trainer.reference.state_dict()
    assert_same_weights(again.trainer.reference.state_dict(), snapshot)
    assert largest_change(snapshot, tiny.qwen3_vl().state_dict()) > 1e-4  # the warm-up
    assert largest_change(snapshot, full.policy) > 1e-4  # stage 2


def test_adaptive_entropy_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(
        use_adaptive_entropy=True, entropy_coef=0.01, entropy_target=6.0, entropy_coef_delta=0.02
    )
    whole = start(tmp_path / "whole", save_strategy="steps", save_steps=9, **options)
    again = resumed(whole, 9, tmp_path / "again", **options)
    check(whole, again, 9)
    # One step of 0.02 for each of the 8 policy updates of stage 2, the entropy being below its target
    assert again.trainer.entropy_coef == pytest.approx(0.01 + 8 * 0.02)


class EndWarmup(TrainerCallback):
    """Ends stage 1 after step 3."""

    trainer: GADTrainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.trainer.end_warmup()


def ending_warmup_early(folder: Path) -> GADTrainer:
    callback = EndWarmup()
    options: dict[str, Any] = PLAN | dict(
        num_iterations=1, discriminator_only_steps=1, gad_warmup_steps=7, max_steps=10
    )
    trainer = runs.trainer(
        folder, dataset=runs.rows(10), save_strategy="steps", save_steps=1, callbacks=[callback], **options
    )
    callback.trainer = trainer
    return trainer


def test_a_warmup_that_ended_early_goes_on(tmp_path: Path) -> None:
    """Before it ended, and after: the plan is part of the checkpoint."""
    whole = ending_warmup_early(tmp_path / "whole")
    whole.train()
    # 1 of D alone, the rollout batch of 2 steps in which it was ended, then the 3 of stage 2 that 10 - 7 were to have
    assert [entry["stage"] for entry in whole.state.log_history[:-1]] == [0, 1, 1, 2, 2, 2]
    for at in (2, 5):
        folder = tmp_path / f"from {at}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{at}", folder / f"checkpoint-{at}")
        again = ending_warmup_early(folder)
        again.train(resume_from_checkpoint=True)
        ours, theirs = (Run(trainer, folder, []) for trainer in (again, whole))
        assert_same_logs(ours.logs(at), theirs.logs(at))
        assert_same_weights(ours.policy, theirs.policy)
        assert_same_weights(ours.discriminator, theirs.discriminator)


def test_another_number_of_processes_is_refused_in_the_middle_of_a_rollout_batch(full: Run, tmp_path: Path) -> None:
    shutil.copytree(full.folder / "checkpoint-7", tmp_path / "checkpoint-7")
    file = tmp_path / "checkpoint-7" / "gad_state.pt"
    torch.save(torch.load(file, weights_only=True) | {"num_processes": 2}, file)
    with pytest.raises(ValueError, match="saved by 2 processes in the middle of a rollout batch"):
        start(tmp_path, resume=True)


def test_save_total_limit_keeps_the_last_ones(tmp_path: Path) -> None:
    run = start(tmp_path, save_strategy="steps", save_steps=2, save_total_limit=2, max_steps=8)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]
    for path in tmp_path.glob("checkpoint-*"):
        assert (path / "discriminator" / "score_head.safetensors").is_file()
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-8")
    assert run.trainer.state.global_step == 8


@pytest.mark.parametrize("options", [{}, "lora"], ids=["full", "lora"])
def test_load_best_model_at_end_brings_back_both_models(tmp_path: Path, options: Any) -> None:
    options = lora() if options == "lora" else {}
    run = start(
        tmp_path, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, max_steps=8,
        eval_dataset=runs.rows(4), load_best_model_at_end=True, metric_for_best_model="discriminator/accuracy",
        greater_is_better=False, save_total_limit=4, **options,
    )  # fmt: skip
    best = Path(str(run.trainer.state.best_model_checkpoint))
    assert best.name == "checkpoint-2", "accuracies rise in this run, so the lowest comes first"
    again = runs.trainer(tmp_path / "again", dataset=runs.rows(10), **PLAN, **options)
    again._load_from_checkpoint(str(best))
    assert_same_weights(run.policy, again.policy.state_dict())
    assert_same_weights(run.discriminator, again.discriminator.state_dict())
