"""Rows, token ids, the check of a dataset and the loader (cases F1, F3, F6 to F9, F11, F12, C1, C3, C5, C6)."""

import base64
import io
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, Features, List, Value
from datasets import Image as ImageFeature
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AddedToken, Qwen2VLImageProcessor

from tests import tiny
from trl_gad.batch import Group
from trl_gad.data import RolloutLoader, check_dataset, prompts_of_rollout, row_order
from trl_gad.messages import OverlongPromptError, OverlongTeacherError, RowError
from trl_gad.rows import RowReader


PROCESSOR = tiny.processor()
TOKENIZER = PROCESSOR.tokenizer
END = tiny.TOKEN_ID["<|im_end|>"]
IMAGE = tiny.TOKEN_ID["<|image_pad|>"]
SPECIAL_IDS = set(tiny.TOKEN_ID.values())


def reader(processing_class: Any = PROCESSOR, **kwargs: Any) -> RowReader:
    options: dict[str, Any] = {"max_prompt_length": 500, "max_completion_length": 90} | kwargs
    return RowReader(processing_class, **options)


def picture(color: str | tuple[int, int, int] = "red", size: tuple[int, int] = (32, 32)) -> Image.Image:
    return Image.new("RGB", size, color)


def encode(image: Image.Image, file_format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format)
    return buffer.getvalue()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def row(content: Any = "What is it?", teacher: Any = "A cat.", **columns: Any) -> dict[str, Any]:
    return {"prompt": [user(content)], "completion": [assistant(teacher)]} | columns


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def own_output(messages: list[dict[str, Any]], processor: Any = PROCESSOR) -> Any:
    """What the processor itself makes of a prompt."""
    return processor.apply_chat_template(
        [messages], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def controls(ids: list[int]) -> Counter[int]:
    return Counter(token for token in ids if token in SPECIAL_IDS)


# --- Token ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processor", [PROCESSOR, tiny.processor_2_5()], ids=["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_prompt_equals_the_processors_own_output(processor: Any, num_images: int) -> None:
    images = [picture("red", (32, 48)), picture("green", (64, 16)), picture("blue", (20, 90))][:num_images]
    prompt = [
        {"role": "system", "content": [text("Be brief. é漢")]},
        user([*[{"type": "image", "image": image} for image in images[:2]], text("First?")]),
        assistant([text("Yes.")]),
        user([text("And "), *[{"type": "image", "image": image} for image in images[2:]], text("this?\n")]),
    ]
    group = reader(processor).read(7, {"prompt": prompt, "completion": [assistant("No.")]})
    own = own_output(prompt, processor)
    assert group.prompt_ids == own["input_ids"][0].tolist()
    assert len(group.pictures) == len(group.images) == num_images
    assert group.row == 7
    if images:
        assert torch.equal(torch.cat([p.pixel_values for p in group.pictures]), own["pixel_values"])
        assert [list(p.grid_thw) for p in group.pictures] == own["image_grid_thw"].tolist()
        # 32 x 48: 4 x 6 patches / 4 = 6 tokens; 64 x 16: 8 x 2 / 4 = 4; 20 x 90, rounded to 16 x 96: 2 x 12 / 4 = 6
        assert group.prompt_ids.count(IMAGE) == {1: 6, 3: 6 + 4 + 6}[num_images]


def test_teacher_is_its_text_and_one_end_token() -> None:
    for content in ["A cat.", [text("A "), text("cat.")], [text("A cat."), text("")]]:
        group = reader().read(0, row(teacher=content))
        assert group.teacher_ids == [*TOKENIZER.encode("A cat."), END]
        assert group.teacher_text == "A cat."
    group = reader().read(0, row(teacher="  A\n\n cat\n"))
    assert TOKENIZER.decode(group.teacher_ids) == "  A\n\n cat\n<|im_end|>"
    assert controls(group.teacher_ids) == {END: 1}
    assert TOKENIZER.decode(group.prompt_ids).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_messages_are_the_same_as_prompt_and_completion() -> None:
    turns = [user("Hi"), assistant("Hello"), user("What is it?"), assistant("A cat.")]
    first = reader().read(0, {"messages": turns, "images": [picture()]})
    second = reader().read(0, {"prompt": turns[:-1], "completion": turns[-1:], "image": picture()})
    assert first.prompt_ids == second.prompt_ids
    assert first.teacher_ids == second.teacher_ids
    assert first.prompt_ids.count(IMAGE) == 4  # 32 x 32: 4 x 4 patches / 4


def test_f12_string_and_block_content_and_system_prompt() -> None:
    system = {"role": "system", "content": "Answer in French."}
    blocks = {"role": "system", "content": [text("Answer in French.")]}
    for r in (reader(), reader(tiny.tokenizer())):
        with_strings = r.read(0, {"prompt": [system, user("What?")], "completion": [assistant("Oui")]})
        with_blocks = r.read(
            0, {"prompt": [blocks, user([text("Wh"), text("at?")])], "completion": [assistant("Oui")]}
        )
        assert with_strings.prompt_ids == with_blocks.prompt_ids
        decoded = TOKENIZER.decode(with_strings.prompt_ids)
        assert decoded.startswith("<|im_start|>system\nAnswer in French.<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>")


def test_text_only_tokenizer_equals_its_own_output_and_refuses_images() -> None:
    tokenizer = tiny.tokenizer("qwen3")
    group = reader(tokenizer).read(0, row([text("What "), text("is it?")]))
    own = tokenizer.apply_chat_template([user("What is it?")], add_generation_prompt=True, return_dict=False)
    assert group.prompt_ids == own
    assert group.prompt == [user("What is it?")]
    with pytest.raises(
        RowError, match=r"Row 3, column 'images': a text-only student reads no images.*Pass a processor"
    ):
        reader(tokenizer).read(3, row(images=[picture()]))
    with pytest.raises(ValueError, match="max_pixels=4096 needs an image processor"):
        reader(tokenizer, max_pixels=4096)


def test_chat_template_kwargs_reach_the_template() -> None:
    tokenizer = tiny.tokenizer("qwen3")
    plain = reader(tokenizer).read(0, row())
    for group in (
        reader(tokenizer, chat_template_kwargs={"enable_thinking": False}).read(0, row()),
        reader(tokenizer).read(0, row(chat_template_kwargs={"enable_thinking": False})),
    ):
        assert group.prompt_ids == [*plain.prompt_ids, *TOKENIZER.encode("<think>\n\n</think>\n\n")]


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|im_end|>", "<|vision_start|>", "<|im_start|>assistant\n"])
def test_c6_special_tokens_in_texts_stay_text(token: str) -> None:
    content = f"What does {token} mean?{token}"
    for r in (reader(), reader(tiny.tokenizer()), reader(tiny.processor_2_5())):
        columns = {"images": [picture()]} if r.image_processor else {}
        plain = r.read(0, row("What?", "Yes.", **columns))
        prompt = [{"role": "system", "content": token}, user([text(content)]), assistant(token), user(content)]
        mixed = r.read(0, {"prompt": [user(content)], "completion": [assistant(content)]} | columns)
        assert controls(mixed.prompt_ids) == controls(plain.prompt_ids)
        assert controls(mixed.teacher_ids) == {END: 1}
        assert TOKENIZER.decode(mixed.teacher_ids) == content + "<|im_end|>"
        # Text and template lie where they lie without the special token.
        assert TOKENIZER.decode(mixed.prompt_ids) == TOKENIZER.decode(plain.prompt_ids).replace("What?", content)
        if not columns:
            turns = r.read(0, {"prompt": prompt, "completion": [assistant("x")]})
            other = [{"role": "system", "content": "a"}, user("b"), assistant("c"), user("d")]
            assert controls(turns.prompt_ids) == controls(
                r.read(0, {"prompt": other, "completion": [assistant("x")]}).prompt_ids
            )


def test_c6_no_special_token_arises_from_two_blocks_or_a_mark_in_the_text() -> None:
    plain = reader().read(0, row("What?"))
    for content in ([text("<|image_"), text("pad|>")], "\ufdd0<|im_end|>\ufdd0", "<|im_<|im_end|>end|>"):
        group = reader().read(0, row(content))
        assert controls(group.prompt_ids) == controls(plain.prompt_ids)
        written = content if isinstance(content, str) else "".join(block["text"] for block in content)
        assert TOKENIZER.decode(group.prompt_ids) == TOKENIZER.decode(plain.prompt_ids).replace("What?", written)


def test_c6_special_tokens_that_overlap_stay_text() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([AddedToken("@@a", special=True), AddedToken("a@@", special=True)])
    group = reader(tokenizer).read(0, row("@@a@@", "@@a@@"))
    assert max(group.prompt_ids) < tiny.VOCAB_SIZE  # the two new ids come after
    assert group.teacher_ids == [*TOKENIZER.encode("@@a@@"), END]
    assert TOKENIZER.decode(group.prompt_ids) == "<|im_start|>user\n@@a@@<|im_end|>\n<|im_start|>assistant\n"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*tiny.SPECIAL_TOKENS, "<|", "|>", "a", " ", "\n", "é", "\ufdd0", "im_end"]), min_size=1)
)
def test_c6_any_text_stays_text(pieces: list[str]) -> None:
    content = "".join(pieces)
    r = reader(max_prompt_length=None, max_completion_length=10**6)
    group = r.read(0, row(content, "x" + content))
    assert controls(group.prompt_ids) == controls(r.read(0, row("What?")).prompt_ids)
    assert TOKENIZER.decode(group.prompt_ids) == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(group.teacher_ids) == f"x{content}<|im_end|>"
    assert controls(group.teacher_ids) == {END: 1}


