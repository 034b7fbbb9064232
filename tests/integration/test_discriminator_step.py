"""One pass of the discriminator: scores first, then one update, equal to every response run alone."""

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests import runs, tiny
from tests.plain import score_alone
from trl_gad import Discriminator, GADTrainer
from trl_gad.adversary import MAX_SKIPPED_IN_A_ROW, Adversary
from trl_gad.batch import Rollout, Sample
from trl_gad.models import structural_copy


IMAGE = tiny.TOKEN_ID["<|image_pad|>"]
ALL_CUTS = [(1, True), (2, True), (5, True), (5, False)]  # (micro-batches, share_prompt)


def build(tmp_path: Path, model: Any = None, double: bool = False, **fields: Any) -> GADTrainer:
    """A trainer whose discriminator is ready to train, for 20 steps."""
    fields = dict(discriminator_max_grad_norm=0.0, max_completion_length=15) | fields
    trainer = runs.trainer(tmp_path, model=model, **fields)
    if double:
        trainer.discriminator.double()
    trainer.adversary.prepare(trainer.get_decay_parameter_names(trainer.discriminator), 20)
    return trainer


def plain(trainer: GADTrainer) -> Discriminator:
    """The same discriminator with the model's own attention."""
    model = tiny.qwen3_vl() if trainer.discriminator.config.model_type == "qwen3_vl" else tiny.qwen3_text()
    discriminator = Discriminator.from_policy(structural_copy(model))
    discriminator.to(trainer.discriminator.score.weight.dtype)
    discriminator.load_state_dict(trainer.discriminator.state_dict())
    return discriminator


def make_rollout(trainer: GADTrainer, num_groups: int = 3, num_samples: int = 4) -> Rollout:
    """Groups with 0, 1 and 2 pictures (none for a text model), samples of 1 to 9 tokens."""
    draw = random.Random(0)
    groups = [trainer.reader.read(row, trainer.train_dataset[row]) for row in range(num_groups)]
    samples = [
        [Sample([draw.randrange(256) for _ in range(draw.randint(1, 9))]) for _ in range(num_samples)] for _ in groups
    ]
    return Rollout(0, groups, samples)


def cut_into(adversary: Adversary, rollout: Rollout, number: int, share_prompt: bool) -> None:
    lengths = tuple(
        (len(group.prompt_ids), (len(group.teacher_ids), *(len(sample.ids) for sample in samples)))
        for group, samples in zip(rollout.groups, rollout.samples, strict=True)
    )
    adversary.cutter.share_prompt = share_prompt
    adversary.cutter.budget = runs.budget(lengths, number, share_prompt, num_repeated=1)


def gradients_of_step(trainer: GADTrainer, rollout: Rollout) -> tuple[Any, dict[str, float], dict[str, torch.Tensor]]:
    """Scores, metrics and the gradients that the optimizer saw."""
    seen: dict[str, torch.Tensor] = {}

    def keep(*args: Any) -> None:
        assert not seen, "a second optimizer step"
        for name, parameter in trainer.discriminator.named_parameters():
            seen[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()

    handle = trainer.adversary.optimizer.optimizer.register_step_pre_hook(keep)
    scores, metrics = trainer.adversary.score_and_update(rollout)
    handle.remove()
    return scores, metrics, seen


def state(adversary: Adversary) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in adversary.module.state_dict().items()}


def moved(before: dict[str, torch.Tensor], adversary: Adversary) -> bool:
    return any(not torch.equal(value, before[name]) for name, value in adversary.module.state_dict().items())


