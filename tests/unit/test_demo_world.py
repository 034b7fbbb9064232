"""The demo's world: its teacher, its checker, its pictures and rows, and the pretrained student that ships with it."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm, Qwen3VLVisionAttention

from recipes.demo.fast import Encoder, assert_same_forward, fixed_positions
from recipes.demo.lessons import STATEMENT_FRAMES, edit_once, near_miss, other_caption, statement
from recipes.demo.student import SPECIAL_TOKENS, WEIGHTS, build_model, build_processor, load_student
from recipes.demo.world import (
    COLOURS,
    PLACES,
    QUESTIONS,
    SHAPES,
    STYLES,
    Scene,
    Thing,
    Verdict,
    check,
    draw,
    facts_text,
    random_scene,
    rows,
    scene_of,
    teacher_text,
)


TWO = Scene((Thing("top left", "red", "circle"), Thing("bottom center", "blue", "cross")))


def scenes(num: int, seed: int = 0, held_out: bool = False) -> list[Scene]:
    rng = random.Random(seed)
    return [random_scene(rng, held_out) for _ in range(num)]


# Teacher and checker


@pytest.mark.parametrize("style", STYLES)
def test_the_teacher_is_wholly_right_in_its_own_style(style: str):
    rng = random.Random(1)
    for scene in scenes(300):
        verdict = check(scene, teacher_text(scene, style, rng))
        # three facts a thing, and the number of things where the style names it ("tour" does not)
        assert verdict == Verdict(style, *[3 * len(scene.things) + (style != "tour")] * 2)


@pytest.mark.parametrize("style", STYLES)
def test_one_edited_fact_is_found(style: str):
    rng = random.Random(2)
    for scene in scenes(300):
        told = edit_once(scene, rng)
        verdict = check(scene, teacher_text(told, style, rng))
        assert verdict.well_formed
        assert not verdict.wholly_right


@pytest.mark.parametrize(
    ("text", "right", "total"),
    [
        ("Two shapes in all. Bottom center: blue cross. Top left: red circle. The rest is empty.", 7, 7),
        ("two shapes in all. bottom center: blue cross. top left: green circle. the rest is empty.", 6, 7),
        ("Two shapes in all. Bottom center: blue square. Top left: green circle. The rest is empty.", 5, 7),
        # the claim about an empty place adds three facts, all wrong; nothing is said of the cross
        ("Two shapes in all. Bottom left: blue cross. Top left: red circle. The rest is empty.", 4, 10),
        ("Three shapes in all. Bottom center: blue cross. Top left: red circle. The rest is empty.", 6, 7),
        ("One shape in all. Top left: red circle. The rest is empty.", 3, 7),
        # a place described twice
        ("Two shapes in all. Top left: red circle. Top left: red circle. The rest is empty.", 4, 10),
    ],
)
def test_facts_are_counted(text: str, right: int, total: int):
    assert check(TWO, text) == Verdict("list", right, total)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "true",
        "Two shapes in all.",
        "Two shape in all. Bottom center: blue cross. Top left: red circle. The rest is empty.",  # no plural
        "Two shapes in all. Bottom center: blue cross. Top left: red circle. The rest is",
        "Two shapes in all. Bottom center: blue cross. Top left: red circle. The rest is empty. empty.",
        "Two shapes in all. Bottom center: blue blue. Top left: red circle. The rest is empty.",
        "Two shapes in all. Bottom center: blue cross. top left has a red circle. The rest is empty.",  # two styles
        "Two shapes in all. Bottom center: blue cross. Top left: red circle. The rest is empty.<|image_pad|>",
    ],
)
def test_malformed_text(text: str):
    assert check(TWO, text) == Verdict(None, 0, 6)


def test_no_grammar_of_pretraining_passes_as_a_style():
    rng = random.Random(3)
    assert not any(check(scene, other_caption(scene, rng)).well_formed for scene in scenes(200))


def test_teacher_texts_are_short_and_varied():
    rng, tokenizer = random.Random(4), build_processor().tokenizer
    texts = [teacher_text(scene, rng.choice(tuple(STYLES)), rng) for scene in scenes(500)]
    lengths = [len(tokenizer(text).input_ids) for text in texts]
    assert min(lengths) >= 12
    assert max(lengths) <= 40
    assert len(set(texts)) > 450


def test_near_misses_and_statements():
    rng = random.Random(5)
    some = scenes(300)
    assert all(near_miss(scene, 0.0, rng) == scene for scene in some)
    changed = sum(near_miss(scene, 0.15, rng).facts != scene.facts for scene in some)
    # a fact stays with 0.85; things are 1, 2, 3 with 0.1, 0.4, 0.5: changed are 1 - (0.1*0.85**3 + 0.4*0.85**6
    # + 0.5*0.85**9) = 67%, a little less because a move onto a taken place is not made
    assert 0.55 < changed / 300 < 0.75
    assert "Nothing is at the top left." not in {statement(TWO, True, rng) for _ in range(300)}
    assert "There is a red circle in the picture." in {statement(TWO, True, rng) for _ in range(300)}
    assert "The picture shows two shapes." not in {statement(TWO, False, rng) for _ in range(300)}


# Pictures and rows


def test_every_fact_shows_in_the_picture():
    base = Thing("middle center", "red", "circle")
    things = [base, *(replace(base, shape=s) for s in SHAPES), *(replace(base, colour=c) for c in COLOURS)]
    things += [replace(base, place=p) for p in PLACES]
    different = {draw(Scene((thing,))).tobytes() for thing in things}
    assert len(different) == len({thing.facts for thing in things}) == 4 + 6 + 9 - 2


def test_pictures_of_different_scenes_differ():
    some = {scene.facts: scene for scene in scenes(500)}.values()
    assert len({draw(scene).tobytes() for scene in some}) == len(some)


def test_things_stay_inside_the_picture_and_apart():
    for scene in scenes(200):
        alone = [np.asarray(draw(Scene((thing,)))) != np.asarray(draw(Scene(()))) for thing in scene.things]
        areas = [mask.any(-1) for mask in alone]
        assert not any((a & b).any() for i, a in enumerate(areas) for b in areas[:i])
        for area, thing in zip(areas, scene.things, strict=True):
            height, width = (np.ptp(np.nonzero(area)[axis]) + 1 for axis in (0, 1))
            assert min(height, width) >= 2 * thing.radius - 1  # a square is two pixels smaller


def test_rows():
    data = rows(60, seed=3)
    assert data.column_names == ["prompt", "completion", "images", "scene"]
    assert len(set(data["scene"])) == 60
    for row in data:
        assert [m["role"] for m in row["prompt"]] == ["user"]
        assert row["prompt"][0]["content"] in QUESTIONS
        assert row["images"][0].size == (64, 64)
        assert check(scene_of(row["scene"]), row["completion"][0]["content"]).wholly_right
    assert len({row["prompt"][0]["content"] for row in data}) > 4
    assert rows(5, seed=3)["scene"] == data["scene"][:5]
    assert rows(5, seed=4)["scene"] != data["scene"][:5]


def test_held_out_scenes_are_never_learned():
    learned = {scene.facts for scene in scenes(3000)}
    held_out = {scene.facts for scene in scenes(400, seed=1, held_out=True)}
    assert not learned & held_out
    assert not set(rows(300, 5)["scene"]) & set(rows(300, 5, held_out=True)["scene"])


def test_facts_text_and_back():
    assert facts_text(TWO) == "top left red circle; bottom center blue cross"
    assert scene_of(facts_text(TWO)).facts == TWO.facts


# The student


def test_every_word_of_the_world_is_one_token():
    rng, tokenizer = random.Random(6), build_processor().tokenizer
    for scene in scenes(300):
        for text in (teacher_text(scene, rng.choice(tuple(STYLES)), rng), statement(scene, True, rng)):
            ids = tokenizer(text).input_ids
            assert tokenizer.decode(ids) == text
            assert len(ids) == len(
                text.replace(".", " .").replace(",", " ,").replace(":", " :").replace(";", " ;").split()
            )
    assert tokenizer.decode(tokenizer("Zebra, q7!").input_ids) == "Zebra, q7!"


def test_the_fast_forward_equals_the_models(monkeypatch: pytest.MonkeyPatch):
    for patched in (Qwen3VLVisionAttention, Qwen3VLTextRMSNorm):  # undone at the end of the test
        monkeypatch.setattr(patched, "forward", patched.forward)
    model, processor = load_student()
    encoder = Encoder(processor)
    assert_same_forward(model, processor, encoder, fixed_positions(model, encoder))


def test_the_shipped_weights_are_small_and_say_where_they_come_from():
    assert sum(file.stat().st_size for file in WEIGHTS.iterdir()) <= 8 * 2**20
    made = json.loads((WEIGHTS / "made.json").read_text())
    assert {"script", "arguments", "date", "steps", "device", "torch", "transformers", "figures"} <= set(made)
    model, processor = load_student()
    assert made["parameters"] == sum(p.numel() for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert processor.tokenizer.get_vocab() == build_processor().tokenizer.get_vocab()
    assert build_model(0).config.text_config.to_dict() == model.config.text_config.to_dict() | {"dtype": None}


def ask(model: Qwen3VLForConditionalGeneration, processor: Qwen3VLProcessor, some: list[Scene], texts: list[str]):
    """The logits [N, vocabulary] of the first word of each answer."""
    messages = [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": t}]}] for t in texts]
    prompts = [processor.apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in messages]
    inputs = processor(text=prompts, images=[[draw(s)] for s in some], padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits[:, -1]


def test_the_shipped_student_judges_statements():
    model, processor = load_student()
    rng = random.Random(7)
    some, truths = scenes(100, seed=8, held_out=True), [i % 2 == 0 for i in range(100)]
    texts = [rng.choice(STATEMENT_FRAMES).format(statement(s, t, rng)) for s, t in zip(some, truths, strict=True)]
    said = processor.batch_decode(ask(model, processor, some, texts).argmax(-1)[:, None])
    right = sum(word == str(truth).lower() for word, truth in zip(said, truths, strict=True))
    assert right >= 95  # 98.9% of 1200 when it was made


def test_the_shipped_student_all_but_never_writes_a_special_token():
    model, processor = load_student()
    some = scenes(50, seed=9, held_out=True)
    odds = ask(model, processor, some, ["What do you see?"] * 50).log_softmax(-1)
    never = processor.tokenizer.convert_tokens_to_ids([t for t in SPECIAL_TOKENS if t != "<|im_end|>"])
    assert odds[:, never].max() < -9
