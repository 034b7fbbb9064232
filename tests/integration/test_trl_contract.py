"""Every internal of TRL, transformers, accelerate and PEFT that `trl_gad` overrides, calls or reads.

A failure here says what a new version changed, before a run goes wrong in silence. `SIGNATURES` pins names of
parameters; the tests below pin behaviour.
"""

import copy
import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from transformers import (
    AttentionInterface,
    GenerationConfig,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import SaveStrategy
from trl import GRPOConfig, GRPOTrainer
from trl.data_utils import is_conversational, prepare_multimodal_messages
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.utils import (
    add_fused_lm_head,
    create_model_from_path,
    disable_dropout_in_model,
    nanstd,
    strip_images_from_messages,
)

from tests import runs, tiny


# ---- Names ----

SIGNATURES: list[tuple[Callable, list[str]]] = [
    # overridden: all parameters, in order
    (
        GRPOTrainer.__init__,
        [
            "self",
            "model",
            "reward_funcs",
            "args",
            "train_dataset",
            "eval_dataset",
            "processing_class",
            "reward_processing_classes",
            "callbacks",
            "optimizers",
            "quantization_config",
            "peft_config",
            "tools",
            "rollout_func",
            "environment_factory",
        ],
    ),
    (GRPOTrainer.get_train_dataloader, ["self"]),
    (GRPOTrainer.training_step, ["self", "model", "inputs", "num_items_in_batch"]),
    (GRPOTrainer.get_high_entropy_mask, ["self", "entropies", "mask", "threshold"]),
    (GRPOTrainer._load_optimizer_and_scheduler, ["self", "checkpoint"]),
    (Trainer.create_scheduler, ["self", "num_training_steps", "optimizer"]),
    (Trainer._prepare_for_training, ["self", "max_steps", "train_dataloader", "resume_from_checkpoint"]),
    (Trainer._get_grad_norm, ["self", "model", "grad_norm"]),
    (Trainer.floating_point_ops, ["self", "inputs"]),
    (Trainer.evaluate, ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"]),
    (Trainer._save, ["self", "output_dir", "state_dict"]),
    (Trainer._save_optimizer_and_scheduler, ["self", "output_dir"]),
    (Trainer._load_from_checkpoint, ["self", "resume_from_checkpoint", "model"]),
    (Trainer._load_best_model, ["self"]),
    # called by us
    (GRPOTrainer._compute_loss, ["self", "model", "inputs"]),
    (GRPOTrainer._calculate_rewards, ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
    (GRPOTrainer.log, ["self", "logs", "start_time"]),
    (Trainer.get_decay_parameter_names, ["self", "model"]),
    (Trainer.get_optimizer_cls_and_kwargs, ["args", "model"]),
    (add_fused_lm_head, ["model", "temperature", "cast_lm_head_to_fp32", "outputs"]),
    (create_model_from_path, ["model_id", "architecture", "kwargs"]),
    (disable_dropout_in_model, ["model"]),
    (nanstd, ["tensor", "dim", "keepdim"]),
    (prepare_multimodal_messages, ["messages", "images"]),
]
NAMES_OF_KEYWORDS: list[tuple[Callable, set[str]]] = [  # those that we pass, wherever they stand
    (unwrap_model_for_generation, {"model", "accelerator", "generation_kwargs", "gradient_checkpointing_kwargs"}),
    (get_scheduler, {"name", "optimizer", "num_warmup_steps", "num_training_steps", "scheduler_specific_kwargs"}),
    (Accelerator.prepare_model, {"model", "evaluation_mode"}),
    (Accelerator.pad_across_processes, {"tensor", "dim", "pad_index"}),
    (Accelerator.reduce, {"tensor", "reduction"}),
    (Accelerator.clip_grad_norm_, {"parameters", "max_norm"}),
    (load_peft_weights, {"model_id", "device"}),
    (set_peft_model_state_dict, {"model", "peft_model_state_dict"}),
    (PeftModel.from_pretrained, {"model", "model_id", "is_trainable"}),
    (PeftModel.load_adapter, {"model_id", "adapter_name", "is_trainable"}),
    (PeftModel.merge_and_unload if "merge_and_unload" in vars(PeftModel) else peft.LoraModel.merge_and_unload, set()),
]


def parameters(function: Callable) -> list[str]:
    return list(inspect.signature(inspect.unwrap(function)).parameters)


@pytest.mark.parametrize(("function", "names"), SIGNATURES, ids=lambda x: x.__qualname__ if callable(x) else "")
def test_signatures(function: Callable, names: list[str]) -> None:
    assert parameters(function) == names


@pytest.mark.parametrize(("function", "names"), NAMES_OF_KEYWORDS, ids=lambda x: x.__qualname__ if callable(x) else "")
def test_names_of_keywords(function: Callable, names: set[str]) -> None:
    assert names <= set(parameters(function))


def test_constants() -> None:
    assert TRAINING_ARGS_NAME == "training_args.bin"
    assert SaveStrategy.EPOCH == "epoch"
    assert "training_bar" in vars(ProgressCallback())
    assert issubclass(GRPOTrainer, Trainer)
    assert GRPOConfig.__mro__[1].__mro__[1] is TrainingArguments
    version = tuple(int(part) for part in trl.__version__.split(".")[:2])
    assert version == (1, 16), "pins above are those of TRL 1.16"


# ---- GRPOTrainer: what its constructor leaves ----


def grpo(tmp_path: Path, model: Any = None, trainer: type[GRPOTrainer] = GRPOTrainer, **fields: Any) -> GRPOTrainer:
    options: dict[str, Any] = dict(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=2, max_completion_length=12,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
        gradient_accumulation_steps=3,
    )  # fmt: skip
    return trainer(
        tiny.qwen3_vl() if model is None else model, reward_funcs=[first, second],
        args=GRPOConfig(**(options | fields)), train_dataset=runs.rows(), processing_class=tiny.processor(),
    )  # fmt: skip


def first(prompts: list[Any], completions: list[Any], completion_ids: list[Any], **kwargs: Any) -> list[float | None]:
    assert {"note", "trainer_state", "log_extra", "log_metric"} <= set(kwargs)
    kwargs["log_extra"]("column", ["x"] * len(prompts))
    kwargs["log_metric"]("metric", 2.0)
    return [None, *range(1, len(prompts))]


async def second(completion_ids: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def test_attributes_of_the_constructor(tmp_path: Path) -> None:
    trainer = grpo(
        tmp_path, temperature=0.7, top_entropy_quantile=0.9, num_iterations=3, reward_weights=[1.0, 2.0],
        loss_type="grpo", scale_rewards=False, entropy_coef=0.1, num_generations_eval=4, log_completions=True,
    )  # fmt: skip
    assert trainer.temperature == 0.7
    assert trainer.num_generations == 2
    assert trainer.num_generations_eval == 4
    assert trainer.num_iterations == 3
    assert trainer.top_entropy_quantile == 0.9
    assert trainer.loss_type == "grpo"
    assert trainer.scale_rewards == "none"
    assert trainer.multi_objective_aggregation == "sum_then_normalize"
    assert trainer.mask_truncated_completions is False
    assert trainer.entropy_coef == 0.1
    assert trainer.use_adaptive_entropy is False
    assert trainer._last_world_entropy == float("inf")
    assert trainer.beta == 0.0
    assert trainer.aux_loss_enabled is False
    assert trainer.log_completions is True
    assert trainer.log_multimodal is True
    assert trainer._step == 0
    assert [function.__name__ for function in trainer.reward_funcs] == ["first", "second"]
    assert trainer.reward_func_names == ["first", "second"]
    assert trainer.reward_processing_classes == [None, None]
    assert torch.equal(trainer.reward_weights, torch.tensor([1.0, 2.0]))
    assert trainer.model_wrapped is trainer.model
    assert trainer._created_lr_scheduler is False
    assert trainer.lr_scheduler is None
    assert isinstance(trainer.callback_handler.callbacks, list)
    assert trainer.accelerator.distributed_type == "NO"
    assert trainer.args.ddp_find_unused_parameters is True, "rows without pictures leave the tower without gradients"


def test_logs_and_metrics_of_the_constructor(tmp_path: Path) -> None:
    trainer = grpo(tmp_path)
    assert set(trainer._metrics) == {"train", "eval"}
    assert isinstance(trainer._metrics["train"], defaultdict)
    assert set(trainer._logs) == {"images", "prompt", "completion", "rewards", "advantages", "extra"}
    for column in (trainer._logs["prompt"], trainer._logs["rewards"]["x"], trainer._logs["extra"]["x"]):
        assert isinstance(column, deque)
        assert column.maxlen == trainer.args.generation_batch_size == 12
    assert trainer._pending_extra_logs == trainer._pending_metrics == {}


def test_generation_kwargs(tmp_path: Path) -> None:
    kwargs = grpo(tmp_path, temperature=0.7).generation_kwargs
    assert kwargs == {
        "max_new_tokens": 12, "do_sample": True, "pad_token_id": tiny.TOKEN_ID["<|endoftext|>"], "bos_token_id": None,
        "eos_token_id": [tiny.TOKEN_ID["<|im_end|>"]], "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": None,
        "repetition_penalty": 1.0, "cache_implementation": None, "suppress_tokens": [tiny.TOKEN_ID["<|image_pad|>"]],
    }  # fmt: skip
    assert GenerationConfig(**kwargs, disable_compile=True).suppress_tokens == kwargs["suppress_tokens"]


def test_it_patches_the_forward_of_the_instance(tmp_path: Path) -> None:
    """So `add_warmup_head` finds TRL's head, and a copy must be made before."""
    model = tiny.qwen3_vl()
    before = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    assert "forward" not in vars(model)
    grpo(tmp_path, model=model)
    assert "forward" in vars(model)
    assert "forward" not in vars(before)
    assert all(ours is theirs for ours, theirs in zip(before.parameters(), model.parameters(), strict=True))
    after = copy.deepcopy(model)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.zero_()
        logits = after(input_ids=ids).logits
        assert torch.equal(logits, model(input_ids=ids).logits), "a copy made later runs the policy's weights"
        assert float(logits.abs().max()) > 0


def test_calculate_rewards(tmp_path: Path) -> None:
    trainer = grpo(tmp_path)
    inputs = [{"note": i, "images": []} for i in range(3)]
    rewards = trainer._calculate_rewards(inputs, ["p"] * 3, ["c"] * 3, [[1], [1, 2], [1, 2, 3]])
    torch.testing.assert_close(
        rewards, torch.tensor([[torch.nan, 1.0], [1.0, 2.0], [2.0, 3.0]]), equal_nan=True
    )  # fmt: skip
    assert trainer._pending_extra_logs == {"column": ["x"] * 3}
    assert trainer._pending_metrics == {"metric": [2.0]}


# ---- GRPOTrainer: the loss ----


class Scripted(GRPOTrainer):
    """`_compute_loss` with log-probs that are given."""

    logps: torch.Tensor
    asked: dict[str, Any]

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple:
        self.asked = {"num_positional": len(args), **kwargs}
        return self.logps, self.logps.detach() * 0 + 2.0, None


# Two responses of 2 and 1 tokens, advantages 1 and 3, log-probs -1; the ratio is 1, so the loss per token is -advantage
# (sapo: 4 * sigmoid(0) / temperature = 2 times that; cispo: min(ratio, epsilon_high = 0.2) * -advantage * log-prob;
# vespo: phi = 1, times -log-prob). f is `current_gradient_accumulation_steps`.
LOSSES: dict[str, Callable[[float], float]] = {
    "grpo": lambda f: (-1 - 3) / 2 / f,  # mean over rows of the mean over tokens
    "sapo": lambda f: 2 * (-1 / 1.0 - 3 / 1.0) / 2 / f,
    "bnpo": lambda f: (-1 - 1 - 3) / 3 / f,  # tokens of the micro-batch
    "dr_grpo": lambda f: (-1 - 1 - 3) / (2 * 12) / f,  # rows * max_completion_length
    "luspo": lambda f: (-2 - 3) / 2 / f,
    # `num_items_in_batch` = 30 in a batch of 3 steps: 10 a step, times f
    "dapo": lambda f: (-1 - 1 - 3) / (30 * f / 3),
    "cispo": lambda f: 0.2 * (1 + 1 + 3) / (30 * f / 3),
    "vespo": lambda f: (1 + 1 + 3) / (30 * f / 3),
}


def loss_inputs() -> dict[str, torch.Tensor]:
    return {
        "prompt_ids": torch.zeros(2, 0, dtype=torch.long), "prompt_mask": torch.zeros(2, 0, dtype=torch.long),
        "completion_ids": torch.zeros(2, 2, dtype=torch.long), "completion_mask": torch.tensor([[1, 1], [1, 0]]),
        "advantages": torch.tensor([1.0, 3.0]), "num_items_in_batch": torch.tensor(30.0),
    }  # fmt: skip


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_normalisers_of_the_loss(tmp_path: Path, loss_type: str, factor: float) -> None:
    trainer: Any = grpo(tmp_path, trainer=Scripted, loss_type=loss_type)
    assert trainer.args.steps_per_generation == 3
    trainer.model.train()
    trainer.logps = torch.full((2, 2), -1.0, requires_grad=True)
    trainer.current_gradient_accumulation_steps = factor
    loss = trainer._compute_loss(trainer.model, loss_inputs())
    assert float(loss) == pytest.approx(LOSSES[loss_type](factor))
    loss.backward()
    assert trainer.logps.grad is not None
    assert float(trainer.logps.grad[1, 1]) == 0.0, "outside the mask"
    assert trainer.asked["num_positional"] == 3
    assert trainer.asked["compute_entropy"] is True


def test_entropy_and_kl_of_the_loss(tmp_path: Path) -> None:
    """The bonus is a token mean over the micro-batch, divided by f; the KL is k3, times the ratio."""
    trainer: Any = grpo(tmp_path, trainer=Scripted, loss_type="grpo", entropy_coef=0.5)
    trainer.model.train()
    trainer.logps = torch.full((2, 2), -1.0)
    trainer.current_gradient_accumulation_steps = 4.0
    loss = trainer._compute_loss(trainer.model, loss_inputs())
    # -2 / 4 - 0.5 * (2 + 2 + 2) / 3 / 4 = -0.75; the entropy is 2 everywhere
    assert float(loss) == pytest.approx(-0.75)
    assert trainer._metrics["train"]["entropy"] == [2.0]
    assert trainer._metrics["train"]["policy_loss"] == [-2.0]
    trainer._metrics["train"].clear()
    trainer.beta = 1.0
    inputs = loss_inputs() | {"ref_per_token_logps": torch.full((2, 2), -1.0 + 0.1)}
    with_kl = trainer._compute_loss(trainer.model, inputs)
    k3 = float(torch.tensor(0.1).exp()) - 0.1 - 1
    assert float(with_kl) == pytest.approx(-0.75 + k3 / 4)
    assert trainer._metrics["train"]["kl"] == [pytest.approx(k3, rel=1e-4)]
    names = {"kl", "entropy", "policy_loss", "entropy_coef"} | {
        f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
    }
    assert set(trainer._metrics["train"]) == names


def test_old_log_probs_of_the_loss(tmp_path: Path) -> None:
    """Where they are given, the ratio is that to them; where not, it is 1 with a gradient."""
    trainer: Any = grpo(tmp_path, trainer=Scripted, loss_type="grpo", epsilon=0.5)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1.0
    trainer.logps = torch.full((2, 2), -1.0)
    inputs = loss_inputs() | {"old_per_token_logps": torch.full((2, 2), -1.2)}
    assert float(trainer._compute_loss(trainer.model, inputs)) == pytest.approx(-2 * 2.718281828**0.2)


def test_high_entropy_mask_is_asked_for(tmp_path: Path) -> None:
    trainer: Any = grpo(tmp_path, trainer=Scripted, loss_type="bnpo", top_entropy_quantile=0.5)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1.0
    trainer.logps = torch.full((2, 2), -1.0)
    trainer.get_high_entropy_mask = lambda entropies, mask, threshold: torch.tensor([[1, 0], [0, 0]]).bool()
    # The masked tokens' loss is 0, the divisor stays the 3 tokens of the micro-batch
    assert float(trainer._compute_loss(trainer.model, loss_inputs())) == pytest.approx(-1 / 3)


# ---- TRL's helpers ----


def test_fused_head() -> None:
    """Index j of its outputs belongs to token j + 1; logits are divided by the temperature; 0 where nothing is asked."""
    model = tiny.qwen3_text()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    labels = torch.tensor([[-100, -100, 3, 4, -100]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0] / 0.5
        add_fused_lm_head(model, 0.5, False, outputs=("log_probs", "entropy"))
        outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
    logps = logits.log_softmax(-1)
    expected = torch.tensor([[0.0, float(logps[1, 3]), float(logps[2, 4]), 0.0]])
    torch.testing.assert_close(outputs.log_probs, expected, rtol=1e-5, atol=1e-5)
    entropies = -(logps.exp() * logps).sum(-1)
    torch.testing.assert_close(outputs.entropy[0, 1:3], entropies[1:3], rtol=1e-5, atol=1e-5)
    assert outputs.log_probs.dtype == torch.float32
    assert model.forward.__func__.__wrapped__ is type(model).forward, "`generate` reads this signature"


def test_small_helpers(tmp_path: Path) -> None:
    # Unbiased: the standard deviation of 1 and 3 is sqrt(2)
    assert float(nanstd(torch.tensor([1.0, torch.nan, 3.0]))) == pytest.approx(2**0.5)
    messages = [{"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text", "text": "x"}]}]
    assert strip_images_from_messages(messages) == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}
    ]
    assert is_conversational({"prompt": [{"role": "user", "content": "x"}]})
    tiny.qwen3_vl().save_pretrained(tmp_path)
    model = create_model_from_path(str(tmp_path))
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert model.dtype == torch.float32
    assert create_model_from_path(str(tmp_path), dtype="bfloat16").dtype == torch.bfloat16
    dropout = torch.nn.Sequential(torch.nn.Dropout(0.5))
    disable_dropout_in_model(dropout)
    assert dropout[0].p == 0


# ---- transformers: the loop ----


class Items:
    """A loader that notes from where it was read."""

    def __init__(self, trainer: "Loop"):
        self.trainer = trainer
        self.dataset = [0] * 6

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.trainer.state.global_step, 6):
            yield {"number": number}


