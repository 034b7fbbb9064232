"""Every field that GRPOConfig adds to TrainingArguments is used in a run with an effect, or refused by name.

`UPDATE`, `SAMPLING`, `OTHER`, `REFUSED` and `INERT` are the table: field -> value. The first test compares it with the
installed TRL, so that a field which a new TRL brings fails here until it is covered.
"""

import copy
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig
from trl.trainer import grpo_trainer

from tests import runs, tiny
from trl_gad import GADConfig, GADTrainer
from trl_gad.batch import Group, Sample


END = tiny.TOKEN_ID["<|im_end|>"]
LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]

# field -> (value, what else the pair of runs has): the trained policy differs from that of the run without the field
UPDATE: dict[str, tuple[Any, dict[str, Any]]] = {
    "learning_rate": (2e-3, {}),
    "beta": (0.5, {}),
    "num_iterations": (3, {"max_steps": 3}),
    "epsilon": (1e-4, {}),
    "epsilon_high": (1e-4, {}),
    "delta": (1.0001, {}),
    "sapo_temperature_neg": (3.0, {"loss_type": "sapo"}),
    "sapo_temperature_pos": (3.0, {"loss_type": "sapo"}),
    "vespo_k_pos": (9.0, {"loss_type": "vespo"}),
    "vespo_lambda_pos": (9.0, {"loss_type": "vespo"}),
    "vespo_k_neg": (9.0, {"loss_type": "vespo"}),
    "vespo_lambda_neg": (9.0, {"loss_type": "vespo"}),
    "importance_sampling_level": ("sequence", {}),
    "loss_type": ("grpo", {}),
    "scale_rewards": ("none", {}),
    "reward_weights": ([1.0, 3.0], {"reward_funcs": True}),
    "multi_objective_aggregation": ("normalize_then_sum", {"reward_funcs": True}),
    "mask_truncated_completions": (True, {}),
    "top_entropy_quantile": (0.5, {}),
    "entropy_coef": (0.5, {}),
    "off_policy_mask_threshold": (1e-6, {}),
    "use_bias_correction_kl": (True, {"beta": 0.5}),
    "disable_dropout": (True, {"dropout": True}),
}
SAMPLING = {
    "num_generations": 4, "max_completion_length": 9, "temperature": 1e-4, "top_p": 1e-4, "top_k": 1, "min_p": 1.0,
    "repetition_penalty": 1e4, "generation_kwargs": {"suppress_tokens": list(range(250))},
    "cache_implementation": "static", "chat_template_kwargs": {"add_vision_id": True}, "shuffle_dataset": False,
    "steps_per_generation": 4, "generation_batch_size": 16, "num_generations_eval": 3,
}  # fmt: skip
OTHER = {  # field -> the test that uses it
    "model_init_kwargs": "test_model_init_kwargs",
    "trust_remote_code": "test_trust_remote_code",
    "cast_lm_head_to_fp32": "test_cast_lm_head_to_fp32",
    "use_adaptive_entropy": "test_adaptive_entropy",
    "entropy_coef_min": "test_adaptive_entropy",
    "entropy_coef_max": "test_adaptive_entropy",
    "entropy_coef_delta": "test_adaptive_entropy",
    "entropy_target": "test_adaptive_entropy",
    "log_completions": "test_what_trackers_get",
    "log_multimodal": "test_what_trackers_get",
    "log_unique_prompts": "test_what_trackers_get",
    "num_completions_to_print": "test_number_of_printed_completions",
    "log_completions_hub_repo": "test_completions_on_the_hub",
}
REFUSED: dict[str, Any] = {
    "router_aux_loss_coef": 0.01, "remove_unused_columns": True, "ds3_gather_for_generation": False,
    "pad_to_multiple_of": 8, "use_vllm": True, "sync_ref_model": True, "max_tool_calling_iterations": 3,
    "use_transformers_continuous_batching": True, "use_transformers_paged": True,
}  # fmt: skip
INERT: dict[str, tuple[Any, str]] = {  # field -> (value, the refused field without which it does nothing)
    "vllm_mode": ("server", "use_vllm"),
    "vllm_model_impl": ("transformers", "use_vllm"),
    "vllm_enable_sleep_mode": (True, "use_vllm"),
    "vllm_structured_outputs_regex": ("a+", "use_vllm"),
    "vllm_server_base_url": ("http://localhost:1", "use_vllm"),
    "vllm_server_host": ("localhost", "use_vllm"),
    "vllm_server_port": (1, "use_vllm"),
    "vllm_server_timeout": (1.0, "use_vllm"),
    "vllm_group_port": (1, "use_vllm"),
    "vllm_gpu_memory_utilization": (0.9, "use_vllm"),
    "vllm_max_model_length": (7, "use_vllm"),
    "vllm_tensor_parallel_size": (4, "use_vllm"),
    "vllm_importance_sampling_correction": (False, "use_vllm"),
    "vllm_importance_sampling_mode": ("token_mask", "use_vllm"),
    "vllm_importance_sampling_clip_max": (2.0, "use_vllm"),
    "vllm_importance_sampling_clip_min": (0.5, "use_vllm"),
    "vllm_importance_sampling_cap": (2.0, "use_vllm"),
    "ref_model_mixup_alpha": (0.1, "sync_ref_model"),
    "ref_model_sync_steps": (1, "sync_ref_model"),
    "transformers_continuous_batching_config": ({}, "use_transformers_continuous_batching"),
}


