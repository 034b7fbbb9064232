"""What the pretrained student can do, on scenes it never saw, and how much room it leaves.

`python -m recipes.demo.probe FOLDER` prints the figures: verdicts, descriptions, and what short supervised warm-ups
make of them; `--keep` writes them into the folder's `made.json`.
"""

import argparse
import copy
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from .fast import Batch, Encoder, Learner, assert_same_forward, fixed_positions, hidden_states, pixels
from .lessons import CHECK_QUESTIONS, STATEMENT_FRAMES, Lesson, caption, edit_once, statement
from .student import WEIGHTS, load_student
from .world import QUESTIONS, STYLES, Scene, Verdict, check, draw, random_scene, teacher_text


MAX_NEW_TOKENS = 56


def describe(
    model: Qwen3VLForConditionalGeneration,
    processor: Qwen3VLProcessor,
    scenes: list[Scene],
    temperature: float,
    seed: int,
) -> list[str]:
    """One description of each scene, sampled at `temperature` (0: greedy), by the library's own `generate`."""
    rng = random.Random(seed)
    texts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": rng.choice(QUESTIONS)}]}],
            add_generation_prompt=True, tokenize=False,
        )
        for _ in scenes
    ]  # fmt: skip
    inputs = processor(text=texts, images=[[draw(s)] for s in scenes], padding=True, return_tensors="pt")
    torch.manual_seed(seed)
    sampling = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    with torch.no_grad():
        out = model.generate(**inputs.to(model.device), max_new_tokens=MAX_NEW_TOKENS, **sampling)
    answers = out[:, inputs["input_ids"].shape[1] :].tolist()
    end = processor.tokenizer.eos_token_id
    # Special tokens stay in the text, so that a stray one makes it malformed; one without an end is malformed too.
    return [
        processor.tokenizer.decode(a[: a.index(end)]) if end in a else processor.tokenizer.decode(a) + " ..."
        for a in answers
    ]


def percent(verdicts: list[Verdict]) -> dict[str, float]:
    """Wholly right and malformed, in percent, and how many of the styles are used for more than 2%."""
    num = len(verdicts)
    shares = [sum(v.style == style for v in verdicts) / num for style in STYLES]
    return {
        "right": round(100 * sum(v.wholly_right for v in verdicts) / num, 1),
        "malformed": round(100 * sum(not v.well_formed for v in verdicts) / num, 1),
        "styles": sum(share > 0.02 for share in shares),
    }


def auc(right: np.ndarray, wrong: np.ndarray) -> float:
    """Share of (right, wrong) pairs with the right one scored higher; equal scores count half."""
    difference = right[:, None] - wrong[None, :]
    return float((difference > 0).mean() + 0.5 * (difference == 0).mean())


