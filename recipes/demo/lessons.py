"""What the small model is pretrained on: conversations about pictures.

Four kinds: descriptions (in the teacher's wordings and in others), statements to judge true or false, questions with
short answers, and descriptions that are judged in a second turn. The descriptions may be careless: each fact is
replaced by a near miss with a given probability, as captions from the wild are often wrong. The verdicts never are.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from .world import (
    COLOURS,
    COLUMNS,
    NUMBERS,
    PLACES,
    QUESTIONS,
    ROWS,
    SHAPES,
    STYLES,
    Scene,
    Thing,
    count_words,
    teacher_text,
)


# What a careless writer confuses: each colour and shape with one other.
NEAR = {
    "red": "purple", "purple": "red", "green": "blue", "blue": "green", "yellow": "white", "white": "yellow",
    "circle": "square", "square": "circle", "triangle": "cross", "cross": "triangle",
}  # fmt: skip
STATEMENT_FRAMES = ("True or false: {}", "Is this true? {}", "{} True or false?", "Judge this: {}")
CHECK_QUESTIONS = ("Is that right?", "True or false?", "Is this true?")
TEACHER_SHARE = 0.6  # of the descriptions; the others are in wordings that the teacher never uses


@dataclass(frozen=True)
class Lesson:
    """A conversation about one picture: question, answer and, where `verdict` is set, a second turn."""

    question: str
    answer: str
    kind: str  # "caption", "statement", "question" or "check"
    check_question: str = ""
    verdict: str = ""


def near_miss(scene: Scene, rate: float, rng: random.Random) -> Scene:
    """The scene as a careless writer reports it: each fact becomes a near miss with probability `rate`."""
    taken = {thing.place for thing in scene.things}
    things = []
    for thing in scene.things:
        if rng.random() < rate:
            thing = replace(thing, colour=NEAR[thing.colour])
        if rng.random() < rate:
            thing = replace(thing, shape=NEAR[thing.shape])
        if rng.random() < rate:
            place = _neighbour(thing.place, rng)
            if place not in taken:
                taken = taken - {thing.place} | {place}
                thing = replace(thing, place=place)
        things.append(thing)
    return Scene(tuple(sorted(things, key=lambda thing: PLACES.index(thing.place))))


def edit_once(scene: Scene, rng: random.Random) -> Scene:
    """The scene with one fact changed: a colour, a shape, a place, or a thing left out or added."""
    index = rng.randrange(len(scene.things))
    thing = scene.things[index]
    change = rng.choice(("colour", "shape", "place", "number"))
    things = list(scene.things)
    free = [place for place in PLACES if all(place != t.place for t in things)]
    if change == "colour":
        near = rng.random() < 0.5
        things[index] = replace(thing, colour=NEAR[thing.colour] if near else _other(thing.colour, COLOURS, rng))
    elif change == "shape":
        near = rng.random() < 0.5
        things[index] = replace(thing, shape=NEAR[thing.shape] if near else _other(thing.shape, SHAPES, rng))
    elif change == "place":
        place = _neighbour(thing.place, rng)
        things[index] = replace(thing, place=place if place in free else rng.choice(free))
    elif len(things) > 1 and (rng.random() < 0.5 or len(things) == 3):
        del things[index]
    else:
        things.append(Thing(rng.choice(free), rng.choice(tuple(COLOURS)), rng.choice(SHAPES)))
    return Scene(tuple(sorted(things, key=lambda t: PLACES.index(t.place))))


def _other(word: Any, words: Iterable[Any], rng: random.Random) -> Any:
    return rng.choice([w for w in words if w != word])


def _neighbour(place: str, rng: random.Random) -> str:
    row, column = divmod(PLACES.index(place), 3)
    steps = [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
    row, column = rng.choice([(r, c) for r, c in steps if 0 <= r < 3 and 0 <= c < 3])
    return f"{ROWS[row]} {COLUMNS[column]}"


# Descriptions in wordings that the teacher never uses


def other_caption(scene: Scene, rng: random.Random) -> str:
    """A description in one of four grammars of their own; two of them name the thing before its place."""
    things = rng.sample(scene.things, len(scene.things))
    grammar = rng.randrange(4)
    if grammar == 0:
        return " and ".join(f"a {t.colour} {t.shape} at the {t.place}" for t in things) + "."
    if grammar == 1:
        return " ".join(f"Here is a {t.shape}: it is {t.colour}, its place is {t.place}." for t in things)
    if grammar == 2:
        return "; ".join(f"{t.place} = {t.colour} {t.shape}" for t in things)
    return (
        f"I count {NUMBERS[len(things)]}: " + ", ".join(f"{t.place} is {t.colour}, a {t.shape}" for t in things) + "."
    )


def caption(scene: Scene, rng: random.Random) -> str:
    """A right description, in the teacher's wordings or in others."""
    if rng.random() < TEACHER_SHARE:
        return teacher_text(scene, rng.choice(tuple(STYLES)), rng)
    return other_caption(scene, rng)


