"""Whole runs of `GADTrainer` on tiny models: the stages, the models it takes, rewards, evaluation, saving."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText, TrainerCallback

from tests import runs, tiny
from trl_gad import Discriminator, GADTrainer
from trl_gad.attention import native_attention
from trl_gad.batch import Group, Rollout, Sample


IMAGE, END = tiny.TOKEN_ID["<|image_pad|>"], tiny.TOKEN_ID["<|im_end|>"]
LORA: dict[str, Any] = dict(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=True)


class Recorder(TrainerCallback):
    """What each step was: learning rate of the update, place in the schedule, the policy after it."""

    def __init__(self):
        self.learning_rates: list[float] = []
        self.places: list[int] = []
        self.policies: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.learning_rates.append(kwargs["optimizer"].param_groups[0]["lr"])
        self.places.append(kwargs["lr_scheduler"].last_epoch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.policies.append(copied(kwargs["model"]))


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def steps(trainer: GADTrainer) -> list[dict[str, float]]:
    """The logs of the training steps."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def record_samples(trainer: GADTrainer) -> list[list[list[Sample]]]:
    """The samples of every call of the sampler, while the trainer runs."""
    seen: list[list[list[Sample]]] = []
    sample = trainer.sampler.sample

    def recorded(*args: Any, **kwargs: Any) -> list[list[Sample]]:
        seen.append(sample(*args, **kwargs))
        return seen[-1]

    trainer.sampler.sample = recorded
    return seen


def answer_with(trainer: GADTrainer, texts: list[str | None]) -> list[list[list[Sample]]]:
    """Every prompt gets these texts as its samples, each with an end token; None is an answer that was cut."""
    tokenizer = tiny.tokenizer()
    samples = [Sample(tokenizer.encode("cut off"), cut=True) if t is None else Sample(tokenizer.encode(t) + [END])
               for t in texts]  # fmt: skip
    seen: list[list[list[Sample]]] = []

    def sample(model: Any, groups: list[Group], num_generations: int, seed: int) -> list[list[Sample]]:
        assert num_generations == len(texts)
        seen.append([copy.deepcopy(samples) for _ in groups])
        return seen[-1]

    trainer.sampler.sample = sample
    return seen


def plain_inputs(group: Group, answer: list[int]) -> dict[str, torch.Tensor]:
    """One sequence as transformers' own forward takes it: no packing."""
    ids = torch.tensor([group.prompt_ids + answer])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int()}
    if group.pictures:
        inputs["pixel_values"] = torch.cat([picture.pixel_values for picture in group.pictures])
        inputs["image_grid_thw"] = torch.tensor([picture.grid_thw for picture in group.pictures])
    return inputs


# ---- Stages ----


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[GADTrainer, Recorder]:
    """2 steps of D alone, 2 of warm-up, 4 of GAD."""
    recorder = Recorder()
    trainer = runs.trainer(
        tmp_path_factory.mktemp("staged"), discriminator_only_steps=2, gad_warmup_steps=4, max_steps=8,
        gad_warmup_learning_rate=2e-3, learning_rate=1e-3, discriminator_learning_rate=4e-3, callbacks=[recorder],
    )  # fmt: skip
    trainer.train()
    return trainer, recorder


def test_both_stages_in_one_run(staged: tuple[GADTrainer, Recorder]) -> None:
    log = steps(staged[0])
    assert [entry["stage"] for entry in log] == [0, 0, 1, 1, 2, 2, 2, 2]
    for entry in log:
        assert ("warmup/cross_entropy" in entry) == (entry["stage"] == 1)
        assert ("policy/loss" in entry) == ("kl" in entry) == ("reward" in entry) == (entry["stage"] == 2)
        assert "discriminator/accuracy" in entry
    assert log[2]["loss"] == pytest.approx(log[2]["warmup/cross_entropy"], abs=1e-4)
    assert log[4]["kl"] == 0.0, "the first step of stage 2 is taken from the snapshot itself"
    assert log[5]["kl"] > 0.0


