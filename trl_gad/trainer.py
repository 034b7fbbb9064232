"""`GADTrainer`: the run. What a step does, in order, is `training_step`.

TRL's `GRPOTrainer` builds the models, computes the policy loss, logs and saves. Ours are the loader (one item per
optimizer step), the rollout batch, the discriminator's pass and the packed forwards. The modules' order is the step's:
data, rollouts, packing, planner, attention, forward, engine, adversary, trainer.
"""

import copy
import logging
import math
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, TrainerCallback

from trl_gad.adversary import Adversary, Scores
from trl_gad.attention import use_packed_attention
from trl_gad.batch import Group, Rollout
from trl_gad.build import build_models
from trl_gad.config import GADConfig
from trl_gad.data import DataReport, check_dataset
from trl_gad.discriminator import Discriminator
from trl_gad.engine import Cutter
from trl_gad.evaluation import run_evaluation
from trl_gad.forward import add_heads, add_warmup_head, is_vision_model, log_probs, pictures_to
from trl_gad.kernels import follow_autocast, use_fused_kernels
from trl_gad.loop import StepEnd, StepLoader
from trl_gad.metrics import Clock, rollout_metrics, sample_table
from trl_gad.models import snapshot
from trl_gad.packed_grpo import Share
from trl_gad.planner import count_tokens
from trl_gad.rewards import log_rollout, set_advantages
from trl_gad.rollouts import TransformersSampler, sampling_seed
from trl_gad.rows import RowReader
from trl_gad.saving import SavingTrainer
from trl_gad.schedule import DISCRIMINATOR, GAD, WARMUP, StageLR, Step, StepPlan, make_plan
from trl_gad.vision import FeatureCache


logger = logging.getLogger(__name__)

RewardFunc = Callable[..., list[float | None]]