# Statements and questions


def statement(scene: Scene, truth: bool, rng: random.Random) -> str:
    """A sentence that is true of the scene, or false of it."""
    facts = scene.facts
    kind = rng.choice(("whole", "colour", "shape", "place", "exists", "count", "empty"))
    place, colour, shape = rng.choice(facts)
    taken = [f[0] for f in facts]
    if kind == "colour":
        colour = colour if truth else _other(colour, COLOURS, rng)
        return f"The {shape} at the {place} is {colour}."
    if kind == "shape":
        shape = shape if truth else _other(shape, SHAPES, rng)
        return f"The thing at the {place} is a {shape}."
    if kind == "place":
        place = place if truth else _other(place, [p for p in PLACES if (p, colour, shape) not in facts], rng)
        return f"There is a {colour} {shape} at the {place}."
    if kind == "exists":
        if not truth:
            pairs = {f[1:] for f in facts}
            colour, shape = rng.choice([(c, s) for c in COLOURS for s in SHAPES if (c, s) not in pairs])
        return f"There is a {colour} {shape} in the picture."
    if kind == "count":
        number = len(facts) if truth else _other(len(facts), (1, 2, 3), rng)
        return f"The picture shows {count_words(number)}."
    if kind == "empty":
        return f"Nothing is at the {rng.choice([p for p in PLACES if p not in taken] if truth else taken)}."
    row, column = place.split()
    whole = (place, colour, shape) if truth else rng.choice(
        ((place, _other(colour, COLOURS, rng), shape), (place, colour, _other(shape, SHAPES, rng)))
    )  # fmt: skip
    return f"In the {row} row, {column}: a {whole[1]} {whole[2]}."


def question(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """A question and its short answer."""
    place, colour, shape = rng.choice(scene.facts)
    kind = rng.choice(("colour", "shape", "what", "empty", "count", "where"))
    if kind == "colour":
        return f"Which colour has the {shape} at the {place}?", f"It is {colour}."
    if kind == "shape":
        return f"Which shape is at the {place}?", f"It is a {shape}."
    if kind == "empty":
        place = rng.choice([p for p in PLACES if p not in {f[0] for f in scene.facts}])
        return f"What is at the {place}?", "Nothing."
    if kind == "count":
        return "How many shapes are there?", f"{count_words(len(scene.facts)).capitalize()}."
    if kind == "where" and sum(f[1:] == (colour, shape) for f in scene.facts) == 1:
        return f"Where is the {colour} {shape}?", f"At the {place}."
    return f"What is at the {place}?", f"A {colour} {shape}."


def lesson(scene: Scene, noise: float, rng: random.Random) -> Lesson:
    """One conversation about the scene. `noise` is the near-miss rate per fact of the descriptions to learn."""
    kind = rng.choices(("caption", "statement", "question", "check"), weights=(4, 3, 1, 3))[0]
    truth = rng.random() < 0.5
    if kind == "caption":
        return Lesson(rng.choice(QUESTIONS), caption(near_miss(scene, noise, rng), rng), kind)
    if kind == "statement":
        asked = rng.choice(STATEMENT_FRAMES).format(statement(scene, truth, rng))
        return Lesson(asked, "true" if truth else "false", kind)
    if kind == "question":
        return Lesson(*question(scene, rng), kind)
    text = caption(scene if truth else edit_once(scene, rng), rng)
    return Lesson(rng.choice(QUESTIONS), text, kind, rng.choice(CHECK_QUESTIONS), "true" if truth else "false")