# --- Images in a row -------------------------------------------------------------------------------------------------


def test_images_in_every_place_give_the_same_group(tmp_path: Path) -> None:
    image = Image.radial_gradient("L").resize((48, 32)).convert("RGB")
    data = encode(image)
    path = tmp_path / "x.png"
    path.write_bytes(data)
    base64_data = base64.b64encode(data).decode()
    place, question = {"type": "image"}, text("What is it?")
    rows = [
        row(images=[image]), row(image=image), row([place, question], images=[data]),
        row([place, question], images=[{"bytes": data, "path": None}]), row([place, question], image=str(path)),
        row([{"type": "image", "image": image}, question]), row([{"type": "image", "path": str(path)}, question]),
        row([{"type": "image", "url": f"file://{path}"}, question], images=[]),
        row([{"type": "image", "base64": base64_data}, question], images=None),
        row([{"type": "image_url", "image_url": f"data:image/png;base64,{base64_data}"}, question]),
        row([{"type": "image_url", "image_url": {"url": str(path), "detail": "low"}}, question]),
    ]  # fmt: skip
    own = own_output([user([{"type": "image", "image": image}, question])])
    for case in rows:
        group = reader().read(0, case)
        assert group.prompt_ids == own["input_ids"][0].tolist()
        assert torch.equal(group.pictures[0].pixel_values, own["pixel_values"])
        assert group.prompt == [user([{"type": "image", "image": group.images[0]}, question])]
        assert group.images[0].mode == "RGB"
        assert group.columns == {}


