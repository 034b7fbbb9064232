"""The step engine against every sequence alone (`tests/plain.py`): cutter, policy, discriminator, and whole steps.

Float64 throughout. TRL's fused head computes in float32, so what passes through it is compared to 1e-5.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOTrainer

from tests import plain, runs, tiny
from trl_gad import Discriminator, GADTrainer, attention, forward
from trl_gad.adversary import Adversary
from trl_gad.batch import Group, Rollout, Sample
from trl_gad.engine import Cutter
from trl_gad.models import structural_copy


TEMPERATURE = 0.8
KINDS = list(plain.MODELS)
LORA: dict[str, Any] = dict(r=2, target_modules=["q_proj", "v_proj", "qkv", "down_proj"], init_lora_weights=False)
LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
HUGE = 10**6


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    plain.compute_in_float64(monkeypatch)


def pictures_of(kind: str) -> list[int]:
    return [0, 0, 0] if kind == "qwen3" else [1, 0, 3]


def budgets(groups: list[Group], responses: list[list[list[int]]], num_repeated: int = 0) -> list[int]:
    """The smallest budget that holds each response with its prompt (and the teacher's), one between, and no limit."""
    smallest = max(
        len(group.prompt_ids) * (1 + num_repeated) + sum(map(len, rows[:num_repeated])) + max(map(len, rows))
        for group, rows in zip(groups, responses, strict=True)
    )
    return [smallest, smallest + plain.MAX_LENGTH, HUGE]


# ---- Log-probs and entropies ----


@pytest.mark.parametrize(("num_generations", "lora"), [(8, False), (2, True)], ids=["8 full", "2 lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_gives_the_log_probs_and_gradients_of_each_sequence_alone(
    kind: str, num_generations: int, lora: bool
) -> None:
    model: Any = plain.MODELS[kind]().double()
    forward.add_heads(model, TEMPERATURE)
    if lora:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(**LORA)).double()
    attention.use_packed_attention(model)
    groups, samples = plain.make_groups(pictures_of(kind), num_generations)
    responses = [[sample.ids for sample in row] for row in samples]
    torch.manual_seed(1)
    expected, weights = {}, {}
    for g, row in enumerate(responses):
        for r, ids in enumerate(row):
            expected[g, r] = torch.stack(plain.log_probs_alone(model, groups[g], ids, TEMPERATURE))
            weights[g, r] = torch.randn(2, len(ids), dtype=torch.float64)
    torch.stack([(weights[member] * values).sum() for member, values in expected.items()]).sum().backward()
    expected_gradients = plain.gradients(model)

    model.train()
    if lora:
        model.enable_input_require_grads()
    smallest, between, huge = budgets(groups, responses)
    for budget, share_prompt, checkpointing, head in (
        (smallest, True, False, False),
        (smallest, False, True, False),
        (between, True, True, True),
        (between, False, False, False),
        (huge, True, True, False),
    ):
        (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
        tolerance = 1e-5 if head else 1e-9
        found: dict[tuple[int, int], torch.Tensor] = {}
        cuts = Cutter(model.config, budget, share_prompt, PartialState()).cut(groups, responses)
        assert [cut.last for cut in cuts] == [False] * (len(cuts) - 1) + [True]
        assert (len(cuts) == 1) == (budget == HUGE)
        for cut in cuts:
            values = fused(model, cut.pack) if head else with_logits(model, cut.pack)
            parts = [values[:, i, :n] for i, n in enumerate(cut.pack.lengths.tolist())]
            chosen = [weights[member] for member in cut.members]
            torch.stack([(w * part).sum() for w, part in zip(chosen, parts, strict=True)]).sum().backward()
            assert not found.keys() & set(cut.members)
            found |= dict(zip(cut.members, parts, strict=True))
        plain.assert_close(found, expected, tolerance)
        plain.assert_close(plain.gradients(model), expected_gradients, tolerance)


def with_logits(model: Any, pack: Any) -> torch.Tensor:
    """Log-probs and entropies of a pack, `[2, R, L]`, by the model's own head in float64."""
    logits = model(**forward.model_inputs(pack, "cpu")).logits[0, :-1]
    table = torch.log_softmax(logits / TEMPERATURE, -1)
    logps = table.gather(-1, pack.labels[1:, None].clamp(min=0))[:, 0]
    return torch.stack([forward.per_response(v, pack)[0] for v in (logps, -(table.exp() * table).sum(-1))])


def fused(model: Any, pack: Any) -> torch.Tensor:
    logps, entropies, _ = forward.log_probs(model, pack)
    assert entropies is not None
    return torch.stack([logps, entropies])


# ---- The discriminator's pass ----


@pytest.mark.parametrize(("num_generations", "lora"), [(8, False), (2, True)], ids=["8 full", "2 lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_gives_the_scores_and_gradients_of_each_response_alone(
    kind: str, num_generations: int, lora: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Discriminator.from_policy(plain.MODELS[kind](), LoraConfig(**LORA) if lora else None).double()
    attention.use_packed_attention(module.backbone)
    groups, samples = plain.make_groups(pictures_of(kind), num_generations, seed=1)
    responses = [[group.teacher_ids, *(s.ids for s in row)] for group, row in zip(groups, samples, strict=True)]
    expected = {
        (g, r): plain.score_alone(module, groups[g], ids)
        for g, row in enumerate(responses)
        for r, ids in enumerate(row)
    }
    pairs = [F.softplus(value - expected[g, 0]) for (g, r), value in expected.items() if r > 0]
    loss = torch.stack(pairs).mean()
    loss.backward()
    expected_gradients = plain.gradients(module)
    assert "score.weight" in expected_gradients

    args = runs.config(tmp_path, gradient_checkpointing=True, optim="sgd", discriminator_max_grad_norm=0.0)
    cutter = Cutter(module.config, HUGE, True, Accelerator(cpu=True))
    adversary = Adversary(module, cutter.accelerator, args, cutter)
    adversary.prepare([], 20)
    seen: list[dict[str, torch.Tensor]] = []
    # Takes the gradients away, so that the weights stay
    adversary.optimizer.optimizer.register_step_pre_hook(lambda *_: seen.append(plain.gradients(module)))
    for number, cutter.budget in enumerate(budgets(groups, responses, num_repeated=1)):
        for cutter.share_prompt in (True, False):
            if number == 1:
                module.base.gradient_checkpointing_disable()
            found, metrics = adversary.score_and_update(Rollout(0, groups, samples))
            assert metrics["discriminator/loss"] == pytest.approx(loss.item(), rel=1e-9)
            scores = torch.cat([found.teacher[:, None], found.students], dim=1).flatten()
            torch.testing.assert_close(scores, torch.stack(list(expected.values())).detach().float())
            plain.assert_close(seen.pop(), expected_gradients, 1e-9)
            assert not seen


# ---- The policy's pass: TRL's formula on the log-probs of each sequence alone ----


def trainer_of(tmp_path: Path, kind: str, lora: bool, **fields: Any) -> GADTrainer:
    model = plain.MODELS[kind]()
    if kind == "qwen3":
        fields |= dict(dataset=runs.rows(images=False), processing_class=tiny.tokenizer("qwen3"))
    if kind == "qwen2_5_vl":
        fields |= dict(processing_class=tiny.processor_2_5())
    if lora:
        fields |= dict(peft_config=LoraConfig(**LORA), gradient_checkpointing=True)
    trainer = runs.trainer(tmp_path, model=model.double(), max_completion_length=plain.MAX_LENGTH, **fields)
    trainer.policy.double()
    trainer.model.train()
    return trainer


@pytest.mark.parametrize(
    ("kind", "num_generations", "lora"),
    [("qwen3_vl", 8, False), ("qwen3_vl", 2, True), ("qwen2_5_vl", 2, False), ("qwen3", 2, True)],
)
def test_every_loss_type_is_trls_formula_on_each_sequence_alone(
    kind: str, num_generations: int, lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, kind, lora, beta=0.3)
    trainer.beta = 0.3
    groups, samples = plain.make_groups(pictures_of(kind), num_generations, seed=2)
    rollout = Rollout(0, groups, samples)
    torch.manual_seed(0)
    rollout.advantages = torch.randn(len(groups), num_generations)
    share = plain.whole(rollout)
    members = share.all_members()
    alone = {
        (g, i): plain.log_probs_alone(trainer.model, groups[g], samples[g][i].ids, trainer.temperature)
        for g, i in members
    }
    for store in (rollout.old_logps, rollout.ref_logps):  # around the present ones, so that ratios are clipped
        for member, (logps, _) in alone.items():
            noise = 0.3 * torch.randn(1) + 0.2 * torch.randn(logps.shape)
            store[member] = (logps.detach() + noise).float()

    def padded(values: list[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(values, batch_first=True)

    mask = padded([torch.ones(len(alone[member][0]), dtype=torch.long) for member in members])
    inputs = {
        "prompt_ids": torch.zeros(len(members), 0, dtype=torch.long),
        "prompt_mask": torch.zeros(len(members), 0, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": torch.stack([rollout.advantages[member] for member in members]),
        "num_items_in_batch": mask.sum() * trainer.args.steps_per_generation,
        "old_per_token_logps": padded([rollout.old_logps[member] for member in members]),
        "ref_per_token_logps": padded([rollout.ref_logps[member] for member in members]),
    }
    tables = [padded([alone[member][i] for member in members]) for i in range(2)]
    smallest, between, _ = budgets(groups, share.responses)
    for number, (loss_type, level) in enumerate((t, level) for t in LOSS_TYPES for level in ("token", "sequence")):
        if num_generations == 8 and number % 3:  # a third of them: 24 sequences take their time
            continue
        trainer.loss_type, trainer.importance_sampling_level = loss_type, level
        trainer.args.use_bias_correction_kl = number % 4 < 2
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (*tables, None))
            trainer.current_gradient_accumulation_steps = 1
            expected = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
        expected.backward(retain_graph=True)
        expected_gradients = plain.gradients(trainer.model)
        trainer.cutter.budget, trainer.cutter.share_prompt = (smallest, between)[number % 2], number % 4 < 2
        assert len(trainer.cutter.cut(groups, share.responses)) > 1
        loss = trainer.policy_pass(trainer.model, share)
        assert float(loss) == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        plain.assert_close(plain.gradients(trainer.model), expected_gradients, 1e-5)


# ---- Whole steps ----


STEPS: dict[str, Any] = dict(
    generation_batch_size=12, per_device_train_batch_size=3, gradient_accumulation_steps=4, num_generations=3,
    shuffle_dataset=False, max_steps=4, discriminator_only_steps=1, gad_warmup_steps=2, beta=0.1,
    learning_rate=2e-3, gad_warmup_learning_rate=3e-3, discriminator_learning_rate=1e-3, weight_decay=0.1,
    lr_scheduler_type="constant", max_grad_norm=0.2, discriminator_max_grad_norm=0.3,
    adam_epsilon=1e-3, max_completion_length=15,
)  # fmt: skip
# Adam divides by the gradient's size: an epsilon far above the rounding keeps what is 0 in theory at 0.


def samples_of(row: int) -> list[Sample]:
    """Lengths of 1 to 15 (`max_completion_length`), one sample is empty, one ends without an end token."""
    lengths = [[1, 15, 4], [7, 0, 2], [3, 9, 5], [15, 6, 1]][row]
    letters = [[97 + (7 * row + 3 * i + k) % 26 for k in range(length)] for i, length in enumerate(lengths)]
    return [
        Sample(ids[:-1] + [plain.END] * (len(ids) > 0)) if i else Sample(ids, cut=True)
        for i, ids in enumerate(letters)
    ]


def new_trainer(tmp_path: Path, **fields: Any) -> GADTrainer:
    trainer = runs.trainer(tmp_path, model=tiny.qwen3_vl().double(), dataset=runs.rows(4), **STEPS, **fields)
    trainer.discriminator.double()
    trainer.sampler.sample = lambda model, groups, *_: [samples_of(group.row) for group in groups]
    return trainer


def adamw(model: torch.nn.Module, weight_decay: float) -> torch.optim.AdamW:
    groups = [
        dict(params=[p for p in model.parameters() if p.dim() > 1], weight_decay=weight_decay),
        dict(params=[p for p in model.parameters() if p.dim() == 1], weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=1.0, eps=STEPS["adam_epsilon"])


def take(optimizer: torch.optim.AdamW, loss: torch.Tensor, lr: float, max_norm: float) -> None:
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = lr
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
    optimizer.step()
    optimizer.zero_grad()


def plain_run(groups: list[Group], head: torch.Tensor, corrected_kl: bool) -> dict[str, dict[str, torch.Tensor]]:
    """The method (GAD, section 3) in its own words: D alone, a step of warm-up, two of GAD, no micro-batches."""
    policy: Any = tiny.qwen3_vl().double()
    module = Discriminator.from_policy(structural_copy(tiny.qwen3_vl())).double()
    module.score.weight.data.copy_(head)
    of_policy, of_discriminator = adamw(policy, 0.1), adamw(module, 0.1)
    members = [(group, sample.ids) for group in groups for sample in samples_of(group.row) if sample.ids]
    reference: dict[int, torch.Tensor] = {}
    for step in range(STEPS["max_steps"]):
        teacher = {group.row: plain.score_alone(module, group, group.teacher_ids) for group in groups}
        scores = torch.stack([plain.score_alone(module, group, ids) for group, ids in members])
        pairs = F.softplus(scores - torch.stack([teacher[group.row] for group, _ in members]))
        take(of_discriminator, pairs.mean(), STEPS["discriminator_learning_rate"], 0.3)
        if step == 1:
            logps = [plain.log_probs_alone(policy, group, group.teacher_ids)[0] for group in groups]
            take(of_policy, -torch.cat(logps).mean(), STEPS["gad_warmup_learning_rate"], 0.2)
        if step >= 2:
            terms = []
            for place, (group, ids) in enumerate(members):
                logps, _ = plain.log_probs_alone(policy, group, ids, TEMPERATURE)
                reference.setdefault(place, logps.detach())
                own = scores[[i for i, (other, _) in enumerate(members) if other is group]].detach()
                advantage = (scores[place].detach() - own.mean()) / (own.std() + 1e-4)
                ratio, distance = (logps - logps.detach()).exp(), reference[place] - logps
                kl = (distance.exp() - distance - 1) * (ratio if corrected_kl else 1.0)
                terms.append(-advantage * ratio + STEPS["beta"] * kl)
            take(of_policy, torch.cat(terms).mean(), STEPS["learning_rate"], 0.2)
    return {"policy": dict(policy.named_parameters()), "discriminator": dict(module.named_parameters())}


@pytest.mark.parametrize(("number", "corrected_kl"), [(1, True), (2, False), (5, True)])
def test_whole_steps_are_those_of_every_sequence_alone(number: int, corrected_kl: bool, tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, use_bias_correction_kl=corrected_kl)
    groups = [trainer.reader.read(row, trainer.train_dataset[row]) for row in range(4)]
    expected = plain_run(groups, trainer.discriminator.score.weight.data.clone(), corrected_kl)
    responses = [[sample.ids for sample in samples_of(row) if sample.ids] for row in range(4)]
    with_teacher = [[group.teacher_ids, *rows] for group, rows in zip(groups, responses, strict=True)]
    trainer.adversary.cutter = Cutter(trainer.cutter.config, HUGE, number != 2, trainer.accelerator)
    for cutter, answers, num_repeated in ((trainer.cutter, responses, 0), (trainer.adversary.cutter, with_teacher, 1)):
        lengths = tuple(
            (len(group.prompt_ids), tuple(map(len, rows))) for group, rows in zip(groups, answers, strict=True)
        )
        cutter.budget = runs.budget(lengths, number, cutter.share_prompt, num_repeated)
        assert len(cutter.cut(groups, answers, num_repeated)) == number
    trainer.train()
    start = {"policy": tiny.qwen3_vl().double(), "discriminator": new_trainer(tmp_path).discriminator}
    for name, model in (("policy", trainer.policy), ("discriminator", trainer.discriminator)):
        before = dict(start[name].named_parameters())
        moved = {n: p - before[n] for n, p in expected[name].items()}
        assert all(float(step.abs().max()) > 1e-5 for step in moved.values())
        plain.assert_close({n: p - before[n] for n, p in model.named_parameters()}, moved, 1e-5)