def test_learning_rates_start_anew_in_each_stage(staged: tuple[GADTrainer, Recorder]) -> None:
    trainer, recorder = staged
    # Linear to 0 in each stage: 2e-3 * (1, 1/2) and 1e-3 * (1, 3/4, 1/2, 1/4); D's over its 8 steps: 4e-3 * (1 - k/8)
    assert recorder.learning_rates[2:] == pytest.approx([2e-3, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert recorder.places == [0, 0, 0, 1, 2, 3, 4, 5], "the steps of D alone do not count in the policy's schedule"
    used = [entry["discriminator/learning_rate"] for entry in steps(trainer)]
    assert used == pytest.approx([4e-3 * (1 - k / 8) for k in range(8)])


def test_steps_of_the_discriminator_alone_leave_the_policy_as_it_is(staged: tuple[GADTrainer, Recorder]) -> None:
    trainer, recorder = staged
    untouched = copied(tiny.qwen3_vl())
    assert same(recorder.policies[0], untouched)
    assert same(recorder.policies[1], untouched)
    assert not same(recorder.policies[2], untouched)
    assert trainer.discriminator.score.weight.grad is None
    assert [entry["grad_norm"] for entry in steps(trainer)[:2]] == [0.0, 0.0]


def test_seconds_of_the_phases_add_up(staged: tuple[GADTrainer, Recorder]) -> None:
    of_stage = {
        0: {"data", "rollout", "discriminator", "optimizer"},
        1: {"data", "rollout", "discriminator", "policy", "optimizer"},
        2: {"data", "rollout", "discriminator", "rewards", "reference", "policy", "optimizer"},
    }
    for entry in steps(staged[0]):
        seconds = {name: value for name, value in entry.items() if name.startswith("time/")}
        whole = seconds.pop("time/step")
        assert set(seconds) == {f"time/{name}" for name in of_stage[int(entry["stage"])]}
        assert 0.5 * whole < sum(seconds.values()) <= whole
        assert min(seconds.values()) > 0


def test_skipped_stage_one_still_trains_the_discriminator_alone(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, gad_warmup_steps=0, discriminator_only_steps=1, max_steps=3)
    trainer.train()
    assert [entry["stage"] for entry in steps(trainer)] == [0, 2, 2]
    assert trainer.reference is not None
    assert same(copied(trainer.reference), copied(tiny.qwen3_vl()))


# ---- Models ----


def test_a_discriminator_from_a_folder(tmp_path: Path) -> None:
    saved = Discriminator.from_policy(tiny.qwen3_vl(seed=5))
    saved.save_pretrained(tmp_path / "saved")
    trainer = runs.trainer(tmp_path, discriminator=str(tmp_path / "saved"), discriminator_only_steps=0, max_steps=1)
    assert same(copied(trainer.discriminator), copied(saved))
    trainer.train()
    assert not same(copied(trainer.discriminator), copied(saved))


@pytest.mark.parametrize("as_path", [True, False])
def test_a_discriminator_from_another_model(tmp_path: Path, as_path: bool) -> None:
    other = tiny.qwen3_vl(seed=5)
    other.save_pretrained(tmp_path / "other")
    trainer = runs.trainer(tmp_path, discriminator=str(tmp_path / "other") if as_path else other)
    assert same(copied(trainer.discriminator.backbone), copied(other.model))
    trainer.train()
    assert same(copied(other), copied(tiny.qwen3_vl(seed=5))), "the given model is not trained"


def test_discriminator_starts_from_the_policy(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path)
    assert same(copied(trainer.discriminator.backbone), copied(tiny.qwen3_vl().model))
    shared = {p.data_ptr() for p in trainer.policy.parameters()} & {
        p.data_ptr() for p in trainer.discriminator.parameters()
    }
    assert not shared


def test_text_student_with_a_tokenizer(tmp_path: Path) -> None:
    trainer = runs.trainer(
        tmp_path, model=tiny.qwen3_text(), dataset=runs.rows(images=False), processing_class=tiny.tokenizer("qwen3"),
    )  # fmt: skip
    trainer.train()
    assert [entry["stage"] for entry in steps(trainer)] == [0, 1, 2, 2, 2]
    assert all(math.isfinite(entry["loss"]) for entry in steps(trainer))


def test_vision_student_on_texts_alone(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, dataset=runs.rows(images=False))
    trainer.train()
    visual = dict(trainer.policy.model.visual.named_parameters())
    theirs = dict(tiny.qwen3_vl().model.visual.named_parameters())
    assert all(torch.equal(value, theirs[name]) for name, value in visual.items())
    assert steps(trainer)[-1]["kl"] > 0


def test_qwen2_5_vl(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, model=tiny.qwen2_5_vl(), processing_class=tiny.processor_2_5())
    trainer.train()
    assert [entry["stage"] for entry in steps(trainer)] == [0, 1, 2, 2, 2]
    theirs = dict(tiny.qwen2_5_vl().model.visual.named_parameters())
    moved = [n for n, p in trainer.policy.model.visual.named_parameters() if not torch.equal(p, theirs[n])]
    assert moved, "the rows have pictures, so the vision tower trains"


def test_lora_on_both_shares_one_frozen_base(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, peft_config=LoraConfig(**LORA), discriminator_peft_config=LoraConfig(**LORA))
    base = dict(tiny.qwen3_vl().named_parameters())
    trainer.train()
    for model in (trainer.policy, trainer.discriminator):
        adapters = [p for n, p in model.named_parameters() if "lora_B" in n]
        assert adapters
        assert all(float(p.abs().max()) > 0 for p in adapters), "B starts at 0"
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        assert all("lora_" in n or n == "score.weight" for n in trained)
    for name, parameter in trainer.policy.get_base_model().named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")]), name
    policy = {p.data_ptr() for p in trainer.policy.parameters() if not p.requires_grad}
    assert {p.data_ptr() for p in trainer.discriminator.parameters() if not p.requires_grad} <= policy
    assert trainer.reference is not None
    frozen = {p.data_ptr() for n, p in trainer.reference.named_parameters() if "lora_" not in n}
    assert frozen <= policy


def test_freeze_vision(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, freeze_vision=True)
    trainer.train()
    theirs = dict(tiny.qwen3_vl().model.visual.named_parameters())
    for model in (trainer.policy.model, trainer.discriminator.backbone):
        assert all(torch.equal(p, theirs[n]) for n, p in model.visual.named_parameters())
    text = dict(tiny.qwen3_vl().model.language_model.named_parameters())
    assert not all(torch.equal(p, text[n]) for n, p in trainer.policy.model.language_model.named_parameters())


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_what_makes_several_turns_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"does not take `{name}`.*Leave it out"):
        GADTrainer(
            model=tiny.qwen3_vl(), args=runs.config(tmp_path), train_dataset=runs.rows(),
            processing_class=tiny.processor(), **{name: [print]},
        )  # fmt: skip


# ---- Rows ----


def mixed_rows() -> Dataset:
    """Rows with no, one and three pictures of several sizes."""
    table = []
    for i, count in enumerate([3, 0, 1, 0, 3, 1, 1, 0]):
        pictures = [Image.new("RGB", (16 + 16 * (j % 2), 32), (40 * i, 80 * j, 9)) for j in range(count)]
        table.append(
            {
                "prompt": [{"role": "user", "content": f"Row {i}?"}],
                "completion": [{"role": "assistant", "content": "xy " * (1 + i % 2) + str(i)}],
                "images": pictures if pictures or i % 2 else None,
            }
        )
    return Dataset.from_list(table)


def test_rows_with_and_without_pictures_score_as_they_do_alone(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, dataset=mixed_rows(), beta=0.0)
    seen = record_samples(trainer)
    trainer.train()
    assert sum(map(len, seen)) == 20  # 4 prompts in each of 5 steps
    groups = [trainer.reader.read(i, trainer.train_dataset[i]) for i in range(8)]
    assert [len(group.pictures) for group in groups] == [3, 0, 1, 0, 3, 1, 1, 0]
    samples = [[Sample([65 + i, 66, END]), Sample([70, 71 + i], cut=True)] for i in range(8)]
    scores, loss, num_pairs = trainer.adversary.score(Rollout(0, groups, samples))
    assert num_pairs == 16
    expected = 0.0
    for i, (group, row) in enumerate(zip(groups, samples, strict=True)):
        plain = [score(trainer.discriminator, group, ids) for ids in [group.teacher_ids, *(s.ids for s in row)]]
        torch.testing.assert_close(scores.teacher[i], torch.tensor(plain[0]), rtol=0, atol=1e-5)
        torch.testing.assert_close(scores.students[i], torch.tensor(plain[1:]), rtol=0, atol=1e-5)
        expected += sum(math.log1p(math.exp(value - plain[0])) for value in plain[1:])
    assert loss == pytest.approx(expected, abs=1e-4)


def score(discriminator: Discriminator, group: Group, ids: list[int]) -> float:
    """D's score of one response in a forward of its own, with the model's own attention."""
    with torch.no_grad(), native_attention(discriminator.backbone):
        hidden = discriminator.eval().backbone(**plain_inputs(group, ids)).last_hidden_state
    return float(hidden[0, -1].float() @ discriminator.score.weight[0])


def test_teachers_end_in_exactly_one_end_token(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, max_completion_length=20)
    tokenizer = trainer.reader.tokenizer
    texts, count = trainer.train_dataset["completion"], 0
    for _, groups in trainer.get_train_dataloader().rollouts(0):
        for group in groups:
            count += 1
            assert group.teacher_ids[-1] == END
            assert group.teacher_ids.count(END) == 1
            assert tokenizer.decode(group.teacher_ids[:-1]) == texts[group.row][0]["content"]
    assert count == 20


# ---- Sampling ----


def with_likely_image_token() -> Any:
    """A student whose most probable next token is an image placeholder, whatever came before."""
    model = tiny.qwen3_vl()
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        model.model.language_model.norm.weight[0] = 0.0  # this hidden unit then carries a constant ...
        ids = torch.tensor([tiny.tokenizer().encode("What 1?")])
        hidden = model.model(input_ids=ids).last_hidden_state[0]
        embedding[IMAGE] = 40.0 * hidden.mean(0) / hidden.mean(0).norm()
        logits = model(input_ids=ids).logits[0]
    assert (logits.argmax(-1) == IMAGE).all()
    return model


def test_an_image_token_is_never_sampled(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, model=with_likely_image_token())
    seen = record_samples(trainer)
    trainer.train()
    tokens = [token for call in seen for row in call for sample in row for token in sample.ids]
    assert len(tokens) > 200
    assert IMAGE not in tokens
    assert tiny.TOKEN_ID["<|video_pad|>"] not in tokens


def test_the_same_seed_gives_the_same_samples(tmp_path: Path) -> None:
    drawn = []
    for seed in (7, 7, 8):
        trainer = runs.trainer(tmp_path, seed=seed, data_seed=0, max_steps=2)
        seen = record_samples(trainer)
        trainer.train()
        drawn.append([[sample.ids for sample in row] for call in seen for row in call])
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert drawn[0][0][0] != drawn[0][0][1], "the samples of a prompt are not one sample twice"


# ---- Losses and rewards ----


def test_cross_entropy_of_the_warmup_is_at_temperature_one(tmp_path: Path) -> None:
    trainer = runs.trainer(
        tmp_path, temperature=0.8, discriminator_only_steps=0, gad_warmup_steps=1, max_steps=1,
        max_tokens_per_micro_batch=80,
    )  # fmt: skip
    _, groups = next(iter(trainer.get_train_dataloader().rollouts(0)))
    model, total, count = tiny.qwen3_vl(), 0.0, 0
    for group in groups:
        with torch.no_grad():
            logits = model(**plain_inputs(group, group.teacher_ids)).logits[0, len(group.prompt_ids) - 1 : -1]
        logps = logits.float().log_softmax(-1).gather(-1, torch.tensor(group.teacher_ids)[:, None])
        total, count = total - float(logps.sum()), count + len(group.teacher_ids)
    trainer.train()
    assert steps(trainer)[0]["warmup/cross_entropy"] == pytest.approx(total / count, abs=1e-5)


def test_extra_rewards_stand_behind_the_discriminator(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def length(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        calls.append(kwargs | {"num": len(completion_ids)})
        return [float(len(ids)) for ids in completion_ids]

    async def row(note: list[str], **kwargs: Any) -> list[float]:
        return [float(text) for text in note]

    dataset = runs.rows().map(lambda _, i: {"note": str(i)}, with_indices=True)
    trainer = runs.trainer(
        tmp_path, dataset=dataset, reward_funcs=[length, row], reward_weights=[1.0, 0.5, 0.25],
        discriminator_only_steps=1, gad_warmup_steps=2, max_steps=4,
    )  # fmt: skip
    trainer.train()
    assert trainer.reward_func_names == ["discriminator", "length", "row"]
    assert len(calls) == 2, "extra rewards are called in stage 2"
    assert calls[0]["num"] == 8
    assert [len(pictures) for pictures in calls[0]["images"]] == [int(i) % 3 for i in calls[0]["note"]]
    assert calls[0]["prompts"][0][0]["role"] == "user"
    assert calls[0]["completions"][0][0]["role"] == "assistant"
    for entry in steps(trainer)[2:]:
        means = [entry[f"rewards/{name}/mean"] for name in trainer.reward_func_names]
        assert means[0] == pytest.approx(entry["discriminator/student_score/mean"], abs=1e-5)
        assert entry["reward"] == pytest.approx(means[0] + 0.5 * means[1] + 0.25 * means[2], abs=1e-5)


def test_the_number_of_weights_is_checked(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"Number of reward weights \(1\) must match number of reward functions \(2\)"
    ):
        runs.trainer(tmp_path, reward_funcs=[lambda prompts, **_: [0.0] * len(prompts)], reward_weights=[1.0])


def test_a_gradient_that_is_no_number_skips_the_policy_step(tmp_path: Path) -> None:
    """The loss may be finite where its gradient is not."""
    recorder = Recorder()
    trainer = runs.trainer(tmp_path, discriminator_only_steps=0, gad_warmup_steps=0, max_steps=3, callbacks=[recorder])
    weight = trainer.policy.model.language_model.layers[0].mlp.up_proj.weight

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf if trainer.state.global_step == 1 else gradient

    weight.register_hook(poison)
    trainer.train()
    assert all(value.isfinite().all() for value in copied(trainer.policy).values())
    assert same(recorder.policies[1], recorder.policies[0])
    assert not same(recorder.policies[2], recorder.policies[1])
    assert recorder.places == [0, 1, 1]


def test_a_schedule_of_ones_own_is_refused(tmp_path: Path) -> None:
    """It could neither wait in the steps of the discriminator alone nor start anew in stage 2."""
    model = tiny.qwen3_vl()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match="optimizers=.*lr_scheduler_type"):
        runs.trainer(tmp_path, model=model, optimizers=(optimizer, schedule))
    trainer = runs.trainer(tmp_path, model=model, optimizers=(optimizer, None))
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)


def answer_by_row(trainer: GADTrainer, answer: Callable[[int, int], Sample]) -> None:
    """The sample number i of row r is `answer(r, i)`."""

    def sample(model: Any, groups: list[Group], num_generations: int, seed: int) -> list[list[Sample]]:
        return [[answer(group.row, i) for i in range(num_generations)] for group in groups]

    trainer.sampler.sample = sample


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"])
def test_every_response_cut_and_masked(tmp_path: Path, loss_type: str) -> None:
    """The policy's loss is 0 with a graph, nothing is NaN, and the discriminator trains on them."""
    recorder = Recorder()
    trainer = runs.trainer(
        tmp_path, mask_truncated_completions=True, loss_type=loss_type, entropy_coef=0.1, top_entropy_quantile=0.5,
        discriminator_only_steps=0, gad_warmup_steps=0, max_steps=2, callbacks=[recorder],
    )  # fmt: skip
    answer_by_row(trainer, lambda row, i: Sample([65 + row + i, 66], cut=True))
    trainer.train()
    for entry in steps(trainer):
        assert entry["loss"] == entry["grad_norm"] == entry["policy/skipped"] == 0.0
        assert entry["discriminator/grad_norm"] > 0
    assert same(recorder.policies[1], copied(tiny.qwen3_vl()))
    assert all(value.isfinite().all() for value in copied(trainer.discriminator).values())


def test_empty_responses_take_no_part(tmp_path: Path) -> None:
    """H9: those of whole prompts, and then all of them for longer than a loss that is no number would be borne."""
    trainer = runs.trainer(tmp_path, max_steps=10, discriminator_only_steps=0, gad_warmup_steps=0)
    answer_by_row(
        trainer,
        lambda row, i: Sample([] if row % 2 or trainer.state.global_step > 2 else [65 + row + i, END]),
    )
    trainer.train()
    log = steps(trainer)
    assert len(log) == 10
    # In the order of this seed: prompts with odd rows are 1 of the first 4 and 3 of the next; 2 samples each
    assert {entry["completions/empty"] for entry in log[:3]} <= {2.0, 4.0, 6.0}
    assert [entry["completions/empty"] for entry in log[3:]] == [8.0] * 7
    assert all(entry["policy/skipped"] == entry["discriminator/skipped"] == 0 for entry in log)
    assert all(value.isfinite().all() for value in copied(trainer.policy).values())


LORAS: list[dict[str, Any]] = [
    {},
    dict(peft_config=LoraConfig(**LORA)),
    dict(peft_config=LoraConfig(**LORA), discriminator_peft_config=LoraConfig(**LORA)),
]


@pytest.mark.parametrize("options", LORAS, ids=["full", "lora", "lora on both"])
def test_gradient_checkpointing_changes_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    plain, checkpointed = (
        runs.trainer(tmp_path, gradient_checkpointing=value, max_steps=3, **options) for value in (False, True)
    )
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    checkpointed.discriminator.base.language_model.layers[0].mlp.up_proj.register_forward_hook(count)
    plain.train()
    checkpointed.train()
    assert calls == 6, "3 forwards, each once more in its backward"
    for ours, theirs in ((checkpointed.policy, plain.policy), (checkpointed.discriminator, plain.discriminator)):
        values = copied(theirs)
        for name, value in copied(ours).items():
            torch.testing.assert_close(value, values[name], rtol=0, atol=1e-6)


def test_bf16_computes_in_half_precision_and_keeps_float32(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, bf16=True)
    seen: set[torch.dtype] = set()

    def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
        seen.add(output.dtype)

    trainer.discriminator.base.language_model.layers[0].mlp.up_proj.register_forward_hook(note)
    trainer.train()
    assert seen == {torch.bfloat16}
    for model in (trainer.policy, trainer.discriminator):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert steps(trainer)[2]["kl"] == pytest.approx(0.0, abs=1e-4)
    assert not same(copied(trainer.policy), copied(tiny.qwen3_vl()))


def test_workers_of_the_loader_change_nothing(tmp_path: Path) -> None:
    plain, workers = (runs.trainer(tmp_path, dataloader_num_workers=number, max_steps=3) for number in (0, 2))
    plain.train()
    workers.train()
    assert same(copied(plain.policy), copied(workers.policy))


def test_strategies_by_epoch(tmp_path: Path) -> None:
    """8 usable rows, 4 a step: an epoch is two steps."""
    trainer = runs.trainer(
        tmp_path, max_steps=-1, num_train_epochs=3, save_strategy="epoch", eval_strategy="epoch",
        logging_strategy="epoch", eval_dataset=runs.rows(3),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 6
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (2, 4, 6)]
    assert [(entry["step"], entry["epoch"]) for entry in steps(trainer)] == [(2, 1.0), (4, 2.0), (6, 3.0)]
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_rouge_l" in entry]
    assert evaluated == [2, 4, 6]


# ---- Evaluation and saving ----


def test_evaluation_by_hand(tmp_path: Path) -> None:
    # Row 0: teacher "abc ", row 1: "abc abc " (rows 0 and 1 of `rows`), 5 and 9 tokens with the end token
    trainer = runs.trainer(tmp_path, eval_dataset=runs.rows(2), per_device_eval_batch_size=2)
    answer_with(trainer, ["abc x", None])  # 6 tokens with the end token; "cut off": 7 tokens
    metrics = trainer.evaluate()
    groups = [trainer.reader.read(i, runs.rows(2)[i]) for i in range(2)]
    tokenizer = tiny.tokenizer()
    answers = [tokenizer.encode("abc x") + [END], tokenizer.encode("cut off")]
    teacher = [score(trainer.discriminator, group, group.teacher_ids) for group in groups]
    students = [[score(trainer.discriminator, group, ids) for ids in answers] for group in groups]
    gaps = [teacher[i] - students[i][j] for i in range(2) for j in range(2)]
    assert metrics["eval_discriminator/accuracy"] == sum(gap > 0 for gap in gaps) / 4
    uncut = [gaps[0], gaps[2]]
    assert metrics["eval_discriminator/accuracy_uncut"] == sum(gap > 0 for gap in uncut) / 2
    assert metrics["eval_discriminator/margin"] == pytest.approx(sum(gaps) / 4, abs=1e-5)
    expected = sum(math.log1p(math.exp(-gap)) for gap in gaps) / 4
    assert metrics["eval_discriminator/loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["eval_completions/mean_length"] == 6.5  # (6 + 7) / 2
    assert metrics["eval_completions/teacher_mean_length"] == 7.0  # (5 + 9) / 2
    assert metrics["eval_completions/clipped_ratio"] == 0.5
    assert metrics["eval_length_auc"] == 0.5  # 5 < 6, 5 < 7, 9 > 6, 9 > 7
    # Words in common, F-measure: [abc] and [abc, x]: P 1/2, R 1, F 2/3; [abc, abc] and [abc, x]: P 1/2, R 1/2, F 1/2;
    # nothing in common with "cut off". (2/3 + 0 + 1/2 + 0) / 4
    assert metrics["eval_rouge_l"] == pytest.approx((2 / 3 + 1 / 2) / 4)
    assert trainer.state.log_history[-1]["eval_rouge_l"] == metrics["eval_rouge_l"]


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    """A run that evaluates after every step ends with the weights of one that does not."""
    plain = runs.trainer(tmp_path, max_steps=4)
    plain.train()
    evaluating = runs.trainer(
        tmp_path, max_steps=4, eval_strategy="steps", eval_steps=1,
        eval_dataset={"a": runs.rows(3), "b": runs.rows(images=False)},
    )  # fmt: skip
    evaluating.train()
    assert same(copied(plain.policy), copied(evaluating.policy))
    assert same(copied(plain.discriminator), copied(evaluating.discriminator))
    of_a = [entry for entry in evaluating.state.log_history if "eval_a_rouge_l" in entry]
    of_b = [entry for entry in evaluating.state.log_history if "eval_b_discriminator/loss" in entry]
    assert len(of_a) == len(of_b) == 4
    assert evaluating.evaluate() == pytest.approx(
        {name: value for entry in (of_a[-1], of_b[-1]) for name, value in entry.items() if name != "step"},
        nan_ok=True, abs=60,
    )  # fmt: skip
    again = evaluating.evaluate()
    assert again["eval_a_discriminator/loss"] == of_a[-1]["eval_a_discriminator/loss"], (
        "equal weights give equal evaluations"
    )


def test_evaluate_needs_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass `eval_dataset`"):
        runs.trainer(tmp_path).evaluate()


def test_saved_models_load_by_themselves(tmp_path: Path, staged: tuple[GADTrainer, Recorder]) -> None:
    trainer = staged[0]
    trainer.save_model(str(tmp_path))
    policy = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    discriminator = Discriminator.from_pretrained(tmp_path / "discriminator")
    group = trainer.reader.read(1, trainer.train_dataset[1])
    assert group.pictures
    with torch.no_grad():
        theirs = policy(**plain_inputs(group, group.teacher_ids)).logits
        with native_attention(trainer.policy):
            ours = trainer.policy.eval()(**plain_inputs(group, group.teacher_ids)).logits
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    before = score(tiny_discriminator(), group, group.teacher_ids)
    after = score(discriminator, group, group.teacher_ids)
    assert after == pytest.approx(score(trainer.discriminator, group, group.teacher_ids), abs=1e-5)
    assert abs(after - before) > 1e-3


def tiny_discriminator() -> Discriminator:
    torch.manual_seed(0)
    return Discriminator.from_policy(tiny.qwen3_vl())


def test_saved_adapters_load_by_themselves(tmp_path: Path) -> None:
    tiny.qwen3_vl().save_pretrained(tmp_path / "base")
    tiny.processor().save_pretrained(tmp_path / "base")
    trainer = runs.trainer(
        tmp_path / "out", model=str(tmp_path / "base"), max_steps=4, processing_class=None,
        peft_config=LoraConfig(**LORA), discriminator_peft_config=LoraConfig(**LORA),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    policy = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    discriminator = Discriminator.from_pretrained(tmp_path / "out" / "discriminator")
    group = trainer.reader.read(1, trainer.train_dataset[1])
    inputs = plain_inputs(group, group.teacher_ids)
    with torch.no_grad(), native_attention(trainer.policy):
        torch.testing.assert_close(policy(**inputs).logits, trainer.policy.eval()(**inputs).logits, rtol=0, atol=1e-5)
        with policy.disable_adapter():
            assert (policy(**inputs).logits - trainer.policy(**inputs).logits).abs().max() > 1e-3
    ours = score(trainer.discriminator, group, group.teacher_ids)
    assert score(discriminator, group, group.teacher_ids) == pytest.approx(ours, abs=1e-5)


def test_a_trainer_trains_once(tmp_path):
    trainer = runs.trainer(tmp_path, max_steps=1)
    trainer.train()
    with pytest.raises(RuntimeError, match="Build another trainer"):
        trainer.train()


def test_a_long_list_of_prompts_is_sampled_in_parts(tmp_path, monkeypatch):
    trainer = runs.trainer(tmp_path)
    groups = [trainer.reader.read(i, trainer.train_dataset[i]) for i in trainer.rows[:4]]
    length = max(len(group.prompt_ids) for group in groups) + trainer.args.max_completion_length
    whole = trainer.sampler.sample(trainer.model, groups, 1, seed=3, greedy=True)
    calls = []
    generate = trainer.sampler._generate
    monkeypatch.setattr(trainer.sampler, "_generate", lambda *args: (calls.append(len(args[1])), generate(*args))[1])
    monkeypatch.setattr("trl_gad.rollouts.MAX_CACHED_TOKENS", 2 * length)
    parts = trainer.sampler.sample(trainer.model, groups, 1, seed=3, greedy=True)
    assert calls == [2, 2]
    assert [[s.ids for s in row] for row in parts] == [[s.ids for s in row] for row in whole]