def test_f7_rows_from_datasets_have_one_placeholder_per_real_image() -> None:
    prompts = [
        [user([{"type": "image", "image": encode(picture())}, text("One?")])],
        [user([text("None?")])],
        [user([{"type": "image", "image": encode(picture("blue"))}, text("And"), {"type": "image", "image": encode(picture())}])],
    ]  # fmt: skip
    dataset = Dataset.from_list([{"prompt": prompt, "completion": [assistant("Yes.")]} for prompt in prompts])
    assert dataset[1]["prompt"][0]["content"][0] == {"type": "text", "image": None, "text": "None?"}
    for index, prompt in enumerate(prompts):
        group = reader().read(index, dataset[index])
        assert group.prompt_ids == reader().read(index, row(prompt[0]["content"], "Yes.")).prompt_ids
        assert group.prompt_ids.count(tiny.TOKEN_ID["<|vision_start|>"]) == len(group.images) == [1, 0, 2][index]


def test_f9_no_one_and_three_images() -> None:
    without = reader().read(0, row())
    for columns in ({"images": []}, {"images": None}, {"image": None}, {"images": [], "image": None}):
        assert reader().read(0, row(**columns)).prompt_ids == without.prompt_ids
    three = [picture("red"), picture("green", (32, 64)), picture("blue")]
    group = reader().read(0, row(images=three))
    assert group.prompt_ids.count(IMAGE) == 4 + 8 + 4
    assert [p.grid_thw for p in group.pictures] == [(1, 4, 4), (1, 8, 4), (1, 4, 4)]
    assert [image.getpixel((0, 0)) for image in group.images] == [(255, 0, 0), (0, 128, 0), (0, 0, 255)]


