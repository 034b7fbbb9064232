"""Names of the metrics, where they arrive, and the table of completions."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerControl, TrainerState

from tests import runs
from trl_gad import GADTrainer
from trl_gad.loop import StepEnd
from trl_gad.metrics import METRICS


# What transformers' and TRL's own code logs beside METRICS
OF_TRANSFORMERS = {"loss", "learning_rate", "epoch", "step", "total_flos", "runtime"}
OF_TRL = (
    r"clip_ratio/(low|high|region)_mean|clip_ratio/low_min|clip_ratio/high_max|rewards/\w+/(mean|std)"
    r"|cispo_clip_ratio|vespo/phi_seq_mean|entropy_coef|profiling/.*"
)


def constant(completions: list[Any], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    return [0.5] * len(completions)


def run(folder: Path, **fields: Any) -> GADTrainer:
    """Both stages and evaluations, with a further reward function; old log-probs and the reference take part."""
    trainer = runs.trainer(
        folder, reward_funcs=[constant], generation_batch_size=16, max_steps=6, discriminator_only_steps=1,
        gad_warmup_steps=3, eval_dataset=runs.rows(4), eval_strategy="steps", eval_steps=3, **fields,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> GADTrainer:
    folder = tmp_path_factory.mktemp("metrics")
    return run(folder, report_to=["tensorboard"], log_completions=True)


def test_every_logged_name_is_known(finished: GADTrainer) -> None:
    logged = {name for entry in finished.state.log_history for name in entry}
    unknown = {
        name
        for name in (name.removeprefix("eval_") for name in logged)
        if name not in METRICS and name not in OF_TRANSFORMERS and not re.fullmatch(OF_TRL + "|train_.*", name)
    }
    assert not unknown


def test_every_known_name_is_logged(finished: GADTrainer) -> None:
    logged = {name.removeprefix("eval_") for entry in finished.state.log_history for name in entry}
    assert set(METRICS) <= logged


def test_readme_lists_exactly_the_metrics() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    table = text.split("<!-- metrics -->")[1].split("<!-- /metrics -->")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \|$", table, flags=re.MULTILINE)
    assert rows == list(METRICS.items())


def test_metrics_reach_tensorboard(finished: GADTrainer) -> None:
    files = list(Path(finished.args.output_dir).rglob("events.out.tfevents.*"))
    assert len(files) == 1
    events = EventAccumulator(str(files[0])).Reload()
    tags = set(events.Tags()["scalars"])
    assert {f"train/{name}" for name in METRICS if name != "rouge_l"} - tags == set()
    of_evaluation = {"rouge_l", "discriminator/accuracy", "discriminator/margin", "completions/mean_length"}
    assert {f"eval/{name}" for name in of_evaluation} <= tags
    for name in ("stage", "discriminator/loss", "completions/mean_length"):
        written = {event.step: event.value for event in events.Scalars(f"train/{name}")}
        expected = {entry["step"]: entry[name] for entry in finished.state.log_history if name in entry}
        assert written == pytest.approx(expected)
        assert len(written) >= 4


def completions(trainer: GADTrainer, step: int) -> pd.DataFrame:
    return pd.read_parquet(Path(trainer.args.output_dir) / "completions" / f"completions_{step:05d}.parquet")


def test_completions_of_both_stages(finished: GADTrainer) -> None:
    for step in range(1, 7):
        table = completions(finished, step)
        assert len(table) == 16, "8 prompts, 2 samples each"
        assert set(table["step"]) == {step}
        columns = ["prompt", "completion", "discriminator", "advantage", "teacher", "teacher_score"]
        assert {*columns} <= set(table.columns)
        assert ("constant" in table.columns) == (step >= 4), "it is called in stage 2"
        assert table[columns].notna().all().all()
        entry = next(e for e in reversed(finished.state.log_history) if e["step"] <= step and "length_auc" in e)
        assert table["discriminator"].mean() == pytest.approx(entry["discriminator/student_score/mean"], abs=1e-4)
        assert table["teacher_score"].mean() == pytest.approx(entry["discriminator/teacher_score/mean"], abs=1e-4)


def test_a_row_of_the_completions(finished: GADTrainer) -> None:
    table = completions(finished, 6)
    for prompt, teacher in zip(table["prompt"], table["teacher"], strict=True):
        number = int(re.findall(r"What (\d+)\?", json.dumps(prompt, default=list))[0])
        assert teacher == "abc " * (1 + number % 3)
    assert all(message[0]["role"] == "assistant" for message in table["completion"])
    # Of the two samples of a prompt one is ahead by as much as the other is behind; the constant reward adds nothing
    pairs = table["advantage"].to_numpy().reshape(8, 2)
    scores = table["discriminator"].to_numpy().reshape(8, 2)
    assert pairs.sum(axis=1) == pytest.approx([0.0] * 8, abs=1e-3)
    # r - mean = +-d/2 and std = d / sqrt(2): +-1 / sqrt(2)
    assert abs(pairs) == pytest.approx(0.5**0.5, abs=2e-2)
    assert ((pairs[:, 0] > pairs[:, 1]) == (scores[:, 0] > scores[:, 1])).all()
    assert list(table["constant"]) == [0.5] * 16


def test_reward_functions_log_their_own(tmp_path: Path) -> None:
    """TRL hands `log_metric` and `log_extra` to every reward function."""

    def talkative(completions: list[Any], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
        log_metric("letters", 3.0)
        log_extra("number", list(range(len(completions))))
        return [0.0] * len(completions)

    trainer = runs.trainer(
        tmp_path, reward_funcs=[talkative], log_completions=True, discriminator_only_steps=0, gad_warmup_steps=0,
        max_steps=2,
    )  # fmt: skip
    trainer.train()
    assert [entry["letters"] for entry in trainer.state.log_history[:2]] == [3.0, 3.0]
    assert list(completions(trainer, 2)["number"]) == list(range(8))


def test_an_epoch_ends_where_its_last_rollout_batch_does(tmp_path: Path) -> None:
    """Also where 49 times 1/49 is not 1 in floating point."""
    trainer = runs.trainer(
        tmp_path, dataset=runs.rows(49, images=False), per_device_train_batch_size=2, gradient_accumulation_steps=1,
        max_steps=60, max_completion_length=13, save_strategy="epoch",
    )  # fmt: skip
    assert trainer.args.prompts_per_rollout == 1
    assert len(trainer.rows) == 49
    assert 49 * (1 / 49) < 1
    ends = []
    for step in range(47, 53):
        state, control = TrainerState(global_step=step, max_steps=60), TrainerControl()
        trainer.clock.mark("optimizer")
        StepEnd(trainer).on_step_end(trainer.args, state, control)
        ends.append((state.epoch, control.should_save))
    assert [saved for _, saved in ends] == [False, False, True, False, False, False]
    assert ends[2][0] == 1.0
