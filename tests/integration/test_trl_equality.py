"""The policy pass against TRL's own `_compute_loss`: loss, gradients of all parameters, metrics.

The reference for every loss type is the optimizer step taken as one micro-batch: TRL's trainer with the same weights
gets the step's samples as one padded batch. Ours is cut into 1, 2 or 5 micro-batches. Parameters are float64, TRL's head
returns float32 log-probs, hence 1e-5.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOConfig, GRPOTrainer

from tests import runs, tiny
from trl_gad import GADTrainer
from trl_gad.batch import Rollout, Sample
from trl_gad.packed_grpo import Share


LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"]
NUM_GROUPS, NUM_GENERATIONS = 4, 3
ALL_CUTS = [(1, True), (2, True), (5, True), (5, False)]  # (micro-batches, share_prompt)
SOME_CUTS = [(1, False), (5, True)]


def ours(tmp_path: Path, **fields: Any) -> GADTrainer:
    """A trainer whose optimizer step is half a rollout batch: 4 of 8 prompts, 3 samples each."""
    trainer = runs.trainer(
        tmp_path, model=tiny.qwen3_vl().double(), num_generations=NUM_GENERATIONS, per_device_train_batch_size=3,
        gradient_accumulation_steps=4, generation_batch_size=24, max_completion_length=15,
        **({"beta": 0.0} | fields),
    )  # fmt: skip
    trainer.model.train()
    return trainer


def theirs(tmp_path: Path, **fields: Any) -> GRPOTrainer:
    """TRL's trainer whose micro-batch is the whole step."""
    beta = fields.pop("beta", 0.0)
    fields.setdefault("temperature", 0.8)
    fields.setdefault("use_bias_correction_kl", False)  # our default
    args = GRPOConfig(
        output_dir=str(tmp_path), num_generations=NUM_GENERATIONS, max_completion_length=15,
        per_device_train_batch_size=NUM_GROUPS * NUM_GENERATIONS, gradient_accumulation_steps=1, use_cpu=True,
        bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True, **fields,
    )  # fmt: skip
    trainer = GRPOTrainer(
        tiny.qwen3_vl().double(), reward_funcs=lambda **kwargs: [], args=args, train_dataset=runs.rows(),
        processing_class=tiny.processor(),
    )  # fmt: skip
    trainer.beta = beta  # given earlier, TRL would look for the reference on disk; the test brings its log-probs
    trainer.current_gradient_accumulation_steps = 1  # transformers' loop sets it
    trainer.model.train()
    return trainer


def share_of(
    trainer: GADTrainer, *, old: bool = True, ref: bool = True, cut: str = "none", empty: bool = False
) -> Share:
    """The second step's share of a rollout batch with and without pictures. Log-probs of old and reference policy lie
    around the present ones, so that ratios are clipped on both sides."""
    draw = random.Random(1)
    groups = [trainer.reader.read(row, trainer.train_dataset[row]) for row in range(2 * NUM_GROUPS)]
    samples = [
        [Sample([draw.randrange(256) for _ in range(draw.randint(1, 9))]) for _ in range(NUM_GENERATIONS)]
        for _ in groups
    ]
    for number, sample in enumerate(sample for row in samples for sample in row):
        sample.cut = cut == "all" or (cut == "some" and number % 3 == 1)
    if empty:
        samples[NUM_GROUPS][1] = Sample([])
    rollout = Rollout(0, groups, samples)
    torch.manual_seed(0)
    rollout.advantages = torch.randn(len(groups), NUM_GENERATIONS)
    share = Share.of(rollout, rollout.part(1, 2))
    present: dict[tuple[int, int], torch.Tensor] = {}
    trainer.no_grad_pass(trainer.model, share, present)
    for wanted, store in ((old, rollout.old_logps), (ref, rollout.ref_logps)):
        if wanted:
            store |= {m: p + 0.3 * torch.randn(1) + 0.2 * torch.randn(p.shape) for m, p in present.items()}
    return share