def test_the_table_is_complete() -> None:
    own = list(vars(GRPOConfig)["__annotations__"])
    assert len(own) == 79
    tables = [UPDATE, SAMPLING, OTHER, REFUSED, INERT]
    assert sorted(field for table in tables for field in table) == sorted(own)
    defaults = {field.name: field.default for field in dataclasses.fields(GADConfig)}
    values: dict[str, Any] = {field: value for field, (value, _) in (UPDATE | INERT).items()}
    for field, value in (values | SAMPLING | REFUSED).items():
        assert value != defaults[field], f"{field}: the default shows nothing"
    assert set(OTHER.values()) <= set(globals())


# ---- Fields of the policy's update ----


def unequal_samples(group: Group, num_generations: int) -> list[Sample]:
    """Answers of unequal lengths, some of them cut."""
    samples = []
    for i in range(num_generations):
        letters = [97 + (7 * group.row + 3 * i + k) % 26 for k in range(1 + (3 * group.row + 5 * i) % 9)]
        cut = (group.row + i) % 3 == 0
        samples.append(Sample(letters + [END] * (not cut), cut=cut))
    return samples


def length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def updated(tmp_path: Path, **fields: Any) -> GADTrainer:
    """After 2 updates of stage 2 on one rollout batch, the second off-policy, with samples that are given."""
    options: dict[str, Any] = dict(
        gad_warmup_steps=0, discriminator_only_steps=0, max_steps=2, num_iterations=2, learning_rate=1e-3, beta=0.0,
        lr_scheduler_type="constant",
    )  # fmt: skip
    if fields.pop("reward_funcs", False):
        options["reward_funcs"] = [length_reward]
    if fields.pop("dropout", False):
        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5)
    trainer = runs.trainer(tmp_path, **(options | fields))

    def sample(model: Any, groups: list[Group], num_generations: int, seed: int) -> list[list[Sample]]:
        return [unequal_samples(group, num_generations) for group in groups]

    trainer.sampler.sample = sample
    trainer.train()
    return trainer


