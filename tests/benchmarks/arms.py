"""The ways to compute one update of policy and discriminator that the benchmark compares. All do the same arithmetic on
the same tensors and differ in how often, and with what padding.

- `engine`: the library. A prompt is stored once; one pass of D; no old log-probs.
- `unshared`: the library with `share_prompt=False`: one row per sequence, no padding.
- `original`: the schedule of the method's first implementation: old log-probs and D's values in passes of their own, and
  D trained on two rows per sample, the teacher's response repeated. No padding.
- `trl_padded`: the same passes with TRL's own log-probs and loss on rows padded to the longest of the batch.

That the work is the same shows in `FIGURES`. At a ratio of 1 the policy's loss says nothing of its log-probs, so the norm
of its gradient and the reference's log-probs are among them.
"""

import dataclasses
import functools
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from trl.trainer.grpo_trainer import GRPOTrainer

from tests import runs
from tests.benchmarks.workload import Scale, build_model
from trl_gad import GADTrainer
from trl_gad.attention import native_attention, what_attends
from trl_gad.batch import Group, Picture, Rollout
from trl_gad.forward import model_inputs
from trl_gad.losses import accumulation_factor, advantages, bradley_terry
from trl_gad.packed_grpo import Share


ARMS = ("engine", "unshared", "original", "trl_padded")
# Equal in all arms on the same rows; the norms are those before clipping, the log-prob is the mean over response tokens
FIGURES = ("policy_loss", "policy_grad_norm", "discriminator_loss", "discriminator_grad_norm", "reference_logp")
ROWS = 2  # of a padded micro-batch; the discriminator's has as many of the teacher's