def padded_inputs(share: Share, mask_truncated: bool) -> dict[str, Any]:
    """All samples of the step as TRL's `_generate_and_score_completions` would return them."""
    rollout, members = share.rollout, share.all_members()
    groups = [rollout.groups[g] for g, _ in members]
    samples = [rollout.samples[g][i] for g, i in members]
    prompts = [torch.tensor(group.prompt_ids) for group in groups]
    answers = [torch.tensor(sample.ids) for sample in samples]
    masks = [torch.ones(len(s.ids), dtype=torch.long) * (not (mask_truncated and s.cut)) for s in samples]
    pictures = [picture for group in groups for picture in group.pictures]
    pad = tiny.TOKEN_ID["<|endoftext|>"]
    assert rollout.advantages is not None
    inputs: dict[str, Any] = {
        "prompt_ids": pad_sequence(prompts, True, pad, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(p) for p in prompts], True, 0, padding_side="left"),
        "completion_ids": pad_sequence(answers, True, pad),
        "completion_mask": pad_sequence(masks, True, 0),
        "advantages": torch.stack([rollout.advantages[member] for member in members]),
        "num_items_in_batch": torch.stack([mask.sum() for mask in masks]).sum(),
        "pixel_values": torch.cat([picture.pixel_values for picture in pictures]),
        "image_grid_thw": torch.tensor([picture.grid_thw for picture in pictures]),
        "num_images": [len(group.pictures) for group in groups],
    }
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    inputs["mm_token_type_ids"] = (ids == tiny.TOKEN_ID["<|image_pad|>"]).int()
    for name, logps in (("old_per_token_logps", rollout.old_logps), ("ref_per_token_logps", rollout.ref_logps)):
        if logps:
            inputs[name] = pad_sequence([logps[member] for member in members], True)
    return inputs


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def cut_into(trainer: GADTrainer, share: Share, number: int, share_prompt: bool) -> None:
    """Set what gives `number` micro-batches."""
    lengths = tuple(
        (len(group.prompt_ids), tuple(map(len, responses)))
        for group, responses in zip(share.groups, share.responses, strict=True)
    )
    trainer.cutter.budget, trainer.cutter.share_prompt = runs.budget(lengths, number, share_prompt), share_prompt
    assert len(trainer.cutter.cut(share.groups, share.responses)) == number


def passes(trainer: GADTrainer, share: Share, cuts: list[tuple[int, bool]]) -> Iterator[tuple[float, dict, dict]]:
    """Loss, gradients and metrics of the policy pass for each way to cut it."""
    for number, share_prompt in cuts:
        cut_into(trainer, share, number, share_prompt)
        trainer.model.zero_grad(set_to_none=True)
        trainer._metrics["train"].clear()
        loss = trainer.policy_pass(trainer.model, share)
        yield float(loss), gradients(trainer.model), {k: v[-1] for k, v in trainer._metrics["train"].items()}