def weights(trainer: GADTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.policy.state_dict().items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


_PLAIN: dict[str, dict[str, torch.Tensor]] = {}  # other options -> the policy of the run without the field


@pytest.mark.parametrize("field", UPDATE)
def test_fields_of_the_update(tmp_path: Path, field: str) -> None:
    value, others = UPDATE[field]
    if str(others) not in _PLAIN:
        _PLAIN[str(others)] = weights(updated(tmp_path, **others))
    trainer = updated(tmp_path, **(others | {field: value}))
    assert not same(weights(trainer), _PLAIN[str(others)])
    assert all(value.isfinite().all() for value in weights(trainer).values())
    last = trainer.state.log_history[-2]
    if field == "beta":
        assert last["kl"] > 0
    if field.startswith("epsilon"):
        assert last["clip_ratio/region_mean"] > 0.05


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_types(tmp_path: Path, loss_type: str) -> None:
    last = updated(tmp_path, loss_type=loss_type).state.log_history[-2]
    assert ("clip_ratio/region_mean" in last) == (loss_type in ("grpo", "dr_grpo", "dapo", "bnpo", "luspo"))
    assert ("cispo_clip_ratio" in last) == (loss_type == "cispo")
    assert ("vespo/phi_seq_mean" in last) == (loss_type == "vespo")


def test_a_repeated_run_is_equal(tmp_path: Path) -> None:
    """Or the comparisons above would show nothing."""
    assert same(weights(updated(tmp_path)), weights(updated(tmp_path)))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # The entropy is about 5.4: below the target the coefficient rises by 0.05, 0.02 -> 0.07, at most 0.06 ...
        (dict(entropy_target=6.0, entropy_coef_delta=0.05, entropy_coef_max=0.06), 0.06),
        (dict(entropy_target=6.0, entropy_coef_delta=0.01), 0.04),
        # ... and above it, it falls: 0.02 -> 0.01 -> 0.0, at least 0.005
        (dict(entropy_target=1.0, entropy_coef_delta=0.01, entropy_coef_min=0.005), 0.005),
    ],
)
def test_adaptive_entropy(tmp_path: Path, fields: dict[str, float], expected: float) -> None:
    trainer = updated(tmp_path, use_adaptive_entropy=True, entropy_coef=0.02, **fields)
    assert trainer.entropy_coef == pytest.approx(expected)
    assert trainer.state.log_history[-2]["entropy_coef"] == pytest.approx(expected)


def test_disable_dropout_reaches_all_models(tmp_path: Path) -> None:
    lora: dict[str, Any] = dict(r=4, target_modules=["q_proj"], lora_dropout=0.5)
    trainer = runs.trainer(
        tmp_path, disable_dropout=True, peft_config=LoraConfig(**lora), discriminator_peft_config=LoraConfig(**lora)
    )
    for model in (trainer.policy, trainer.discriminator):
        rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
        assert rates
        assert set(rates) == {0.0}


# ---- Fields of the rollout ----


def sampled(tmp_path: Path, **fields: Any) -> tuple[GADTrainer, list[list[list[Sample]]]]:
    """The samples of the first two rollout batches, by prompt."""
    options: dict[str, Any] = dict(
        max_steps=2, discriminator_only_steps=2, gad_warmup_steps=2, overlong_teachers="cut"
    )
    trainer = runs.trainer(tmp_path, **(options | fields))
    seen: list[list[list[Sample]]] = []
    sample = trainer.sampler.sample

    def recorded(*args: Any, **kwargs: Any) -> list[list[Sample]]:
        seen.append(sample(*args, **kwargs))
        return seen[-1]

    trainer.sampler.sample = recorded
    trainer.train()
    return trainer, seen


@pytest.fixture(scope="module")
def plain_samples(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[Sample]]]:
    return sampled(tmp_path_factory.mktemp("plain"))[1]


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p"])
def test_sampling_becomes_greedy(tmp_path: Path, plain_samples: list[list[list[Sample]]], field: str) -> None:
    assert all(row[0].ids != row[1].ids for call in plain_samples for row in call)
    _, seen = sampled(tmp_path, **{field: SAMPLING[field]})
    assert all(row[0].ids == row[1].ids for call in seen for row in call)


def test_repetition_penalty(tmp_path: Path) -> None:
    _, free = sampled(tmp_path, top_k=1)
    _, seen = sampled(tmp_path, top_k=1, repetition_penalty=SAMPLING["repetition_penalty"])
    assert any(len(set(sample.ids)) < len(sample.ids) for call in free for row in call for sample in row)
    assert all(len(set(sample.ids)) == len(sample.ids) for call in seen for row in call for sample in row)


def test_generation_kwargs(tmp_path: Path) -> None:
    """They reach the sampler, and do not take the place of the tokens that are never sampled."""
    _, seen = sampled(tmp_path, generation_kwargs=SAMPLING["generation_kwargs"])
    drawn = {token for call in seen for row in call for sample in row for token in sample.ids}
    assert drawn <= set(range(250, 262)), "256 to 263 are special, the last two of them image and video"
    assert len(drawn) > 4


