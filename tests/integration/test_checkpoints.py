"""A checkpoint is whole or absent: killed saves, lost and cut files, full disks, limits, other numbers of processes.

Run as a script, this file trains and is killed in the middle of its second save, or trains in two processes.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from tests import runs
from tests.integration.test_resume import assert_same_weights, lora
from trl_gad import Discriminator, GADTrainer, checkpoint


TIMEOUT_S = 120
SAVES: dict[str, Any] = dict(save_strategy="steps", save_steps=1, max_steps=3)
# 1 step of D alone, 2 of warm-up on one rollout batch, 1 of GAD; 8 completions a step on two processes
TWO: dict[str, Any] = SAVES | dict(gradient_accumulation_steps=1, generation_batch_size=16, max_steps=4)
KILLED_AFTER = ("model.safetensors", "gad_state.pt", "manifest.json")


def train(folder: Path, resume: Any = None, **overrides: Any) -> GADTrainer:
    trainer = runs.trainer(folder, **(SAVES | overrides))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def names(folder: Path) -> list[str]:
    """The folders of a run's folder."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name != "discriminator")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> GADTrainer:
    return train(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def copied(whole: GADTrainer, tmp_path: Path) -> Path:
    """The whole run's folder without its last checkpoint."""
    shutil.copytree(str(whole.args.output_dir), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    return tmp_path / "run"


def assert_same_end(ours: GADTrainer, theirs: GADTrainer) -> None:
    assert ours.state.global_step == theirs.state.global_step
    assert_same_weights(ours.policy.state_dict(), theirs.policy.state_dict())
    assert_same_weights(ours.discriminator.state_dict(), theirs.discriminator.state_dict())


def test_the_manifest_names_every_file(whole: GADTrainer) -> None:
    folder = Path(str(whole.args.output_dir)) / "checkpoint-2"
    assert names(folder.parent) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    del files["manifest.json"]
    assert json.loads((folder / "manifest.json").read_text())["files"] == files
    assert {"model.safetensors", "discriminator/model.safetensors", "discriminator/score_head.safetensors"} < set(
        files
    )
    assert {"optimizer.pt", "gad_state.pt", "rng_state.pth", "trainer_state.json"} < set(files)


@pytest.mark.parametrize("file", KILLED_AFTER)
def test_a_save_that_was_killed_leaves_the_one_before(whole: GADTrainer, tmp_path: Path, file: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, __file__, str(tmp_path), file]
    done = subprocess.run(command, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert names(tmp_path) == ["_saving", "checkpoint-1"]
    assert (tmp_path / "_saving" / "checkpoint-2" / file).is_file()
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-1")
    again = train(tmp_path, resume=True)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert_same_end(again, whole)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("discriminator/model.safetensors", Path.unlink, "discriminator/model.safetensors is missing"),
        ("optimizer.pt", cut, "optimizer.pt is cut off"),
        ("manifest.json", Path.unlink, "manifest.json is missing"),
        ("manifest.json", cut, "manifest.json is cut off"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_refused_by_name(
    whole: GADTrainer, copied: Path, caplog: pytest.LogCaptureFixture, file: str, damage: Any, said: str
) -> None:
    damage(copied / "checkpoint-2" / file)
    trainer = runs.trainer(copied, **SAVES)
    with pytest.raises(ValueError, match=f"checkpoint-2 is not a whole checkpoint: {said}"):
        trainer.train(resume_from_checkpoint=str(copied / "checkpoint-2"))
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=True)
    assert f"checkpoint-2 is not a whole checkpoint and is passed over: {said}" in caplog.text
    assert_same_end(trainer, whole)
    assert checkpoint.what_is_wrong(copied / "checkpoint-2") is None, "it was saved anew"


def test_no_whole_checkpoint_at_all(copied: Path, tmp_path: Path) -> None:
    shutil.rmtree(copied / "checkpoint-2")
    (copied / "checkpoint-1" / "scheduler.pt").unlink()
    trainer = runs.trainer(copied, **SAVES)
    with pytest.raises(ValueError, match=r"no whole checkpoint in .*checkpoint-1: scheduler.pt is missing"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="checkpoint-7 is not a whole checkpoint: there is no such folder"):
        trainer.train(resume_from_checkpoint=copied / "checkpoint-7")
    empty = runs.trainer(tmp_path / "empty", **SAVES)
    with pytest.raises(ValueError, match="no whole checkpoint in .*empty"):
        empty.train(resume_from_checkpoint=True)


def test_models_alone_cannot_be_resumed(tmp_path: Path) -> None:
    train(tmp_path, save_only_model=True, max_steps=1)
    assert checkpoint.what_is_wrong(tmp_path / "checkpoint-1") is None
    with pytest.raises(ValueError, match="checkpoint-1 holds the models alone .*save_only_model"):
        train(tmp_path, resume=True)


def test_a_replaced_checkpoint_comes_back_after_a_kill(copied: Path) -> None:
    """Killed between the two renames that put a new checkpoint in the place of one of the same step."""
    (copied / "_saving" / "replaced").mkdir(parents=True)
    (copied / "checkpoint-2").rename(copied / "_saving" / "replaced" / "checkpoint-2")
    (copied / "_saving" / "checkpoint-2").mkdir()
    checkpoint.clear_unfinished(copied)
    assert names(copied) == ["checkpoint-1", "checkpoint-2"]
    assert checkpoint.what_is_wrong(copied / "checkpoint-2") is None


def test_a_limit_removes_old_ones_after_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    remove = shutil.rmtree

    def look(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).name.startswith("checkpoint-"):
            there = [n for n in names(tmp_path) if n != "_saving" and not checkpoint.what_is_wrong(tmp_path / n)]
            seen.append((Path(path).name, there))
        remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", look)
    train(tmp_path, save_total_limit=1)
    assert seen == [
        ("checkpoint-1", ["checkpoint-1", "checkpoint-2"]),
        ("checkpoint-2", ["checkpoint-2", "checkpoint-3"]),
    ]
    assert names(tmp_path) == ["checkpoint-3"]


def test_a_limit_keeps_the_new_one_and_the_best(copied: Path) -> None:
    """Numbers above the new one's, left by a run that was resumed from further back, do not push it out."""
    shutil.copytree(copied / "checkpoint-2", copied / "checkpoint-9")
    shutil.copytree(copied / "checkpoint-2", copied / "checkpoint-8")
    (copied / "checkpoint-9" / "optimizer.pt").unlink()
    checkpoint.remove_old(copied, keep=[copied / "checkpoint-1", copied / "checkpoint-2"], limit=3)
    assert names(copied) == ["checkpoint-1", "checkpoint-2", "checkpoint-8"], "a damaged one goes first"
    checkpoint.remove_old(copied, keep=[copied / "checkpoint-1", copied / "checkpoint-2"], limit=1)
    assert names(copied) == ["checkpoint-1", "checkpoint-2"]
    checkpoint.remove_old(copied, keep=[copied / "checkpoint-2"], limit=None)
    assert names(copied) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_checkpoint_has_both_models(tmp_path: Path, limit: int) -> None:
    """The first evaluation is the best; its checkpoint stays, and both models are those of that step."""
    trainer = runs.trainer(
        tmp_path, eval_strategy="steps", eval_steps=1, eval_dataset=runs.rows(4), load_best_model_at_end=True,
        metric_for_best_model="discriminator/accuracy", greater_is_better=False, save_total_limit=limit, **SAVES,
    )  # fmt: skip
    accuracies = iter([0.1, 0.5, 0.9])
    evaluate = trainer.evaluate

    def with_known_accuracy(*args: Any, **kwargs: Any) -> dict[str, float]:
        return evaluate(*args, **kwargs) | {"eval_discriminator/accuracy": next(accuracies)}

    trainer.evaluate = with_known_accuracy
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert names(tmp_path) == (["checkpoint-1"] if limit == 1 else ["checkpoint-1", "checkpoint-3"])
    saved = Discriminator.from_pretrained(tmp_path / "checkpoint-1" / "discriminator")
    assert_same_weights(trainer.discriminator.state_dict(), saved.state_dict())
    last = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    assert last["best_model_checkpoint"] == str(tmp_path / "checkpoint-1"), "not the folder it was written in"


def test_a_full_disk_is_said_before_anything_is_written(
    whole: GADTrainer, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = runs.trainer(copied, save_total_limit=1, **SAVES)
    free = SimpleNamespace(total=2**40, used=2**40 - 12_345, free=12_345)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(OSError, match=r"checkpoint-3 needs about [\d,]+ bytes in .* and 12,345 bytes are free"):
        trainer.train(resume_from_checkpoint=True)
    assert names(copied) == ["checkpoint-1", "checkpoint-2"]
    monkeypatch.undo()
    assert_same_end(train(copied, resume=True), whole)


@pytest.mark.parametrize(("kind", "overhead"), [("full", 200_000), ("lora", 45_000)])
def test_the_space_a_checkpoint_needs(tmp_path: Path, kind: str, overhead: int) -> None:
    """All tensors of the files are counted: what is left are names and headers, far less than any of the models."""
    trainer = train(tmp_path, max_steps=4, save_steps=4, **(lora() if kind == "lora" else {}))
    written = {path.name: path.stat().st_size for path in (tmp_path / "checkpoint-4").iterdir() if path.is_file()}
    tensors = ("model", "adapter_model", "optimizer", "gad_state", "reference")
    large = sum(size for name, size in written.items() if name.split(".")[0] in tensors)
    large += sum(p.stat().st_size for p in (tmp_path / "checkpoint-4" / "discriminator").glob("*.safetensors"))
    assert trainer.reference is not None
    assert 0 < large - checkpoint.bytes_of_tensors(trainer) < overhead
    assert checkpoint.bytes_needed(trainer) > sum(written.values())


def test_another_number_of_processes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Refused in the middle of a rollout batch, before anything is loaded; said at its end."""
    options: dict[str, Any] = dict(generation_batch_size=16, max_steps=4, save_steps=1)
    train(tmp_path, **options)  # 1 step of D alone, 2 of warm-up on one rollout batch, 1 of GAD
    for step in (2, 3):
        file = tmp_path / f"checkpoint-{step}" / "gad_state.pt"
        torch.save(torch.load(file, weights_only=True) | {"num_processes": 2}, file)
    trainer = runs.trainer(tmp_path, **options)
    start = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    with pytest.raises(ValueError, match="saved by 2 processes in the middle of a rollout batch"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(trainer.policy.state_dict(), start)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert "checkpoint-3 was saved by 2 processes and is resumed by 1: dropout draws other numbers" in caplog.text
    assert trainer.state.global_step == 4


def test_two_processes_save_one_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each its own part, under one name; resumed by two in the middle of a rollout batch, and by one at its end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    done = subprocess.run(
        [*command, str(tmp_path), "two processes"], env=environment, timeout=TIMEOUT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-6000:]
    whole, again = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "again"))
    for model, weights in whole.items():
        assert_same_weights(again[model], weights)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-4"]
    files = json.loads((tmp_path / "checkpoint-2" / "manifest.json").read_text())["files"]
    assert {"rollout_0.pt", "rollout_1.pt", "rng_state_0.pth", "rng_state_1.pth"} < set(files)
    trainer = runs.trainer(tmp_path, **(TWO | {"gradient_accumulation_steps": 2}))
    with pytest.raises(ValueError, match="saved by 2 processes in the middle of a rollout batch"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert "checkpoint-3 was saved by 2 processes and is resumed by 1" in caplog.text
    assert trainer.state.global_step == 4


def test_a_token_is_not_saved(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, hub_token="hf_secret")
    trainer.save_model()
    assert torch.load(tmp_path / "training_args.bin", weights_only=False).hub_token is None
    assert trainer.args.hub_token == "hf_secret"


def two_processes(folder: Path) -> None:
    # transformers loads the optimizer to `cpu:0` in a process of several without GPU, which older torch does not know
    torch.serialization.register_package(
        5, lambda _: None, lambda storage, place: storage if place == "cpu:0" else None
    )
    for name, resume in (("whole", None), ("again", str(folder / "checkpoint-2"))):
        trainer = runs.trainer(folder, **TWO)
        trainer.train(resume_from_checkpoint=resume)
        weights = {"policy": trainer.policy.state_dict(), "discriminator": trainer.discriminator.state_dict()}
        if trainer.accelerator.is_main_process:
            torch.save(weights, folder / f"{name}.pt")


def killed_in_the_second_save(folder: Path, file: str) -> None:
    trainer = runs.trainer(folder, **SAVES)

    def kill() -> None:
        if trainer.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    if file == "model.safetensors":
        checkpoint.save_models = lambda *args, save=checkpoint.save_models: (kill(), save(*args))
    elif file == "gad_state.pt":
        checkpoint.save_run = lambda *args, save=checkpoint.save_run: (save(*args), kill())
    else:
        os.rename = lambda *args, rename=os.rename: (kill(), rename(*args))
    trainer.train()


if __name__ == "__main__":
    if sys.argv[2] == "two processes":
        two_processes(Path(sys.argv[1]))
    else:
        killed_in_the_second_save(Path(sys.argv[1]), sys.argv[2])