class Loop(Trainer):
    """Notes what transformers' loop calls, in order."""

    def note(self, name: str) -> None:
        vars(self).setdefault("calls", []).append(name)

    def get_train_dataloader(self) -> Any:
        return Items(self)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.note(f"create_scheduler {num_training_steps}")
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.note(f"training_step {inputs['number']}")
        assert self.accelerator.sync_gradients is True
        loss = model(torch.ones(1, 1)).sum()
        self.accelerator.backward(loss)
        return loss.detach()

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self.note("_get_grad_norm")
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.note("_load_from_checkpoint")
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _prepare_for_training(self, *args: Any) -> Any:
        self.note("_prepare_for_training")
        return super()._prepare_for_training(*args)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.note("_load_optimizer_and_scheduler")
        super()._load_optimizer_and_scheduler(checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.note("_save")
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert Path(output_dir).name == f"checkpoint-{self.state.global_step}"
        self.note("_save_optimizer_and_scheduler")
        super()._save_optimizer_and_scheduler(output_dir)


class Watch(TrainerCallback):
    def __init__(self, stop_at: int | None = None):
        self.epochs: list[float] = []
        self.places: list[int] = []
        self.seen_keywords: set[str] = set()
        self.stop_at = stop_at

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.places.append(kwargs["lr_scheduler"].last_epoch)
        self.seen_keywords |= set(kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epochs.append(state.epoch)
        if state.global_step == self.stop_at:
            state.max_steps = state.global_step + 1


def loop(folder: Path, watch: Watch, **fields: Any) -> Loop:
    torch.manual_seed(0)
    options: dict[str, Any] = dict(
        output_dir=str(folder), max_steps=6, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
        save_strategy="steps", save_steps=4, logging_steps=1, ignore_data_skip=True,
    )  # fmt: skip
    args = TrainingArguments(**(options | fields))
    return Loop(torch.nn.Linear(1, 1), args, train_dataset=[0] * 6, callbacks=[watch])


def test_order_of_the_loop(tmp_path: Path) -> None:
    trainer = loop(tmp_path, watch := Watch(), max_grad_norm=0.0)
    trainer.train()
    calls = trainer.calls
    assert calls[:2] == ["_prepare_for_training", "create_scheduler 6"]
    step = [call for call in calls if call.startswith(("training_step", "_get_grad_norm"))]
    assert step == [call for n in range(6) for call in (f"training_step {n}", "_get_grad_norm")]
    saved = calls.index("_save")
    assert calls[saved : saved + 2] == ["_save", "_save_optimizer_and_scheduler"]
    assert calls[saved - 2] == "training_step 3"
    assert watch.places == [0, 1, 2, 3, 4, 5], "the schedule steps once per item, after the optimizer"
    assert watch.epochs == pytest.approx([n / 6 for n in range(1, 7)])
    assert {"model", "optimizer", "lr_scheduler"} <= watch.seen_keywords
    assert (tmp_path / "checkpoint-4" / TRAINING_ARGS_NAME).is_file()


def test_resume_reads_the_loader_from_where_it_begins(tmp_path: Path) -> None:
    """With `ignore_data_skip` nothing is skipped: our loader begins at `state.global_step` by itself."""
    whole = loop(tmp_path, Watch())
    whole.train()
    trainer = loop(tmp_path, watch := Watch())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [call for call in trainer.calls if call.startswith("training_step")] == [
        "training_step 4",
        "training_step 5",
    ]
    order = [call for call in trainer.calls if "load" in call or "prepare" in call or "create" in call]
    assert order == [
        "_load_from_checkpoint", "_prepare_for_training", "create_scheduler 6", "_load_optimizer_and_scheduler",
    ]  # fmt: skip
    assert watch.places == [4, 5]
    assert torch.equal(trainer.model.weight, whole.model.weight)


def test_a_smaller_max_steps_ends_the_loop(tmp_path: Path) -> None:
    """`end_warmup` shortens a run through `state.max_steps`."""
    trainer = loop(tmp_path, Watch(stop_at=2))
    trainer.train()
    assert trainer.state.global_step == 3


def test_a_step_without_gradients_moves_nothing(tmp_path: Path) -> None:
    """Gradients of None, unlike zeros, leave the weights to AdamW's decay and moments as they are."""
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    before = layer.weight.detach().clone()
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert torch.equal(layer.weight, before)
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    assert not torch.equal(layer.weight, before)


def test_optimizer_and_schedule_helpers(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), learning_rate=0.25, use_cpu=True, bf16=False)
    optimizer_cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, torch.nn.Linear(1, 1))
    assert isinstance(optimizer_cls, type)
    assert kwargs["lr"] == 0.25
    assert not {"params", "model", "optimizer_dict"} & set(kwargs)
    optimizer = optimizer_cls(torch.nn.Linear(1, 1).parameters(), **kwargs)
    schedule = get_scheduler(
        "cosine", optimizer, num_warmup_steps=2, num_training_steps=6, scheduler_specific_kwargs=None
    )
    assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    assert [schedule.lr_lambdas[0](step) for step in (0, 1, 2, 4)] == pytest.approx([0.0, 0.5, 1.0, 0.5])
    trainer = loop(tmp_path, Watch())
    norm = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    assert trainer.get_decay_parameter_names(norm) == ["0.weight"]