def test_cache_implementation(tmp_path: Path, plain_samples: list[list[list[Sample]]]) -> None:
    _, seen = sampled(tmp_path, cache_implementation=SAMPLING["cache_implementation"])
    assert seen == plain_samples


def test_max_completion_length(tmp_path: Path) -> None:
    trainer, seen = sampled(tmp_path, max_completion_length=SAMPLING["max_completion_length"])
    samples = [sample for call in seen for row in call for sample in row]
    assert max(len(sample.ids) for sample in samples) == 9
    assert all(sample.cut == (sample.ids[-1] != END) for sample in samples)
    assert trainer.state.log_history[0]["completions/max_length"] == 9


def test_number_of_generations(tmp_path: Path, plain_samples: list[list[list[Sample]]]) -> None:
    assert [[len(row) for row in call] for call in plain_samples] == [[2] * 4] * 2
    _, seen = sampled(tmp_path, num_generations=SAMPLING["num_generations"])
    assert [[len(row) for row in call] for call in seen] == [[4] * 2] * 2


@pytest.mark.parametrize("field", ["steps_per_generation", "generation_batch_size"])
def test_rollout_batches_of_two_steps(tmp_path: Path, field: str) -> None:
    """4 micro-steps of 4 completions, or 16 completions: two optimizer steps of 8."""
    trainer, seen = sampled(
        tmp_path, discriminator_only_steps=0, gad_warmup_steps=0, max_steps=4, **{field: SAMPLING[field]}
    )
    assert [[len(row) for row in call] for call in seen] == [[2] * 8] * 2
    assert trainer.args.steps_per_rollout == 2
    with pytest.raises(ValueError, match="can not be both configured"):
        runs.config(tmp_path, steps_per_generation=4, generation_batch_size=16)


def test_number_of_generations_for_evaluation(tmp_path: Path) -> None:
    trainer, seen = sampled(
        tmp_path, num_generations_eval=SAMPLING["num_generations_eval"], per_device_eval_batch_size=6
    )
    trainer.evaluate(runs.rows(3))
    assert [len(row) for call in seen[2:] for row in call] == [3, 3, 3]


def test_chat_template_kwargs(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, chat_template_kwargs=SAMPLING["chat_template_kwargs"])
    group = trainer.reader.read(1, trainer.train_dataset[1])
    assert "Picture 1: <|vision_start|>" in trainer.reader.tokenizer.decode(group.prompt_ids)


def test_shuffle_dataset(tmp_path: Path) -> None:
    loader = runs.trainer(tmp_path, shuffle_dataset=False).get_train_dataloader().rollouts(0)
    # Rows 2, 5, 8 and 11 have too long a teacher
    assert [loader.rows_of_rollout(i) for i in range(3)] == [[0, 1, 3, 4], [6, 7, 9, 10], [0, 1, 3, 4]]
    loader = runs.trainer(tmp_path).get_train_dataloader().rollouts(0)
    assert sorted(loader.rows_of_rollout(0) + loader.rows_of_rollout(1)) == [0, 1, 3, 4, 6, 7, 9, 10]
    assert loader.rows_of_rollout(0) != [0, 1, 3, 4]


# ---- Fields of the models ----


def saved_model(folder: Path, model: Any = None) -> str:
    (tiny.qwen3_vl() if model is None else model).save_pretrained(folder)
    return str(folder)


