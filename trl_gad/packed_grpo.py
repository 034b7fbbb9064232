"""TRL's policy loss on packs: the micro-batches of all processes add up to the step taken as one micro-batch.

TRL's `GRPOTrainer._compute_loss` is used as it is. It asks `_get_per_token_logps_and_entropies` for log-probs, which
here come from the packed forward, and divides by numbers that are set here so that the cut into micro-batches does not
matter (`losses.accumulation_factor`). Knows nothing of discriminators or stages.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.grpo_trainer import GRPOTrainer

from trl_gad.batch import Group, Rollout
from trl_gad.engine import Cut, Cutter
from trl_gad.forward import log_probs
from trl_gad.losses import accumulation_factor
from trl_gad.metrics import merge_micro_batches


@dataclass
class Share:
    """The groups of a rollout batch that one pass runs on, and which of their samples take part."""

    rollout: Rollout
    chosen: list[int]  # indices of the groups
    present: list[list[int]]  # of each, the samples that are not empty
    _cuts: list[Cut] | None = None

    @classmethod
    def of(cls, rollout: Rollout, chosen: list[int]) -> "Share":
        """All samples of these groups but empty ones."""
        return cls(rollout, chosen, [[i for i, s in enumerate(rollout.samples[g]) if s.ids] for g in chosen])

    @property
    def groups(self) -> list[Group]:
        """The groups themselves."""
        return [self.rollout.groups[g] for g in self.chosen]

    @property
    def responses(self) -> list[list[list[int]]]:
        """Token ids, `[groups][samples]`."""
        return [
            [self.rollout.samples[g][i].ids for i in kept] for g, kept in zip(self.chosen, self.present, strict=True)
        ]

    def cuts(self, cutter: Cutter) -> list[Cut]:
        """The micro-batches of its samples, made once for all passes. Called by every process."""
        if self._cuts is None:
            self._cuts = cutter.cut(self.groups, self.responses)
        return self._cuts

    def members(self, cut: Cut) -> list[tuple[int, int]]:
        """(group, sample) of the rollout batch for each of the cut's R responses."""
        return [(self.chosen[g], self.present[g][r]) for g, r in cut.members]

    def all_members(self) -> list[tuple[int, int]]:
        """(group, sample) of every response that takes part."""
        return [(g, i) for g, kept in zip(self.chosen, self.present, strict=True) for i in kept]


class PackedGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` whose policy loss runs on packs. A subclass sets `cutter` and calls `policy_pass`."""

    # Optional or a union for TRL and transformers; set and of one kind once the trainer is built
    args: Any
    accelerator: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    processing_class: Any
    num_generations: int
    num_generations_eval: int

    cutter: Cutter
    step_flos = 0.0
    _cut: Cut | None = None  # the micro-batch that TRL's loss is about to ask for
    _outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]  # what it got: log-probs, entropies, mask
    _entropy_threshold = 0.0

    def policy_pass(self, model: torch.nn.Module, share: Share) -> torch.Tensor:
        """
        TRL's loss over the samples of `share`. Leaves the gradient of the loss of the whole step: that of all
        micro-batches of all processes taken as one.

        Returns:
            `torch.Tensor`: This process's part of the loss; the mean over processes is the step's loss.
        """
        samples = [share.rollout.samples[g][i] for g, i in share.all_members()]
        counts = [0 if self.mask_truncated_completions and sample.cut else len(sample.ids) for sample in samples]
        num_rows, num_tokens = self.sum_over_processes(len(counts)), self.sum_over_processes(sum(counts))
        entropy_tokens = num_tokens
        if self.top_entropy_quantile < 1.0:
            entropy_tokens = self._find_entropy_threshold(model, share)
        total = torch.zeros((), device=self.accelerator.device)
        parts, weights, metrics = [], [], self._metrics["train"]
        for cut in self.cuts(model, share.cuts(self.cutter)):
            inputs = self._loss_inputs(cut, share)
            micro_tokens = int(inputs["completion_mask"].sum())
            factor = 1.0 if cut.filler else accumulation_factor(
                self.loss_type, micro_rows=len(cut.members), micro_tokens=micro_tokens, step_rows=num_rows,
                step_tokens=num_tokens, num_processes=self.accelerator.num_processes,
            )  # fmt: skip
            self.current_gradient_accumulation_steps = factor
            # TRL rescales the rollout batch's tokens to one accumulation window: undone, these are the step's
            inputs["num_items_in_batch"] = torch.tensor(
                num_tokens * self.args.steps_per_generation / factor, device=self.accelerator.device
            )
            coefficient = self._entropy_coefficient()
            self._metrics["train"] = defaultdict(list)
            with self._gather_of_unequal_rows():
                loss = self._compute_loss(model, inputs)
            loss = loss + self._entropy_correction(coefficient, factor, entropy_tokens, inputs["completion_mask"])
            parts.append(self._metrics["train"])
            weights.append(micro_tokens)
            self.accelerator.backward(loss)
            total += loss.detach()
            self._keep_old_log_probs(cut, share)
        self._metrics["train"] = metrics
        # Each is a mean over the micro-batches of that number on all processes
        of_all = self.accelerator.reduce(torch.tensor(weights, device=self.accelerator.device), reduction="sum")
        merged = merge_micro_batches(list(zip(parts, of_all.tolist(), strict=True)))
        merged.pop("policy_loss", None)  # TRL's, scaled by the micro-batch
        merged["policy/loss"] = self.mean_over_processes(total)
        self.add_metrics(merged)
        return total

    @contextlib.contextmanager
    def _gather_of_unequal_rows(self) -> Iterator[None]:
        """
        For its metrics TRL's loss gathers one value per response, and here processes have different numbers of them:
        shorter ones are filled up with NaN, which its means, minimum and maximum leave out. A filler has nothing else.
        """
        assert self._cut is not None
        gather, pad, filler = self.accelerator.gather, self.accelerator.pad_across_processes, self._cut.filler

        def gather_padded(values: torch.Tensor) -> torch.Tensor:
            values = torch.full_like(values, torch.nan) if filler and values.is_floating_point() else values
            return gather(pad(values, dim=0, pad_index=torch.nan))

        self.accelerator.gather = gather_padded
        try:
            yield
        finally:
            del self.accelerator.gather  # what hides the method

    def cuts(self, model: torch.nn.Module, cuts: list[Cut]) -> Iterator[Cut]:
        """The micro-batches of a pass with gradients; all but the last keep their gradients to their process."""
        num_tokens = 0
        for cut in cuts:
            num_tokens += cut.pack.input_ids.numel()
            self.accelerator.gradient_state._set_sync_gradients(cut.last)
            with contextlib.nullcontext() if cut.last else self.accelerator.no_sync(model):
                yield cut
        num_tokens = self.sum_over_processes(num_tokens)
        self.add_flos(model, num_tokens)
        self.add_metrics({"tokens/policy": num_tokens})

    def no_grad_pass(self, model: torch.nn.Module, share: Share, store: dict[tuple[int, int], torch.Tensor]) -> None:
        """Log-probs of every response of `share` into `store`."""
        with torch.no_grad():
            for cut in share.cuts(self.cutter):
                logps, _, _ = log_probs(model, cut.pack, compute_entropy=False)
                if cut.filler:
                    continue
                lengths = cut.pack.lengths.tolist()
                for row, length, member in zip(logps.cpu(), lengths, share.members(cut), strict=True):
                    store[member] = row[:length]

    # ---- What TRL's loss asks for ----

    def _get_per_token_logps_and_entropies(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple:
        """From the packed forward of the present micro-batch: `[R, L]` each, no auxiliary loss."""
        assert self._cut is not None
        logps, entropies, mask = log_probs(model, self._cut.pack)
        if self._cut.filler:  # in the graph, but 0: far from its old log-probs a ratio would overflow
            logps, entropies = logps * 0.0, None if entropies is None else entropies * 0.0
        self._outputs = logps, entropies, mask
        return logps, entropies, None

    def _loss_inputs(self, cut: Cut, share: Share) -> dict[str, torch.Tensor]:
        """TRL's inputs of the loss for one micro-batch: R responses, padded to the longest, L."""
        self._cut = cut
        rollout, members = share.rollout, share.members(cut)
        if cut.filler:
            return self._filler_inputs(cut)
        assert rollout.advantages is not None
        mask = torch.arange(int(cut.pack.lengths.max())) < cut.pack.lengths[:, None]
        if self.mask_truncated_completions:
            mask &= ~torch.tensor([rollout.samples[g][i].cut for g, i in members])[:, None]
        inputs = {
            "prompt_ids": torch.zeros(len(members), 0, dtype=torch.long),
            "prompt_mask": torch.zeros(len(members), 0, dtype=torch.long),
            "completion_ids": torch.zeros(mask.shape, dtype=torch.long),  # only its shape is read
            "completion_mask": mask.long(),
            "advantages": torch.stack([rollout.advantages[g, i] for g, i in members]),
        }
        for name, logps in (("old_per_token_logps", rollout.old_logps), ("ref_per_token_logps", rollout.ref_logps)):
            if all(member in logps for member in members):
                inputs[name] = pad_sequence([logps[member] for member in members], batch_first=True)
        return {name: value.to(self.accelerator.device) for name, value in inputs.items()}

    def _filler_inputs(self, cut: Cut) -> dict[str, torch.Tensor]:
        """Inputs of a loss that is 0: every token is masked."""
        shape = (1, int(cut.pack.lengths.max()))
        ids, nothing = torch.zeros(shape, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long)
        zeros = torch.zeros(shape)
        inputs = {
            "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": ids, "completion_mask": ids,
            "advantages": torch.zeros(1), "old_per_token_logps": zeros, "ref_per_token_logps": zeros,
        }  # fmt: skip
        return {name: value.to(self.accelerator.device) for name, value in inputs.items()}

    def _keep_old_log_probs(self, cut: Cut, share: Share) -> None:
        """With several iterations, the first one's log-probs are the old ones of the next."""
        if self.num_iterations > 1 and not cut.filler:
            lengths = cut.pack.lengths.tolist()
            for row, length, member in zip(self._outputs[0].detach().cpu(), lengths, share.members(cut), strict=True):
                share.rollout.old_logps.setdefault(member, row[:length])

    # ---- Entropy: TRL's terms are those of a micro-batch; here they become those of the step ----

    def _find_entropy_threshold(self, model: torch.nn.Module, share: Share) -> int:
        """The step's quantile of the entropy, for `top_entropy_quantile`; returns the number of tokens above it."""
        kept = []
        with torch.no_grad():
            for cut in share.cuts(self.cutter):
                _, entropies, _ = log_probs(model, cut.pack)
                assert entropies is not None
                kept.append(entropies[self._loss_inputs(cut, share)["completion_mask"].bool()].float())
        padded = self.accelerator.pad_across_processes(torch.cat(kept), dim=0, pad_index=-1)
        values = self.accelerator.gather(padded)
        values = values[values >= 0]  # entropies are; the padding is not
        self._entropy_threshold = (
            float(values.quantile(1 - self.top_entropy_quantile)) if values.numel() else torch.inf
        )
        return int((values >= self._entropy_threshold).sum())

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        """`[R, L]` bool: the tokens above the quantile of the whole step, not of the micro-batch."""
        return (entropies >= self._entropy_threshold) & mask.bool()

    def _entropy_coefficient(self) -> float:
        """The coefficient that TRL's loss is about to use."""
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0
        return self.entropy_coef

    def _entropy_correction(
        self, coefficient: float, factor: float, step_tokens: int, mask: torch.Tensor
    ) -> torch.Tensor | float:
        """
        Makes the entropy bonus a token mean over the step. TRL has subtracted `coefficient * mean / factor`, with the
        mean of the micro-batch; what that micro-batch adds to the step's mean is `mean * tokens * processes /
        step_tokens`.
        """
        entropies = self._outputs[1]
        if coefficient == 0.0 or entropies is None:
            return 0.0
        if self.top_entropy_quantile < 1.0:
            mask = self.get_high_entropy_mask(entropies, mask, 0.0)
        num_tokens = mask.sum()
        mean = (entropies * mask).sum() / num_tokens.clamp(min=1)
        return -coefficient * mean * (num_tokens * self.accelerator.num_processes / max(step_tokens, 1) - 1 / factor)

    # ---- Numbers ----

    def sum_over_processes(self, value: int) -> int:
        """The sum of a count over all processes."""
        if self.accelerator.num_processes == 1:
            return value
        return int(self.accelerator.reduce(torch.tensor([value], device=self.accelerator.device), reduction="sum"))

    def mean_over_processes(self, value: torch.Tensor) -> float:
        """The mean of a scalar over all processes."""
        return float(self.accelerator.reduce(value.detach().clone(), reduction="mean"))

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """Values of this step, to be averaged over the steps until the next log."""
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def add_flos(self, model: torch.nn.Module, num_tokens: float) -> None:
        """transformers' own estimate of a forward and backward: 6 operations per token and parameter."""
        self.step_flos += 6.0 * num_tokens * sum(p.numel() for p in model.parameters())

    def floating_point_ops(self, inputs: Any) -> float:
        """Operations of this step's updates, all models."""
        return self.step_flos
