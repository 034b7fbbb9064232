"""The plan of a run and its learning rates."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_gad.schedule import DISCRIMINATOR, GAD, WARMUP, StageLR, Step, StepPlan, make_plan


PLANS = st.builds(
    StepPlan,
    num_discriminator_rollouts=st.integers(0, 4),
    num_warmup_rollouts=st.integers(0, 4),
    steps_per_rollout=st.integers(1, 3),
    num_iterations=st.integers(1, 3),
    max_steps=st.integers(1, 60),
)


@given(PLANS)
def test_steps_of_a_plan(plan: StepPlan):
    steps = [plan.at(number) for number in range(plan.max_steps)]
    order = [DISCRIMINATOR, WARMUP, GAD]
    assert [order.index(s.stage) for s in steps] == sorted(order.index(s.stage) for s in steps)
    assert all((s.stage == GAD) == (number >= plan.gad_start) for number, s in enumerate(steps))
    by_rollout: dict[int, list[Step]] = {}
    for step in steps:
        by_rollout.setdefault(step.rollout, []).append(step)
    assert list(by_rollout) == list(range(plan.num_rollouts))  # in order, none left out
    parts = plan.steps_per_rollout
    for rollout, of_rollout in by_rollout.items():
        length = {DISCRIMINATOR: 1, WARMUP: parts, GAD: parts * plan.num_iterations}[of_rollout[0].stage]
        assert len({s.stage for s in of_rollout}) == 1
        assert [s.first for s in of_rollout] == [True] + [False] * (len(of_rollout) - 1)
        assert [s.part for s in of_rollout] == [turn % parts for turn in range(len(of_rollout))]
        if rollout < plan.num_rollouts - 1:  # the run may end within the last one
            assert len(of_rollout) == length
        assert [s.last for s in of_rollout] == [turn == length - 1 for turn in range(len(of_rollout))]


@given(PLANS, st.integers(1, 12))
def test_steps_of_some_rollouts(plan: StepPlan, num_rollouts: int):
    num_steps = plan.steps_of(num_rollouts)
    assert plan.at(num_steps - 1).rollout == num_rollouts - 1
    assert plan.at(num_steps - 1).last
    assert plan.at(num_steps).rollout == num_rollouts


@given(PLANS, st.integers(0, 12))
def test_warmup_ended_early(plan: StepPlan, num_rollouts: int):
    ended = plan.with_warmup_ended(num_rollouts)
    assert plan.num_discriminator_rollouts == ended.num_discriminator_rollouts
    assert ended.max_steps - ended.gad_start == plan.max_steps - plan.gad_start  # stage 2 keeps its length
    done = plan.steps_of(min(num_rollouts, plan.num_discriminator_rollouts + plan.num_warmup_rollouts))
    assert [ended.at(number) for number in range(done)] == [plan.at(number) for number in range(done)]
    if plan.num_discriminator_rollouts <= num_rollouts:
        assert ended.gad_start == done


def test_rollouts_by_hand():
    # D alone: steps 0, 1. Warm-up: 2, 3 on rollout 2. GAD, 2 parts x 2 iterations: 4-7 on rollout 3, 8-11 on 4
    plan = StepPlan(2, 1, steps_per_rollout=2, num_iterations=2, max_steps=10)
    assert (plan.num_warmup_steps, plan.gad_start, plan.num_rollouts) == (2, 4, 5)
    assert plan.at(3) == Step(WARMUP, 2, 1, False, True)
    assert [plan.at(number).part for number in range(4, 10)] == [0, 1, 0, 1, 0, 1]
    assert plan.steps_of(5) == 12


def make(**fields: Any) -> StepPlan:
    defaults: dict[str, Any] = dict(
        num_rows=100, prompts_per_rollout=8, steps_per_rollout=2, num_iterations=1, max_steps=-1, num_train_epochs=3.0,
        warmup_steps=None, warmup_epochs=None, discriminator_only_steps=3,
    )  # fmt: skip
    return make_plan(**(defaults | fields))


def test_plan_from_epochs():
    # Warm-up, 1 epoch: 100 / 8 = 12.5 -> 13 rollout batches, 3 of them D's. In all 3 * 12.5 = 37.5 -> 37.
    # Steps: 3 + 2 * (10 + 24) = 71
    assert make() == StepPlan(3, 10, 2, 1, 71)
    # Half an epoch: 6.25 -> 7; two iterations count in stage 2 only: 3 + 2 * (4 + 30 * 2) = 131
    assert make(warmup_epochs=0.5, num_iterations=2) == StepPlan(3, 4, 2, 2, 131)


def test_plan_from_steps():
    # 8 warm-up steps, 3 of them D's: 5 are left, 2 a rollout batch -> 3 rollout batches
    assert make(warmup_steps=8, max_steps=50) == StepPlan(3, 3, 2, 1, 50)
    assert make(warmup_steps=0, max_steps=50) == StepPlan(3, 0, 2, 1, 50)  # D alone all the same
    assert make(warmup_steps=0, discriminator_only_steps=0, max_steps=5) == StepPlan(0, 0, 2, 1, 5)


def test_a_dataset_smaller_than_a_rollout_batch():
    # 0.5 epochs of 3 rows are 0.19 rollout batches of 8: one is run, D alone
    assert make(num_rows=3, num_train_epochs=0.5) == StepPlan(3, 0, 2, 1, 1)


def schedule(name: str = "linear", warmup_steps: float = 0, kwargs: dict | None = None, **stages: Any) -> StageLR:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    return StageLR(optimizer, stages.get("stages", [(4e-2, 4), (1e-2, 5)]), 1e-2, name, warmup_steps, kwargs)


def rates(lr: StageLR, num_steps: int) -> list[float]:
    """The learning rate of each step, in hundredths."""
    values = []
    for _ in range(num_steps):
        values.append(lr.optimizer.param_groups[0]["lr"] * 100)
        lr.optimizer.step()
        lr.step()
    return values


def test_linear_starts_anew_in_each_stage():
    # 4 * (1, 3/4, 2/4, 1/4), then 1 * (5/5, 4/5, 3/5, 2/5, 1/5), and 0 after the end
    assert rates(schedule(), 10) == pytest.approx([4, 3, 2, 1, 1, 0.8, 0.6, 0.4, 0.2, 0])


def test_constant_with_warmup_as_a_share():
    # a half of each stage: 2 of 4 steps (0, 1/2), ceil(2.5) = 3 of 5 (0, 1/3, 2/3)
    assert rates(schedule("constant_with_warmup", 0.5), 9) == pytest.approx([0, 2, 4, 4, 0, 1 / 3, 2 / 3, 1, 1])


def test_warmup_in_steps_is_at_most_the_stage():
    # 10 steps do not fit: stage 1 rises 0, 1/4, 2/4, 3/4; stage 2 rises over its 5
    assert rates(schedule("constant_with_warmup", 10), 6) == pytest.approx([0, 1, 2, 3, 0, 0.2])


def test_cosine():
    # (1 + cos(pi * t / 4)) / 2 at t = 0, 1, 2, 3
    expected = [4 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]
    assert rates(schedule("cosine"), 5) == pytest.approx([*expected, 1])


def test_options_of_the_schedule():
    # down to 0.1 of each stage's rate: 1 - 0.9 t / 2 for two steps
    lr = schedule("cosine_with_min_lr", 0, {"min_lr_rate": 0.1}, stages=[(1e-2, 2)])
    assert rates(lr, 3) == pytest.approx([1, 0.55, 0.1])


def test_a_stage_without_steps_is_passed_over():
    assert rates(schedule(stages=[(4e-2, 0), (1e-2, 2)]), 2) == pytest.approx([1, 0.5])


def test_hold_stays_for_one_step():
    lr = schedule()
    lr.optimizer.step()
    lr.hold = True
    lr.step()
    assert lr.get_last_lr() == [pytest.approx(4e-2)]
    lr.step()
    assert lr.get_last_lr() == [pytest.approx(3e-2)]


def test_shorten():
    lr = schedule()
    assert rates(lr, 2) == pytest.approx([4, 3])
    lr.shorten(0, 2)  # stage 1 is cut off, the next step is the first of stage 2
    assert rates(lr, 6) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0])


def test_shorten_the_last_stage():
    lr = schedule(stages=[(1e-2, 10)])
    assert rates(lr, 2) == pytest.approx([1, 0.9])
    lr.shorten(0, 4)  # fitted: places 2 and 3 of 4
    assert rates(lr, 3) == pytest.approx([0.5, 0.25, 0])


def test_state():
    whole, again = schedule(), schedule()
    expected = rates(whole, 9)
    half = schedule()
    assert rates(half, 5) == pytest.approx(expected[:5])
    again.load_state_dict(half.state_dict())
    again.optimizer.param_groups[0]["lr"] = half.get_last_lr()[0]  # kept by the optimizer's own state
    assert rates(again, 4) == pytest.approx(expected[5:])


def test_schedules_that_look_at_the_loss_are_refused():
    with pytest.raises(ValueError, match="function of the step.*reduce_lr_on_plateau"):
        schedule("reduce_lr_on_plateau")
