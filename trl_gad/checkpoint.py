"""What a run adds to transformers' checkpoint folder, and how it comes back.

checkpoint-N/                  as transformers and TRL write it: policy, its optimizer and schedule, random states
  discriminator/               the discriminator, loadable on its own
  gad_state.pt                 its optimizer and schedule, counters
  reference.safetensors        the snapshot that the KL term refers to (what the policy trains), from stage 2 on
  rollout_RANK.pt              samples of a rollout batch that later steps still train on, when one is in work
  manifest.json                names and sizes of all these files, written last

A checkpoint is whole or absent: it is written in `_saving/` and renamed when all of it is on the disk. Neither
transformers' search for checkpoints nor its uploads look into that folder.
"""

import copy
import errno
import json
import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel, load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from trl_gad.batch import Rollout, Sample
from trl_gad.discriminator import HEAD_FILE, Discriminator


if TYPE_CHECKING:
    from trl_gad.trainer import GADTrainer

logger = logging.getLogger(__name__)

DISCRIMINATOR_FOLDER = "discriminator"
STATE_FILE = "gad_state.pt"
REFERENCE_FILE = "reference.safetensors"
MANIFEST_FILE = "manifest.json"
UNFINISHED_FOLDER = "_saving"  # uploads leave out what begins with an underscore
REPLACED_FOLDER = "replaced"  # in it: a checkpoint of the same step, until the new one has its name
# Patterns of what is the run's and no model's
RUN_FILES = (
    "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", TRAINER_STATE_NAME, "entropy_ctrl_state.json",
    STATE_FILE, REFERENCE_FILE, "rollout_*.pt", MANIFEST_FILE,
)  # fmt: skip
SPARE_BYTES = 64 * 2**20  # tokenizer, configurations, logs of the run, random states


def save_models(folder: str, discriminator: Discriminator, args: Any) -> None:
    """The discriminator beside the policy, and the arguments as the user gave them, without the Hub's token."""
    discriminator.save_pretrained(os.path.join(folder, DISCRIMINATOR_FOLDER))
    args = copy.copy(args)
    args.hub_token = None  # the file goes to the Hub
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
    """The state that `save_run` wrote, which `to_resume` has checked. The trainer's optimizers exist already."""
    path = Path(folder)
    state = torch.load(path / STATE_FILE, map_location="cpu", weights_only=True)
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
        trainer.rollout = _load_rollout(path / f"rollout_{trainer.accelerator.process_index}.pt", trainer)
        trainer.take_up(trainer.rollout.groups)


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


def _check_processes(folder: str, state: dict[str, Any], trainer: "GADTrainer") -> None:
    """Samples in work belong to the process that wrote them; without any, only random states are lost."""
    before, now = state["num_processes"], trainer.accelerator.num_processes
    if before == now:
        return
    if state["has_rollout"]:
        raise ValueError(
            f"{folder} was saved by {before} processes in the middle of a rollout batch and can be resumed by as "
            f"many, got {now}. Resume from a checkpoint at the end of a rollout batch, or with the same number of "
            "processes."
        )
    logger.warning(
        "%s was saved by %d processes and is resumed by %d: dropout draws other numbers from here on.",
        folder, before, now,
    )  # fmt: skip


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


# ---- Whole or absent ----


def begin(trainer: "GADTrainer", run_dir: str) -> str:
    """
    Make ready for a checkpoint. Every process calls it.

    Returns:
        `str`: The folder that stands for `run_dir` until `finish`.

    Raises:
        OSError: there is not enough space, on all processes. Nothing was written, and no checkpoint removed.
    """
    problem: list[OSError | None] = [None]
    if trainer.args.should_save:
        os.makedirs(run_dir, exist_ok=True)
        clear_unfinished(run_dir)
    if trainer.accelerator.is_main_process:
        problem = [_lack_of_space(trainer, run_dir)]
    error = broadcast_object_list(problem)[0]
    if error is not None:
        raise error
    trainer.accelerator.wait_for_everyone()
    return os.path.join(run_dir, UNFINISHED_FOLDER)


