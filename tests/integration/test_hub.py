"""Both models reach the Hub by every way, and come back from it: proved on a stand-in of the Hub on this machine.

Run as a script, this file uploads (`push`) or downloads and scores (`load`); huggingface_hub reads where the Hub is when
it is imported, so both are processes of their own.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback

from tests import runs, tiny
from tests.hub_standin import Hub
from trl_gad import Discriminator, GADTrainer, checkpoint, hub
from trl_gad.attention import native_attention


TIMEOUT_S = 180
TOKEN = "hf_standin"
STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")
MODELS = {
    "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "training_args.bin",
    "discriminator/config.json", "discriminator/model.safetensors", "discriminator/score_head.safetensors",
    "discriminator/discriminator_config.json",
}  # fmt: skip
RESUMABLE = {"optimizer.pt", "gad_state.pt", "trainer_state.json", "manifest.json"} | MODELS - {"README.md"}


def child(endpoint: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Runs this file with the stand-in as the Hub; what it printed last, as JSON."""
    environment = os.environ | {
        "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(folder / "home"), "HF_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    command = [sys.executable, __file__, str(folder), *arguments]
    done = subprocess.run(command, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


@dataclass
class Uploaded:
    """What the stand-in received from one run for each `hub_strategy`, and from one with LoRA on both."""

    hub: Hub
    folder: Path
    before: dict[str, Any]  # outputs of the models that were trained
    after: dict[str, Any]  # of those that were loaded from the stand-in

    def files(self, name: str) -> dict[str, bytes]:
        return self.hub.repositories[f"someone/{name}"].files

    def card(self, name: str) -> str:
        return self.files(name)["README.md"].decode()


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory: pytest.TempPathFactory) -> Uploaded:
    folder = tmp_path_factory.mktemp("runs")
    with Hub(TOKEN) as server:
        before = child(server.endpoint, folder, "push", *STRATEGIES, "lora")
        after = child(server.endpoint, folder, "load", "end", "checkpoint", "lora")
    return Uploaded(server, folder, before, after)


def test_every_strategy_pushes_both_models(uploaded: Uploaded) -> None:
    saves = ["Training in progress, step 2", "Training in progress, step 3"]
    with_checkpoints = [message for save in saves for message in (save, f"{save}, checkpoint")]
    expected = {
        "end": ["End of training"],
        "every_save": [*saves, "End of training"],
        "checkpoint": [*with_checkpoints, "End of training"],
        "all_checkpoints": [*with_checkpoints, "End of training"],
    }
    for name, messages in expected.items():
        commits = uploaded.hub.repositories[f"someone/{name}"].commits[1:]
        assert [commit.message for commit in commits] == messages, name
        for commit in commits:
            assert set(commit.files) >= MODELS, (name, commit.message)
        folders = ("last-checkpoint", "checkpoint-2", "checkpoint-3")
        of_models = {path for path in uploaded.files(name) if path.split("/")[0] not in folders}
        assert not of_models & (RESUMABLE - MODELS), name
        assert not any(path.startswith("_") for path in of_models), name


def test_checkpoints_on_the_hub_are_whole(uploaded: Uploaded, tmp_path: Path) -> None:
    expected = {"checkpoint": ["last-checkpoint"], "all_checkpoints": ["checkpoint-2", "checkpoint-3"]}
    for strategy, folders in expected.items():
        for path, data in uploaded.files(strategy).items():
            to = tmp_path / strategy / path
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(data)
        for name in folders:
            folder = tmp_path / strategy / name
            assert {str(path.relative_to(folder)) for path in folder.rglob("*")} >= RESUMABLE
            assert checkpoint.what_is_wrong(folder) is None
        for pushed in uploaded.hub.repositories[f"someone/{strategy}"].commits:
            if pushed.message.endswith(", checkpoint"):  # both models at the root are those of the checkpoint
                name = f"checkpoint-{pushed.message.split()[4][0]}" if strategy == "all_checkpoints" else folders[0]
                for path in ("model.safetensors", "discriminator/model.safetensors"):
                    assert pushed.files[path] == pushed.files[f"{name}/{path}"], pushed.message
    for strategy in ("end", "every_save"):
        assert not any("checkpoint" in path for path in uploaded.files(strategy))
    trainer = runs.trainer(tmp_path / "on", max_steps=4)
    trainer.train(resume_from_checkpoint=tmp_path / "checkpoint" / "last-checkpoint")
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("name", ["end", "checkpoint", "lora"])
def test_both_models_come_back_from_the_hub(uploaded: Uploaded, name: str) -> None:
    """Loaded as the card says; equal to those that were trained."""
    before, after = uploaded.before[name], uploaded.after[name]
    assert after["logits"] == pytest.approx(before["logits"], abs=1e-5)
    assert after["score"] == pytest.approx(before["score"], abs=1e-5)
    assert after["downloaded"] == ["discriminator"], "the policy's weights were not fetched for the discriminator"
    other = uploaded.before["end" if name == "lora" else "lora"]
    assert after["logits"] != pytest.approx(other["logits"], abs=1e-3)


def test_what_is_not_on_the_hub(uploaded: Uploaded) -> None:
    nothing = "is no folder here, and no repository on the Hub has score_head.safetensors under that name"
    assert uploaded.after["none"].startswith(f"someone/none {nothing} in discriminator/. Pass")
    assert uploaded.after["without_subfolder"].startswith(f"someone/end {nothing}. Pass")
    assert uploaded.after["without_subfolder"].endswith('or a repository with subfolder="discriminator".')


def test_the_card(uploaded: Uploaded) -> None:
    text = uploaded.card("checkpoint")
    for part in (
        "trained with GAD", "https://huggingface.co/papers/2511.10643", "- gad\n", "datasets: someone/answers\n",
        "[someone/answers](https://huggingface.co/datasets/someone/answers): 8 prompts",
        "| Steps taken | 3 of 3 |", "| Stage 1: discriminator alone | 1 step |",
        "| Stage 1: warm-up | 1 step, learning rate 0.002 |", "| Stage 2: adversarial | 1 step, learning rate 0.001 |",
        "| Discriminator | Qwen3VLModel, ", "of them trained, learning rate 0.003 |", "| Samples per prompt (G) | 2 |",
        "| KL to the student after stage 1 (`beta`) | 0.01 |", "| discriminator/accuracy | ", "| step | 3 |",
        'model = AutoModelForImageTextToText.from_pretrained("someone/checkpoint")',
        'Discriminator.from_pretrained("someone/checkpoint", subfolder="discriminator")',
    ):  # fmt: skip
        assert part in text, part
    for private in (str(uploaded.folder), str(Path.home()), TOKEN, "None", "pipeline("):
        assert private not in text, private
    assert text.index("## The two models") < text.index("## Training procedure") < text.index("### Last metrics")
    assert "| Discriminator | adapters on Qwen3VLModel, " in uploaded.card("lora")
    assert "pass `base_model=`" in uploaded.card("lora")
    assert str(uploaded.folder) not in uploaded.card("lora")


def test_no_token_is_uploaded(uploaded: Uploaded) -> None:
    for repository in uploaded.hub.repositories.values():
        for path, data in repository.files.items():
            assert TOKEN.encode() not in data, path


def test_an_upload_that_fails_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    with Hub(TOKEN) as server:
        server.refuse_commits = True
        result = child(server.endpoint, tmp_path, "refused")
    assert result["step"] == 3
    assert "An upload to the Hub failed, the run goes on" in result["stderr"]
    assert "no commits today" in result["stderr"]


def named(dataset: Dataset, *sources: str) -> Dataset:
    dataset.info.download_checksums = {source: {} for source in sources}
    return dataset


def test_names_of_the_data(tmp_path: Path) -> None:
    plain = Dataset.from_dict({"a": [1]})
    assert hub.dataset_name(None, plain) is None
    assert hub.dataset_name("someone/answers", plain) == "someone/answers"
    assert hub.dataset_name(str(tmp_path), plain) is None
    assert hub.dataset_name("/not/here/teacher.jsonl", plain) is None
    assert hub.dataset_name(None, named(plain, "/home/a/teacher.jsonl")) is None
    assert hub.dataset_name(None, named(plain, "hf://datasets/a/b@0123/train.jsonl")) == "a/b"
    assert hub.dataset_name(None, named(plain, "hf://datasets/a/b@0123/train.jsonl").select([0])) == "a/b"


def test_paths_stay_out_of_the_card(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path / "run")
    for place in ("/gone/away/model", str(tmp_path), "mine/model"):  # a folder that is gone, one that is there, a name
        trainer.policy.config._name_or_path = place
        trainer.create_model_card("student", dataset_name=str(tmp_path / "teacher.jsonl"))
        text = (tmp_path / "run" / "README.md").read_text()
        assert (place in text) == (place == "mine/model")
        assert str(tmp_path) not in text
        assert ("a model that is not on the Hub" in text) == (place != "mine/model")
        assert "Data that is not on the Hub: 8 prompts" in text
        assert ("base_model: mine/model\n" in text) == (place == "mine/model")


def test_last_metrics_are_those_of_the_last_logs() -> None:
    history = [
        {"loss": 3.0, "step": 1}, {"eval_reward": 0.1, "step": 1}, {"loss": 2.0, "step": 2, "time/step": 1.0},
        {"eval_reward": 0.25, "step": 2}, {"loss": 1.0, "kl": float("nan"), "reward": None, "step": 3},
        {"train_runtime": 3.0, "train_loss": 2.0, "step": 3},
    ]  # fmt: skip
    assert hub.last_metrics(history) == {"step": "3", "loss": "1", "eval_reward": "0.25"}
    assert hub.last_metrics([]) == {}


def test_a_checkpoint_that_is_being_uploaded_stays(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path)
    assert hub.being_uploaded(trainer) == ()
    trainer.uploads = ("out/checkpoint-1",)
    trainer.push_in_progress = hub.PushInProgress([hub.Future()])
    assert hub.being_uploaded(trainer) == ("out/checkpoint-1",)
    trainer.push_in_progress.jobs[0].set_result(None)
    assert hub.being_uploaded(trainer) == ()


def score_and_logits(policy: Any, discriminator: Discriminator) -> dict[str, Any]:
    """Both models on the same short text, in evaluation mode."""
    ids = torch.arange(40, 52)[None]
    policy.eval()
    discriminator.eval()
    with torch.no_grad():
        logits = policy(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1, :50]
        score = discriminator(last=torch.tensor([11]), input_ids=ids, attention_mask=torch.ones_like(ids))
    return {"logits": logits.tolist(), "score": score.tolist()}


class WaitForUploads(TrainerCallback):
    """An upload under way would leave out the next one."""

    trainer: GADTrainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._finish_current_push()


def trainer_of(folder: Path, name: str) -> GADTrainer:
    wait = WaitForUploads()
    options: dict[str, Any] = {}
    if name == "lora":
        lora: dict[str, Any] = dict(r=4, target_modules=["q_proj", "v_proj"])
        options = dict(peft_config=LoraConfig(**lora), discriminator_peft_config=LoraConfig(**lora))
        tiny.qwen3_vl().save_pretrained(folder / "base")
        options["model"] = str(folder / "base")
    wait.trainer = runs.trainer(
        folder / name, dataset=named(runs.rows(), "hf://datasets/someone/answers@0123/train.jsonl"), max_steps=3,
        push_to_hub=True, hub_model_id=f"someone/{name}", hub_token=TOKEN, save_strategy="steps", save_steps=2,
        save_total_limit=1, hub_strategy=name if name in STRATEGIES else "every_save",
        gad_warmup_learning_rate=2e-3, discriminator_learning_rate=3e-3, callbacks=[wait], **options,
    )  # fmt: skip
    return wait.trainer


def push(folder: Path, *names: str) -> dict[str, Any]:
    result = {}
    for name in names:
        trainer = trainer_of(folder, name)
        trainer.train()
        trainer.push_to_hub()
        with native_attention(trainer.policy), native_attention(trainer.discriminator.backbone):
            result[name] = score_and_logits(trainer.policy, trainer.discriminator)
    return result


def push_refused(folder: Path) -> dict[str, Any]:
    trainer = trainer_of(folder, "every_save")
    trainer.train()
    return {"step": trainer.state.global_step}


def refusal(repository: str, **kwargs: Any) -> str:
    with pytest.raises(ValueError, match="no folder here") as error:
        Discriminator.from_pretrained(repository, **kwargs)
    return str(error.value)


def load(folder: Path, *names: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "none": refusal("someone/none", subfolder="discriminator"),
        "without_subfolder": refusal("someone/end"),
    }
    for name in names:
        repository = f"someone/{name}"
        discriminator = Discriminator.from_pretrained(repository, subfolder="discriminator")
        snapshots = folder / "home" / "hub" / f"models--someone--{name}" / "snapshots"
        downloaded = sorted(path.name for path in next(snapshots.iterdir()).iterdir())
        AutoProcessor.from_pretrained(repository)
        policy = AutoModelForImageTextToText.from_pretrained(repository)
        result[name] = score_and_logits(policy, discriminator) | {"downloaded": downloaded}
    return result


if __name__ == "__main__":
    action = {"push": push, "load": load, "refused": push_refused}[sys.argv[2]]
    sys.stdout.write("\n" + json.dumps(action(Path(sys.argv[1]), *sys.argv[3:])) + "\n")
