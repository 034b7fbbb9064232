"""The demo: GAD on drawn pictures from start to end, beside continued supervised training, with every fact checked."""

import copy
import time
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml
from PIL import Image, ImageDraw

from trl_gad import GADConfig, GADTrainer

from .arms import Data, Figures, StopByAccuracy, answer, continue_from, figures, load, ranking
from .student import load_student
from .world import rows


TARGET_RIGHT = 65.0  # percent of sampled answers wholly right: ends the warm-up
NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 3000, 100, 300


def read_settings(file: Path = Path(__file__).parents[1] / "demo.yaml") -> dict[str, Any]:
    """The demo's fields of `GADConfig`."""
    settings = yaml.safe_load(file.read_text())
    del settings["dataset"]  # of the recipe
    return settings


def config(settings: dict[str, Any], **changes: Any) -> GADConfig:
    return GADConfig(**settings | {"disable_tqdm": True} | changes)


def make_data(seed: int) -> Data:
    held_out = rows(NUM_VALIDATION + NUM_TEST, seed + 1, held_out=True)
    return Data(
        train=rows(NUM_TRAIN, seed),
        validation=held_out.select(range(NUM_VALIDATION)),
        test=held_out.select(range(NUM_VALIDATION, NUM_VALIDATION + NUM_TEST)),
    )


def run(args: GADConfig) -> None:
    out, data = Path(args.output_dir), make_data(args.seed)
    model, processor = load_student()
    watcher = StopByAccuracy(data.validation, TARGET_RIGHT, every=5, folder=out / "warmup")
    trainer = GADTrainer(
        model=model, args=args, train_dataset=data.train, eval_dataset=data.validation, processing_class=processor,
        callbacks=[watcher],
    )  # fmt: skip
    watcher.trainer = trainer
    begin = time.perf_counter()
    trainer.train()
    gad_seconds = time.perf_counter() - begin
    trainer.save_model(str(out))
    plan = trainer.step_plan
    num_updates = plan.max_steps - plan.gad_start
    args.data_seed = args.seed + 1000  # not again the prompts of the warm-up: the adversarial steps had fresh ones too
    supervised, supervised_seconds = continue_from(
        "supervised", out / "warmup", args, data, num_updates, args.gad_warmup_learning_rate
    )
    lines = ["", f"{NUM_TEST} pictures never seen; percent of answers, sampled at {args.temperature} and greedy"]
    lines.append(f"{'':28} right  right  malformed  styles  tokens  seconds")
    lines.append(f"{'':28}  0.8  greedy       0.8     0.8     0.8")
    texts = {}
    for name, source, seconds in (
        (f"after warm-up ({plan.gad_start} steps)", warmed_up(out / "warmup", trainer), None),
        (f"after GAD (+{num_updates} steps)", trainer, gad_seconds),
        (f"supervised (+{num_updates} steps)", supervised, supervised_seconds),
    ):
        sampled = answer(source, data.test)
        greedy = figures(source, answer(source, data.test, greedy=True))
        lines.append(row(name, figures(source, sampled), greedy, seconds))
        texts[name] = [source.reader.tokenizer.decode(s[0].ids, skip_special_tokens=True) for s in sampled.samples[:6]]
    lines += ["", *history(trainer)]
    lines.append(
        f"the discriminator ranks a right answer above a wrong one of the same picture in "
        f"{ranking(trainer, data.test.select(range(60))):.0f}% of cases"
    )
    print("\n".join(lines), flush=True)
    show(data, texts, out / "demo.png")
    lines = [
        "", f"pictures and texts: {out / 'demo.png'}", "both models are saved; load them with",
        f"    Qwen3VLForConditionalGeneration.from_pretrained({str(out)!r})",
        f"    Discriminator.from_pretrained({str(out / 'discriminator')!r})",
    ]  # fmt: skip
    print("\n".join(lines), flush=True)


def warmed_up(folder: Path, like: GADTrainer) -> GADTrainer:
    """A trainer around the warm-up's models, for measuring."""
    model, processor = load(folder)
    args = copy.copy(like.given_args)
    return GADTrainer(
        model=model, discriminator=str(folder / "discriminator"), args=args, train_dataset=like.train_dataset,
        processing_class=processor,
    )  # fmt: skip


def row(name: str, sampled: Figures, greedy: Figures, seconds: float | None) -> str:
    time_taken = "" if seconds is None else f"{seconds:8.0f}"
    return (
        f"{name:28} {sampled.right:5.1f}  {greedy.right:5.1f}  {sampled.malformed:9.1f}  {sampled.styles:6d}  "
        f"{sampled.length:6.1f} {time_taken}"
    )


def history(trainer: GADTrainer) -> list[str]:
    """The discriminator's accuracy on fresh pairs over the run."""
    name = "discriminator/accuracy"
    logs = [log for log in trainer.state.log_history if log.get(name) is not None]
    return ["discriminator's accuracy on fresh pairs (step: percent)"] + [
        "  ".join(f"{log['step']}: {100 * log[name]:.0f}" for log in logs)
    ]


def show(data: Data, texts: dict[str, list[str]], path: Path) -> None:
    """A PNG of some pictures with the teacher's and the students' texts."""
    height, width, left = 160, 1000, 150
    num = len(next(iter(texts.values())))
    sheet = Image.new("RGB", (width, height * num), "white")
    pen = ImageDraw.Draw(sheet)
    for i, example in enumerate(data.test.select(range(num))):
        top = i * height + 8
        sheet.paste(example["images"][0].resize((128, 128), Image.Resampling.NEAREST), (8, top))
        y = top
        shown = {"teacher": example["completion"][0]["content"]} | {name: of[i] for name, of in texts.items()}
        for name, text in shown.items():
            for line in wrap(f"{name}: {text.strip()}", 130):
                pen.text((left, y), line, fill="black")
                y += 13
            y += 6
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
