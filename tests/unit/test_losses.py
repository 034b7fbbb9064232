"""Losses and advantages: by hand, and advantages against what TRL's trainer computes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests import tiny
from trl_gad.losses import accumulation_factor, advantages, bradley_terry, length_auc


NAN = math.nan


def test_bradley_terry():
    # softplus(s - t): s - t = 0 gives log 2; s - t = log 3 gives log(1 + 3) = log 4
    teacher = torch.tensor([2.0, 1.0], requires_grad=True)
    students = torch.tensor([2.0, 1.0 + math.log(3)], requires_grad=True)
    loss = bradley_terry(teacher, students)
    assert loss.item() == pytest.approx(math.log(2) + math.log(4), rel=1e-6)
    loss.backward()
    # d softplus(d) = sigmoid(d): 1 / 2 and 3 / 4; the teacher's is its negative
    assert students.grad is not None
    assert teacher.grad is not None
    assert students.grad.tolist() == pytest.approx([0.5, 0.75])
    assert teacher.grad.tolist() == pytest.approx([-0.5, -0.75])


def test_bradley_terry_keeps_to_large_differences():
    # softplus(500) = 500 + log(1 + exp(-500)) = 500; softplus(-500) = exp(-500) = 0; no overflow of exp(500)
    assert bradley_terry(torch.tensor([0.0, 500.0]), torch.tensor([500.0, 0.0])).item() == 500.0
    assert bradley_terry(torch.zeros(0), torch.zeros(0)).item() == 0.0


def test_length_auc():
    # teacher 5 against 4, 5, 6: 1 + 0.5 + 0; teacher 2 against 1, 1, 1: 3. Together 4.5 of 6
    assert length_auc([5, 2], [[4, 5, 6], [1, 1, 1]]) == 0.75
    assert length_auc([9, 9], [[1, 2], [3, 4]]) == 1.0
    assert length_auc([1, 1], [[1, 2], [1, 4]]) == 0.25  # 0.5 + 0 + 0.5 + 0 of 4


def call(rewards: list[list[float]], scale: str, aggregation: str, weights: tuple[float, ...] = (1.0,)) -> list[float]:
    result, _ = advantages(torch.tensor(rewards), torch.tensor(weights), 2, scale, aggregation)
    return result.tolist()


def test_advantages_of_a_group():
    # Groups (1, 3) and (4, 4): means 2 and 4; standard deviations with n - 1: sqrt(1 + 1) = 1.41421 and 0
    rewards = [[1.0], [3.0], [4.0], [4.0]]
    group = 1 / (math.sqrt(2) + 1e-4)
    assert call(rewards, "group", "sum_then_normalize") == pytest.approx([-group, group, 0, 0])
    assert call(rewards, "none", "sum_then_normalize") == pytest.approx([-1, 1, 0, 0])
    # of the batch: mean 3, squares 4 + 0 + 1 + 1 = 6, over n - 1 = 3: sqrt(2)
    assert call(rewards, "batch", "sum_then_normalize") == pytest.approx([-group, group, 0, 0])


def test_advantages_without_a_reward():
    # Group (nan, 2): the mean is that of the other, 2; both advantages are 0, and the reward says that there was none
    result, rewards = advantages(torch.tensor([[NAN], [2.0]]), torch.ones(1), 2, "none", "sum_then_normalize")
    assert result.tolist() == [0.0, 0.0]
    assert math.isnan(rewards[0])
    assert rewards[1] == 2.0


def test_advantages_of_two_functions():
    # Weights 1 and 2, a missing value counts 0 beside a present one: 1 + 0, 3 + 2 * 1, so (1, 5): mean 3
    rewards = [[1.0, NAN], [3.0, 1.0]]
    assert call(rewards, "none", "sum_then_normalize", (1.0, 2.0)) == pytest.approx([-2, 2])


@pytest.mark.parametrize(("scale", "aggregation", "name"), [
    ("std", "sum_then_normalize", "scale_rewards"), ("group", "sum", "multi_objective_aggregation")
])  # fmt: skip
def test_advantages_refuse_unknown_names(scale: str, aggregation: str, name: str):
    with pytest.raises(ValueError, match=name):
        call([[1.0], [2.0]], scale, aggregation)


VALUES = [
    [0.5, -1.0, 2.0, 2.0, None, 0.25, None, None],
    [1.0, None, 3.0, -2.0, 0.5, 0.5, None, 4.0],
]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("num_functions", [1, 2])
@pytest.mark.parametrize("num_generations", [2, 4])
def test_advantages_are_those_of_trl(
    scale: str, aggregation: str, num_functions: int, num_generations: int, tmp_path: Path
):
    def first(**kwargs: Any) -> list[float | None]:
        return VALUES[0]

    def second(**kwargs: Any) -> list[float | None]:
        return VALUES[1]

    weights = [0.7, 1.5][:num_functions]
    prompts = [{"prompt": f"p{i // num_generations}"} for i in range(8)]
    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=num_generations,
        max_completion_length=2, scale_rewards=scale, multi_objective_aggregation=aggregation, reward_weights=weights,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        tiny.qwen3_text(), reward_funcs=[first, second][:num_functions], args=args,
        train_dataset=Dataset.from_list(prompts), processing_class=tiny.tokenizer(),
    )  # fmt: skip
    trainer.model.train()
    expected = trainer._generate_and_score_completions(prompts)["advantages"]

    columns = [[NAN if value is None else value for value in column] for column in VALUES[:num_functions]]
    rewards = torch.tensor(columns).T
    result, total = advantages(rewards, torch.tensor(weights), num_generations, scale, aggregation)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    assert result.abs().max() > 0.1
    assert float(total.nanmean()) == pytest.approx(trainer._metrics["train"]["reward"][0], rel=1e-5)


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "dr_grpo", "luspo"])
def test_accumulation_factor_by_rows(loss_type: str):
    # Two processes, 8 rows in the step; this micro-batch has 2: 8 / (2 * 2). TRL's mean over 2 rows of the sum S is
    # S / 2, divided by the factor S / 4, averaged over 2 processes S / 8: a row counts 1 of 8, wherever it lies.
    numbers = dict(micro_rows=2, micro_tokens=9, step_rows=8, step_tokens=50, num_processes=2)
    assert accumulation_factor(loss_type, **numbers) == 2.0


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo", "cispo", "vespo"])
def test_accumulation_factor_by_tokens(loss_type: str):
    # 48 / (8 * 2) = 3: a token counts 1 / 8 / 3 / 2 = 1 of 48
    numbers = dict(micro_rows=2, micro_tokens=8, step_rows=8, step_tokens=48, num_processes=2)
    assert accumulation_factor(loss_type, **numbers) == 3.0
    # no token left after masking: 0 divided by 1
    assert accumulation_factor(loss_type, **(numbers | dict(micro_tokens=0))) == 1.0