def test_model_init_kwargs(tmp_path: Path) -> None:
    """They reach the policy, and the discriminator and the reference that are made from it."""
    trainer = runs.trainer(
        tmp_path, model=saved_model(tmp_path / "model"), model_init_kwargs={"dtype": "bfloat16"}, learning_rate=1e-2,
        gad_warmup_learning_rate=1e-2, discriminator_learning_rate=1e-2, discriminator_only_steps=0,
        gad_warmup_steps=0, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.reference is not None
    for model in (trainer.policy, trainer.discriminator.backbone, trainer.reference):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    plain = runs.trainer(tmp_path, model=str(tmp_path / "model"))
    assert {parameter.dtype for parameter in plain.policy.parameters()} == {torch.float32}


def test_trust_remote_code(tmp_path: Path) -> None:
    """A student whose code lies beside its weights."""
    folder = tmp_path / "model"
    model = tiny.qwen3_text()
    model.config.architectures = ["OwnForCausalLM"]
    model.config.auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    model.config.save_pretrained(folder)
    saved_model(folder, model)
    config = (folder / "config.json").read_text().replace('"model_type": "qwen3"', '"model_type": "own"')
    (folder / "config.json").write_text(config.replace("Qwen3ForCausalLM", "OwnForCausalLM"))
    (folder / "own.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n\n\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'own'\n\n\n"
        "class OwnForCausalLM(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
    )
    options: dict[str, Any] = dict(
        model=str(folder), dataset=runs.rows(images=False), processing_class=tiny.tokenizer("qwen3"), max_steps=3
    )
    with pytest.raises(ValueError, match="trust_remote_code"):
        runs.trainer(tmp_path, **options)
    trainer = runs.trainer(tmp_path, trust_remote_code=True, **options)
    trainer.train()
    assert type(trainer.policy).__name__ == "OwnForCausalLM"
    assert trainer.state.log_history[2]["stage"] == 2


def untied_text_model() -> Any:
    model = tiny.qwen3_text()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model.bfloat16()


def test_cast_lm_head_to_fp32(tmp_path: Path) -> None:
    """With half-precision parameters the head of the policy and of the reference is float32, and the run goes on."""
    trainer = runs.trainer(
        tmp_path, model=untied_text_model(), dataset=runs.rows(images=False), cast_lm_head_to_fp32=True,
        processing_class=tiny.tokenizer("qwen3"), learning_rate=1e-2, gad_warmup_learning_rate=1e-2,
        discriminator_learning_rate=1e-2, max_steps=4,
    )  # fmt: skip
    trainer.train()
    assert trainer.reference is not None
    for model in (trainer.policy, trainer.reference):
        assert model.lm_head.weight.dtype == torch.float32
        assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert [entry["stage"] for entry in trainer.state.log_history[:4]] == [0, 1, 2, 2]
    assert trainer.state.log_history[2]["kl"] == pytest.approx(0.0, abs=1e-6)


def test_cast_lm_head_to_fp32_needs_a_head_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ties its head to the input embeddings.*cast_lm_head_to_fp32=False"):
        runs.trainer(tmp_path, cast_lm_head_to_fp32=True)


def tiny_mixture_of_experts() -> Any:
    torch.manual_seed(0)
    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**tiny.TEXT, **sizes))


def test_mixture_of_experts_without_its_auxiliary_loss(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(
        dataset=runs.rows(images=False), processing_class=tiny.tokenizer("qwen3"), max_steps=3
    )
    with pytest.raises(ValueError, match="Set router_aux_loss_coef=0"):
        runs.trainer(tmp_path, model=tiny_mixture_of_experts(), **options)
    trainer = runs.trainer(tmp_path, model=tiny_mixture_of_experts(), router_aux_loss_coef=0.0, **options)
    trainer.train()
    assert [entry["stage"] for entry in trainer.state.log_history[:3]] == [0, 1, 2]


# ---- Fields of the logs ----


class Tracker:
    """Stands for a tracking service, which needs an account: keeps the tables that it is given."""

    def __init__(self):
        self.tables: list[Any] = []

    @staticmethod
    def Table(dataframe: Any) -> Any:  # noqa: N802
        return dataframe

    @staticmethod
    def Image(image: Any) -> Any:  # noqa: N802
        return image.size

    def log(self, entry: dict[str, Any]) -> None:
        self.tables.append(entry["completions"])


def tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: Dataset | None = None, **fields: Any) -> Tracker:
    tracker = Tracker()
    monkeypatch.setattr(grpo_trainer, "trackio", tracker, raising=False)
    trainer = runs.trainer(tmp_path, dataset=dataset, log_completions=True, **fields)
    trainer.args.report_to = ["trackio"]
    trainer.train()
    return tracker


