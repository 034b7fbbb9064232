"""The demo's runs from one warm-up, and what is measured of them."""

import copy
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor, TrainerCallback

from trl_gad import GADConfig, GADTrainer
from trl_gad.batch import Group, Rollout, Sample
from trl_gad.schedule import WARMUP, Step

from .world import STYLES, check, scene_of


TEMPERATURE_SEED = 7


@dataclass
class Figures:
    """Of answers to held-out pictures. Shares in percent."""

    right: float  # wholly right
    malformed: float
    styles: int  # used in more than 2% of the answers
    length: float  # tokens


def answer(trainer: GADTrainer, dataset: Dataset, num: int = 1, greedy: bool = False) -> Rollout:
    """`num` answers to every row."""
    groups = [trainer.reader.read(i, row) for i, row in enumerate(dataset)]  # type: ignore[arg-type]
    samples: list[list[Sample]] = []
    for start in range(0, len(groups), 100):
        part = groups[start : start + 100]
        samples += trainer.sampler.sample(trainer.model, part, num, TEMPERATURE_SEED + start, greedy)
    return Rollout(0, groups, samples)


def verdict_of(trainer: GADTrainer, group: Group, sample: Sample) -> Any:
    """The checker's verdict. Special tokens stay in the text and a missing end is marked, so that both are malformed."""
    ids = sample.ids if sample.cut else sample.ids[:-1]
    text = trainer.reader.tokenizer.decode(ids) + (" ..." if sample.cut else "")
    return check(scene_of(group.columns["scene"]), text)


def figures(trainer: GADTrainer, rollout: Rollout) -> Figures:
    pairs = [(g, s) for g, row in zip(rollout.groups, rollout.samples, strict=True) for s in row]
    verdicts = [verdict_of(trainer, group, sample) for group, sample in pairs]
    share = [sum(v.style == style for v in verdicts) / len(verdicts) for style in STYLES]
    return Figures(
        right=100 * statistics.mean(v.wholly_right for v in verdicts),
        malformed=100 * statistics.mean(not v.well_formed for v in verdicts),
        styles=sum(value > 0.02 for value in share),
        length=statistics.mean(len(sample.ids) for _, sample in pairs),
    )


def ranking(trainer: GADTrainer, dataset: Dataset, num: int = 8) -> float:
    """How often the discriminator puts a right answer above a wrong one of the same picture, in percent."""
    rollout = answer(trainer, dataset, num)
    scores, _, _ = trainer.adversary.score(rollout)
    wins = []
    for group, samples, row in zip(rollout.groups, rollout.samples, scores.students.tolist(), strict=True):
        right = [verdict_of(trainer, group, sample).wholly_right for sample in samples]
        above = [s for s, r in zip(row, right, strict=True) if r]
        below = [s for s, r in zip(row, right, strict=True) if not r]
        wins += [(a > b) + 0.5 * (a == b) for a in above for b in below]
    return 100 * statistics.mean(wins) if wins else float("nan")


def checker_reward(completion_ids: list, scene: list[str], completions: list, **_: Any) -> list[float]:
    """1 for a wholly right description: the ceiling, which needs a checker that no user has."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(check(scene_of(s), text).wholly_right) for s, text in zip(scene, texts, strict=True)]


class RandomReward:
    """Rewards that say nothing, of the same spread as any (advantages are divided by it)."""

    __name__ = "random"

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def __call__(self, completion_ids: list, **_: Any) -> list[float]:
        return [self.rng.gauss(0, 1) for _ in completion_ids]


class SupervisedTrainer(GADTrainer):
    """Stage 1 without its discriminator: continued supervised distillation, which samples nothing."""

    def _start_rollout(self, step: Step, groups: list[Group]) -> None:
        self.rollout = Rollout(step.rollout, groups, [[] for _ in groups])


class StopByAccuracy(TrainerCallback):
    """Ends the warm-up when enough sampled answers to held-out pictures are right, and saves what it made."""

    def __init__(self, dataset: Dataset, target: float, every: int, folder: Path):
        self.dataset, self.target, self.every, self.folder = dataset, target, every, folder
        self.trainer: GADTrainer | None = None
        self.curve: list[tuple[int, float]] = []  # (step, wholly right in percent)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        assert trainer is not None
        step = trainer.step_plan.at(state.global_step - 1)
        last = state.global_step == trainer.step_plan.gad_start
        if step.stage != WARMUP or not (last or state.global_step % self.every == 0):
            return
        right = figures(trainer, answer(trainer, self.dataset)).right
        self.curve.append((state.global_step, right))
        if right >= self.target or last:
            trainer.end_warmup()
            trainer.save_model(str(self.folder))
        trainer.clock.restart()


@dataclass
class Data:
    train: Dataset
    validation: Dataset  # held-out pictures, to stop the warm-up by
    test: Dataset  # held-out pictures, for the table


def load(folder: Path | str) -> tuple[Qwen3VLForConditionalGeneration, Qwen3VLProcessor]:
    return Qwen3VLForConditionalGeneration.from_pretrained(folder), Qwen3VLProcessor.from_pretrained(folder)


def continue_from(
    kind: str, warm: Path, args: GADConfig, data: Data, num_steps: int, learning_rate: float
) -> tuple[GADTrainer, float]:
    """
    A run of `num_steps` student updates from the warm-up in folder `warm`; its own learning rate decays to 0.

    Args:
        kind: `gad`, `random` (random rewards), `checker` (the checker as reward) or `supervised`.

    Returns:
        The trainer after its run and the seconds it took.
    """
    args = copy.copy(args)
    args.output_dir = f"{args.output_dir}/{kind}"
    args.max_steps, args.discriminator_only_steps, args.save_strategy = num_steps, 0, "no"
    args.gad_warmup_steps, args.learning_rate = 0, learning_rate
    trainer_class, rewards = GADTrainer, []
    if kind == "supervised":
        args.gad_warmup_steps, args.gad_warmup_learning_rate = num_steps, learning_rate
        trainer_class = SupervisedTrainer
    elif kind in ("random", "checker"):
        rewards = [RandomReward(args.seed) if kind == "random" else checker_reward]
        args.reward_weights = [0.0, 1.0]  # the discriminator's weight first
    model, processor = load(warm)
    trainer = trainer_class(
        model=model,
        discriminator=str(warm / "discriminator"),
        args=args,
        train_dataset=data.train,
        eval_dataset=data.validation,
        processing_class=processor,
        reward_funcs=rewards,
    )
    begin = time.perf_counter()
    trainer.train()
    return trainer, time.perf_counter() - begin