@pytest.mark.parametrize("kind", ["vision", "text"])
def test_pass_is_each_response_alone(kind: str, tmp_path: Path):
    text = dict(model=tiny.qwen3_text(), dataset=runs.rows(images=False), processing_class=tiny.tokenizer())
    trainer = build(tmp_path, double=True, **(text if kind == "text" else {}))
    adversary, rollout, reference = trainer.adversary, make_rollout(trainer), plain(trainer)
    teacher = torch.stack([score_alone(reference, g, g.teacher_ids) for g in rollout.groups])
    students = torch.stack([
        torch.stack([score_alone(reference, g, sample.ids) for sample in row])
        for g, row in zip(rollout.groups, rollout.samples, strict=True)
    ])  # fmt: skip
    loss = F.softplus(students - teacher[:, None]).mean()
    loss.backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    start = state(adversary)
    for number, share_prompt in ALL_CUTS:
        adversary.module.load_state_dict(start)
        cut_into(adversary, rollout, number, share_prompt)
        before, loss_sum, num_pairs = adversary.score(rollout)
        assert (loss_sum / num_pairs, num_pairs) == (pytest.approx(loss.item(), rel=1e-6), 12)
        scores, metrics, found = gradients_of_step(trainer, rollout)
        assert metrics["discriminator/loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert moved(start, adversary)
        torch.testing.assert_close(scores.students, before.students, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(scores.students, students.detach().float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scores.teacher, teacher.detach().float(), rtol=1e-5, atol=1e-5)
        for name, gradient in expected.items():
            assert gradient is not None
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
        norm = math.sqrt(sum(float(g.square().sum()) for g in found.values()))
        assert metrics["discriminator/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_one_group_in_several_micro_batches(tmp_path: Path):
    trainer = build(tmp_path, double=True)
    adversary, rollout = trainer.adversary, make_rollout(trainer, num_groups=1, num_samples=7)
    start, results = state(adversary), []
    for number in (1, 4):
        adversary.module.load_state_dict(start)
        cut_into(adversary, rollout, number, True)
        results.append(gradients_of_step(trainer, rollout))
    (whole, _, expected), (parts, _, found) = results
    torch.testing.assert_close(parts.students, whole.students, rtol=1e-6, atol=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


def test_gradient_against_finite_differences(tmp_path: Path):
    trainer = build(tmp_path, double=True)
    adversary, rollout = trainer.adversary, make_rollout(trainer, num_groups=2, num_samples=2)
    start = state(adversary)
    _, _, gradients = gradients_of_step(trainer, rollout)
    torch.manual_seed(0)
    for _ in range(3):
        direction = {name: torch.randn_like(gradient) for name, gradient in gradients.items()}
        losses = []
        # Norms and rotary angles are float32 inside, so a smaller step would measure their rounding
        for step in (1e-4, -1e-4):
            adversary.module.load_state_dict({n: v + step * direction.get(n, 0) for n, v in start.items()})
            _, loss_sum, num_pairs = adversary.score(rollout)
            losses.append(loss_sum / num_pairs)
        slope = sum(float((gradients[name] * direction[name]).sum()) for name in gradients)
        assert abs(slope) > 0.1
        assert (losses[0] - losses[1]) / 2e-4 == pytest.approx(slope, rel=2e-3)


def test_one_step_per_rollout_batch(tmp_path: Path):
    """Two policy steps a rollout batch and two iterations: 1 of D alone, 2 of warm-up, 2 x 2 x 2 of GAD."""
    trainer = runs.trainer(
        tmp_path, generation_batch_size=16, num_iterations=2, max_steps=11, gad_warmup_steps=3,
        max_completion_length=15,
    )  # fmt: skip
    trainer.train()
    updates = [int(slot["step"]) for slot in trainer.adversary.optimizer.state_dict()["state"].values()]
    assert set(updates) == {4}  # rollout batches: 1 + 1 + 2
    assert trainer.adversary.schedule.last_epoch == 4
    assert {int(slot["step"]) for slot in trainer.optimizer.state_dict()["state"].values()} == {10}
    assert trainer.lr_scheduler.last_epoch == 10


@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_a_loss_that_is_not_finite_changes_nothing(value: float, tmp_path: Path):
    """G12 of the field reports: the step is left out and counted; five in a row end the run."""
    trainer = build(tmp_path)
    adversary, rollout = trainer.adversary, make_rollout(trainer)
    adversary.score_and_update(rollout)  # the optimizer has moments
    head = adversary.module.score.weight
    healthy = head.detach().clone()
    head.data.fill_(value)
    before, optimizer = state(adversary), str(adversary.optimizer.state_dict())
    for number in range(1, MAX_SKIPPED_IN_A_ROW):
        scores, metrics = adversary.score_and_update(rollout)
        assert metrics["discriminator/skipped"] == number
        assert not scores.finite
        del before["score.weight"]  # NaN is not equal to itself
        assert all(torch.equal(adversary.module.state_dict()[name], tensor) for name, tensor in before.items())
        assert str(adversary.optimizer.state_dict()) == optimizer
        assert adversary.schedule.last_epoch == 1
        before = state(adversary)
    head.data.copy_(healthy)
    adversary.score_and_update(rollout)
    assert (adversary.num_skipped, adversary.num_skipped_in_a_row) == (MAX_SKIPPED_IN_A_ROW - 1, 0)
    assert moved(before | {"score.weight": healthy}, adversary)
    head.data.fill_(value)
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        adversary.score_and_update(rollout)
    with pytest.raises(RuntimeError, match="not finite 5 times in a row"):
        adversary.score_and_update(rollout)


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path):
    trainer = build(tmp_path)
    adversary, rollout = trainer.adversary, make_rollout(trainer)
    before = state(adversary)
    handle = adversary.module.score.weight.register_hook(lambda gradient: gradient * math.nan)
    _, metrics = adversary.score_and_update(rollout)
    assert math.isfinite(metrics["discriminator/loss"])
    assert metrics["discriminator/skipped"] == 1
    assert not moved(before, adversary)
    handle.remove()
    adversary.score_and_update(rollout)
    assert moved(before, adversary)


def test_an_infinite_loss_with_a_finite_gradient_changes_nothing(tmp_path: Path):
    """With a frozen backbone the head's gradient, a difference of hidden states, is finite whatever the loss."""
    trainer = runs.trainer(tmp_path)
    trainer.discriminator.backbone.requires_grad_(False)
    adversary, rollout = trainer.adversary, make_rollout(trainer, num_groups=1, num_samples=1)
    adversary.prepare([], 20)
    head = adversary.module.score.weight
    _, _, gradients = gradients_of_step(trainer, rollout)
    # Along sample minus teacher, two hidden states of one length, the scores are opposite: 2.5e38 and -2.5e38. Their
    # difference is over float32's largest number, 3.4e38
    head.data.copy_(gradients["score.weight"])
    scores, _, _ = adversary.score(rollout)
    head.data.mul_(5 / float(scores.students[0, 0] - scores.teacher[0])).mul_(1e38)
    before = state(adversary)
    scores, metrics = adversary.score_and_update(rollout)
    assert scores.finite
    assert metrics["discriminator/loss"] == math.inf
    assert math.isfinite(metrics["discriminator/grad_norm"])
    assert metrics["discriminator/skipped"] == 1
    assert not moved(before, adversary)


def test_a_run_goes_on_after_scores_that_are_no_numbers(tmp_path: Path):
    trainer = runs.trainer(tmp_path, gad_warmup_steps=0, discriminator_only_steps=0, max_steps=2)
    trainer.discriminator.score.weight.data.fill_(math.nan)
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "discriminator/skipped" in entry]
    assert [(entry["discriminator/skipped"], entry["policy/skipped"]) for entry in logs] == [(1, 1), (2, 2)]
    assert all(torch.equal(value, before[name]) for name, value in trainer.policy.state_dict().items())


def test_clip(tmp_path: Path):
    trainer = build(tmp_path, discriminator_max_grad_norm=0.2)
    _, metrics, found = gradients_of_step(trainer, make_rollout(trainer))
    assert metrics["discriminator/grad_norm"] > 1.0
    norm = math.sqrt(sum(float(g.square().sum()) for g in found.values()))
    assert norm == pytest.approx(0.2, rel=1e-4)


def test_lengths_1_and_500(tmp_path: Path):
    """G6 of the field reports."""
    trainer = build(tmp_path)
    adversary, rollout = trainer.adversary, make_rollout(trainer, num_groups=2, num_samples=2)
    draw = random.Random(3)
    for row in rollout.samples:
        row[:] = [Sample([7]), Sample([draw.randrange(256) for _ in range(500)], cut=True)]
    scores, metrics = adversary.score_and_update(rollout)
    assert math.isfinite(metrics["discriminator/loss"])
    assert scores.students.isfinite().all()
    reference = plain(build(tmp_path))
    expected = [
        [score_alone(reference, g, s.ids).item() for s in row]
        for g, row in zip(rollout.groups, rollout.samples, strict=True)
    ]
    torch.testing.assert_close(scores.students, torch.tensor(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_pictures", [0, 2])
def test_the_place_of_the_score_comes_from_lengths(num_pictures: int, tmp_path: Path):
    """G2 of the field reports: alone, with 3 pads on the right, with 3 pads on the left, in a pack with others. The
    response holds pad and end tokens of its own."""
    trainer = build(tmp_path)
    rollout = make_rollout(trainer)
    group, pad, end = rollout.groups[num_pictures], tiny.TOKEN_ID["<|endoftext|>"], tiny.TOKEN_ID["<|im_end|>"]
    ids = [5, pad, 9, end, end, pad]
    rollout.samples[num_pictures][1] = Sample(ids)
    packed = trainer.adversary.score(rollout)[0].students[num_pictures, 1].item()
    reference = plain(trainer)
    alone = score_alone(reference, group, ids).item()
    tokens = torch.tensor([group.prompt_ids + ids])
    pads, last = torch.full((1, 3), pad), tokens.size(1) - 1
    pictures: dict[str, Any] = {}
    if group.pictures:
        pictures["pixel_values"] = torch.cat([picture.pixel_values for picture in group.pictures])
        pictures["image_grid_thw"] = torch.tensor([picture.grid_thw for picture in group.pictures])
    found = []
    for place, padded in ((last, torch.cat([tokens, pads], 1)), (last + 3, torch.cat([pads, tokens], 1))):
        mask = torch.ones_like(padded)
        mask[0, slice(last + 1, None) if place == last else slice(0, 3)] = 0
        types = {"mm_token_type_ids": (padded == IMAGE).int()} if pictures else {}
        inputs = dict(input_ids=padded, attention_mask=mask, **types, **pictures)
        found.append(reference(last=torch.tensor([place]), **inputs).item())
    assert found == pytest.approx([alone, alone], rel=1e-5, abs=1e-5)
    assert packed == pytest.approx(alone, rel=1e-5, abs=1e-5)


def test_empty_samples_take_no_part(tmp_path: Path):
    """H9 of the field reports."""
    trainer = build(tmp_path, double=True)
    rollout = make_rollout(trainer, num_groups=2, num_samples=3)
    start = state(trainer.adversary)
    rollout.samples[0].pop(1)
    rollout.samples[1].pop(1)
    expected_scores, expected_metrics, expected = gradients_of_step(trainer, rollout)
    trainer.adversary.module.load_state_dict(start)
    rollout.samples[0].insert(1, Sample([]))
    rollout.samples[1].insert(0, Sample([]))
    scores, metrics, found = gradients_of_step(trainer, rollout)
    assert scores.finite
    assert scores.students.isnan().tolist() == [[False, True, False], [True, False, False]]
    torch.testing.assert_close(scores.students[0, [0, 2]], expected_scores.students[0])
    torch.testing.assert_close(scores.students[1, [1, 2]], expected_scores.students[1])
    assert metrics["discriminator/loss"] == pytest.approx(expected_metrics["discriminator/loss"], rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7)


def test_nothing_but_empty_samples(tmp_path: Path):
    trainer = build(tmp_path)
    rollout = make_rollout(trainer, num_groups=2, num_samples=2)
    rollout.samples[0][:] = [Sample([]), Sample([])]
    scores, metrics = trainer.adversary.score_and_update(rollout)
    assert scores.students.isnan().tolist() == [[True, True], [False, False]]
    assert metrics["discriminator/skipped"] == 0
    before = state(trainer.adversary)
    rollout.samples[1][:] = [Sample([]), Sample([])]
    _, metrics = trainer.adversary.score_and_update(rollout)
    assert metrics["discriminator/loss"] == 0.0
    assert not moved(before, trainer.adversary)


def test_an_empty_sample_in_a_run(tmp_path: Path):
    trainer = runs.trainer(tmp_path, gad_warmup_steps=0, discriminator_only_steps=0, max_steps=2)
    sample = trainer.sampler.sample

    def with_an_empty_one(*args: Any, **kwargs: Any) -> list[list[Sample]]:
        rows = sample(*args, **kwargs)
        rows[0][0] = Sample([])
        return rows

    trainer.sampler.sample = with_an_empty_one
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "policy/loss" in entry]
    assert [entry["completions/empty"] for entry in logs] == [1.0, 1.0]
    assert all(math.isfinite(entry[name]) for entry in logs for name in ("policy/loss", "grad_norm", "reward", "kl"))
    assert all(entry["policy/skipped"] == 0 for entry in logs)


def test_cut_samples_train_the_discriminator_where_the_policy_masks_them(tmp_path: Path):
    """H7 of the field reports: every response is cut by `max_completion_length`."""
    dataset = runs.rows().select([0, 3, 6, 9])
    trainer = runs.trainer(
        tmp_path, dataset=dataset, mask_truncated_completions=True, gad_warmup_steps=0, discriminator_only_steps=0,
        max_steps=2, max_completion_length=6,
    )  # fmt: skip
    before = state(trainer.adversary)
    sample = trainer.sampler.sample
    trainer.sampler.sample = lambda *args, **kwargs: [
        [dataclasses.replace(s, cut=True) for s in row] for row in sample(*args, **kwargs)
    ]
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "policy/loss" in entry]
    assert [entry["policy/loss"] for entry in logs] == [0.0, 0.0]
    assert [entry["grad_norm"] for entry in logs] == [0.0, 0.0]
    assert all(value.isfinite().all() for value in trainer.policy.state_dict().values())
    assert moved(before, trainer.adversary)