# ---- transformers: models ----


def test_attention_can_be_set_for_the_text_layers_alone() -> None:
    """Keywords of the model's forward reach our function and our mask function; the vision tower keeps its own."""
    seen: list[dict[str, Any]] = []
    native = AttentionInterface()["sdpa"]

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float = 1.0, dropout: float = 0.0,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        seen.append({"module": module, "mask": attention_mask, "marker": kwargs["marker"], "shape": query.shape})
        return native(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, is_causal=True)

    def mask(*args: Any, attention_mask: Any = None, **kwargs: Any) -> None:
        return None

    AttentionInterface.register("contract_probe", attention)
    AttentionMaskInterface.register("contract_probe", mask)
    for model, name, num_layers in (
        (tiny.qwen3_vl(), {"text_config": "contract_probe"}, 3),
        (tiny.qwen2_5_vl(), {"text_config": "contract_probe"}, 3),
        (tiny.qwen3_text(), "contract_probe", 3),
    ):
        ids = torch.tensor([[1, 2, 3, 4]])
        with torch.no_grad():
            before = model(input_ids=ids).logits
            model.set_attn_implementation(name)
            assert model.config.get_text_config()._attn_implementation == "contract_probe"
            seen.clear()
            after = model(input_ids=ids, position_ids=torch.arange(4)[None], marker="here", use_cache=False).logits
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
        assert len(seen) == num_layers
        assert all(call["marker"] == "here" and call["mask"] is None for call in seen)
        assert seen[0]["shape"] == (1, 4, 4, 8), "batch, heads, tokens, head size"
        if isinstance(name, dict):
            assert model.config.vision_config._attn_implementation != "contract_probe"