class Judge:
    """Measures one model on `num` held-out scenes."""

    def __init__(
        self,
        model: Qwen3VLForConditionalGeneration,
        processor: Qwen3VLProcessor,
        encoder: Encoder,
        positions: torch.Tensor,
        num: int,
    ):
        self.model, self.processor, self.encoder, self.positions = model, processor, encoder, positions
        rng = random.Random(12345)
        self.scenes = [random_scene(rng, held_out=True) for _ in range(num)]

    def report(self) -> dict[str, Any]:
        return {
            "sampled": self.captions(self.model, 0.8),
            "greedy": self.captions(self.model, 0.0),
            **self.verdicts(),
            "own samples": self.own_samples(),
        }

    def captions(self, model: Qwen3VLForConditionalGeneration, temperature: float) -> dict[str, float]:
        texts = describe(model, self.processor, self.scenes, temperature, seed=1)
        return percent([check(scene, text) for scene, text in zip(self.scenes, texts, strict=True)])

    def _hidden(self, scenes: list[Scene], lessons: list[Lesson]) -> tuple[torch.Tensor, Batch]:
        """[N, LENGTH, hidden], in float32."""
        batch, device = self.encoder.batch(list(range(len(scenes))), lessons), self.positions.device
        parts = []
        with torch.no_grad():
            for i in range(0, len(scenes), 500):
                images = torch.from_numpy(pixels(scenes[i : i + 500])).to(device)
                ids = torch.from_numpy(batch.ids[i : i + 500]).to(device).long()
                parts.append(hidden_states(self.model, images, ids, self.positions))
        return torch.cat(parts), batch

    def hidden_of_captions(self) -> torch.Tensor:
        """[N, hidden]: last hidden states where descriptions are written."""
        rng = random.Random(3)
        hidden, batch = self._hidden(
            self.scenes, [Lesson(QUESTIONS[0], caption(s, rng), "caption") for s in self.scenes]
        )
        return hidden[:, :-1][torch.from_numpy(batch.weights[:, 1:] > 0).to(hidden.device)]

    def judged(self, scenes: list[Scene], lessons: list[Lesson]) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays [N]: log-odds of "true" against "false", and whether neither is the likeliest word."""
        hidden, batch = self._hidden(scenes, lessons)
        at = hidden[torch.arange(len(scenes)), torch.from_numpy(batch.verdict).long() - 1]
        with torch.no_grad():
            logits = self.model.lm_head(at).float().cpu()
        odds = logits[:, self.encoder.true] - logits[:, self.encoder.false]
        best = logits.argmax(1)
        return odds.numpy(), ((best != self.encoder.true) & (best != self.encoder.false)).numpy()

    def verdicts(self) -> dict[str, float]:
        """Percent of right verdicts: on statements, and on descriptions (right ones and ones with one fact changed)."""
        rng, scenes = random.Random(2), [s for s in self.scenes for _ in range(4)]
        truths = np.array([i % 2 == 0 for i in range(len(scenes))])
        statements, checks = [], []
        for scene, truth in zip(scenes, truths, strict=True):
            asked = rng.choice(STATEMENT_FRAMES).format(statement(scene, bool(truth), rng))
            statements.append(Lesson(asked, "true", "statement"))
            told = scene if truth else edit_once(scene, rng)
            text = teacher_text(told, rng.choice(tuple(STYLES)), rng)
            checks.append(Lesson(rng.choice(QUESTIONS), text, "check", rng.choice(CHECK_QUESTIONS), "true"))
        odds, neither = self.judged(scenes, statements)
        check_odds, check_neither = self.judged(scenes, checks)
        return {
            "statements right": round(100 * float(((odds > 0) == truths).mean()), 1),
            "statements malformed": round(100 * float(neither.mean()), 1),
            "checks right": round(100 * float(((check_odds > 0) == truths).mean()), 1),
            "checks malformed": round(100 * float(check_neither.mean()), 1),
        }

    def own_samples(self) -> dict[str, float]:
        """How well "Is that right?" ranks the model's own samples of the same picture: percent of (right, wrong) pairs."""
        scenes = [s for s in self.scenes[:100] for _ in range(8)]
        texts = describe(self.model, self.processor, scenes, 0.8, seed=5)
        verdicts = [check(s, t) for s, t in zip(scenes, texts, strict=True)]
        asked = [Lesson(QUESTIONS[0], text, "check", CHECK_QUESTIONS[0], "true") for text in texts]
        odds, _ = self.judged(scenes, asked)
        right = np.array([v.wholly_right for v in verdicts])
        formed = np.array([v.well_formed for v in verdicts])
        pairs = []
        for i in range(0, len(scenes), 8):
            one, r, w = odds[i : i + 8], right[i : i + 8], (formed & ~right)[i : i + 8]
            if r.any() and w.any():
                pairs.append(auc(one[r], one[w]))
        return {"auc": round(100 * float(np.mean(pairs)), 1) if pairs else float("nan"), "pictures": len(pairs)}

    def warm_up(self, lr: float, stops: list[int], size: int = 32, seed: int = 7) -> dict[int, dict[str, Any]]:
        """Supervised updates on the teacher's texts at a constant rate: what the descriptions become at each stop."""
        model, device, rng = copy.deepcopy(self.model), self.positions.device, random.Random(seed)
        scenes = [random_scene(rng) for _ in range(size * max(stops, default=0))]
        learner = Learner(model, self.positions, lr, fade=False)
        curve = {}
        for step in range(max(stops, default=0)):
            part = scenes[step * size : (step + 1) * size]
            lessons = [
                Lesson(rng.choice(QUESTIONS), teacher_text(s, rng.choice(tuple(STYLES)), rng), "caption") for s in part
            ]
            images = torch.from_numpy(pixels(part)).to(device)
            learner.step(self.encoder.batch(list(range(size)), lessons), images, 0.0)
            if step + 1 in stops:
                curve[step + 1] = {"sampled": self.captions(model, 0.8), "greedy": self.captions(model, 0.0)}
        return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=WEIGHTS)
    parser.add_argument("--scenes", type=int, default=500, help="held-out scenes")
    parser.add_argument("--warm-up-lr", type=float, nargs="*", default=[])
    parser.add_argument("--warm-up-steps", type=int, nargs="*", default=[20, 40, 60])
    parser.add_argument("--warm-up-size", type=int, default=32, help="rows of a warm-up update")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    model, processor = load_student(args.folder)
    encoder = Encoder(processor)
    positions = fixed_positions(model, encoder)
    assert_same_forward(model, processor, encoder, positions)
    judge = Judge(model.eval(), processor, encoder, positions, args.scenes)
    figures = judge.report()
    sys.stdout.write(json.dumps(figures) + "\n")
    for lr in args.warm_up_lr:
        curve = judge.warm_up(lr, args.warm_up_steps, args.warm_up_size)
        figures[f"warm-up, learning rate {lr}, {args.warm_up_size} rows an update"] = curve
        sys.stdout.write(f"{lr} {json.dumps(curve)}\n")
        sys.stdout.flush()
    if args.keep:
        made = json.loads((args.folder / "made.json").read_text())
        (args.folder / "made.json").write_text(json.dumps(made | {"figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
