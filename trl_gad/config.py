"""`GADConfig`: every option of a run, on top of TRL's `GRPOConfig`.

An option of `GRPOConfig` either works as TRL documents it or is refused here, with the rule, the value and the way out.
"""

import os
from dataclasses import dataclass, field

from trl.trainer.grpo_config import GRPOConfig


PROMPTS_PER_STEP = 256  # the paper's batch, when `gradient_accumulation_steps` is left unset


@dataclass
class GADConfig(GRPOConfig):
    """
    Configuration of [`GADTrainer`] (Generative Adversarial Distillation, arXiv 2511.10643).

    Defaults are the paper's settings. Batch words are TRL's: completions per optimizer step =
    `per_device_train_batch_size * gradient_accumulation_steps * processes`, completions per rollout batch =
    `generation_batch_size`; both are multiples of `num_generations`. How a step is cut into micro-batches
    (`max_tokens_per_micro_batch`) changes memory and speed, never the result.

    Only what [`~trl.GRPOConfig`] does not have, or has with another default, is listed in this class.
    """

    # Other defaults or types than GRPOConfig
    num_generations: int = field(default=8, metadata={"help": "Samples of the student per prompt, G."})
    generation_batch_size: int | None = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "Completions per rollout batch, over all processes. Unset: those of one optimizer step (or of "
            "`steps_per_generation`, as in TRL)."
        },
    )
    temperature: float = field(default=0.8, metadata={"help": "Sampling temperature of the student."})
    beta: float = field(
        default=0.001,
        metadata={
            "help": "Weight of the KL term (k3) against the snapshot of the policy taken when stage 2 starts. 0 needs "
            "no snapshot and no reference pass."
        },
    )
    use_bias_correction_kl: bool = field(
        default=False,
        metadata={
            "help": "Weigh the k3 estimate of the KL by the importance ratio, whose gradient counts also where the ratio "
            "is 1. False: the plain k3 term of the paper."
        },
    )
    max_grad_norm: float = field(default=0.2, metadata={"help": "Gradient clip of the policy."})
    max_completion_length: int | None = field(
        default=1536, metadata={"help": "Longest response in tokens, end token included, of student and teacher."}
    )
    save_steps: float = field(default=50, metadata={"help": "Save a checkpoint every so many optimizer steps."})
    gradient_accumulation_steps: int | None = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "With `per_device_train_batch_size` and the number of processes it sets the completions per "
            f"optimizer step. Unset: as many as {PROMPTS_PER_STEP} prompts a step need. It sets no micro-batches: see "
            "`max_tokens_per_micro_batch`."
        },
    )

    # Stages
    gad_warmup_steps: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer steps of stage 1 (cross-entropy on the teacher's response, discriminator on fresh "
            "samples), the discriminator-only steps included. 0 skips it, for a model that was trained with "
            "`SFTTrainer` already. Unset: `gad_warmup_epochs`."
        },
    )
    gad_warmup_epochs: float | None = field(
        default=None, metadata={"help": "Stage 1 in epochs, when `gad_warmup_steps` is unset. Unset: 1."}
    )
    gad_warmup_learning_rate: float = field(
        default=5e-6, metadata={"help": "Learning rate of the policy in stage 1; `learning_rate` is that of stage 2."}
    )

    # Discriminator
    discriminator_only_steps: int = field(
        default=10,
        metadata={"help": "First steps of the run that train the discriminator alone, also when stage 1 is skipped."},
    )
    discriminator_learning_rate: float = field(
        default=1e-6, metadata={"help": "Learning rate of the discriminator, scheduled as `lr_scheduler_type` says."}
    )
    discriminator_max_grad_norm: float = field(default=0.2, metadata={"help": "Gradient clip of the discriminator."})
    discriminator_replay_ratio: float = field(
        default=0.0, metadata={"help": "Share of earlier pairs in the discriminator's step. Only 0 in this version."}
    )

    # The step engine
    max_tokens_per_micro_batch: int = field(
        default=16384,
        metadata={"help": "Most tokens of one forward of any model. Memory follows it, the result does not."},
    )
    share_prompt: bool = field(
        default=True,
        metadata={
            "help": "Store a group's prompt, images included, once for all its responses. False: one row per "
            "sequence, without padding."
        },
    )
    freeze_vision: bool = field(
        default=False,
        metadata={
            "help": "Do not train the vision tower, of the policy nor of the discriminator. It is held once for all models "
            "and reads every picture once per rollout batch."
        },
    )

    # Data
    max_prompt_length: int | None = field(
        default=2048, metadata={"help": "Longest prompt in tokens, counted after image expansion. Never cut."}
    )
    overlong_prompts: str = field(
        default="drop", metadata={"help": "Prompts over `max_prompt_length`: `drop` (counted) or `raise`."}
    )
    overlong_teachers: str = field(
        default="drop",
        metadata={
            "help": "Teacher responses over `max_completion_length`: `drop` (counted), `raise`, or `cut` (no end "
            "token, like a cut student)."
        },
    )
    bad_rows: str = field(
        default="raise", metadata={"help": "Rows that cannot be used: `raise`, or `skip` (counted, with row numbers)."}
    )
    dataloader_num_workers: int = field(
        default=4,
        metadata={
            "help": "Processes that decode, process and tokenize the rows of the next rollout batch while this one "
            "trains; also those that check the dataset before training. 0: the training process itself, in between."
        },
    )
    max_pixels: int | None = field(
        default=None, metadata={"help": "Most pixels of a picture; larger ones are scaled down by the processor."}
    )

    # Rollout servers
    vllm_server_base_urls: list[str] | None = field(
        default=None, metadata={"help": "Addresses of several vLLM servers. Not in this version."}
    )
    vllm_weight_sync: str = field(
        default="nccl", metadata={"help": "How weights reach the servers: `nccl` or `filesystem`."}
    )
    rollout_ahead: int = field(
        default=0, metadata={"help": "Rollout batches generated ahead of training: 0. Not in this version: 1."}
    )

    @property
    def completions_per_step(self) -> int:
        """Completions of one optimizer step, over all processes."""
        return self.completions_per_step_and_process * self.world_size

    @property
    def completions_per_rollout(self) -> int:
        """Completions of one rollout batch, over all processes: `generation_batch_size` once it is known."""
        assert self.generation_batch_size is not None, "set in __post_init__"
        return self.generation_batch_size

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps that share one rollout batch, before `num_iterations`."""
        return self.completions_per_rollout // self.completions_per_step

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts of one rollout batch, over all processes."""
        return self.completions_per_rollout // self.num_generations

    def __post_init__(self):
        if self.gradient_accumulation_steps is None:
            per_micro_step = self.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))
            self.gradient_accumulation_steps = max(PROMPTS_PER_STEP * self.num_generations // per_micro_step, 1)
        if self.metric_for_best_model is None and (self.load_best_model_at_end or self.save_strategy == "best"):
            raise ValueError(
                "The best checkpoint needs `metric_for_best_model`: a low discriminator loss or a high accuracy means "
                "a student that is easy to tell from its teacher. Set it to a metric of your task, or for example to "
                "`eval_discriminator/margin` with greater_is_better=False."
            )
        super().__post_init__()
        # Kept apart: the trainer's loop sees one item per optimizer step and so runs without accumulation
        self.completions_per_step_and_process = self.per_device_train_batch_size * self.gradient_accumulation_steps
        self._check_batch()
        self._check_choices()
        self._check_unsupported()

    def _check_batch(self) -> None:
        whole = self.num_generations * self.world_size
        for name, value in (
            ("completions per optimizer step", self.completions_per_step),
            ("generation_batch_size", self.completions_per_rollout),
        ):
            if value % whole:
                raise ValueError(
                    f"A group stays on one process: {name} must be a multiple of num_generations x processes = "
                    f"{self.num_generations} x {self.world_size} = {whole}, got {value}. Completions per optimizer "
                    "step are per_device_train_batch_size x gradient_accumulation_steps x processes."
                )
        if self.completions_per_rollout % self.completions_per_step:
            raise ValueError(
                "A rollout batch must hold whole optimizer steps: generation_batch_size "
                f"({self.generation_batch_size}) must be a multiple of the completions per optimizer step "
                f"({self.completions_per_step}). Raise `generation_batch_size` or lower `gradient_accumulation_steps`."
            )

    def _check_choices(self) -> None:
        choices = {
            "overlong_prompts": ("drop", "raise"),
            "overlong_teachers": ("drop", "raise", "cut"),
            "bad_rows": ("raise", "skip"),
            "vllm_weight_sync": ("nccl", "filesystem"),
            # TRL looks at these in the first step of stage 2 only
            "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
            "importance_sampling_level": ("token", "sequence"),
            "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
            "scale_rewards": ("group", "batch", "none"),
        }
        for name, allowed in choices.items():
            if vars(self)[name] not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {vars(self)[name]!r}.")
        if self.gad_warmup_steps is not None and self.gad_warmup_epochs is not None:
            raise ValueError(
                "Stage 1 has one length: set `gad_warmup_steps` or `gad_warmup_epochs`, not both (got "
                f"{self.gad_warmup_steps} and {self.gad_warmup_epochs})."
            )
        for name in ("gad_warmup_steps", "gad_warmup_epochs", "discriminator_only_steps"):
            if vars(self)[name] is not None and vars(self)[name] < 0:
                raise ValueError(f"`{name}` must not be negative, got {vars(self)[name]}.")
        for name in (
            "learning_rate",
            "gad_warmup_learning_rate",
            "discriminator_learning_rate",
            "max_tokens_per_micro_batch",
            "max_completion_length",  # None, which TRL allows, would leave responses without a limit
        ):
            if vars(self)[name] is None or vars(self)[name] <= 0:
                raise ValueError(f"`{name}` must be positive, got {vars(self)[name]}.")

    def _check_unsupported(self) -> None:
        refused = {
            "use_vllm": (self.use_vllm, "rollouts run in transformers' generate in this version; set use_vllm=False"),
            "vllm_server_base_urls": (self.vllm_server_base_urls, "it needs `use_vllm`; leave it unset"),
            "rollout_ahead": (self.rollout_ahead, "it needs rollout servers; set rollout_ahead=0"),
            "discriminator_replay_ratio": (
                self.discriminator_replay_ratio,
                "the discriminator trains on fresh pairs only in this version; set discriminator_replay_ratio=0",
            ),
            "sync_ref_model": (
                self.sync_ref_model,
                "GAD's reference is the policy as it was when stage 2 started; set sync_ref_model=False",
            ),
            "use_transformers_continuous_batching": (
                self.use_transformers_continuous_batching,
                "it does not take images; leave it (and use_transformers_paged) False",
            ),
            "max_tool_calling_iterations": (
                self.max_tool_calling_iterations is not None,
                "a teacher's answer is one turn, tools are not called; leave it unset",
            ),
            "pad_to_multiple_of": (self.pad_to_multiple_of, "packed rows have no padding; leave it 'auto' or None"),
            "remove_unused_columns": (
                self.remove_unused_columns,
                "reward functions may read every column; set remove_unused_columns=False",
            ),
            "router_aux_loss_coef": (
                self.router_aux_loss_coef,
                "the load-balancing loss of a mixture of experts depends on how a step is cut into micro-batches; "
                "set router_aux_loss_coef=0",
            ),
            "fp16": (self.fp16, "two models with one loss scaler are not supported; set bf16=True"),
            "deepspeed": (
                self.deepspeed,
                "DeepSpeed has one engine per process and GAD trains two models; launch with DDP",
            ),
            "fsdp": (self.fsdp, "sharded training is not in this version; launch with DDP"),
            "include_num_input_tokens_seen": (
                self.include_num_input_tokens_seen not in ("no", False),
                "packs hold several models' tokens; read the `tokens/` metrics and leave it 'no'",
            ),
        }
        if not self.ds3_gather_for_generation:
            refused["ds3_gather_for_generation"] = (True, "DeepSpeed is not supported; leave it True")
        for name, (value, way_out) in refused.items():
            if value:
                raise ValueError(f"GAD does not support `{name}` (got {vars(self)[name]!r}): {way_out}.")