class Bench:
    """
    One trainer whose parts the arms call, and the seconds and tokens of their phases.

    Args:
        scale: Of the model.
        device: `cuda` or `cpu`.
        budget: `max_tokens_per_micro_batch`.
        num_generations: G, that of the rollouts.
        checkpointing: Gradient checkpointing of both models.
        padded_groups: Groups that `trl_padded` really runs; its seconds are scaled to all of them.
    """

    def __init__(
        self, scale: Scale, device: str, budget: int, num_generations: int, checkpointing: bool, padded_groups: int
    ):
        self.scale, self.device, self.padded_groups = scale, torch.device(device), padded_groups
        model = build_model(scale, device)
        on_gpu = device == "cuda"
        fields: dict[str, Any] = dict(
            use_cpu=not on_gpu, bf16=on_gpu, gradient_checkpointing=checkpointing, max_tokens_per_micro_batch=budget,
            num_generations=num_generations, per_device_train_batch_size=2 * num_generations, beta=0.001,
            gradient_accumulation_steps=1, dataloader_num_workers=0, max_completion_length=64, max_prompt_length=64,
            temperature=1.0,
            # Such steps move nothing: every run of every arm starts from the same weights
            learning_rate=1e-9, gad_warmup_learning_rate=1e-9, discriminator_learning_rate=1e-9,
        )  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()  # removed with this object; nothing is written
        self.trainer: GADTrainer = runs.trainer(Path(self._folder.name), model=model, **fields)
        trainer = self.trainer
        trainer._prepare_for_training(5, trainer.get_train_dataloader(), None)
        if checkpointing:
            trainer.policy.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
        trainer.take_snapshot()
        self.seconds: dict[str, float] = defaultdict(float)
        self.tokens: dict[str, int] = defaultdict(int)
        self.measured_share = 1.0
        cut = trainer.cutter.cut

        def counted(*args: Any, **kwargs: Any) -> Any:
            cuts = cut(*args, **kwargs)
            self.tokens[self._phase] += sum(one.pack.input_ids.numel() for one in cuts)
            return cuts

        trainer.cutter.cut = counted

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside as phase `name`."""
        self._phase = name
        begin = self._now()
        yield
        self.seconds[name] += self._now() - begin

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def run(self, arm: str, rollout: Rollout) -> dict[str, Any]:
        """One update of both models by `arm`: seconds and tokens by phase, `FIGURES`, peak memory in GiB.

        Raises:
            RuntimeError: a figure is no number, and the time of such an update means nothing.
        """
        self.seconds.clear()
        self.tokens.clear()
        self.figures: dict[str, float] = {}
        self.measured_share = 1.0
        # Nothing left of an earlier arm: log-probs, or pictures on the device
        groups = [
            dataclasses.replace(group, pictures=[dataclasses.replace(picture) for picture in group.pictures])
            for group in rollout.groups
        ]
        rollout = Rollout(rollout.index, groups, rollout.samples)
        self.trainer.model.train()
        self.trainer.cutter.share_prompt = arm == "engine"
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with self.phase("pictures"):
            self.trainer.take_up(groups)
        {"engine": self._packed, "unshared": self._packed, "original": self._original, "trl_padded": self._padded}[
            arm
        ](rollout)
        broken = [name for name in FIGURES if not math.isfinite(self.figures[name])]
        if broken:
            raise RuntimeError(
                f"{arm}: {', '.join(broken)} must be finite, got {self.figures}. Its time means nothing."
            )
        in_full = ("pictures", "optimizers")  # whatever share of the rows was run
        seconds = {n: value / (1.0 if n in in_full else self.measured_share) for n, value in self.seconds.items()}
        # Passes over the same rows share their packs
        self.tokens["policy"] = self.tokens.pop("old_logps", self.tokens["reference"])
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        return dict(
            arm=arm, total_s=sum(seconds.values()), seconds=seconds, tokens=dict(self.tokens), peak_gib=peak,
            measured_share=self.measured_share, attention=self._attention(arm), **self.figures,
        )  # fmt: skip

    def _attention(self, arm: str) -> str:
        """What computes it, in the text layers and in the vision tower."""
        policy = self.trainer.policy
        text, tower = policy.config.get_text_config(), policy.config.vision_config._attn_implementation
        if arm == "trl_padded":
            with native_attention(policy):
                return f"{text._attn_implementation} with a mask; vision {tower}"
        dtype = torch.bfloat16 if self.trainer.accelerator.mixed_precision == "bf16" else torch.float32
        return f"{what_attends(self.trainer.accelerator.device, dtype, text.head_dim)}; vision {tower}"

    # ---- The library ----

    def _packed(self, rollout: Rollout) -> None:
        trainer = self.trainer
        with self.phase("discriminator"):
            scores, metrics = trainer.adversary.score_and_update(rollout)
        self._set_advantages(rollout, scores.students)
        share = Share.of(rollout, list(range(len(rollout.groups))))
        with self.phase("reference"):
            trainer.no_grad_pass(trainer.reference, share, rollout.ref_logps)
        with self.phase("policy"):
            loss = float(trainer.policy_pass(trainer.model_wrapped, share))
        self._policy_step()
        self._keep_figures(rollout, loss, metrics)

    def _original(self, rollout: Rollout) -> None:
        trainer = self.trainer
        share = Share.of(rollout, list(range(len(rollout.groups))))
        with self.phase("old_logps"):
            trainer.no_grad_pass(trainer.model_wrapped, share, rollout.old_logps)
        with self.phase("reference"):
            trainer.no_grad_pass(trainer.reference, share, rollout.ref_logps)
        with self.phase("values"), torch.no_grad():
            scores = torch.zeros(len(rollout.groups), trainer.num_generations)
            for cut in trainer.cutter.cut(share.groups, share.responses):
                last = cut.pack.last.to(self.device)
                values = trainer.adversary.wrapped(last=last, **model_inputs(cut.pack, self.device))
                for member, value in zip(cut.members, values.float().tolist(), strict=True):
                    scores[member] = value
        self._set_advantages(rollout, scores)
        pairs = [(g, s) for g, row in zip(rollout.groups, rollout.samples, strict=True) for s in row]
        with self.phase("discriminator"):
            _, metrics = trainer.adversary.score_and_update(Rollout(0, [g for g, _ in pairs], [[s] for _, s in pairs]))
        with self.phase("policy"):
            loss = float(trainer.policy_pass(trainer.model_wrapped, share))
        self._policy_step()
        self._keep_figures(rollout, loss, metrics)

    def _keep_figures(self, rollout: Rollout, policy_loss: float, metrics: dict[str, float]) -> None:
        self.figures["policy_loss"] = policy_loss
        self.figures["discriminator_loss"] = metrics["discriminator/loss"]
        self.figures["discriminator_grad_norm"] = metrics["discriminator/grad_norm"]
        self.figures["reference_logp"] = float(torch.cat(list(rollout.ref_logps.values())).mean())

    def _set_advantages(self, rollout: Rollout, scores: torch.Tensor) -> None:
        trainer = self.trainer
        values, _ = advantages(
            scores.flatten()[:, None], torch.ones(1), trainer.num_generations, "group", "sum_then_normalize"
        )
        self.advantages = rollout.advantages = values.view(scores.shape)

    def _policy_step(self) -> None:
        trainer = self.trainer
        with self.phase("optimizers"):  # D's own is within its phase
            norm = trainer.accelerator.clip_grad_norm_(trainer.model_wrapped.parameters(), trainer.args.max_grad_norm)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=True)
        self.figures["policy_grad_norm"] = float(norm)

    # ---- Padded rows ----

    def _padded(self, rollout: Rollout) -> None:
        trainer, accelerator = self.trainer, self.trainer.accelerator
        rows = _Padding(rollout, trainer.policy.config.image_token_id, self.device)
        groups = middling([math.prod(group.pictures[0].grid_thw) for group in rollout.groups], self.padded_groups)
        self.measured_share = len(groups) / len(rollout.groups)
        starts = range(0, trainer.num_generations, ROWS)
        parts = [(g, slice(start, start + ROWS)) for g in groups for start in starts]
        num_rows = len(rollout.groups) * trainer.num_generations  # tokens: of all, padding counted
        self.tokens["reference"] = num_rows * (rows.width + rows.length)
        self.tokens["discriminator"] = 2 * num_rows * (rows.width + rows.both)
        policy, reference, backbone = trainer.policy, trainer.reference, trainer.discriminator.backbone
        log_probs = functools.partial(GRPOTrainer._get_per_token_logps_and_entropies, trainer)
        with (
            native_attention(policy),
            native_attention(accelerator.unwrap_model(reference)),
            native_attention(backbone),
        ):
            kept: dict[str, list[torch.Tensor]] = {}
            for phase, model in (("old_logps", trainer.model_wrapped), ("reference", reference)):
                with self.phase(phase), torch.no_grad():
                    kept[phase] = [log_probs(model, **rows.policy_inputs(*part))[0] for part in parts]
            scores = torch.full((len(rollout.groups), trainer.num_generations), torch.nan)  # of those not run
            with self.phase("values"), torch.no_grad():
                for g, part in parts:
                    scores[g, part] = self._score_padded(rows, g, part)[1].cpu()
            self._set_advantages(rollout, scores)
            samples = [s for g in groups for s in rollout.samples[g]]
            discriminator_loss = 0.0
            with self.phase("discriminator"):
                for g, part in parts:
                    loss = bradley_terry(*self._score_padded(rows, g, part)) / len(samples)
                    accelerator.backward(loss)
                    discriminator_loss += float(loss.detach())
            with self.phase("optimizers"):
                most = trainer.args.discriminator_max_grad_norm
                norm = accelerator.clip_grad_norm_(trainer.adversary.wrapped.parameters(), most)
                trainer.adversary.optimizer.step()
                trainer.adversary.optimizer.zero_grad(set_to_none=True)
            num_tokens = sum(len(sample.ids) for sample in samples)
            trainer._get_per_token_logps_and_entropies = log_probs  # TRL's own, on padded rows
            policy_loss = 0.0
            try:
                with self.phase("policy"):
                    for part, old, ref in zip(parts, kept["old_logps"], kept["reference"], strict=True):
                        loss = self._loss_padded(rows.loss_inputs(*part), len(samples), num_tokens, part, old, ref)
                        accelerator.backward(loss)
                        policy_loss += float(loss.detach())
            finally:
                del trainer._get_per_token_logps_and_entropies
        self._policy_step()
        of_rows = [logps for batch in kept["reference"] for logps in batch]  # in the order of `samples`
        total = sum(float(logps[: len(s.ids)].sum()) for logps, s in zip(of_rows, samples, strict=True))
        self.figures |= dict(
            policy_loss=policy_loss, discriminator_loss=discriminator_loss, discriminator_grad_norm=float(norm),
            reference_logp=total / num_tokens,
        )  # fmt: skip

    def _score_padded(self, rows: "_Padding", g: int, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the teacher's response, once per sample, and of the samples: `[n]` each."""
        inputs, last = rows.discriminator_inputs(g, part)
        discriminator = self.trainer.discriminator
        with self.trainer.accelerator.autocast():
            hidden = discriminator.backbone(**inputs).last_hidden_state
        scores = linear(hidden[torch.arange(len(last)), last].float(), discriminator.score.weight)[:, 0]
        half = len(last) // 2
        return scores[:half], scores[half:]

    def _loss_padded(
        self, inputs: dict[str, Any], step_rows: int, step_tokens: int, part: tuple[int, slice], old: Any, ref: Any
    ) -> torch.Tensor:
        trainer = self.trainer
        factor = accumulation_factor(
            trainer.loss_type, micro_rows=len(inputs["completion_ids"]), step_rows=step_rows, step_tokens=step_tokens,
            micro_tokens=int(inputs["completion_mask"].sum()), num_processes=1,
        )  # fmt: skip
        trainer.current_gradient_accumulation_steps = factor
        per_window = step_tokens * trainer.args.steps_per_generation / factor
        inputs |= dict(
            advantages=self.advantages[part].to(self.device), old_per_token_logps=old, ref_per_token_logps=ref,
            num_items_in_batch=torch.tensor(per_window, device=self.device),
        )  # fmt: skip
        return trainer._compute_loss(trainer.model_wrapped, inputs)