def test_f3_and_c5_same_tokens_for_all_modes_and_forms() -> None:
    image = picture((100, 150, 200), (40, 30))
    forms = [image, encode(image), {"bytes": encode(image), "path": "x"}, image.convert("RGBA"), image.convert("CMYK")]
    groups = [reader().read(0, row(images=[form])) for form in forms]
    for group in groups[1:]:
        assert group.prompt_ids == groups[0].prompt_ids
        torch.testing.assert_close(
            group.pictures[0].pixel_values, groups[0].pictures[0].pixel_values, atol=0.02, rtol=0
        )


def test_f6_max_pixels_bounds_photos_and_is_saved_with_the_processor(tmp_path: Path) -> None:
    processor = tiny.processor()
    photo = picture(size=(600, 400))
    assert reader(processor).measure(0, row(images=[photo])).images == [12]  # 64 x 48 pixels of at most 64 x 64
    r = reader(processor, max_pixels=1024)
    # At most 1024 pixels: scale sqrt(1024 / 240000) = 1/15.3, so 39.2 x 26.1, cut to 32 x 16: 4 x 2 patches / 4 = 2
    assert r.measure(0, row(images=[photo])).images == [2]
    assert r.read(0, row(images=[photo])).prompt_ids.count(IMAGE) == 2
    processor.image_processor.save_pretrained(tmp_path)
    assert Qwen2VLImageProcessor.from_pretrained(tmp_path).size["longest_edge"] == 1024
    with pytest.raises(ValueError, match="max_pixels=100 must be at least .* 256 pixels"):
        reader(processor, max_pixels=100)