class GADTrainer(SavingTrainer):
    """
    Trains a student on the *text* of a teacher by Generative Adversarial Distillation ([Black-Box On-Policy
    Distillation of Large Language Models](https://huggingface.co/papers/2511.10643)): a discriminator learns online to
    score the teacher's responses above the student's, and its score is the reward of a GRPO step.

    One run has two stages. Stage 1 (warm-up): the discriminator alone for `discriminator_only_steps`, then the student
    by cross-entropy on the teacher's responses and the discriminator on fresh samples. Stage 2 (adversarial): GRPO with
    the discriminator's scores, and a KL term to the student as it was when stage 2 started.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from trl_gad import GADConfig, GADTrainer

    >>> trainer = GADTrainer(
    ...     model="Qwen/Qwen3-VL-2B-Instruct",
    ...     args=GADConfig(output_dir="out"),
    ...     train_dataset=load_dataset("json", data_files="teacher.jsonl", split="train"),
    ... )
    >>> trainer.train()
    >>> trainer.save_model()  # the student in out/, the discriminator in out/discriminator/
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student, as in [`~trl.GRPOTrainer`].
        discriminator (`str` or [`Discriminator`] or [`~transformers.PreTrainedModel`], *optional*):
            A folder that `Discriminator.save_pretrained` wrote, a model to start one from, or `None`: the student's own
            weights and a new head.
        args ([`GADConfig`], *optional*):
            Configuration. `None`: the defaults.
        train_dataset ([`~datasets.Dataset`]):
            TRL's *prompt-completion* type, conversational, with `images` where there are any; `completion` is the
            teacher's response. Or `messages`, whose last assistant turn is the teacher's.
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            The same for evaluation.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            `None`: the one beside the model.
        reward_funcs (reward function or list of them, *optional*):
            Further rewards beside the discriminator's, as in [`~trl.GRPOTrainer`]; `reward_weights` has the
            discriminator's weight first. They are called in stage 2.
        reward_processing_classes (*optional*):
            Of the `reward_funcs`, as in [`~trl.GRPOTrainer`].
        callbacks, optimizers (*optional*):
            As in [`~transformers.Trainer`]; the optimizer is the student's.
        quantization_config (*optional*):
            Refused: quantized bases are not in this version.
        peft_config ([`~peft.PeftConfig`], *optional*):
            As in [`~trl.GRPOTrainer`].
        discriminator_peft_config ([`~peft.PeftConfig`], *optional*):
            Train adapters of the discriminator only. With `peft_config`, both share one frozen base.

    Raises:
        ValueError: an option or a dataset that cannot be used, with the rule, the value and the way out.
    """

    _tag_names = ["trl", "trl-gad", "gad"]
    _name = "GAD"
    _paper = {
        "title": "Black-Box On-Policy Distillation of Large Language Models",
        "id": "2511.10643",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{gad2025,
                title        = {{Black-Box On-Policy Distillation of Large Language Models}},
                year         = 2025,
                eprint       = {arXiv:2511.10643},
            }"""),
    }

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        discriminator: "str | Discriminator | PreTrainedModel | None" = None,
        args: GADConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: "Dataset | dict[str, Dataset] | None" = None,
        processing_class: Any = None,
        reward_funcs: "RewardFunc | str | PreTrainedModel | list | None" = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: PeftConfig | None = None,
        discriminator_peft_config: PeftConfig | None = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ):
        for name, value in (
            ("tools", tools),
            ("rollout_func", rollout_func),
            ("environment_factory", environment_factory),
        ):
            if value is not None:
                raise ValueError(f"GADTrainer does not take `{name}`: a teacher's answer is one turn. Leave it out.")
        if optimizers[1] is not None:
            raise ValueError(
                "The policy's schedule starts anew in each stage, which one given in `optimizers` cannot do. Pass "
                "optimizers=(optimizer, None) and set `lr_scheduler_type`, `lr_scheduler_kwargs` and `warmup_steps`."
            )
        self.given_args = args if args is not None else GADConfig("trainer_output")
        args = self._args_of_one_item_per_step(self.given_args)
        model, discriminator, self._skeleton = build_models(
            model, discriminator, self.given_args, peft_config, discriminator_peft_config, quantization_config
        )
        all_rewards: Any = [] if reward_funcs is None else reward_funcs
        all_rewards = [self._discriminator_reward, *(all_rewards if isinstance(all_rewards, list) else [all_rewards])]
        if reward_processing_classes is not None and not isinstance(reward_processing_classes, list):
            reward_processing_classes = [reward_processing_classes]
        of_rewards: Any = [None, *reward_processing_classes] if reward_processing_classes else None
        held_out: Any = eval_dataset
        if is_vision_model(model.config):
            # Rows without pictures, and steps of one model only, leave parameters without a gradient
            if args.ddp_find_unused_parameters is False and args.world_size > 1:
                raise ValueError(
                    "A vision-language model has parameters that a batch without pictures does not use: "
                    "ddp_find_unused_parameters=False would end the run there. Leave it unset."
                )
            args.ddp_find_unused_parameters = True
        super().__init__(
            model=model,
            reward_funcs=all_rewards,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=held_out,
            processing_class=processing_class,
            reward_processing_classes=of_rewards,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.reward_func_names[0] = "discriminator"
        self.beta = self.args.beta = self.given_args.beta
        self.clock = Clock(self.accelerator.device)
        self.reference: torch.nn.Module | None = None  # from the first step of stage 2 on
        self.rollout: Rollout | None = None  # the batch in work
        self.scores: Scores | None = None  # of that batch
        self.num_policy_skipped = 0
        self.warmup_ended_after: int | None = None  # rollout batches, when `end_warmup` was called
        self._prepare_policy()
        self._prepare_data()
        self.adversary = Adversary(discriminator.to(self.accelerator.device), self.accelerator, self.args, self.cutter)
        self._prepare_backbone(discriminator.backbone)
        self.features = FeatureCache(self.policy)  # of a frozen vision tower; the reference joins when there is one
        self.features.attach(self.policy)
        self.features.attach(discriminator.backbone)
        self.callback_handler.callbacks.insert(0, StepEnd(self))  # before what others do at a step's end

    # ---- Building ----

    @staticmethod
    def _args_of_one_item_per_step(given: GADConfig) -> GADConfig:
        """What transformers' loop and TRL's constructor see of the arguments."""
        args = copy.copy(given)
        args.gradient_accumulation_steps = 1  # an item of the loader is an optimizer step
        args.ignore_data_skip = True  # the loader starts at the right step by itself
        args.model_init_kwargs = None  # the model is loaded already
        args.beta = 0.0  # or TRL would load the reference now; ours is a snapshot taken later
        return args

    @property
    def discriminator(self) -> Discriminator:
        """The live discriminator, without wrappers."""
        return self.adversary.module

    @property
    def policy(self) -> "PreTrainedModel | PeftModel":
        """The live policy, without wrappers."""
        return self.accelerator.unwrap_model(self.model)

    def _prepare_policy(self) -> None:
        if self.aux_loss_enabled:
            raise ValueError(
                "The load-balancing loss of a mixture of experts depends on how a step is cut into micro-batches. "
                "Set router_aux_loss_coef=0."
            )
        if self.accelerator.distributed_type not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise ValueError(
                f"GAD trains in one process or with DDP, not with {self.accelerator.distributed_type}. Change "
                "`distributed_type` of the accelerate configuration."
            )
        add_warmup_head(self.policy, self.args.cast_lm_head_to_fp32)
        self._prepare_backbone(self.policy)
        config = self.policy.config
        vision = (config.image_token_id, config.video_token_id) if is_vision_model(config) else None
        self.sampler = TransformersSampler(
            self.accelerator, self.generation_kwargs, list(vision or ()), vision,
            self.args.gradient_checkpointing_kwargs,
        )  # fmt: skip
        self.cutter = Cutter(config, self.args.max_tokens_per_micro_batch, self.args.share_prompt, self.accelerator)

    @staticmethod
    def _prepare_backbone(model: "PreTrainedModel | PeftModel") -> None:
        """What policy, reference and discriminator have in common. The model is on its device."""
        use_packed_attention(model)
        use_fused_kernels(model)
        follow_autocast(model)

    def _prepare_data(self) -> None:
        args = self.args
        self.reader = RowReader.of(self.processing_class, args)
        report = self.report_of(self.train_dataset, "train_dataset")
        self.rows = report.kept
        # Expected tokens of each row, by which the processes share a step's rows: the samples as long as the teacher's
        self.row_costs: list[int] | None = [
            count_tokens(prompt, [teacher] * (1 + self.num_generations), args.share_prompt)
            for prompt, teacher in zip(report.prompt_lengths, report.teacher_lengths, strict=True)
        ]
        self.step_plan = make_plan(
            num_rows=len(self.rows),
            prompts_per_rollout=args.prompts_per_rollout,
            steps_per_rollout=args.steps_per_rollout,
            num_iterations=self.num_iterations,
            max_steps=args.max_steps,
            num_train_epochs=args.num_train_epochs,
            warmup_steps=args.gad_warmup_steps,
            warmup_epochs=args.gad_warmup_epochs,
            discriminator_only_steps=args.discriminator_only_steps,
        )
        args.max_steps = self.step_plan.max_steps
        if self.step_plan.gad_start >= self.step_plan.max_steps:
            logger.warning(
                "All %d steps belong to the warm-up, which takes %d: nothing is distilled adversarially. Raise "
                "`num_train_epochs` or `max_steps`, or lower `gad_warmup_steps` or `gad_warmup_epochs`.",
                self.step_plan.max_steps, self.step_plan.gad_start,
            )  # fmt: skip

        # The datasets themselves are kept: an id alone may be that of another one later
        self._eval_rows: dict[int, tuple[Any, list[int]]] = {}
        for dataset in self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]:
            if dataset is not None:
                self.rows_for_evaluation(dataset)

    def rows_for_evaluation(self, dataset: Any) -> list[int]:
        """The usable rows of an evaluation dataset, read once."""
        if id(dataset) not in self._eval_rows:
            self._eval_rows[id(dataset)] = (dataset, self.report_of(dataset, "eval_dataset").kept)
        return self._eval_rows[id(dataset)][1]

    def report_of(self, dataset: Any, name: str) -> DataReport:
        """Reads every row of a dataset once; which can be used, the same on all processes.

        Raises:
            ValueError: a row that the options do not allow to drop, none is left, or one is over the token budget.
        """
        found: list[Any] = [None]
        if self.accelerator.is_main_process:
            try:
                found = [
                    check_dataset(
                        dataset,
                        self.reader,
                        bad_rows=self.args.bad_rows,
                        num_workers=self.args.dataloader_num_workers,
                        progress=not self.args.disable_tqdm,
                    )
                ]
            except ValueError as error:
                found = [error]
        report = broadcast_object_list(found)[0]  # one process reads, so that all use the same rows
        if isinstance(report, ValueError):
            raise report
        if self.accelerator.is_main_process:
            log = logger.warning if report.dropped else logger.info
            log("%s: %s", name, report)
        report.check_budget(self.args)
        return report

    # ---- The run ----

    def get_train_dataloader(self) -> "StepLoader":
        """One item per optimizer step; the first of a rollout batch carries its groups."""
        return StepLoader(self)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The policy's learning rate: a schedule anew for each stage. Discriminator-only steps do not count."""
        if self.lr_scheduler is None:
            args, plan = self.args, self.step_plan
            warmup = min(plan.num_warmup_steps, max(num_training_steps - plan.num_discriminator_rollouts, 0))
            stages = [
                (args.gad_warmup_learning_rate, warmup),
                (args.learning_rate, max(num_training_steps - plan.gad_start, 1)),
            ]
            self.lr_scheduler = StageLR(
                self.optimizer if optimizer is None else optimizer, stages, args.learning_rate,
                args.lr_scheduler_type, args.warmup_steps, args.lr_scheduler_kwargs,
            )  # fmt: skip
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def end_warmup(self) -> None:
        """
        Start stage 2 with the next rollout batch, for a callback that watches how far stage 1 has come: to be called
        on all processes, in `on_step_end` or `on_evaluate`. Stage 2 keeps its number of steps. Without effect in
        stage 2.
        """
        step = self.step_plan.at(self.state.global_step - 1) if self.state.global_step else None
        self.warmup_ended_after = step.rollout + 1 if step else 0
        self.set_plan(self.step_plan.with_warmup_ended(self.warmup_ended_after))

    def set_plan(self, plan: StepPlan) -> None:
        """Change the rest of the run to `plan`, whose stages are not longer than the present ones."""
        self.step_plan = plan
        self.args.max_steps = self.state.max_steps = plan.max_steps
        self.lr_scheduler.shorten(0, plan.num_warmup_steps)
        self.adversary.schedule.shorten(0, plan.num_rollouts)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if self.adversary.prepared:
            raise RuntimeError(
                "A GADTrainer trains once: its reference and its stages belong to one run. Build another trainer."
            )
        decay = self.get_decay_parameter_names(self.discriminator)
        self.adversary.prepare(decay, self.step_plan.num_rollouts)
        result = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self.clock.reset()
        return result

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """
        One optimizer step up to the policy's gradient: rollout and discriminator where a rollout batch begins, then
        the policy's forwards and backwards.

        Returns:
            `torch.Tensor`: The policy's loss of this process (0 in a discriminator-only step).
        """
        step: Step = inputs["step"]
        model.train()
        self.step_flos = 0.0
        self.add_metrics({"stage": [DISCRIMINATOR, WARMUP, GAD].index(step.stage)})
        if step.stage == GAD and self.reference is None and self.beta != 0.0:
            self.take_snapshot()
        if step.first:
            self._start_rollout(step, inputs["groups"])
        rollout = self.rollout
        assert rollout is not None, "the rollout batch of this step is missing"
        share = Share.of(rollout, rollout.part(step.part, self.args.steps_per_rollout))
        if step.stage == DISCRIMINATOR:
            loss = self._skip_policy()
        elif step.stage == WARMUP:
            loss = self._finite_or_skipped(self._warmup_pass(model, share))
        elif rollout.advantages is None:  # the scores were no numbers
            loss = self._finite_or_skipped(torch.tensor(torch.nan, device=self.accelerator.device))
        else:
            loss = self._finite_or_skipped(self._gad_pass(model, share))
        if step.last:
            self.rollout = None
            self.features.clear()
        self._step += 1
        self.clock.mark("optimizer")
        return loss

    def _start_rollout(self, step: Step, groups: list[Group]) -> None:
        """Sample, score, update the discriminator, and prepare what the policy steps on this batch need."""
        with self.clock.phase("rollout"):
            seed = sampling_seed(self.args.seed, step.rollout, self.accelerator.process_index)
            samples = self.sampler.sample(self.model_wrapped, groups, self.num_generations, seed)
        rollout = self.rollout = Rollout(step.rollout, groups, samples)
        self.take_up(groups)
        with self.clock.phase("discriminator"):
            self.scores, metrics = self.adversary.score_and_update(rollout)
        self.add_flos(self.discriminator, metrics["tokens/discriminator"])
        table = sample_table(rollout, self.scores.teacher, self.scores.students).to(self.accelerator.device)
        metrics |= rollout_metrics(self.accelerator.gather(table).cpu())
        rewards = self.scores.students.flatten()[:, None]
        if step.stage == GAD:
            with self.clock.phase("rewards"):
                rewards = set_advantages(self, rollout, self.scores, metrics)
            if self.args.steps_per_rollout > 1:
                with self.clock.phase("old_logps"):
                    self._old_log_probs(rollout)
        self.add_metrics(metrics)
        if self.log_completions:
            log_rollout(self, rollout, self.scores, rewards)

    def take_up(self, groups: list[Group]) -> None:
        """The pictures of a rollout batch, ready for its passes."""
        dtype = torch.bfloat16 if self.accelerator.mixed_precision == "bf16" else None
        pictures_to(groups, self.accelerator.device, dtype)
        self.features.hold(groups)

    def _old_log_probs(self, rollout: Rollout) -> None:
        """Of the samples that later steps train on: the policy as it is now is the one that wrote them."""
        num_parts = self.args.steps_per_rollout
        later = [g for part in range(1, num_parts) for g in rollout.part(part, num_parts)]
        self.no_grad_pass(self.model_wrapped, Share.of(rollout, later), rollout.old_logps)

    def _warmup_pass(self, model: torch.nn.Module, share: Share) -> torch.Tensor:
        """Cross-entropy per token of the teacher's responses, at temperature 1; leaves its gradient."""
        groups = share.groups
        num_tokens = self.sum_over_processes(sum(len(group.teacher_ids) for group in groups))
        total = torch.zeros((), device=self.accelerator.device)
        with self.clock.phase("policy"):
            for cut in self.cuts(model, self.cutter.cut(groups, [[group.teacher_ids] for group in groups])):
                logps, _, _ = log_probs(model, cut.pack, compute_entropy=False, at_temperature_one=True)
                loss = -logps.sum() * self.accelerator.num_processes / num_tokens * (not cut.filler)
                self.accelerator.backward(loss)
                total += loss.detach()
        self.add_metrics({"warmup/cross_entropy": self.mean_over_processes(total)})
        return total

    def _gad_pass(self, model: torch.nn.Module, share: Share) -> torch.Tensor:
        """TRL's policy loss over the samples of `share`; leaves its gradient."""
        missing = any(member not in share.rollout.ref_logps for member in share.all_members())
        if self.beta != 0.0 and self.sum_over_processes(missing):  # a pass of all processes or of none
            assert self.reference is not None
            with self.clock.phase("reference"):
                self.no_grad_pass(self.reference, share, share.rollout.ref_logps)
        with self.clock.phase("policy"):
            return self.policy_pass(model, share)

    def take_snapshot(self) -> None:
        """Freeze the policy as it is now: the reference of the KL term."""
        reference = snapshot(self._skeleton)
        add_heads(reference, self.temperature, self.args.cast_lm_head_to_fp32)
        self._prepare_backbone(reference.to(self.accelerator.device))
        self.features.attach(reference)
        self.reference = self.accelerator.prepare_model(reference, evaluation_mode=True)

    # ---- Steps left out ----

    def _skip_policy(self) -> torch.Tensor:
        """No update of the policy: no gradients (zeros would still move AdamW), and its schedule waits."""
        self.optimizer.zero_grad(set_to_none=True)
        self.lr_scheduler.hold = True
        return torch.zeros((), device=self.accelerator.device)

    def _finite_or_skipped(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, or a skipped update where it is not finite on any process."""
        if not torch.isfinite(self.accelerator.reduce(loss.clone(), reduction="sum")):
            self.num_policy_skipped += 1
            loss = self._skip_policy()
        return loss

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """The norm that is logged. An update whose gradient is not finite (the same on all processes) is left out."""
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not math.isfinite(grad_norm):
            self.num_policy_skipped += 1
            self._skip_policy()
        self.add_metrics({"policy/skipped": self.num_policy_skipped})
        return grad_norm

    def _discriminator_reward(self, **kwargs: Any) -> list[float]:
        """The discriminator as TRL's first reward function: the scores of the rollout batch in work."""
        assert self.scores is not None
        return self.scores.students.flatten().tolist()

    # ---- Evaluation ----

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """
        Samples `num_generations_eval` answers to every prompt and scores them beside the teacher's responses.

        Returns:
            `dict[str, float]`: The metrics listed in the README, with `metric_key_prefix` before their names.
        """
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if eval_dataset is None:
            raise ValueError("Evaluation needs data: pass `eval_dataset` here or to the trainer.")
        if isinstance(eval_dataset, dict):
            results = [
                self.evaluate(dataset, ignore_keys, f"{metric_key_prefix}_{name}")
                for name, dataset in eval_dataset.items()
            ]
            return {name: value for result in results for name, value in result.items()}
        was_training = self.model.training
        self.model.eval()  # `log` tells an evaluation by it
        metrics = run_evaluation(self, eval_dataset, metric_key_prefix)
        self.log(metrics)
        self.model.train(was_training)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.clock.restart()
        return metrics
