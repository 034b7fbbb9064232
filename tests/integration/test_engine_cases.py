"""Inputs behind reports from the field, as far as the step engine sees them: B4, C7, E2, G6 and H9.

Run as a script under torchrun, this file takes the steps of the two cases that need two processes.
"""

import faulthandler
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import plain, runs, tiny
from tests.integration.test_two_processes import SETUP, samples_of
from trl_gad import GADTrainer, rows
from trl_gad.batch import Group, Rollout, Sample


VIDEO = tiny.TOKEN_ID["<|video_pad|>"]


def answer(trainer: GADTrainer, samples: Any) -> None:
    """Let the student answer with `samples(group)`."""
    trainer.sampler.sample = lambda model, groups, *_: [samples(group) for group in groups]


def logs_of(trainer: GADTrainer) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("num_iterations", "share_prompt"), [(1, False), (3, True)])
def test_b4_each_picture_is_decoded_and_processed_once_a_step(
    num_iterations: int, share_prompt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G = 8, many micro-batches, several iterations: discriminator, reference, old log-probs and policy share them."""
    trainer = runs.trainer(
        tmp_path, dataset=runs.rows(4), num_generations=8, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        generation_batch_size=32, num_iterations=num_iterations, max_steps=2 * num_iterations, gad_warmup_steps=0,
        discriminator_only_steps=0, max_tokens_per_micro_batch=110, share_prompt=share_prompt, max_completion_length=15,
    )  # fmt: skip
    answer(trainer, lambda group: [Sample([97 + i, 98, plain.END]) for i in range(8)])
    calls: list[str] = []
    for name in ("load_picture", "process_picture"):
        original = vars(rows)[name]

        def count(*args: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(rows, name, count)
    num_forwards = 0

    def forward_of_policy(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    trainer.policy.model.register_forward_hook(forward_of_policy)
    trainer.train()
    # Rows 0 to 3 have 0, 1, 2 and 0 pictures; the run takes one rollout batch of all four rows
    assert sorted(calls) == ["load_picture"] * 3 + ["process_picture"] * 3
    assert num_forwards > 2 * 2 * num_iterations, "the pictures went through several forwards"


@pytest.mark.parametrize("greedy", [False, True])
def test_c7_an_image_token_is_not_sampled_whatever_else_is_banned(greedy: bool, tmp_path: Path) -> None:
    """Also where the user bans tokens of their own, and in a greedy answer (evaluation)."""
    model = tiny.qwen3_vl()
    trainer = runs.trainer(
        tmp_path, model=model, max_completion_length=15, generation_kwargs={"suppress_tokens": [65]}
    )
    groups = [trainer.reader.read(row, trainer.train_dataset[row]) for row in range(3)]
    banned = {plain.IMAGE, VIDEO, 65}
    # Most of the probability lies on the three: they would be drawn at once
    with torch.no_grad():
        bias = torch.zeros(tiny.VOCAB_SIZE)
        bias[sorted(banned)] = 50.0
        model.lm_head.register_forward_hook(lambda module, arguments, logits: logits + bias)
    drawn = trainer.sampler.sample(trainer.model, groups, 1 if greedy else 4, seed=0, greedy=greedy)
    tokens = [token for row in drawn for sample in row for token in sample.ids]
    assert len(tokens) >= len(drawn) * len(drawn[0])
    assert not banned & set(tokens)


def test_c7_a_response_with_an_image_token_is_named_by_its_place(tmp_path: Path) -> None:
    """From a sampler that does not ban it: never read as a picture in silence."""
    trainer = runs.trainer(tmp_path)
    group = trainer.reader.read(1, trainer.train_dataset[1])
    for token in (plain.IMAGE, VIDEO):
        with pytest.raises(ValueError, match="response 1 does"):
            trainer.cutter.cut([group], [[[5, 6], [5, token, 7]]])


def test_g6_lengths_1_and_500_in_one_policy_step(tmp_path: Path) -> None:
    """Finite, and the short response's part is what it is beside another short one: no term counts pads."""
    draw = random.Random(0)
    long = [draw.randrange(256) for _ in range(500)]
    gradients, losses = [], []
    for other in (long, [7]):
        trainer = runs.trainer(
            tmp_path, model=tiny.qwen3_vl().double(), max_completion_length=500, beta=0.0, loss_type="grpo",
            dataset=runs.rows(4), per_device_train_batch_size=2, gradient_accumulation_steps=4,
            max_tokens_per_micro_batch=4096,
        )  # fmt: skip
        group = trainer.reader.read(1, trainer.train_dataset[1])
        rollout = Rollout(0, [group], [[Sample([9]), Sample(other, cut=True)]])
        rollout.advantages = torch.tensor([[1.0, 0.0]])  # only the short one has an effect
        loss = trainer.policy_pass(trainer.model, plain.whole(rollout))
        losses.append(float(loss))
        gradients.append(plain.gradients(trainer.model))
    assert losses == pytest.approx([-0.5, -0.5])  # mean over responses of -advantage * 1
    plain.assert_close(gradients[0], gradients[1], 1e-6)


# ---- Two processes ----


def take_steps(folder: Path, case: str, num_processes: int) -> GADTrainer:
    fields: dict[str, Any] = SETUP | dict(gradient_accumulation_steps=8 // num_processes)
    if case == "e2":
        fields |= dict(max_tokens_per_micro_batch=110)
    else:
        fields |= dict(max_steps=1, gad_warmup_steps=0, discriminator_only_steps=0)
    trainer = runs.trainer(folder, dataset=runs.rows(8, images=case == "h9"), **fields)
    trainer.row_costs = None  # neighbours: the second process has the last rows

    def samples(group: Group) -> list[Sample]:
        row = samples_of(group, 2)
        return [Sample([]) for _ in row] if case == "h9" and group.row >= 4 else row

    answer(trainer, samples)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what two processes ended with; a case that hangs leaves nothing."""
    folder = tmp_path_factory.mktemp("pair")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([*command, str(folder)], env=environment, timeout=120, capture_output=True)
    return folder


def assert_equal_to_one_process(pair: Path, folder: Path, case: str) -> GADTrainer:
    alone = take_steps(folder, case, num_processes=1)
    for rank in range(2):
        path = pair / f"{case}_{rank}.pt"
        assert path.exists(), "a process hung or failed"
        found = torch.load(path, weights_only=True)
        for name, model in (("policy", alone.policy), ("discriminator", alone.discriminator)):
            for parameter, value in model.state_dict().items():
                difference = float((found[name][parameter] - value).abs().max())
                assert difference < 1e-5, (name, parameter, rank, difference)
    assert all(math.isfinite(entry["loss"]) for entry in logs_of(alone))
    return alone


def test_e2_no_image_in_the_whole_dataset_on_two_processes(pair: Path, tmp_path: Path) -> None:
    alone = assert_equal_to_one_process(pair, tmp_path, "e2")
    start = tiny.qwen3_vl()
    moved = {n for n, p in alone.policy.named_parameters() if not torch.equal(p, start.get_parameter(n))}
    assert moved
    assert not [name for name in moved if "visual" in name]


def test_h9_every_sample_of_one_process_is_empty(pair: Path, tmp_path: Path) -> None:
    assert_equal_to_one_process(pair, tmp_path, "h9")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for of_case in ("e2", "h9"):
        faulthandler.dump_traceback_later(60, exit=True)  # a hang ends here
        finished = take_steps(out / "run", of_case, num_processes=2)
        state = {"policy": finished.policy.state_dict(), "discriminator": finished.discriminator.state_dict()}
        torch.save(state, out / f"{of_case}_{finished.accelerator.process_index}.pt")