def assert_equal(tmp_path: Path, cuts: list[tuple[int, bool]] = ALL_CUTS, data: Any = None, **fields: Any) -> None:
    """Our pass and TRL's loss with the configuration `fields` on the samples that `data` describes."""
    mine, reference = ours(tmp_path, **fields), theirs(tmp_path, **fields)
    share = share_of(mine, **(data or {}))
    expected = reference._compute_loss(reference.model, padded_inputs(share, mine.mask_truncated_completions))
    expected.backward()
    expected_gradients = gradients(reference.model)
    largest = max(float(g.abs().max()) for g in expected_gradients.values())
    assert largest > 1e-4
    for loss, found, metrics in passes(mine, share, cuts):
        assert loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * largest, msg=lambda m: name + m)  # noqa: B023
        for name in {"kl", "entropy"} & set(reference._metrics["train"]):
            assert metrics[name] == pytest.approx(reference._metrics["train"][name][0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_types(loss_type: str, level: str, tmp_path: Path):
    assert_equal(tmp_path, loss_type=loss_type, importance_sampling_level=level, beta=0.3)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_everything_together(loss_type: str, tmp_path: Path):
    assert_equal(
        tmp_path, SOME_CUTS, dict(cut="some", empty=True), loss_type=loss_type, beta=0.3, top_entropy_quantile=0.37,
        entropy_coef=0.2, mask_truncated_completions=True, off_policy_mask_threshold=0.1, epsilon=0.1,
    )  # fmt: skip


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_entropy_bonus(loss_type: str, tmp_path: Path):
    assert_equal(tmp_path, SOME_CUTS, loss_type=loss_type, beta=0.1, entropy_coef=0.5)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_high_entropy_tokens_only(loss_type: str, tmp_path: Path):
    assert_equal(tmp_path, loss_type=loss_type, top_entropy_quantile=0.37)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_truncated_completions(loss_type: str, tmp_path: Path):
    assert_equal(tmp_path, SOME_CUTS, dict(cut="some"), loss_type=loss_type, mask_truncated_completions=True)


@pytest.mark.parametrize(
    "fields",
    [
        dict(delta=1.1),
        dict(off_policy_mask_threshold=0.05),
        dict(epsilon=0.05, epsilon_high=0.1),
        dict(use_bias_correction_kl=True, beta=0.3),
        dict(temperature=1.3),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_options(fields: dict, tmp_path: Path):
    assert_equal(tmp_path, SOME_CUTS, **fields)


def test_without_old_log_probs(tmp_path: Path):
    assert_equal(tmp_path, data=dict(old=False), loss_type="grpo", beta=0.3)


def test_empty_samples_are_left_out(tmp_path: Path):
    assert_equal(tmp_path, data=dict(empty=True), loss_type="grpo", beta=0.3)


@pytest.mark.parametrize("last_entropy", [0.0, 9.0])  # below and above the target: the bonus counts, or it does not
@pytest.mark.parametrize("target", [0.1, 8.0])  # entropy of the step is about 5: the coefficient falls, or it rises
def test_adaptive_entropy(target: float, last_entropy: float, tmp_path: Path):
    fields = dict(loss_type="dapo", use_adaptive_entropy=True, entropy_coef=0.3, entropy_coef_delta=0.01)
    fields["entropy_target"] = target
    mine, reference = ours(tmp_path, **fields), theirs(tmp_path, **fields)
    share = share_of(mine)
    reference._last_world_entropy = last_entropy
    expected = reference._compute_loss(reference.model, padded_inputs(share, False))
    for number, share_prompt in ALL_CUTS:
        mine.entropy_coef, mine._last_world_entropy = 0.3, last_entropy
        ((loss, _, metrics),) = passes(mine, share, [(number, share_prompt)])
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert mine.entropy_coef == reference.entropy_coef == pytest.approx(0.29 if target == 0.1 else 0.31)
        assert mine._last_world_entropy == pytest.approx(reference._last_world_entropy, rel=1e-5)
        assert metrics["entropy_coef"] == reference.entropy_coef


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_response_cut(loss_type: str, tmp_path: Path):
    """H7 of the field reports: nothing is left to train on."""
    trainer = ours(
        tmp_path, loss_type=loss_type, mask_truncated_completions=True, beta=0.3, entropy_coef=0.2,
        top_entropy_quantile=0.5,
    )  # fmt: skip
    for loss, found, metrics in passes(trainer, share_of(trainer, cut="all"), SOME_CUTS):
        assert loss == 0.0
        assert all(bool((gradient == 0).all()) for gradient in found.values())  # NaN != 0
        assert trainer.policy.get_input_embeddings().weight.grad is not None  # there was a graph
        assert all(value == value for value in metrics.values())


def test_the_first_iteration_leaves_the_old_log_probs(tmp_path: Path):
    trainer = ours(tmp_path, num_iterations=2)
    share = share_of(trainer, old=False)
    present: dict[tuple[int, int], torch.Tensor] = {}
    trainer.no_grad_pass(trainer.model, share, present)
    cut_into(trainer, share, 5, True)
    trainer.policy_pass(trainer.model, share)
    assert set(share.rollout.old_logps) == set(present)
    for member, logps in share.rollout.old_logps.items():
        torch.testing.assert_close(logps, present[member], rtol=1e-5, atol=1e-5)
