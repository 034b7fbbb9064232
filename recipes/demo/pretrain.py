"""Pretrains the demo's student once, on a GPU, and writes its weights: `python -m recipes.demo.pretrain --out FOLDER`.

A plain torch loop over conversations about drawn scenes (`lessons.py`). It needs torch, transformers and Pillow only.
The weights in `weights/` came from two runs (their arguments are in `made.json`): one on an H200 for 132 seconds, and
130 small steps on a CPU with more careless descriptions, `--start` from the first, so that a warm-up ends with wrong
facts rather than with foreign wordings. `probe.py` measures the result.
`--steps 20 --batch 64 --scenes 500` runs on a CPU in under a minute.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import Qwen3VLForConditionalGeneration

from .fast import Batch, Encoder, Learner, assert_same_forward, fixed_positions, pixels
from .lessons import lesson
from .probe import Judge
from .student import build_model, build_processor, load_student
from .world import Scene, random_scene


PER_SCENE = 4  # conversations about a picture in a batch: the vision tower reads it once


class Maker:
    """Makes batches in worker processes; forked, so that they share the scenes."""

    def __init__(self, encoder: Encoder, scenes: list[Scene], size: int, noise: float, seed: int):
        self.encoder, self.scenes, self.size, self.noise = encoder, scenes, size, noise
        self.seed = seed

    def __call__(self, step: int) -> Batch:
        rng = random.Random(f"{self.seed} {step}")
        chosen = rng.sample(range(len(self.scenes)), self.size // PER_SCENE)
        lessons = [lesson(self.scenes[i], self.noise, rng) for i in chosen for _ in range(PER_SCENE)]
        return self.encoder.batch(chosen, lessons)


def start_workers(num: int, maker: Maker, scenes: list[Scene]) -> Pool:
    """Forked, so that they share the scenes: call it before the GPU is touched."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive the fork
    return multiprocessing.get_context("fork").Pool(num, initializer=_keep, initargs=(maker, scenes))


def _keep(maker: Maker, scenes: list[Scene]) -> None:
    _kept["maker"], _kept["scenes"] = maker, scenes


def _make(step: int) -> Batch:
    return _kept["maker"](step)


def _pixels(start: int) -> np.ndarray:
    return pixels(_kept["scenes"][start : start + 1000])


_kept: dict = {}  # of a worker process


def pretrain(
    args: argparse.Namespace,
    model: Qwen3VLForConditionalGeneration,
    positions: torch.Tensor,
    pool: Pool,
    never: list[int],
) -> int:
    """Train `model` in place; returns the number of steps made."""
    start = time.time()
    images = torch.from_numpy(np.concatenate(pool.map(_pixels, range(0, args.scenes, 1000)))).to(positions.device)
    say(f"{len(images)} scenes drawn in {time.time() - start:.1f} s")
    learner, start, told = Learner(model, positions, args.lr, fade=True, never=never), time.time(), 0.0
    for step, batch in enumerate(pool.imap(_make, range(args.steps)), 1):
        spent = time.time() - start
        progress = max(step / args.steps, spent / args.seconds if args.seconds else 0.0)
        loss = learner.step(batch, images, min(progress, 1.0))
        if spent - told > 8 or progress >= 1:
            told = spent
            say(f"step {step}/{args.steps} loss {loss.item():.4f} {spent:.0f} s")
        if progress >= 1:
            return step
    raise AssertionError("unreachable: the last step has progress 1")


def silence(model: Qwen3VLForConditionalGeneration, tokens: list[int], hidden: torch.Tensor) -> None:
    """Make tokens all but impossible: their rows of the (tied) embedding point away from all hidden states.

    `hidden` [N, hidden]: last hidden states of real text. Only for tokens whose own embedding is never read.
    """
    away = -hidden.float().mean(0)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokens] = away / away.norm() * 8


def main() -> None:
    args = parse()
    processor = build_processor()
    encoder = Encoder(processor)
    rng = random.Random(args.seed)
    scenes = [random_scene(rng) for _ in range(args.scenes)]
    pool = start_workers(args.workers, Maker(encoder, scenes, args.batch, args.noise, args.seed), scenes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_student(args.start)[0] if args.start else build_model(args.seed)
    positions = fixed_positions(model, encoder)
    assert_same_forward(model, processor, encoder, positions)
    model, positions = model.to(device), positions.to(device)
    start = time.time()
    steps = pretrain(args, model, positions, pool, encoder.never_spoken)
    seconds = round(time.time() - start)
    pool.terminate()

    judge = Judge(model.eval(), processor, encoder, positions, num=200)
    silence(model, encoder.never_read, judge.hidden_of_captions())
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    made = {
        "script": "recipes/demo/pretrain.py", "arguments": {k: v for k, v in vars(args).items() if k not in ("out", "start")},
        "date": datetime.date.today().isoformat(), "steps": steps, "seconds": seconds, "device": name,
        "torch": torch.__version__, "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    if args.start:
        made["before"] = json.loads((args.start / "made.json").read_text())
    model.half().save_pretrained(args.out)
    processor.save_pretrained(args.out)
    (args.out / "made.json").write_text(json.dumps(made, indent=1) + "\n")
    say(json.dumps(made))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights")
    parser.add_argument("--start", type=Path, help="folder of weights to go on from; without it from random ones")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seconds", type=float, help="end earlier, after this time; the learning rate falls with it")
    parser.add_argument("--batch", type=int, default=1024, help="conversations a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--noise", type=float, default=0.1, help="near-miss rate per fact of the descriptions")
    parser.add_argument("--scenes", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    return parser.parse_args()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