def finish(trainer: "GADTrainer", run_dir: str) -> str:
    """
    Give the checkpoint that lies in the unfinished folder its name. Every process calls it, after its own files.

    Returns:
        `str`: The checkpoint's folder.
    """
    args, state = trainer.args, trainer.state
    name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    if state.best_global_step and args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST):
        # As transformers sets it, which has looked into the unfinished folder
        best = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if state.best_global_step == state.global_step or os.path.exists(best):
            state.best_model_checkpoint = best
    trainer.accelerator.wait_for_everyone()
    if args.should_save:
        unfinished = Path(run_dir, UNFINISHED_FOLDER)
        state.save_to_json(str(unfinished / name / TRAINER_STATE_NAME))
        _write_manifest(unfinished / name)
        if Path(run_dir, name).exists():  # of a run that was resumed from further back
            (unfinished / REPLACED_FOLDER).mkdir()
            os.rename(Path(run_dir, name), unfinished / REPLACED_FOLDER / name)
        os.rename(unfinished / name, Path(run_dir, name))
        _sync(run_dir)
        shutil.rmtree(unfinished)
    trainer.accelerator.wait_for_everyone()
    return os.path.join(run_dir, name)


def clear_unfinished(run_dir: str | Path) -> None:
    """Remove what a save that did not end has left."""
    unfinished = Path(run_dir, UNFINISHED_FOLDER)
    if not unfinished.is_dir():
        return
    for replaced in (unfinished / REPLACED_FOLDER).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if not Path(run_dir, replaced.name).exists():
            os.rename(replaced, Path(run_dir, replaced.name))
    shutil.rmtree(unfinished)
    logger.warning("Removed %s: a checkpoint that was not written to its end.", unfinished)


def remove_old(run_dir: str | Path, keep: Iterable[str | Path], limit: int | None) -> None:
    """
    Remove checkpoints until `limit` are left: damaged ones first, then the oldest.

    Args:
        run_dir: Where they are.
        keep: Those that stay, counted in the limit: the newest, the best, those being uploaded.
        limit: `save_total_limit`; `None` or 0: remove none.
    """
    if not limit or limit < 0:
        return
    kept = {Path(folder).resolve() for folder in keep}
    others = [folder for folder in _checkpoints(run_dir) if folder.resolve() not in kept]
    # The number is no age: a run that was resumed from further back comes after larger ones
    others.sort(key=lambda folder: (what_is_wrong(folder) is None, folder.stat().st_mtime_ns, _step(folder)))
    for folder in others[: max(len(others) + len(kept) - limit, 0)]:
        shutil.rmtree(folder)


def what_is_wrong(folder: str | Path) -> str | None:
    """Why `folder` is not a whole checkpoint, or `None`."""
    folder = Path(folder)
    if not folder.is_dir():
        return "there is no such folder"
    manifest = folder / MANIFEST_FILE
    if not manifest.is_file():
        return f"{MANIFEST_FILE} is missing"
    try:
        files = json.loads(manifest.read_text())["files"]
    except ValueError:
        return f"{MANIFEST_FILE} is cut off"
    for name, size in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        present = (folder / name).stat().st_size
        if present < size:
            return f"{name} is cut off ({present} of {size} bytes)"
    return None


def to_resume(asked: str | Path | bool | None, trainer: "GADTrainer") -> str | None:
    """
    The checkpoint that `train(resume_from_checkpoint=...)` means. Every process calls it.

    Args:
        asked: A folder; `True` for the newest whole checkpoint of the run's folder; `None` or `False` for none.

    Raises:
        ValueError: it is not whole, there is none, or this run cannot go on from it. Nothing is loaded by then.
    """
    found: list[Any] = [None]
    if trainer.args.should_save:
        clear_unfinished(str(trainer.args.output_dir))
    if trainer.accelerator.is_main_process:
        try:
            found = [_find(asked, trainer)]
        except ValueError as error:
            found = [error]
    result = broadcast_object_list(found)[0]
    if isinstance(result, ValueError):
        raise result
    return result


