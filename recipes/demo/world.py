"""The demo's world: pictures of a few coloured shapes, a program as teacher, and a checker of every fact of a text.

A scene holds one to three things on a 3 x 3 grid of places. The teacher describes it rightly in one of five styles;
`check` parses any text and says what of it is right. Scenes fall into two sets by their facts: those the student may
learn from, and held-out ones.
"""

import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw


if TYPE_CHECKING:
    from datasets import Dataset


IMAGE_SIZE = 64  # pixels a side
SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (220, 50, 47), "green": (60, 160, 60), "blue": (50, 90, 220), "yellow": (230, 210, 50),
    "purple": (150, 60, 170), "white": (240, 240, 240),
}  # fmt: skip
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")
PLACES = tuple(f"{row} {column}" for row in ROWS for column in COLUMNS)  # in reading order
NUMBERS = ("no", "one", "two", "three")
QUESTIONS = (
    "Describe the picture.", "What do you see?", "What does the picture show?", "Tell me what is where.",
    "Describe every shape and its place.", "Which shapes are in this picture?", "Please describe this image.",
    "What is in the image?",
)  # fmt: skip
_BACKGROUND = (45, 45, 50)
_CELL = IMAGE_SIZE / 3
_HELD_OUT_ONE_IN = 8
MAX_ROWS = 50_000  # of the more than 100,000 scenes that differ in their facts and are held out


@dataclass(frozen=True)
class Thing:
    """A shape on the picture. `dx`, `dy` (shift from the middle of its place) and `radius` are in pixels."""

    place: str
    colour: str
    shape: str
    dx: int = 0
    dy: int = 0
    radius: int = 6

    @property
    def facts(self) -> tuple[str, str, str]:
        return self.place, self.colour, self.shape


@dataclass(frozen=True)
class Scene:
    """One to three things at different places, in reading order."""

    things: tuple[Thing, ...]

    @property
    def facts(self) -> tuple[tuple[str, str, str], ...]:
        """What a description can name: (place, colour, shape) of every thing, in reading order."""
        return tuple(thing.facts for thing in self.things)

    @property
    def held_out(self) -> bool:
        """Whether the scene is for tests only. It depends on the facts alone, so the two sets share no description."""
        return zlib.crc32(repr(self.facts).encode()) % _HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Verdict:
    """What a text says about a scene.

    `total` counts place, colour and shape of every thing, the same for every claim about an empty (or already
    described) place, and the number of things where the text names it. `right` of them are right.
    """

    style: str | None  # None: the text follows no style of the teacher
    right: int
    total: int

    @property
    def well_formed(self) -> bool:
        return self.style is not None

    @property
    def wholly_right(self) -> bool:
        return self.well_formed and self.right == self.total


def random_scene(rng: random.Random, held_out: bool = False) -> Scene:
    """A scene of the learning set, or of the held-out one. Two or three things are more frequent than one."""
    while True:
        num_things = rng.choices((1, 2, 3), weights=(1, 4, 5))[0]
        places = sorted(rng.sample(range(len(PLACES)), num_things))
        scene = Scene(
            tuple(
                Thing(
                    PLACES[place], rng.choice(tuple(COLOURS)), rng.choice(SHAPES),
                    rng.randint(-3, 3), rng.randint(-3, 3), rng.randint(5, 7),
                )
                for place in places
            )
        )  # fmt: skip
        if scene.held_out == held_out:
            return scene