# --- Refused rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        # F8: no teacher
        (row(teacher=""), "'completion': the teacher's response must not be empty"),
        (row(teacher="  \n"), "'completion': the teacher's response must not be empty"),
        (row(teacher=None), "'completion': the assistant's content is a text or a list of blocks, got None"),
        (row(teacher=[]), "'completion': the teacher's response must not be empty"),
        ({"prompt": [user("x")]}, "'completion': a row needs a prompt and the teacher's response, got None"),
        ({"prompt": [user("x")], "completion": None}, "'completion': a row needs a prompt"),
        ({"prompt": [user("x")], "completion": []}, "'completion': a row needs a prompt"),
        ({"messages": [user("x")]}, "'messages': a row needs a prompt and the teacher's response"),
        ({"messages": [user("x"), user("y")]}, "'messages': the teacher's turn is a text of role 'assistant'"),
        # F11: video, audio, tools
        (row(videos=["x.mp4"]), "'videos': video, audio and tools are not supported, got .*x.mp4.*Remove the column"),
        (row(video="x.mp4"), "'video': video, audio and tools"),
        (row(tools=[{"name": "f"}]), "'tools': video, audio and tools"),
        (row([{"type": "video", "video": "x.mp4"}]), "'prompt': a block is .*Video and audio are not supported"),
        # F1: pictures
        (row(images=[encode(picture(size=(90, 90)), "JPEG")[:300]]), "'images': a picture cannot be used.*<300 bytes>"),
        (row(images=[b"no image"]), "'images': a picture cannot be used.*<8 bytes>"),
        (row(image="/nowhere.png"), "'image': a picture cannot be used.*/nowhere.png"),
        (row([{"type": "image", "path": "/nowhere.png"}]), "'prompt': a picture cannot be used.*/nowhere.png"),
        (row(images=[None]), "'images': a picture cannot be used.*NoneType"),
        (row(images=[picture(size=(1000, 2))]), "aspect ratio.*Crop it"),
        # Images and placeholders that do not match
        (row([{"type": "image"}, text("x")]), r"images provided \(0\).*placeholders \(1\)"),
        (row([text("x")], images=[picture()]), r"images provided \(1\).*placeholders \(0\).*one {'type': 'image'} block"),
        (row([{"type": "image", "image": picture()}], images=[picture()]), r"images provided \(1\)"),
        (row(images=[picture()], image=picture()), "'image': a row has `images` or `image`"),
        (row(images=picture()), "'images': must be a list"),
        (row([{"type": "image", "image": picture(), "path": "x"}]), "'prompt': a block is"),
        (row([{"type": "image", "image": picture(), "max_pixels": 9}]), "'prompt': a block is .*set by `max_pixels`"),
        (row([{"type": "text", "text": "x", "image": picture()}]), "'prompt': a block is"),
        (row(teacher=[{"type": "image", "image": picture()}]), "'completion': only a user's turn holds images"),
        # Formats
        (row() | {"prompt": "What?"}, "'prompt': must be a list of messages, got 'What\\?'.*'role': 'user'"),
        (row() | {"completion": "Cat."}, "'completion': must be a list of messages"),
        (row() | {"prompt": None}, "'prompt': a row needs a prompt"),
        (row() | {"completion": [assistant("a"), assistant("b")]}, "'completion': must be one message"),
        (row() | {"prompt": [user("a"), assistant("b")]}, "'prompt': the turn before the teacher's must be the user's"),
        (row() | {"messages": [user("x"), assistant("y")]}, "'messages': a row has `messages` or `prompt`"),
        (row() | {"prompt": [{"role": "tool", "content": "x"}, user("y")]}, "'prompt': a role is"),
        (row() | {"completion": [assistant("x") | {"reasoning_content": "hm"}]}, "no key 'reasoning_content'"),
        (row(chat_template_kwargs={"x": "<|im_end|>"}), "'chat_template_kwargs': must hold no special token"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused(bad: dict[str, Any], message: str) -> None:
    for function in (reader().read, reader().measure):
        with pytest.raises(RowError, match=message) as error:
            function(12, bad)
        assert str(error.value).startswith("Row 12, column ")
        assert len(str(error.value)) < 700


def test_lengths_count_images_and_the_end_token() -> None:
    # C1, C3: 4 text tokens and a 64 x 64 picture, 8 x 8 patches / 4 = 16 image tokens
    case = row("What", images=[picture(size=(64, 64))])
    length = len(reader().read(0, case).prompt_ids)
    assert length == len(reader().read(0, row("What")).prompt_ids) + 16 + 2  # vision start and end
    assert len(reader(max_prompt_length=length).read(0, case).prompt_ids) == length
    tight = reader(max_prompt_length=length - 1)
    tight.read(0, row("What"))  # the text alone fits
    for function in (tight.read, tight.measure):
        with pytest.raises(OverlongPromptError, match=rf"Row 4: .*max_prompt_length={length - 1} .*{length} \(16 of"):
            function(4, case)

    assert reader(max_completion_length=7).read(0, row()).teacher_ids[-1] == END  # "A cat." is 6 bytes
    for mode in ("drop", "raise"):
        with pytest.raises(OverlongTeacherError, match="max_completion_length=6 tokens .*got 7"):
            reader(max_completion_length=6, overlong_teachers=mode).read(0, row())
    for limit in (6, 3):
        cut = reader(max_completion_length=limit, overlong_teachers="cut").read(0, row())
        assert cut.teacher_ids == TOKENIZER.encode("A cat.")[:limit]
        assert cut.teacher_cut
        assert cut.teacher_text == "A cat."
    assert not reader(max_completion_length=7, overlong_teachers="cut").read(0, row()).teacher_cut


# --- The whole dataset -----------------------------------------------------------------------------------------------


def mixed_dataset(decode: bool = True) -> Dataset:
    """Rows 0 to 5: no picture, one, three, half a JPEG, a long prompt, a long teacher."""
    half = encode(picture(size=(90, 90)), "JPEG")[:300]
    images = [None, [encode(picture())], [encode(picture(size=(64, 64)))] * 3, [half], [], None]
    contents = ["a", "b", "c", "d", "e" * 300, "f"]
    return Dataset.from_dict(
        {
            "prompt": [[user(content)] for content in contents],
            "completion": [[assistant("x" * (100 if content == "f" else 5))] for content in contents],
            "images": images,
            "answer": contents,
        },
        features=Features(
            prompt=List({"role": Value("string"), "content": Value("string")}),
            completion=List({"role": Value("string"), "content": Value("string")}),
            images=List(ImageFeature(decode=decode)),
            answer=Value("string"),
        ),
    )


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_check_dataset_counts_and_reports(decode: bool, num_workers: int) -> None:
    report = check_dataset(
        mixed_dataset(decode), reader(max_prompt_length=200), bad_rows="skip", num_workers=num_workers
    )
    assert report.kept == [0, 1, 2]
    assert report.dropped == {"bad row": [3], "prompt too long": [4], "teacher response too long": [5]}
    assert "Row 3, column 'images'" in report.examples["bad row"]
    # One 32 x 32 picture (4 tokens) and three of 64 x 64 (16 each)
    assert (report.image_tokens.min, report.image_tokens.median, report.image_tokens.max) == (4, 16, 16)
    base = len(reader().read(0, row("a")).prompt_ids)
    # + (4 + 2 control tokens), + 3 * (16 + 2)
    assert (report.prompt_tokens.min, report.prompt_tokens.median, report.prompt_tokens.max) == (
        base,
        base + 6,
        base + 54,
    )
    assert (report.teacher_tokens.min, report.teacher_tokens.p95) == (6, 6)
    assert pickle.loads(pickle.dumps(report)) == report
    assert "3 of 6 rows kept, 4 images" in str(report)
    assert "dropped, bad row: 1 (rows 3); the first: Row 3" in str(report)


def test_check_dataset_raises_where_the_options_say_so() -> None:
    dataset = mixed_dataset()
    with pytest.raises(RowError, match="Row 3, .*Or set bad_rows='skip'"):
        check_dataset(dataset, reader())
    with pytest.raises(OverlongPromptError, match="Row 4: .*overlong_prompts='drop'"):
        check_dataset(dataset, reader(max_prompt_length=200, overlong_prompts="raise"), bad_rows="skip")
    with pytest.raises(OverlongTeacherError, match="Row 5: .*overlong_teachers='cut'"):
        check_dataset(dataset, reader(overlong_teachers="raise"), bad_rows="skip")
    report = check_dataset(dataset, reader(overlong_teachers="cut"), bad_rows="skip")
    assert (report.kept, report.num_cut_teachers) == ([0, 1, 2, 4, 5], 1)
    with pytest.raises(ValueError, match=r"No row is left.*\n.*bad row: 1"):
        check_dataset(dataset.select([3]), reader(), bad_rows="skip")


def test_datasets_without_row_numbers_are_refused() -> None:
    dataset = mixed_dataset()
    with pytest.raises(ValueError, match="got IterableDataset. Load it with streaming=False"):
        check_dataset(dataset.to_iterable_dataset(), reader())
    with pytest.raises(ValueError, match="Pass one split"):
        check_dataset(DatasetDict({"train": dataset}), reader())
    with pytest.raises(ValueError, match="no rows"):
        check_dataset(dataset.select([]), reader())


# --- Order and loader ------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 99), st.booleans())
def test_rollouts_walk_every_epoch_once(num_rows: int, num_prompts: int, seed: int, shuffle: bool) -> None:
    # num_rows rollouts take num_rows * num_prompts rows: num_prompts whole epochs.
    walked = [
        prompt for i in range(num_rows) for prompt in prompts_of_rollout(num_rows, num_prompts, seed, i, shuffle)
    ]
    for epoch in range(num_prompts):
        order = walked[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(order) == list(range(num_rows))
        assert order == row_order(num_rows, seed, epoch, shuffle)


def test_row_order_depends_on_seed_and_epoch() -> None:
    orders = {tuple(row_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert row_order(4, seed=1, epoch=5, shuffle=False) == [0, 1, 2, 3]


class CountingImageProcessor(Qwen2VLImageProcessor):
    num_images = 0

    def preprocess(self, images: Any, **kwargs: Any) -> Any:
        type(self).num_images += len(images)
        return super().preprocess(images, **kwargs)


def load(dataset: Any, r: RowReader | None = None, **kwargs: Any) -> list[tuple[int, list[Group]]]:
    options: dict[str, Any] = {"rows": [0, 1, 2, 4, 5], "prompts_per_rollout": 4, "seed": 3, "stop": 5} | kwargs
    return list(RolloutLoader(dataset, r or reader(overlong_teachers="cut"), **options))


def test_loader_covers_every_row_once_per_epoch_over_two_ranks() -> None:
    # 5 rollouts of 4 prompts over 5 rows: 4 epochs
    ranks = [load(mixed_dataset(), rank=rank, num_processes=2) for rank in range(2)]
    walked = []
    for (first_index, first), (second_index, second) in zip(*ranks, strict=True):
        assert first_index == second_index
        assert len(first) == len(second) == 2
        walked += [group.row for group in [*first, *second]]
    assert [sorted(walked[i : i + 5]) for i in range(0, 20, 5)] == [[0, 1, 2, 4, 5]] * 4
    assert [index for index, _ in ranks[0]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("steps_per_rollout", [1, 2])
@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize("with_costs", [False, True])
def test_every_step_trains_on_the_same_prompts_whatever_the_number_of_ranks(
    steps_per_rollout: int, num_processes: int, with_costs: bool
) -> None:
    rows, costs = list(range(10, 26)), [1, 40, 3, 3, 90, 2, 2, 1, 60, 5, 4, 8, 33, 1, 1, 70]

    def loader(rank: int, num_processes: int) -> RolloutLoader:
        return RolloutLoader(
            [{}] * 30, reader(), rows=rows, prompts_per_rollout=8, seed=3, stop=4, rank=rank,
            num_processes=num_processes, steps_per_rollout=steps_per_rollout, costs=costs if with_costs else None,
        )  # fmt: skip

    alone = loader(0, 1)
    ranks = [loader(rank, num_processes) for rank in range(num_processes)]
    worst = []
    for index in range(4):
        whole = alone.rows_of_rollout(index)
        places = prompts_of_rollout(len(rows), 8, seed=3, rollout_index=index)
        assert whole == [rows[place] for place in places]  # one process: in order
        shares = [of_rank.rows_of_rollout(index) for of_rank in ranks]
        for step in range(steps_per_rollout):
            size, own = 8 // steps_per_rollout, 8 // steps_per_rollout // num_processes
            together = [row for share in shares for row in share[step * own : (step + 1) * own]]
            assert sorted(together) == sorted(whole[step * size : (step + 1) * size])
            if not with_costs:
                assert together == whole[step * size : (step + 1) * size]
        sums = [sum(costs[rows.index(row)] for row in share) for share in shares]
        worst.append(max(sums) / (sum(sums) / num_processes))
    if with_costs and (num_processes, steps_per_rollout) == (2, 1):
        assert max(worst) < 1.2  # neighbours: up to 1.9


def test_loader_resumes_and_workers_change_nothing() -> None:
    random_state = torch.get_rng_state()
    whole = load(mixed_dataset())
    variants: list[dict[str, Any]] = [
        {"start": 3}, {"start": 3, "num_workers": 2}, {"start": 3, "num_workers": 1, "prefetch_rows": 1}
    ]  # fmt: skip
    for kwargs in variants:
        part = load(mixed_dataset(), **kwargs)
        assert [index for index, _ in part] == [3, 4]
        for (_, groups), (_, expected) in zip(part, whole[3:], strict=True):
            for group, other in zip(groups, expected, strict=True):
                assert (group.row, group.prompt_ids, group.teacher_ids) == (
                    other.row,
                    other.prompt_ids,
                    other.teacher_ids,
                )
                assert group.columns == other.columns == {"answer": mixed_dataset()[group.row]["answer"]}
                for a, b in zip(group.pictures, other.pictures, strict=True):
                    assert torch.equal(a.pixel_values, b.pixel_values)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_loader_processes_each_picture_once() -> None:
    processor = tiny.processor()
    processor.image_processor = CountingImageProcessor(**processor.image_processor.to_dict())
    r = reader(processor, overlong_teachers="cut")
    CountingImageProcessor.num_images = 0
    groups = [group for _, rollout in load(mixed_dataset(), r) for group in rollout]
    assert CountingImageProcessor.num_images == sum(len(group.pictures) for group in groups) == 4 * (1 + 3)
    check_dataset(mixed_dataset(), r, bad_rows="skip")
    assert CountingImageProcessor.num_images == 16  # the check only decodes


def test_loader_reads_plain_lists_and_names_the_row_that_fails() -> None:
    rows = [row("a", images=[picture()]), row("b"), row("c", images=["/nowhere.png"])]
    groups = load(rows, rows=[0, 1], prompts_per_rollout=2, stop=1)[0][1]
    assert sorted(group.row for group in groups) == [0, 1]
    for num_workers in (0, 1):
        with pytest.raises(RowError, match="Row 2, column 'images': a picture cannot be used"):
            load(rows, rows=[0, 1, 2], prompts_per_rollout=3, stop=1, num_workers=num_workers)


def test_loader_refuses_unequal_shares() -> None:
    with pytest.raises(ValueError, match="got 4 prompts for 3 processes"):
        load(mixed_dataset(), num_processes=3)
    with pytest.raises(ValueError, match="at least one row"):
        load(mixed_dataset(), rows=[])
