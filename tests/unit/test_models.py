"""Precision of the parameters, copies of the policy, and the snapshot that the KL term refers to."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import TrainerCallback

from tests import runs, tiny
from trl_gad.models import check_precision, own_parameters, rounded_away_share, snapshot, structural_copy


def moved_share(dtype: torch.dtype, learning_rate: float) -> float:
    """The share of weights of the usual size (0.02) that one real AdamW step moves."""
    torch.manual_seed(0)
    weight = nn.Parameter((0.02 * torch.randn(100_000)).to(dtype))
    before = weight.detach().clone()
    weight.grad = torch.randn(100_000).to(dtype)
    torch.optim.AdamW([weight], lr=learning_rate, weight_decay=0.0).step()
    return float((weight != before).float().mean())


def test_half_precision_parameters_hardly_move():
    assert moved_share(torch.float32, 1e-6) > 0.999
    assert moved_share(torch.bfloat16, 1e-6) < 0.03


@pytest.mark.parametrize("learning_rate", [1e-6, 1e-5, 1e-4, 1e-3])
def test_rounded_away_share_is_what_adamw_does(learning_rate: float):
    torch.manual_seed(0)
    weight = nn.Parameter((0.02 * torch.randn(4096)).bfloat16())
    # AdamW's first step is the learning rate for all weights; moments and rounding to even make the rest of it
    found = rounded_away_share([weight], learning_rate)
    assert found == pytest.approx(1 - moved_share(torch.bfloat16, learning_rate), abs=0.03)


def test_rounded_away_share_by_hand():
    # bf16 keeps 8 bits: numbers from 1 to 2 lie 2**-7 apart, from 1/2 to 1 2**-8. An update of 0.003 is less than half
    # of 2**-7 = 0.0078 and more than half of 2**-8 = 0.0039: 1.0 and 1.5 stay, 0.5 and 0.75 move. Zero always moves.
    values = nn.Parameter(torch.tensor([1.0, 1.5, 0.5, 0.75, 0.0]).bfloat16())
    assert rounded_away_share([values], 0.003) == pytest.approx(2 / 5)
    assert rounded_away_share([], 1e-6) == 0.0


def weights(scale: float, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    nn.init.normal_(model.weight, std=scale)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused(dtype: torch.dtype):
    with pytest.raises(ValueError, match=f"The policy has .*{dtype}.* 1e-06 about 9.%.*dtype='float32'.*bf16=True"):
        check_precision(weights(0.02 if dtype == torch.bfloat16 else 0.2, dtype), 1e-6, "policy")


def test_what_moves_in_part_is_warned_of(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        check_precision(weights(0.02, torch.bfloat16), 1e-4, "discriminator")
    assert "updates of the discriminator's torch.bfloat16 parameters round to nothing" in caplog.text


def test_float32_and_frozen_parameters_are_fine(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        check_precision(weights(0.02, torch.float32), 1e-6, "policy")
        check_precision(weights(0.02, torch.bfloat16).requires_grad_(False), 1e-6, "policy")
    assert not caplog.records


def test_a_trainer_refuses_half_precision(tmp_path: Path):
    with pytest.raises(ValueError, match="The policy has trainable parameters in torch.bfloat16"):
        runs.trainer(tmp_path, model=tiny.qwen3_vl(scale=1.0).bfloat16(), learning_rate=1e-6)
    with pytest.raises(ValueError, match="The discriminator has trainable parameters in torch.bfloat16"):
        runs.trainer(
            tmp_path, discriminator=tiny.qwen3_vl(scale=1.0).bfloat16(), discriminator_learning_rate=1e-6
        )  # fmt: skip


def test_a_structural_copy_shares_parameters_and_nothing_else():
    model: Any = tiny.qwen3_text()
    copied = structural_copy(model)
    assert all(a is b for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    assert not {id(module) for module in model.modules()} & {id(module) for module in copied.modules()}
    assert not {id(buffer) for buffer in model.buffers()} & {id(buffer) for buffer in copied.buffers()}
    assert copied.lm_head.weight is copied.model.embed_tokens.weight

    own_parameters(copied)
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in copied.parameters()}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    assert copied.lm_head.weight is copied.model.embed_tokens.weight  # still tied


@pytest.mark.parametrize("lora", [False, True])
def test_snapshot_keeps_what_the_policy_was(lora: bool):
    model: Any = tiny.qwen3_text()
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    skeleton = structural_copy(model)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)  # the skeleton follows until the snapshot
        before = model(input_ids=ids).logits
        reference = snapshot(skeleton)
        assert torch.equal(reference(input_ids=ids).logits, before)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)
        assert not torch.allclose(model(input_ids=ids).logits, before, atol=1e-2)
        assert torch.equal(reference(input_ids=ids).logits, before)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert not any(module.training for module in reference.modules())
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in reference.parameters()}
    assert shared == {p.data_ptr() for p in model.parameters() if not p.requires_grad}  # no copy of a frozen base


class Keeper(TrainerCallback):
    """The policy and the reference at the end of every step."""

    trainer: Any

    def __init__(self):
        self.policies: list[dict[str, torch.Tensor]] = []
        self.references: list[dict[str, torch.Tensor] | None] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reference = self.trainer.reference
        self.policies.append({n: p.detach().clone() for n, p in self.trainer.policy.named_parameters()})
        self.references.append(reference and {n: p.clone() for n, p in reference.named_parameters()})


@pytest.mark.parametrize("lora", [False, True])
def test_the_reference_is_the_policy_at_the_start_of_stage_two(lora: bool, tmp_path: Path):
    keeper = Keeper()
    peft: dict[str, Any] = dict(peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"])) if lora else {}
    # Steps 0: D alone, 1: warm-up, 2 to 4: GAD. Learning rates without decay, so that the last step moves too
    trainer = runs.trainer(
        tmp_path, callbacks=[keeper], lr_scheduler_type="constant", max_tokens_per_micro_batch=120, **peft
    )
    keeper.trainer = trainer
    trainer.train()
    assert keeper.references[:2] == [None, None]
    start = keeper.policies[1]
    trained = [name for name, parameter in trainer.policy.named_parameters() if parameter.requires_grad]
    for policy, reference in zip(keeper.policies[2:], keeper.references[2:], strict=True):
        assert reference is not None
        assert reference.keys() == start.keys()
        assert all(torch.equal(value, start[name]) for name, value in reference.items())
        assert any(not torch.equal(policy[name], start[name]) for name in trained)
    first, second, third = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert first == 0.0
    assert second > 0.0
    assert third > 0.0
