"""What a run adds to transformers' checkpoint folder, and how it comes back.

checkpoint-N/                  as transformers and TRL write it: policy, its optimizer and schedule, random states
  discriminator/               the discriminator, loadable on its own
  gad_state.pt                 its optimizer and schedule, counters
  reference.safetensors        the snapshot that the KL term refers to (what the policy trains), from stage 2 on
  rollout_RANK.pt              samples of a rollout batch that later steps still train on, when one is in work
"""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel, load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers.trainer import TRAINING_ARGS_NAME

from trl_gad.batch import Rollout, Sample
from trl_gad.discriminator import HEAD_FILE, Discriminator


if TYPE_CHECKING:
    from trl_gad.trainer import GADTrainer

DISCRIMINATOR_FOLDER = "discriminator"
STATE_FILE = "gad_state.pt"
REFERENCE_FILE = "reference.safetensors"


def save_models(folder: str, discriminator: Discriminator, args: Any) -> None:
    """The discriminator beside the policy, and the arguments as the user gave them."""
    discriminator.save_pretrained(os.path.join(folder, DISCRIMINATOR_FOLDER))
    torch.save(args, os.path.join(folder, TRAINING_ARGS_NAME))


def load_discriminator(folder: str | Path, discriminator: Discriminator) -> None:
    """The weights of a checkpoint into the live discriminator."""
    saved = Path(folder) / DISCRIMINATOR_FOLDER
    if isinstance(discriminator.backbone, PeftModel):  # its base is frozen, and may have no folder to load it from
        set_peft_model_state_dict(discriminator.backbone, load_peft_weights(str(saved), device="cpu"))
        discriminator.score.load_state_dict(load_file(saved / HEAD_FILE))
        return
    loaded = Discriminator.from_pretrained(saved, dtype=discriminator.base.dtype)
    discriminator.load_state_dict(loaded.state_dict())


def save_run(folder: str, trainer: "GADTrainer") -> None:
    """All of the run that is neither a model nor transformers' own state. Every process calls it."""
    path = Path(folder)
    if trainer.args.should_save:
        state = {
            "adversary": trainer.adversary.state_dict(),
            "plan": asdict(trainer.step_plan),
            "warmup_ended_after": trainer.warmup_ended_after,
            "data": {"num_rows": len(trainer.rows), "prompts_per_rollout": trainer.args.prompts_per_rollout},
            "has_reference": trainer.reference is not None,
            "has_rollout": trainer.rollout is not None,
            "num_policy_skipped": trainer.num_policy_skipped,
            "num_processes": trainer.accelerator.num_processes,
        }
        torch.save(state, path / STATE_FILE)
        if trainer.reference is not None:
            save_file(_reference_state(trainer), path / REFERENCE_FILE)
    if trainer.rollout is not None:
        path.mkdir(parents=True, exist_ok=True)
        rollout = trainer.rollout
        state = {name: vars(rollout)[name] for name in ("index", "advantages", "old_logps", "ref_logps")}
        state["samples"] = [[asdict(sample) for sample in row] for row in rollout.samples]
        state["rows"] = [group.row for group in rollout.groups]
        torch.save(state, path / f"rollout_{trainer.accelerator.process_index}.pt")


def load_run(folder: str, trainer: "GADTrainer") -> None:
    """
    The state that `save_run` wrote; the trainer's models and optimizers exist already.

    Raises:
        ValueError: a rollout batch is in work and the number of processes is another one.
    """
    path = Path(folder)
    state = torch.load(path / STATE_FILE, map_location="cpu", weights_only=True)
    _check_same_order(state, trainer)
    ended_after: int | None = state["warmup_ended_after"]
    if ended_after is not None:
        trainer.warmup_ended_after = ended_after
        trainer.set_plan(trainer.step_plan.with_warmup_ended(ended_after))
    trainer.adversary.load_state_dict(state["adversary"])
    trainer.num_policy_skipped = state["num_policy_skipped"]
    if state["has_reference"]:
        trainer.take_snapshot()
        own = _reference_state(trainer)
        for name, value in load_file(path / REFERENCE_FILE).items():
            own[name].copy_(value)
    if state["has_rollout"]:
        if state["num_processes"] != trainer.accelerator.num_processes:
            raise ValueError(
                f"{folder} was saved by {state['num_processes']} processes in the middle of a rollout batch and can be "
                f"resumed by as many, got {trainer.accelerator.num_processes}. Resume from a checkpoint at the end of "
                "a rollout batch, or with the same number of processes."
            )
        trainer.rollout = _load_rollout(path / f"rollout_{trainer.accelerator.process_index}.pt", trainer)


def _check_same_order(state: dict[str, Any], trainer: "GADTrainer") -> None:
    """What says which rows a step trains on must be as it was; only the length of the run may change."""
    fields = ("num_discriminator_rollouts", "steps_per_rollout", "num_iterations")
    saved = {name: state["plan"][name] for name in fields} | state["data"]
    present = {name: vars(trainer.step_plan)[name] for name in fields} | {
        "num_rows": len(trainer.rows),
        "prompts_per_rollout": trainer.args.prompts_per_rollout,
    }
    for name, value in saved.items():
        if present[name] != value:
            raise ValueError(
                f"A run resumes with the rows and batches it was started with: {name} was {value} and is "
                f"{present[name]}. Restore the dataset and the batch settings, or start a new run from the saved "
                "models (`model=` and `discriminator=`)."
            )


def _load_rollout(path: Path, trainer: "GADTrainer") -> Rollout:
    """The rollout batch in work: its prompts are read again, its samples are those of the file."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    dataset: Any = trainer.train_dataset
    groups = [trainer.reader.read(row, dataset[row]) for row in state.pop("rows")]
    samples = [[Sample(**sample) for sample in row] for row in state.pop("samples")]
    return Rollout(groups=groups, samples=samples, **state)


def _reference_state(trainer: "GADTrainer") -> dict[str, torch.Tensor]:
    """The parameters of the reference that are its own, by name: those the policy trains."""
    assert trainer.reference is not None
    policy = {name for name, parameter in trainer.policy.named_parameters() if parameter.requires_grad}
    reference = trainer.accelerator.unwrap_model(trainer.reference)
    return {name: parameter.data for name, parameter in reference.named_parameters() if name in policy}