def draw(scene: Scene) -> Image.Image:
    """The scene as an RGB picture of `IMAGE_SIZE` x `IMAGE_SIZE` pixels."""
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), _BACKGROUND)
    pen = ImageDraw.Draw(image)
    for thing in scene.things:
        row, column = divmod(PLACES.index(thing.place), 3)
        x, y, r = round((column + 0.5) * _CELL) + thing.dx, round((row + 0.5) * _CELL) + thing.dy, thing.radius
        colour = COLOURS[thing.colour]
        if thing.shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        elif thing.shape == "square":
            pen.rectangle((x - r + 1, y - r + 1, x + r - 1, y + r - 1), fill=colour)
        elif thing.shape == "triangle":
            pen.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill=colour)
        else:
            pen.rectangle((x - r, y - 1, x + r, y + 1), fill=colour)
            pen.rectangle((x - 1, y - r, x + 1, y + r), fill=colour)
    return image


# The teacher


def count_words(number: int) -> str:
    return f"{NUMBERS[number]} shape" + ("" if number == 1 else "s")


def _in_order(things: tuple[Thing, ...], order: str, rng: random.Random) -> list[Thing]:
    listed = list(things)
    if order == "bottom up":
        listed.reverse()
    elif order == "by column":
        listed.sort(key=lambda thing: COLUMNS.index(thing.place.split()[1]))  # stable: top to bottom in a column
    elif order == "any":
        rng.shuffle(listed)
    return listed


def _survey(things: list[Thing], rng: random.Random) -> str:
    opener = rng.choice(("The picture shows", "This picture has", "We can see"))
    items = [f"At the {t.place} there is a {t.colour} {t.shape}." for t in things]
    return f"{opener} {count_words(len(things))}. " + " ".join(items)


def _list(things: list[Thing], rng: random.Random) -> str:
    items = [f"{t.place.capitalize()}: {t.colour} {t.shape}." for t in things]
    end = rng.choice(("The rest is empty.", "Nothing else is there."))
    return f"{count_words(len(things)).capitalize()} in all. {' '.join(items)} {end}"


def _holds(things: list[Thing], rng: random.Random) -> str:
    items = [f"the {t.place} holds a {t.colour} {t.shape}" for t in things]
    end = rng.choice(("and that makes", "which gives"))
    return f"T{', '.join(items)[1:]}, {end} {count_words(len(things))}."


def _look(things: list[Thing], rng: random.Random) -> str:
    items = [f"Look at the {t.place}: a {t.shape} in {t.colour}." for t in things]
    end = rng.choice(("In total", "Altogether"))
    return f"{' '.join(items)} {end} {count_words(len(things))}."


def _tour(things: list[Thing], rng: random.Random) -> str:
    opener = rng.choice(("From place to place", "Going over the picture"))
    items = [f"the {t.place} has a {t.colour} {t.shape}" for t in things]
    return f"{opener}, {'; '.join(items)}; and nothing else."


@dataclass(frozen=True)
class Style:
    """One way to describe: how it is written, in which order, and what it looks like to the checker."""

    write: Callable[[list[Thing], random.Random], str]
    order: str
    whole: re.Pattern[str]
    item: re.Pattern[str]


_PLACE = rf"(?P<place>(?:{'|'.join(ROWS)}) (?:{'|'.join(COLUMNS)}))"
_COLOUR = rf"(?P<colour>{'|'.join(COLOURS)})"
_SHAPE = rf"(?P<shape>{'|'.join(SHAPES)})"
_COUNT = r"(?P<count>one(?= shape\b)|two(?= shapes\b)|three(?= shapes\b)) shapes?"


def _style(write: Callable[[list[Thing], random.Random], str], order: str, whole: str, item: str) -> Style:
    """`whole` names the places of items by `<items>` (joined as the style joins them) and of the count by `<count>`."""
    item = item.replace("<place>", _PLACE).replace("<colour>", _COLOUR).replace("<shape>", _SHAPE)
    nameless = re.sub(r"\?P<\w+>", "?:", item)  # a group name may stand only once in a pattern
    whole = re.sub(r"<items by '(.*?)'>", lambda m: f"{nameless}(?:{m[1]}{nameless})*", whole)
    return Style(write, order, re.compile(whole.replace("<count>", _COUNT)), re.compile(item))


