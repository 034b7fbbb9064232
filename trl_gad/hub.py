"""What goes to the Hub: both models in one repository, and a card that says what they are.

README.md                      the card
config.json, *.safetensors ... the policy, as any model
discriminator/                 the discriminator: `Discriminator.from_pretrained(repo, subfolder="discriminator")`
last-checkpoint/ or checkpoint-N/   with `hub_strategy` "checkpoint" or "all_checkpoints"
"""

import logging
import math
import shutil
from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from huggingface_hub import HfApi
from huggingface_hub.utils import HFValidationError, validate_repo_id
from peft import PeftModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy, SchedulerType
from transformers.utils.hub import PushInProgress

from trl_gad.checkpoint import DISCRIMINATOR_FOLDER, RUN_FILES
from trl_gad.forward import is_vision_model


if TYPE_CHECKING:
    from trl_gad.trainer import GADTrainer

logger = logging.getLogger(__name__)

CARD_FILE = "README.md"
LOCAL_MODEL = "a model that is not on the Hub"
# Of the last log of training that go onto the card; evaluations go there whole
METRICS = ("loss", "reward", "kl", "entropy", "warmup/", "discriminator/", "completions/mean_length")


def push_checkpoint(trainer: "GADTrainer", folder: str) -> None:
    """
    Upload a whole checkpoint as `hub_strategy` says, beside the training. Left out while the last upload is still
    under way, unless `hub_always_push`.
    """
    args, state = trainer.args, trainer.state
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return
    progress: Any = trainer.push_in_progress
    if progress is not None and not progress.is_done() and not args.hub_always_push:
        return
    trainer.callback_handler.on_push_begin(args, state, trainer.control)
    copy_models(folder, str(args.output_dir))
    if args.save_strategy == SaveStrategy.STEPS:
        message = f"Training in progress, step {state.global_step}"
    else:
        message = f"Training in progress, epoch {int(state.epoch or 0)}"
    api = HfApi(token=args.hub_token, library_name="trl-gad")  # one: its uploads follow each other
    common: dict[str, Any] = dict(repo_id=trainer.hub_model_id, revision=args.hub_revision, run_as_future=True)
    ignored = ["_*", f"{PREFIX_CHECKPOINT_DIR}-*"]
    jobs: Any = [
        api.upload_folder(folder_path=str(args.output_dir), commit_message=message, ignore_patterns=ignored, **common)
    ]
    if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        name = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else Path(folder).name
        message += ", checkpoint"
        jobs.append(api.upload_folder(folder_path=folder, path_in_repo=name, commit_message=message, **common))
    for job in jobs:
        job.add_done_callback(_report)
    if progress is not None and not progress.is_done():
        progress.jobs.extend(jobs)
        trainer.uploads = (*trainer.uploads, folder)
    else:
        trainer.push_in_progress = PushInProgress(jobs)
        trainer.uploads = (folder,)


def _report(job: "Future[Any]") -> None:
    """A failed upload does not stop a run, and transformers would not tell."""
    error = None if job.cancelled() else job.exception()
    if error is not None:
        logger.error("An upload to the Hub failed, the run goes on: %s", error)


def being_uploaded(trainer: "GADTrainer") -> tuple[str, ...]:
    """Checkpoints that an upload still reads."""
    if not trainer.uploads:
        return ()
    progress: Any = trainer.push_in_progress
    return () if progress.is_done() else trainer.uploads


def copy_models(folder: str, to: str) -> None:
    """Both models and what belongs to them out of a checkpoint, without the state of the run."""
    for path in Path(folder).iterdir():
        if path.is_dir():
            shutil.copytree(path, Path(to, path.name), dirs_exist_ok=True)
        elif not any(fnmatch(path.name, pattern) for pattern in RUN_FILES):
            shutil.copy(path, to)


def dataset_name(given: str | None, dataset: Any) -> str | None:
    """
    The name of the training data on the Hub, or `None`.

    Args:
        given: What the user calls it. A path is no name: it says nothing to others.
        dataset: Asked where `given` is `None`: it knows the files it was loaded from.
    """
    if given is None and isinstance(dataset, Dataset):
        sources = [source.removeprefix("hf://datasets/") for source in dataset.info.download_checksums or {}
                   if source.startswith("hf://datasets/")]  # fmt: skip
        given = sources[0].partition("@")[0] if sources else None
    return given if given is not None and _is_public(given) else None