def middling(sizes: list[int], count: int) -> list[int]:
    """`count` places, ascending, whose mean size is close to the mean of all: what stands for the whole batch.

    Each next one brings the mean of those chosen closest.

    >>> middling([9, 2, 4, 1], 2)  # the mean is 4: first 4 itself, then 2, as (4 + 2) / 2 = 3 is nearer than 6.5 or 2.5
    [1, 2]
    """
    mean, chosen = sum(sizes) / len(sizes), []
    while len(chosen) < min(count, len(sizes)):
        total = sum(sizes[i] for i in chosen)
        left = [i for i in range(len(sizes)) if i not in chosen]
        chosen.append(min(left, key=lambda i: abs((total + sizes[i]) / (len(chosen) + 1) - mean)))
    return sorted(chosen)


class _Padding:
    """Rows as TRL's trainer makes them: prompts padded on the left, responses on the right, to the batch's longest."""

    def __init__(self, rollout: Rollout, image_token: int, device: torch.device):
        self.rollout, self.image_token, self.device = rollout, image_token, device
        self.width = max(len(group.prompt_ids) for group in rollout.groups)
        self.length = max(len(s.ids) for row in rollout.samples for s in row)
        self.both = max(self.length, max(len(group.teacher_ids) for group in rollout.groups))

    def _rows(self, group: Group, responses: list[list[int]], length: int) -> dict[str, Any]:
        left = self.width - len(group.prompt_ids)
        ids = [[0] * left + group.prompt_ids + r + [0] * (length - len(r)) for r in responses]
        mask = [[0] * left + [1] * (len(group.prompt_ids) + len(r)) + [0] * (length - len(r)) for r in responses]
        tensors = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        tensors["mm_token_type_ids"] = (tensors["input_ids"] == self.image_token).int()
        pictures: list[Picture] = group.pictures * len(responses)
        tensors["pixel_values"] = torch.cat([p.pixel_values for p in pictures])
        tensors["image_grid_thw"] = torch.tensor([p.grid_thw for p in pictures])
        return {name: value.to(self.device) for name, value in tensors.items()}

    def policy_inputs(self, g: int, part: slice) -> dict[str, Any]:
        """Arguments of TRL's `_get_per_token_logps_and_entropies`."""
        responses = [s.ids for s in self.rollout.samples[g][part]]
        rows = self._rows(self.rollout.groups[g], responses, self.length)
        return rows | dict(logits_to_keep=self.length, num_images=[1] * len(responses))

    def loss_inputs(self, g: int, part: slice) -> dict[str, Any]:
        """Inputs of TRL's `_compute_loss`, without log-probs and advantages."""
        rows = self.policy_inputs(g, part)
        ids, mask = rows.pop("input_ids"), rows.pop("attention_mask")
        return rows | dict(
            prompt_ids=ids[:, : self.width], prompt_mask=mask[:, : self.width], completion_ids=ids[:, self.width :],
            completion_mask=mask[:, self.width :],
        )  # fmt: skip

    def discriminator_inputs(self, g: int, part: slice) -> tuple[dict[str, Any], torch.Tensor]:
        """The teacher's response once per sample, then the samples; and the place of each one's last token."""
        group, samples = self.rollout.groups[g], self.rollout.samples[g][part]
        responses = [group.teacher_ids] * len(samples) + [s.ids for s in samples]
        last = torch.tensor([self.width + len(r) - 1 for r in responses], device=self.device)
        return self._rows(group, responses, self.both) | dict(use_cache=False), last