# The place comes before the thing in every style: a student learns that far sooner than the reverse.
STYLES = {
    "survey": _style(
        _survey, "reading", r"(?:the picture shows|this picture has|we can see) <count>\. <items by ' '>",
        r"at the <place> there is a <colour> <shape>\."),
    "list": _style(
        _list, "bottom up", r"<count> in all\. <items by ' '> (?:the rest is empty|nothing else is there)\.",
        r"<place>: <colour> <shape>\."),
    "holds": _style(
        _holds, "by column", r"<items by ', '>, (?:and that makes|which gives) <count>\.",
        r"the <place> holds a <colour> <shape>"),
    "look": _style(
        _look, "any", r"<items by ' '> (?:in total|altogether) <count>\.",
        r"look at the <place>: a <shape> in <colour>\."),
    "tour": _style(
        _tour, "any", r"(?:from place to place|going over the picture), <items by '; '>; and nothing else\.",
        r"the <place> has a <colour> <shape>"),
}  # fmt: skip


def teacher_text(scene: Scene, style: str, rng: random.Random) -> str:
    """A wholly right description of the scene in one of `STYLES`, 12 to 39 tokens long."""
    return STYLES[style].write(_in_order(scene.things, STYLES[style].order, rng), rng)


def check(scene: Scene, text: str) -> Verdict:
    """Parse any text and compare it with the scene. Letter case and outer white space do not matter."""
    text = text.strip().lower()
    truth = {thing.place: thing for thing in scene.things}
    for name, style in STYLES.items():
        match = style.whole.fullmatch(text)
        if match is None:
            continue
        right, total, described = 0, 3 * len(truth), set()
        for claim in style.item.finditer(text):
            thing = truth.get(claim["place"])
            if thing is None or claim["place"] in described:
                total += 3
                continue
            described.add(claim["place"])
            right += 1 + (claim["colour"] == thing.colour) + (claim["shape"] == thing.shape)
        if "count" in style.whole.groupindex:
            total += 1
            right += match["count"] == NUMBERS[len(truth)]
        return Verdict(name, right, total)
    return Verdict(None, 0, 3 * len(truth))


# The rows of a dataset


def rows(num: int, seed: int, held_out: bool = False) -> "Dataset":
    """`num` prompts with the teacher's answers, as TRL's conversational prompt-completion type with `images`.

    No two rows share a scene's facts. `scene` holds the facts as text (see `facts_text`), for `check` in a reward
    function or an evaluation: `scene_of`.
    """
    from datasets import Dataset  # noqa: PLC0415 - the machine that pretrains has no datasets

    if num > MAX_ROWS:
        raise ValueError(f"num must be at most {MAX_ROWS}, or scenes run out, got {num}. Use several epochs instead.")
    rng = random.Random(seed)
    scenes: dict[tuple[tuple[str, str, str], ...], Scene] = {}
    while len(scenes) < num:
        scene = random_scene(rng, held_out)
        scenes.setdefault(scene.facts, scene)
    return Dataset.from_list([_row(scene, rng) for scene in scenes.values()])


def _row(scene: Scene, rng: random.Random) -> dict[str, Any]:
    answer = teacher_text(scene, rng.choice(tuple(STYLES)), rng)
    return {
        "prompt": [{"role": "user", "content": rng.choice(QUESTIONS)}],
        "completion": [{"role": "assistant", "content": answer}],
        "images": [draw(scene)],
        "scene": facts_text(scene),
    }


def facts_text(scene: Scene) -> str:
    """`"top left red circle; middle right blue square"`"""
    return "; ".join(" ".join(facts) for facts in scene.facts)


def scene_of(facts: str) -> Scene:
    """The reverse of `facts_text` (without the shifts and sizes, which no description names)."""
    words = [thing.split() for thing in facts.split("; ")]
    return Scene(tuple(Thing(f"{row} {column}", colour, shape) for row, column, colour, shape in words))
