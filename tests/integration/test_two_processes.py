"""Two processes over gloo take the step that one process takes with all rows, with pictures on one of them or on both.

Run as a script, under torchrun or alone, this file trains and saves what it got; the tests start it and compare.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image

from tests import runs, tiny
from trl_gad import GADTrainer
from trl_gad.batch import Group, Sample


TIMEOUT_S = 120
CASES = ["one_forward", "micro_batches", "lora", "bnpo", "balanced"]
END = tiny.TOKEN_ID["<|im_end|>"]
# One rollout batch of 8 prompts is one step: 1 of D alone, 1 of warm-up, 2 of GAD. Plain SGD: Adam would blow up
# the rounding of gradients near 0.
SETUP: dict[str, Any] = dict(
    num_generations=2, per_device_train_batch_size=2, generation_batch_size=16, shuffle_dataset=False, max_steps=4,
    discriminator_only_steps=1, gad_warmup_steps=2, optim="sgd", max_grad_norm=1.0, learning_rate=0.05,
    gad_warmup_learning_rate=0.05, discriminator_learning_rate=0.05, discriminator_max_grad_norm=1.0,
    lr_scheduler_type="constant", max_completion_length=20, beta=0.1, entropy_coef=0.01,
)  # fmt: skip


def pictures_first() -> Dataset:
    """8 rows: the first 4, which are the first process's, have pictures; the last 4 are short texts."""
    table = []
    for i in range(8):
        pictures = [Image.new("RGB", (32 + 16 * (i % 2), 48), (30 * i, 200, 9)) for _ in range(1 + i % 2)]
        table.append(
            {
                "prompt": [{"role": "user", "content": f"What {i}?" + " Look at it." * (i < 4)}],
                "completion": [{"role": "assistant", "content": "abc " * (1 + i % 3)}],
                "images": pictures if i < 4 else [],
            }
        )
    return Dataset.from_list(table)


def samples_of(group: Group, num_generations: int) -> list[Sample]:
    """Answers made from the row's number and the number of the sample; one of them is empty, some are cut."""
    samples = []
    for i in range(num_generations):
        letters = [97 + (7 * group.row + 3 * i + k) % 26 for k in range(1 + (3 * group.row + 5 * i) % 9)]
        cut = (group.row + i) % 3 == 0
        samples.append(Sample([] if (group.row, i) == (5, 1) else letters + [END] * (not cut), cut=cut))
    return samples


def train(folder: Path, case: str, num_processes: int) -> GADTrainer:
    options: dict[str, Any] = dict(gradient_accumulation_steps=8 // num_processes)
    if case == "micro_batches":  # the pictures make it 4 forwards or more on one process, the texts need fewer
        options["max_tokens_per_micro_batch"] = 150
    if case == "lora":
        lora: dict[str, Any] = dict(r=4, target_modules=["q_proj", "v_proj", "linear_fc1"])
        options |= dict(
            peft_config=LoraConfig(**lora), discriminator_peft_config=LoraConfig(**lora), gradient_checkpointing=True,
            max_tokens_per_micro_batch=150,
        )  # fmt: skip
    if case == "bnpo":
        options |= dict(loss_type="bnpo", top_entropy_quantile=0.55, max_tokens_per_micro_batch=150)
    trainer = runs.trainer(folder, dataset=pictures_first(), **(SETUP | options))
    if case != "balanced":
        trainer.row_costs = None  # neighbours: all pictures on the first process

    def sample(model: Any, groups: list[Group], num_generations: int, seed: int) -> list[list[Sample]]:
        return [samples_of(group, num_generations) for group in groups]

    trainer.sampler.sample = sample
    trainer.train()
    return trainer


def result_of(trainer: GADTrainer) -> dict[str, Any]:
    logs = [
        {name: value for name, value in entry.items() if not name.startswith("time/")}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return {
        "policy": trainer.policy.state_dict(), "discriminator": trainer.discriminator.state_dict(), "logs": logs,
        "processes": trainer.accelerator.num_processes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each of two processes ended with, in every case."""
    folder = tmp_path_factory.mktemp("pair")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([*command, str(folder)], env=environment, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_take_the_step_of_one(pair: Path, tmp_path: Path, case: str) -> None:
    both = [torch.load(pair / f"{case}_{rank}.pt", weights_only=True) for rank in range(2)]
    alone = result_of(train(tmp_path, case, num_processes=1))
    assert [result["processes"] for result in both] == [2, 2]
    start = {"policy": tiny.qwen3_vl().state_dict()}
    for name in ("policy", "discriminator"):
        for parameter, value in alone[name].items():
            for rank, result in enumerate(both):
                difference = float((result[name][parameter] - value).abs().max())
                assert difference < 1e-5, (name, parameter, rank, difference)
    if case != "lora":
        moved = max(float((v - start["policy"][n]).abs().max()) for n, v in alone["policy"].items() if "visual" in n)
        assert moved > 1e-3, "the tolerance is far below what the steps do, in the vision tower too"
    assert [entry["stage"] for entry in alone["logs"]] == [0, 1, 2, 2]
    for ours, theirs in zip(both[0]["logs"], alone["logs"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if value is not None and not name.startswith("tokens/"):  # blank parts are cut otherwise
                assert ours[name] == pytest.approx(value, rel=1e-3, abs=2e-4), (name, ours["step"])


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for of_case in CASES:
        finished = train(out / "run", of_case, num_processes=2)
        torch.save(result_of(finished), out / f"{of_case}_{finished.accelerator.process_index}.pt")