def test_what_trackers_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tracked(tmp_path, monkeypatch, log_multimodal=True)
    assert len(full.tables) == 6, "5 steps and the end"
    for table in full.tables:
        assert len(table) == 8, "4 prompts, 2 samples each"
        for prompt, sizes in zip(table["prompt"], table["image"], strict=True):
            number = int(str(prompt).split("What ")[1].split("?")[0])
            assert sizes == [(32 + 16 * (number % 2), 32)] * (number % 3)
    less = tracked(tmp_path, monkeypatch, log_multimodal=False, log_unique_prompts=True)
    assert [len(table) for table in less.tables] == [4] * 6
    assert all("image" not in table.columns for table in less.tables)


def test_no_picture_of_an_earlier_batch_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollout batches with pictures and without take turns: 4 rows with one each, then 4 without."""
    table = runs.rows(8)
    options: dict[str, Any] = dict(shuffle_dataset=False, max_steps=3, overlong_teachers="cut")
    order = table.select([1, 4, 7, 1, 0, 3, 6, 0])
    tracker = tracked(tmp_path, monkeypatch, dataset=order, **options)
    assert [bool(table["image"].map(len).sum()) if "image" in table else False for table in tracker.tables[:3]] == [
        True, False, True,
    ]  # fmt: skip


def test_number_of_printed_completions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for fields in ({"num_completions_to_print": 1}, {}):
        trainer = runs.trainer(tmp_path, log_completions=True, max_steps=1, **fields)
        trainer.train()
        printed.append(capsys.readouterr().out.count("USER"))
    assert printed[0] > 0
    assert printed[1] == 8 * printed[0], "1 of 8 completions"


def test_completions_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="log_completions_hub_repo is set, but log_completions is False"):
        runs.config(tmp_path, log_completions_hub_repo="someone/completions")
    calls: dict[str, Any] = {}
    monkeypatch.setattr(grpo_trainer, "create_repo", lambda repo_id, **kwargs: calls.update(repo=repo_id))
    monkeypatch.setattr(grpo_trainer.DatasetCard, "push_to_hub", lambda self, repo_id: calls.update(card=repo_id))
    monkeypatch.setattr(grpo_trainer, "CommitScheduler", lambda **kwargs: calls.update(scheduler=kwargs))
    runs.trainer(tmp_path, log_completions=True, log_completions_hub_repo="someone/completions", max_steps=1).train()
    assert calls["repo"] == calls["card"] == calls["scheduler"]["repo_id"] == "someone/completions"
    assert [path.suffix for path in Path(calls["scheduler"]["folder_path"]).iterdir()] == [".parquet"]


# ---- Refused and inert fields ----


@pytest.mark.parametrize("field", REFUSED)
def test_refused_fields_are_named(tmp_path: Path, field: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with pytest.raises(ValueError, match=r"GAD does not support .*: .*(set|leave|launch)") as error:
            runs.config(tmp_path, **{field: REFUSED[field]})
    assert field in str(error.value)


def test_inert_fields_change_nothing(tmp_path: Path) -> None:
    assert {needs for _, needs in INERT.values()} <= set(REFUSED)
    values: dict[str, Any] = {field: value for field, (value, _) in INERT.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert same(weights(updated(tmp_path, **values)), weights(updated(tmp_path)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss_type", "ppo"),
        ("importance_sampling_level", "word"),
        ("multi_objective_aggregation", "sum"),
        ("scale_rewards", "prompt"),
    ],
)
def test_words_that_trl_checks_late_are_checked_at_once(tmp_path: Path, field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must be one of .*got '{value}'"):
        runs.config(tmp_path, **{field: value})


@pytest.mark.parametrize("value", [None, 0])
def test_responses_need_a_limit(tmp_path: Path, value: int | None) -> None:
    with pytest.raises(ValueError, match=f"`max_completion_length` must be positive, got {value}"):
        runs.config(tmp_path, max_completion_length=value)


def test_the_given_arguments_stay_as_they_are(tmp_path: Path) -> None:
    args = runs.config(tmp_path)
    before = copy.deepcopy(vars(args))
    GADTrainer(
        model=tiny.qwen3_vl(), args=args, train_dataset=runs.rows(), processing_class=tiny.processor()
    ).train()  # fmt: skip
    changed = {name for name, value in vars(args).items() if value != before.get(name)}
    assert changed <= {"ddp_find_unused_parameters", "accelerator_config", "distributed_state"}, changed