def test_a_backbone_is_a_model_of_its_own() -> None:
    for model in (tiny.qwen3_vl(), tiny.qwen2_5_vl(), tiny.qwen3_text()):
        backbone = model.base_model
        assert isinstance(backbone, transformers.PreTrainedModel)
        assert backbone is model.model
        assert backbone.base_model is backbone
        assert backbone.config.get_text_config().hidden_size == 32
        assert model.config._name_or_path == ""
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tiny.qwen3_vl().model.visual is not None


# ---- accelerate ----


def test_accelerate() -> None:
    accelerator = Accelerator(cpu=True)
    layer = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert accelerator.unwrap_model(model) is layer
    accelerator.backward(model(torch.ones(1, 1)).sum())
    before = layer.weight.detach().clone()
    accelerator.gradient_state._set_sync_gradients(False)
    optimizer.step()
    assert torch.equal(layer.weight, before), "a prepared optimizer waits for the last micro-batch"
    accelerator.gradient_state._set_sync_gradients(True)
    assert float(accelerator.clip_grad_norm_(model.parameters(), float("inf"))) == pytest.approx(2**0.5)
    optimizer.step()
    assert not torch.equal(layer.weight, before)
    with accelerator.no_sync(model):
        pass
    values = torch.tensor([1.0, 2.0])
    assert torch.equal(accelerator.reduce(values, reduction="sum"), values)
    assert torch.equal(accelerator.pad_across_processes(values, dim=0, pad_index=torch.nan), values)
    assert gather_object([1, 2]) == [1, 2]
    assert broadcast_object_list([ValueError("x")])[0].args == ("x",)
    # What `_gather_of_unequal_rows` does: an attribute of the instance hides the method, and goes away again
    assert "gather" not in vars(accelerator)
    accelerator.gather = lambda tensor: tensor + 1
    assert torch.equal(accelerator.gather(values), values + 1)
    del accelerator.gather
    assert torch.equal(accelerator.gather(values), values)