def _is_public(name: str) -> bool:
    """Whether `name` can be that of a repository, and is no path of this machine."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def complete_card(trainer: "GADTrainer", model_name: str | None, data: str | None) -> None:
    """Put what TRL's card does not know into it: the data, both models, the settings, the last metrics."""
    path = Path(str(trainer.args.output_dir), CARD_FILE)
    text = path.read_text(encoding="utf-8")
    base = trainer.policy.config._name_or_path
    if base and not _is_public(base):  # TRL leaves out folders, not paths of folders that are gone
        text = text.replace(f"base_model: {base}\n", "").replace(
            f"[{base}](https://huggingface.co/{base})", LOCAL_MODEL
        )
    text = text.replace("[None](https://huggingface.co/None)", LOCAL_MODEL)
    before, _, rest = text.partition("## Quick start")  # of a text model, for `pipeline`
    _, heading, rest = rest.partition("## Training procedure")
    procedure, versions, rest = rest.partition("### Framework versions")
    sections = [
        before.rstrip(),
        _loading(trainer, trainer.hub_model_id or model_name or "this-repository"),
        (heading + procedure).strip(),
        _data(trainer, data),
        _table("### Settings", ("Setting", "Value"), settings(trainer)),
        _table("### Last metrics", ("Metric", "Value"), last_metrics(trainer.state.log_history)),
        (versions + rest).rstrip(),
    ]
    path.write_text("\n\n".join(section for section in sections if section) + "\n", encoding="utf-8")


def _loading(trainer: "GADTrainer", repository: str) -> str:
    vision = is_vision_model(trainer.policy.config)
    auto = "AutoModelForImageTextToText" if vision else "AutoModelForCausalLM"
    processor = "AutoProcessor" if vision else "AutoTokenizer"
    name = "processor" if vision else "tokenizer"
    lines = [
        "## The two models", "",
        "The student, which is the model of this repository:", "",
        "```python",
        f"from transformers import {', '.join(sorted([auto, processor]))}", "",
        f'model = {auto}.from_pretrained("{repository}")',
        f'{name} = {processor}.from_pretrained("{repository}")',
        "```", "",
        f"The discriminator, in `{DISCRIMINATOR_FOLDER}/`. It scores how much a response looks like the teacher's:", "",
        "```python",
        "from trl_gad import Discriminator", "",
        f'discriminator = Discriminator.from_pretrained("{repository}", subfolder="{DISCRIMINATOR_FOLDER}")',
        "```",
    ]  # fmt: skip
    if isinstance(trainer.discriminator.backbone, PeftModel):
        lines += ["", "It is an adapter: pass `base_model=` where its base model has another place on your machine."]
    return "\n".join(lines)


def _data(trainer: "GADTrainer", data: str | None) -> str:
    name = "Data that is not on the Hub" if data is None else f"[{data}](https://huggingface.co/datasets/{data})"
    return f"### Data\n\n{name}: {len(trainer.rows):,} prompts with a teacher's response each."


def _table(heading: str, names: tuple[str, str], rows: dict[str, Any]) -> str:
    """Nothing where there are no rows."""
    if not rows:
        return ""
    lines = [heading, "", "| {} | {} |".format(*names), "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])


def settings(trainer: "GADTrainer") -> dict[str, str]:
    """What a reader wants to know of the run, by name. Holds no paths."""
    args, plan = trainer.given_args, trainer.step_plan
    discriminator = trainer.discriminator
    sizes = [sum(p.numel() for p in discriminator.parameters() if p.requires_grad or every) for every in (True, False)]
    kind = "adapters on " if isinstance(discriminator.backbone, PeftModel) else ""
    return {
        "Steps taken": f"{trainer.state.global_step} of {plan.max_steps}",
        "Stage 1: discriminator alone": _steps(min(plan.num_discriminator_rollouts, plan.max_steps)),
        "Stage 1: warm-up": f"{_steps(min(plan.gad_start, plan.max_steps) - plan.num_discriminator_rollouts)}, "
        f"learning rate {args.gad_warmup_learning_rate:g}",
        "Stage 2: adversarial": f"{_steps(plan.max_steps - plan.gad_start)}, learning rate {args.learning_rate:g}",
        "Discriminator": f"{kind}{type(discriminator.base).__name__}, {sizes[0]:,} parameters, {sizes[1]:,} of them "
        f"trained, learning rate {args.discriminator_learning_rate:g}",
        "Schedule": SchedulerType(args.lr_scheduler_type).value,
        "KL to the student after stage 1 (`beta`)": f"{args.beta:g}",
        "Samples per prompt (G)": str(args.num_generations),
        "Prompts per rollout batch": str(args.prompts_per_rollout),
        "Steps per rollout batch": str(args.steps_per_rollout * trainer.num_iterations),
        "Sampling temperature": f"{args.temperature:g}",
        "Longest prompt and response": f"{args.max_prompt_length} and {args.max_completion_length} tokens",
        "Policy loss": str(args.loss_type),
        "Seed": str(args.seed),
    }


def _steps(number: int) -> str:
    """Of a stage that the run may end before."""
    return "1 step" if number == 1 else f"{max(number, 0)} steps"


def last_metrics(history: list[dict[str, Any]]) -> dict[str, str]:
    """Of the last logged step of training, and of the last evaluation."""
    train = next((entry for entry in reversed(history) if "loss" in entry), {})
    held_out = next((entry for entry in reversed(history) if any(name.startswith("eval_") for name in entry)), {})
    chosen = {name: value for name, value in train.items() if name.startswith(METRICS)}
    chosen |= {
        name: value for name, value in held_out.items() if name.startswith("eval_") and not name.endswith("runtime")
    }
    shown = {
        name: f"{value:.4g}"
        for name, value in chosen.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }
    return {"step": str(train["step"]), **shown} if train else shown