def _find(asked: str | Path | bool | None, trainer: "GADTrainer") -> str | None:
    if asked is None or asked is False:
        return None
    folder = str(_newest_whole(str(trainer.args.output_dir)) if asked is True else asked)
    wrong = what_is_wrong(folder)
    if wrong is not None:
        raise ValueError(
            f"{folder} is not a whole checkpoint: {wrong}. Pass another one, or resume_from_checkpoint=True for the "
            "newest whole one; models that are whole can start a new run (`model=` and `discriminator=`)."
        )
    if not Path(folder, STATE_FILE).is_file():
        raise ValueError(
            f"{folder} holds the models alone (save_only_model=True), and a run goes on with its optimizers. Start a "
            "new run from the saved models (`model=` and `discriminator=`)."
        )
    # Mapped: the optimizer's tensors in it are not read
    state = torch.load(Path(folder, STATE_FILE), map_location="cpu", weights_only=True, mmap=True)
    _check_same_order(state, trainer)
    _check_processes(folder, state, trainer)
    return folder


def _newest_whole(run_dir: str) -> Path:
    """The whole checkpoint of the latest step."""
    reasons = []
    for folder in sorted(_checkpoints(run_dir), key=_step, reverse=True):
        wrong = what_is_wrong(folder)
        if wrong is None:
            return folder
        logger.warning("%s is not a whole checkpoint and is passed over: %s.", folder, wrong)
        reasons.append(f"{folder.name}: {wrong}")
    raise ValueError(
        f"resume_from_checkpoint=True, and there is no whole checkpoint in {run_dir}"
        f"{' (' + '; '.join(reasons) + ')' if reasons else ''}. Leave it out to start a new run."
    )


def _checkpoints(run_dir: str | Path) -> list[Path]:
    folders = Path(run_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return [path for path in folders if path.is_dir() and path.name.rpartition("-")[2].isdecimal()]


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _write_manifest(folder: Path) -> None:
    """Bring all files to the disk, and only then the list of them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    (folder / MANIFEST_FILE).write_text(json.dumps({"files": sizes}, indent=2) + "\n")
    _sync(folder / MANIFEST_FILE)
    for inner in {path.parent for path in files} | {folder, folder.parent}:
        _sync(inner)


def _sync(path: str | Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems know no sync of a folder
            raise
    finally:
        os.close(descriptor)


def _lack_of_space(trainer: "GADTrainer", run_dir: str) -> OSError | None:
    needed, free = bytes_needed(trainer), shutil.disk_usage(run_dir).free
    if free >= needed:
        return None
    return OSError(
        errno.ENOSPC,
        f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step} needs about {needed:,} bytes in {run_dir} and {free:,} "
        "bytes are free. Nothing was written and no checkpoint removed. Make room and go on from the last one with "
        "train(resume_from_checkpoint=True); a lower `save_total_limit` or `save_only_model=True` need less. Beside "
        "`save_total_limit` checkpoints there must be room for one more: an old one goes when the new one is whole.",
    )


def bytes_needed(trainer: "GADTrainer") -> int:
    """About what the next checkpoint takes."""
    return bytes_of_tensors(trainer) * 102 // 100 + SPARE_BYTES


def bytes_of_tensors(trainer: "GADTrainer") -> int:
    """Of both models, their optimizers and the reference, as far as they are saved."""
    policy, discriminator = trainer.policy, trainer.discriminator
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    tensors: list[torch.Tensor] = []
    for model, backbone in ((policy, policy), (discriminator, discriminator.backbone)):
        adapters_only = isinstance(backbone, PeftModel)
        tensors += [p for p in model.parameters() if p.requires_grad or not adapters_only]
    if not trainer.args.save_only_model:
        for optimizer in (trainer.optimizer, trainer.adversary.optimizer):
            for values in optimizer.state.values():
                tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
        if trainer.reference is not None:
            tensors += trained
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
