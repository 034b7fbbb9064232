"""What transformers' training loop sees of a run: one item per optimizer step, and the end of each step."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import ProgressCallback, TrainerCallback
from transformers.trainer_utils import SaveStrategy

from trl_gad.data import RolloutLoader
from trl_gad.schedule import DISCRIMINATOR, GAD, WARMUP


if TYPE_CHECKING:
    from trl_gad.trainer import GADTrainer

LABELS = {DISCRIMINATOR: "discriminator alone", WARMUP: "warm-up", GAD: "adversarial"}


class StepLoader:
    """What transformers' loop iterates over: one item per optimizer step, from the present step on."""

    def __init__(self, trainer: "GADTrainer"):
        self.trainer = trainer
        self.dataset = trainer.train_dataset

    def __len__(self) -> int:
        return self.trainer.step_plan.max_steps

    def rollouts(self, start: int) -> RolloutLoader:
        """This process's groups of every rollout batch from `start` on."""
        trainer, args = self.trainer, self.trainer.args
        return RolloutLoader(
            trainer.train_dataset,
            trainer.reader,
            rows=trainer.rows,
            prompts_per_rollout=args.prompts_per_rollout,
            seed=args.seed if args.data_seed is None else args.data_seed,
            start=start,
            stop=trainer.step_plan.num_rollouts,
            shuffle=bool(args.shuffle_dataset),
            steps_per_rollout=args.steps_per_rollout,
            costs=trainer.row_costs,
            rank=trainer.accelerator.process_index,
            num_processes=trainer.accelerator.num_processes,
            num_workers=args.dataloader_num_workers,
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        trainer = self.trainer
        number = trainer.state.global_step
        first = trainer.step_plan.at(number)
        rollouts = iter(self.rollouts(first.rollout if first.first else first.rollout + 1))
        while number < trainer.step_plan.max_steps:
            step = trainer.step_plan.at(number)  # the plan may have changed
            number += 1
            groups = None
            if step.first:
                with trainer.clock.phase("data"):
                    index, groups = next(rollouts)
                assert index == step.rollout
            yield {"step": step, "groups": groups}


class StepEnd(TrainerCallback):
    """Closes the clock of a step, and turns the single epoch of transformers' loop into those of the dataset."""

    def __init__(self, trainer: "GADTrainer"):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, plan = self.trainer, self.trainer.step_plan
        trainer.clock.close("optimizer")
        seconds = trainer.clock.reset()
        trainer.add_metrics(seconds)
        self._show(state, seconds)
        step = plan.at(state.global_step - 1)
        before, after = (number * args.prompts_per_rollout for number in (step.rollout, step.rollout + step.last))
        num_rows = len(trainer.rows)
        state.epoch = after / num_rows
        if before // num_rows < after // num_rows and state.global_step < state.max_steps:
            control.should_save |= args.save_strategy == SaveStrategy.EPOCH
            control.should_evaluate |= args.eval_strategy == "epoch"
            control.should_log |= args.logging_strategy == "epoch"

    def _show(self, state: Any, seconds: dict[str, float]) -> None:
        """Stage, length of the run and slowest phase, on the progress bar where there is one."""
        phases = {name.removeprefix("time/"): value for name, value in seconds.items() if name != "time/step"}
        slowest = max(phases, key=lambda name: phases[name])
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.total = state.max_steps  # less when the warm-up was ended early
                callback.training_bar.set_description(LABELS[self.trainer.step_plan.at(state.global_step - 1).stage])
                callback.training_bar.set_postfix_str(f"mostly {slowest}, {phases[slowest]:.1f} s")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.clock.restart()
