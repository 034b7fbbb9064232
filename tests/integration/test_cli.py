"""The command `trl-gad` and the recipe, as a user starts them."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from datasets import Dataset, DatasetDict
from transformers import AutoModelForImageTextToText

from tests import tiny
from trl_gad import Discriminator, cli
from trl_gad.data import load_rows


RECIPE = Path(__file__).parents[2] / "recipes" / "gad_qwen3vl.py"


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a processor and no weights: checking rows needs none."""
    folder = tmp_path_factory.mktemp("student")
    tiny.qwen3_vl().config.save_pretrained(folder)
    tiny.processor().save_pretrained(folder)
    return folder


def rows_file(folder: Path, answers: list[str]) -> Path:
    file = folder / "teacher.jsonl"
    rows = [
        {
            "prompt": [{"role": "user", "content": "What?"}],
            "completion": [{"role": "assistant", "content": answer}],
        }
        for answer in answers
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config_file(folder: Path, student: Path, **fields: object) -> Path:
    file = folder / "run.yaml"
    base = dict(
        model_name_or_path=str(student), dataset=str(rows_file(folder, ["yes", "no " * 40])), use_cpu=True, bf16=False,
        output_dir=str(folder / "out"), max_completion_length=20, dataloader_num_workers=0, report_to="none",
    )  # fmt: skip
    file.write_text(yaml.safe_dump(base | fields))
    return file


def test_validate_prints_what_a_run_would_find(tmp_path: Path, student: Path, capsys: pytest.CaptureFixture) -> None:
    file = config_file(tmp_path, student)
    assert cli.main(["validate", "--config", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 rows kept, 0 images" in printed
    assert "teacher tokens min 4  median 4  p95 4  max 4" in printed  # y, e, s and the end token
    assert "(rows 1)" in printed
    # The command line goes before the file
    assert cli.main(["validate", "--config", str(file), "--overlong_teachers", "cut"]) == 0
    assert "2 of 2 rows kept" in capsys.readouterr().out


def test_validate_fails_where_a_run_would_not_start(
    tmp_path: Path, student: Path, capsys: pytest.CaptureFixture
) -> None:
    file = config_file(tmp_path, student, overlong_teachers="raise")
    assert cli.main(["validate", "--config", str(file)]) == 1
    assert "Row 1" in capsys.readouterr().out
    file = config_file(tmp_path, student, max_tokens_per_micro_batch=30)
    assert cli.main(["validate", "--config", str(file)]) == 1
    assert "Raise `max_tokens_per_micro_batch`" in capsys.readouterr().out


def test_the_installed_command_tells_the_versions() -> None:
    command = Path(sys.executable).parent / "trl-gad"
    start = [str(command)] if command.exists() else [sys.executable, "-m", "trl_gad.cli"]
    done = subprocess.run([*start, "env"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("torch", "transformers", "trl"):
        assert f"{name}: {version(name)}" in done.stdout
    assert "scaled_dot_product_attention" in done.stdout or "varlen_attn" in done.stdout
    helped = subprocess.run([*start, "--help"], capture_output=True, text=True, timeout=120)
    assert helped.returncode == 0
    assert "validate" in helped.stdout
    assert subprocess.run([*start, "nonsense"], capture_output=True, timeout=120).returncode == 1


def test_the_recipe_trains_from_a_file_and_saves_both_models(tmp_path: Path, student: Path) -> None:
    model = tiny.qwen3_vl()
    model.save_pretrained(tmp_path / "model")
    tiny.processor().save_pretrained(tmp_path / "model")
    file = config_file(
        tmp_path, tmp_path / "model", max_steps=3, gad_warmup_steps=2, discriminator_only_steps=1, num_generations=2,
        per_device_train_batch_size=2, gradient_accumulation_steps=1, overlong_teachers="cut", save_strategy="no",
        gradient_checkpointing=False, learning_rate=1e-4, gad_warmup_learning_rate=1e-3, dtype="float32",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(RECIPE), "--config", str(file), "--seed", "3"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    moved = [name for name, value in saved.named_parameters() if not value.equal(model.get_parameter(name))]
    assert any("language_model" in name for name in moved)
    Discriminator.from_pretrained(tmp_path / "out" / "discriminator")


def test_rows_come_from_files_and_folders(tmp_path: Path) -> None:
    file = rows_file(tmp_path, ["yes", "no"])
    assert load_rows(str(file))[1]["completion"][0]["content"] == "no"
    rows = Dataset.from_list([{"a": 1}])
    rows.to_parquet(tmp_path / "rows.parquet")
    assert load_rows(str(tmp_path / "rows.parquet"))[0] == {"a": 1}
    rows.save_to_disk(tmp_path / "folder")
    assert load_rows(str(tmp_path / "folder"))[0] == {"a": 1}
    DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match="holds train, test"):
        load_rows(str(tmp_path / "splits"))
    file.rename(tmp_path / "rows.csv")
    with pytest.raises(ValueError, match="must be one of .jsonl"):
        load_rows(str(tmp_path / "rows.csv"))
