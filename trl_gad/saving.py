"""A trainer's checkpoints, its saved models and what goes to the Hub: transformers' hooks, filled in by `checkpoint` and
`hub`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import PeftModel

from trl_gad import checkpoint, hub
from trl_gad.packed_grpo import PackedGRPOTrainer


if TYPE_CHECKING:
    from trl_gad.trainer import GADTrainer


class SavingTrainer(PackedGRPOTrainer):
    """`PackedGRPOTrainer` that saves and loads two models as one. `GADTrainer` is the one that has them."""

    @property
    def _gad(self) -> "GADTrainer":
        return cast("GADTrainer", self)

    _unfinished: str | None = None  # stands for the run's folder while a checkpoint is written

    def train(
        self,
        resume_from_checkpoint: "str | Path | bool | None" = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """
        As [`~transformers.Trainer.train`]; `True` means the newest checkpoint that is whole.

        Raises:
            ValueError: the checkpoint is not whole, or this run cannot go on from it.
        """
        folder = checkpoint.to_resume(resume_from_checkpoint, self._gad)
        return super().train(folder, trial, ignore_keys_for_eval)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._unfinished is None else self._unfinished

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """As transformers writes it, but whole or absent: older ones are removed, and it is uploaded, after that."""
        run_dir = self._get_output_dir(trial)
        self._unfinished = checkpoint.begin(self._gad, run_dir)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._unfinished = None
        folder = checkpoint.finish(self._gad, run_dir)
        if self.args.push_to_hub:
            self._push_from_checkpoint(folder)
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            keep = [folder, *([best] if best else []), *hub.being_uploaded(self._gad)]
            checkpoint.remove_old(run_dir, keep, self.args.save_total_limit)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """The policy as TRL saves it, the discriminator beside it in `discriminator/`."""
        output_dir = str(self.args.output_dir) if output_dir is None else output_dir
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            checkpoint.save_models(output_dir, self._gad.discriminator, self._gad.given_args)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        checkpoint.save_run(output_dir, self._gad)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if isinstance(self._gad.policy, PeftModel):
            # transformers would take the discriminator's folder for one more adapter of the policy
            self._gad.policy.load_adapter(
                resume_from_checkpoint, self._gad.policy.active_adapters[0], is_trainable=True
            )
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        checkpoint.load_discriminator(resume_from_checkpoint, self._gad.discriminator)

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint_folder)
        if checkpoint_folder is not None:
            checkpoint.load_run(checkpoint_folder, self._gad)

    def _load_best_model(self) -> None:
        self._finish_current_push()  # transformers may remove the other checkpoints after this
        super()._load_best_model()
        checkpoint.load_discriminator(str(self.state.best_model_checkpoint), self._gad.discriminator)

    # ---- Hub ----

    uploads: "tuple[str, ...]" = ()  # checkpoints of the push in progress

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._unfinished is None:  # transformers calls it before the checkpoint is whole
            hub.push_checkpoint(self._gad, checkpoint_folder)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: "str | list[str] | None" = None,
    ) -> None:
        """
        Write `README.md`: TRL's card with the data, the settings, the last metrics and how to load both models.

        Args:
            model_name (`str`, *optional*):
                Name of the model.
            dataset_name (`str`, *optional*):
                The training data's name on the Hub. `None`: as the dataset itself knows it.
            tags (`str` or `list[str]`, *optional*):
                Further tags.
        """
        dataset_name = hub.dataset_name(dataset_name, self.train_dataset)
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            hub.complete_card(self._gad, model_name, dataset_name)