# ---- PEFT ----


def test_peft(tmp_path: Path) -> None:
    config: dict[str, Any] = dict(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny.qwen3_text(), LoraConfig(**config))
    assert isinstance(model, PeftModel)
    assert model.active_adapters == ["default"]
    assert isinstance(model.get_base_model(), transformers.PreTrainedModel)
    assert all(("lora_" in name) == parameter.requires_grad for name, parameter in model.named_parameters())
    model.save_pretrained(str(tmp_path))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    other = tiny.qwen3_text()
    torch.manual_seed(9)
    other = get_peft_model(other, LoraConfig(**config))
    of_both = [dict(m.named_parameters())["base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"]
               for m in (model, other)]  # fmt: skip
    assert not torch.equal(*of_both)
    set_peft_model_state_dict(other, load_peft_weights(str(tmp_path), device="cpu"))
    assert torch.equal(*of_both)
    again = get_peft_model(tiny.qwen3_text(), LoraConfig(**config))
    again.load_adapter(str(tmp_path), "default", is_trainable=True)
    assert {name for name, p in again.named_parameters() if p.requires_grad} == {
        name for name, p in model.named_parameters() if p.requires_grad
    }
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        theirs = model.eval()(input_ids=ids).logits
        torch.testing.assert_close(again.eval()(input_ids=ids).logits, theirs)
        torch.testing.assert_close(model.merge_and_unload()(input_ids=ids).logits, theirs, rtol=1e-4, atol=1e-4)


def test_a_folder_of_adapters_in_a_checkpoint_is_taken_for_the_policys(tmp_path: Path) -> None:
    """Why `GADTrainer._load_from_checkpoint` loads the policy's adapter itself."""
    config: dict[str, Any] = dict(r=2, target_modules=["q_proj"])
    model = get_peft_model(tiny.qwen3_text(), LoraConfig(**config))
    model.save_pretrained(str(tmp_path))
    model.save_pretrained(str(tmp_path / "discriminator"))
    args = TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, report_to=[])
    Trainer(model, args)._load_from_checkpoint(str(tmp_path))
    assert list(model.peft_config) == ["default", "discriminator"]
