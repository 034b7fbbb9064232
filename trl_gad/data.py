"""Dataset rows to `Group`s: what a row may hold, its token ids, the check of a whole dataset, and the loader.

A row is TRL's prompt-completion type, conversational, or `messages` (its last assistant turn is the teacher):

    {"prompt": [{"role": "user", "content": "What is it?"}], "images": [image],
     "completion": [{"role": "assistant", "content": "A cat."}]}

Nothing of a row is dropped, cut or changed in silence: what cannot be used as it stands is a `RowError` that names row,
column, value and the way out. This module knows nothing of models and processes; the rank is a number it is given.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import datasets
import jinja2
import numpy as np
import torch
from PIL import Image
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl.data_utils import is_conversational, prepare_multimodal_messages

from trl_gad.batch import Group
from trl_gad.pictures import PictureError, count_patches, describe, load_picture, process_picture


Message = dict[str, Any]
FORMAT_COLUMNS = {"prompt", "completion", "messages", "images", "image", "chat_template_kwargs"}
REFUSED_COLUMNS = ("video", "videos", "audio", "audios", "tools")
IMAGE_KEYS = ("image", "image_url", "url", "path", "base64")
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters: no text has a use for them
PROGRESS_FROM_ROWS = 1000
CHUNK = 16  # rows a worker checks before it answers


class RowError(ValueError):
    """A dataset row that cannot be trained on. Names row, column, value and the way out."""

    reason = "bad row"


class OverlongPromptError(RowError):
    """A prompt of more than `max_prompt_length` tokens, counted after image expansion."""

    reason = "prompt too long"


class OverlongTeacherError(RowError):
    """A teacher response of more than `max_completion_length` tokens, counted with its end token."""

    reason = "teacher response too long"


class _Fault(ValueError):
    """What is wrong with a row, not yet with the row's number."""

    def __init__(self, column: str, rule: str, value: Any, way_out: str):
        # A picture's error names what was given itself.
        got = value if isinstance(value, PictureError) else f"got {describe(value)}"
        super().__init__(f"column {column!r}: {rule}, {got}. {way_out}")


@dataclass
class RowLengths:
    """Sizes of one row in tokens."""

    prompt: int  # after image expansion
    teacher: int  # with the end token
    images: list[int]  # image tokens of each picture
    teacher_cut: bool


# --- What a row may hold ---------------------------------------------------------------------------------------------


def _is_given(value: Any) -> bool:
    """False for what `datasets` fills in where a row has nothing: None, an empty list, a struct of Nones."""
    if isinstance(value, dict):
        return any(item is not None for item in value.values())
    return len(value) > 0 if isinstance(value, list | tuple | str) else value is not None


@dataclass
class ParsedRow:
    """The same for every format a row may have."""

    messages: list[Message]  # the prompt; every content is a list of blocks
    teacher_text: str
    image_column: str  # where the images came from, for error messages


def parse_row(row: dict[str, Any]) -> ParsedRow:
    """Gives the prompt's messages and the teacher's text.

    Every content becomes a list of blocks, `{"type": "text", "text": ...}` or `{"type": "image", "image": source}`;
    neighbouring texts are joined, so that no special token can arise from two halves.
    """
    for column in REFUSED_COLUMNS:
        if _is_given(row.get(column)):
            raise _Fault(column, "video, audio and tools are not supported", row[column], "Remove the column.")
    prompt, column, completion = _split_turns(row)
    prompt_column = "prompt" if column == "completion" else column
    messages = [_clean_message(prompt_column, message) for message in prompt]
    if messages[-1]["role"] != "user":
        raise _Fault(
            prompt_column, "the turn before the teacher's must be the user's", prompt[-1], "Cut the row there."
        )
    teacher = _clean_message(column, completion)
    content = teacher["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if teacher["role"] != "assistant" or any(block["type"] != "text" for block in blocks):
        raise _Fault(column, "the teacher's turn is a text of role 'assistant'", completion, "Rewrite it.")
    teacher_text = "".join(block["text"] for block in blocks)
    if not teacher_text.strip():
        raise _Fault(column, "the teacher's response must not be empty", completion, "Query the teacher again.")

    image_column, sources = _image_column(row)
    try:
        messages = prepare_multimodal_messages(messages, images=sources)
    except ValueError as error:
        raise _Fault(
            image_column, str(error).rstrip("."), sources,
            "Give each image one {'type': 'image'} block, or write the contents as plain strings: then the images come "
            "before the first user text. An image inside a block is not repeated in the column.",
        ) from error  # fmt: skip
    messages = [message | {"content": _join_texts(message["content"])} for message in messages]
    return ParsedRow(messages, teacher_text, image_column if sources else prompt_column)


def _split_turns(row: dict[str, Any]) -> tuple[list[Any], str, Any]:
    """The prompt's messages, the name of the column that holds the teacher's message, and that message."""
    names = [name for name in ("messages", "prompt", "completion") if row.get(name) is not None]
    if "messages" in names and len(names) > 1:
        raise _Fault("messages", "a row has `messages` or `prompt` and `completion`", names, "Remove one of them.")
    for name in ["messages"] if "messages" in names else ["prompt", "completion"]:
        value = row.get(name)
        if not value:
            raise _Fault(name, "a row needs a prompt and the teacher's response", value, "Fill it or remove the row.")
        if not is_conversational({name: value}):
            raise _Fault(
                name, "must be a list of messages", value,
                "Write a plain text as [{'role': 'user', 'content': text}] ('assistant' in `completion`).",
            )  # fmt: skip
    if "messages" in names:
        turns = row["messages"]
        if len(turns) < 2:
            raise _Fault("messages", "a row needs a prompt and the teacher's response", turns, "Add the missing turn.")
        return turns[:-1], "messages", turns[-1]
    if len(row["completion"]) != 1:
        raise _Fault("completion", "must be one message", row["completion"], "Move earlier turns to `prompt`.")
    return row["prompt"], "completion", row["completion"][0]


def _clean_message(column: str, message: Any) -> Message:
    """The message with its role and content only."""
    if not isinstance(message, dict):
        raise _Fault(column, "a message is a dict with 'role' and 'content'", message, "Rewrite it.")
    for key, value in message.items():
        # Templates differ in what they do with other keys (most drop a 'reasoning_content'), none of it visible here.
        if key not in ("role", "content") and _is_given(value):
            raise _Fault(column, f"a message has no key {key!r} here", value, "Write it into 'content' or remove it.")
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant"):
        raise _Fault(column, "a role is 'system', 'user' or 'assistant'", role, "Rewrite the message.")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list | tuple):
        raise _Fault(column, f"the {role}'s content is a text or a list of blocks", content, "Rewrite the message.")
    blocks = [_clean_block(column, block) for block in content]
    if role != "user" and any(block["type"] == "image" for block in blocks):
        raise _Fault(column, "only a user's turn holds images", content, f"Move them out of the {role}'s turn.")
    return {"role": role, "content": blocks}


def _clean_block(column: str, block: Any) -> dict[str, Any]:
    """A text block or an image block, with an image's source (if any) under 'image'."""
    if not isinstance(block, dict):
        raise _Fault(column, "a content block is a dict with 'type'", block, "Rewrite it.")
    kind, text = block.get("type"), block.get("text")
    # `datasets` gives every block the keys of all the others, with None. A template that asks for the key alone would
    # see an image in each text.
    given = {key: value for key, value in block.items() if key != "type" and _is_given(value)}
    if kind == "text" and isinstance(text, str) and not given.keys() - {"text"}:
        return {"type": "text", "text": text}
    if kind not in ("image", "image_url") or given.keys() - set(IMAGE_KEYS) or len(given) > 1:
        raise _Fault(
            column, "a block is {'type': 'text', 'text': ...} or {'type': 'image', 'image': ...}", block,
            "Video and audio are not supported; the size of all images is set by `max_pixels`.",
        )  # fmt: skip
    if not given:
        return {"type": "image"}
    key, source = given.popitem()
    if key == "image_url" and isinstance(source, dict):
        source = source.get("url")
    elif key == "base64" and not str(source).startswith("data:"):
        source = f"data:;base64,{source}"
    return {"type": "image", "image": source}


def _image_column(row: dict[str, Any]) -> tuple[str, list[Any]]:
    names = [name for name in ("images", "image") if _is_given(row.get(name))]
    if len(names) == 2:
        raise _Fault("image", "a row has `images` or `image`", row["image"], "Remove one of the two columns.")
    if not names:
        return "images", []
    value = row[names[0]]
    if names[0] == "images" and not isinstance(value, list | tuple):
        raise _Fault("images", "must be a list", value, "Put a single image into the column `image`.")
    return names[0], list(value) if isinstance(value, list | tuple) else [value]


def _join_texts(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    joined: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": joined[-1]["text"] + block["text"]}
        else:
            joined.append(block)
    return joined


# --- Token ids -------------------------------------------------------------------------------------------------------


class RowReader:
    """Reads one dataset row at a time.

    Args:
        processing_class (`ProcessorMixin` or `PreTrainedTokenizerBase`):
            The student's. With a tokenizer alone, rows with images are refused.
        max_prompt_length (`int`, *optional*):
            In tokens, counted after image expansion. A longer prompt is an [`OverlongPromptError`], it is never cut.
        overlong_prompts, overlong_teachers (`str`, *optional*, defaults to `"drop"`):
            What [`check_dataset`] does with such rows: drop and count them, or raise.
        max_completion_length (`int`):
            In tokens, the end token among them. A longer response is an [`OverlongTeacherError`], unless
            `overlong_teachers` is `"cut"`: then its first `max_completion_length` tokens stay, without an end token,
            like a cut student.
        chat_template_kwargs (`dict`, *optional*):
            For the chat template; a row's own column `chat_template_kwargs` goes before.
        max_pixels (`int`, *optional*):
            Largest size of an image in pixels. Set in the image processor itself, so that it is saved with it and the
            rollout server, which loads that processor, bounds images the same way.
        eos_token_id (`int`, *optional*, defaults to the tokenizer's):
            The end token of a teacher response.

    Special tokens written in a user's or teacher's text stay text. Added tokens that the tokenizer does not call special
    (`<think>`, `<tool_call>` in Qwen3) are read as the tokenizer reads them.
    """

    def __init__(
        self,
        processing_class: ProcessorMixin | PreTrainedTokenizerBase,
        *,
        max_prompt_length: int | None,
        max_completion_length: int,
        overlong_prompts: Literal["drop", "raise"] = "drop",
        overlong_teachers: Literal["drop", "raise", "cut"] = "drop",
        chat_template_kwargs: dict[str, Any] | None = None,
        max_pixels: int | None = None,
        eos_token_id: int | None = None,
    ):
        # Any: tokenizer, image processor and image token are not attributes of every processor.
        self.processing_class: Any = processing_class
        self.max_prompt_length = max_prompt_length
        self.max_completion_length = max_completion_length
        self.overlong_prompts, self.overlong_teachers = overlong_prompts, overlong_teachers
        self.chat_template_kwargs = chat_template_kwargs or {}
        if isinstance(processing_class, ProcessorMixin):
            self.tokenizer: Any = self.processing_class.tokenizer
            self.image_processor: Any = self.processing_class.image_processor
            self.image_token_id: int | None = self.processing_class.image_token_id
        else:
            self.tokenizer, self.image_processor, self.image_token_id = processing_class, None, None
        self.eos_token_id = self.tokenizer.eos_token_id if eos_token_id is None else eos_token_id
        if self.eos_token_id is None:
            raise ValueError("The tokenizer has no end token. Set `eos_token` in the tokenizer.")
        if max_pixels is not None:
            self._limit_pixels(max_pixels)
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        # The longest first: of two that start alike, the tokenizer takes the longer one. `(?!)` matches nothing.
        pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or "(?!)"
        self._special_token = re.compile(f"({pattern})")

    def _limit_pixels(self, max_pixels: int) -> None:
        if self.image_processor is None:
            raise ValueError(
                f"max_pixels={max_pixels} needs an image processor. Leave it out for a text-only student."
            )
        smallest = self.image_processor.size["shortest_edge"]
        if max_pixels < smallest:
            raise ValueError(
                f"max_pixels={max_pixels} must be at least the image processor's smallest size of {smallest} pixels "
                "(size['shortest_edge']). Raise max_pixels."
            )
        self.image_processor.size["longest_edge"] = max_pixels

    def read(self, row_index: int, row: dict[str, Any]) -> Group:
        """Reads a row, with every picture decoded and processed once.

        Raises:
            [`RowError`]: See the module; [`OverlongPromptError`] and [`OverlongTeacherError`] among them.
        """
        with _row_named(row_index):
            parsed = parse_row(row)
            with _column_named(parsed.image_column):
                images = self._load_images(parsed)
                pictures = [process_picture(image, self.image_processor) for image in images]
            patches = [math.prod(picture.grid_thw) for picture in pictures]
            prompt_ids, teacher_ids, teacher_cut = self._ids(row_index, row, parsed, patches)
        return Group(
            row=row_index,
            prompt_ids=prompt_ids,
            teacher_ids=teacher_ids,
            pictures=pictures,
            teacher_cut=teacher_cut,
            prompt=parsed.messages if self.image_processor is not None else _as_strings(parsed.messages),
            teacher_text=parsed.teacher_text,
            images=images,
            columns={k: v for k, v in row.items() if k not in FORMAT_COLUMNS and k not in REFUSED_COLUMNS},
        )

    def measure(self, row_index: int, row: dict[str, Any]) -> RowLengths:
        """Sizes of what `read` gives; same errors. Pictures are decoded (a broken file shows) but not processed."""
        with _row_named(row_index):
            parsed = parse_row(row)
            with _column_named(parsed.image_column):
                patches = [count_patches(image, self.image_processor) for image in self._load_images(parsed)]
            prompt_ids, teacher_ids, teacher_cut = self._ids(row_index, row, parsed, patches)
        images = [num_patches // self.image_processor.merge_size**2 for num_patches in patches]
        return RowLengths(len(prompt_ids), len(teacher_ids), images, teacher_cut)

    def _load_images(self, parsed: ParsedRow) -> list[Image.Image]:
        """Decodes the images in the messages, in place."""
        blocks = [block for message in parsed.messages for block in message["content"] if block["type"] == "image"]
        if blocks and self.image_processor is None:
            raise _Fault(
                parsed.image_column, "a text-only student reads no images", blocks, "Pass a processor or drop them."
            )
        for block in blocks:
            block["image"] = load_picture(block["image"])
        return [block["image"] for block in blocks]

    def _ids(
        self, row_index: int, row: dict[str, Any], parsed: ParsedRow, patches: list[int]
    ) -> tuple[list[int], list[int], bool]:
        """Prompt ids after image expansion, teacher ids, and whether the teacher was cut."""
        prompt_ids = self._expand(self._prompt_ids(row, parsed.messages), patches)
        if self.max_prompt_length is not None and len(prompt_ids) > self.max_prompt_length:
            num_image_tokens = sum(token == self.image_token_id for token in prompt_ids)
            raise OverlongPromptError(
                f"Row {row_index}: a prompt has at most max_prompt_length={self.max_prompt_length} tokens, got "
                f"{len(prompt_ids)} ({num_image_tokens} of them for images). Raise "
                "max_prompt_length, lower max_pixels, or set overlong_prompts='drop'."
            )
        # The tokens that follow the generation prompt, not the re-rendered turn: a template may add a newline or an
        # empty think block there, which no student writes and by which a discriminator would know the teacher.
        teacher_ids = [*self._encode(parsed.teacher_text, split_special_tokens=True), self.eos_token_id]
        if len(teacher_ids) <= self.max_completion_length:
            return prompt_ids, teacher_ids, False
        if self.overlong_teachers == "cut":
            return prompt_ids, teacher_ids[: self.max_completion_length], True
        raise OverlongTeacherError(
            f"Row {row_index}: a teacher response has at most max_completion_length={self.max_completion_length} "
            f"tokens with its end token, got {len(teacher_ids)} ({describe(parsed.teacher_text)}). Raise "
            "max_completion_length, or set overlong_teachers='cut' or 'drop'."
        )

    def _encode(self, text: str, split_special_tokens: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split_special_tokens)

    def _prompt_ids(self, row: dict[str, Any], messages: list[Message]) -> list[int]:
        """Ids of the rendered prompt, one per image placeholder.

        A special token in a user's text is told apart from the template's own by a mark put inside it before rendering:

            user text  a<|im_end|>b     marked  a<#|im_end|>b      (# is the mark)
            rendered   <|im_start|>user\\na<#|im_end|>b<|im_end|>...
            pieces     <|im_start|> | user\\na<#|im_end|>b | <|im_end|> | ...

        The pieces between special tokens lose their marks and are tokenized as plain text.
        """
        kwargs = row.get("chat_template_kwargs") or {}
        if self._special_token.search(repr(kwargs)):
            raise _Fault("chat_template_kwargs", "must hold no special token", kwargs, "Remove it.")
        kwargs = self.chat_template_kwargs | {key: value for key, value in kwargs.items() if value is not None}
        texts = "".join(b["text"] for message in messages for b in message["content"] if b["type"] == "text")
        if not self._special_token.search(texts):
            return self._encode(self._render(messages, kwargs))
        mark = next((mark for mark in MARKS if mark not in texts), None)
        if mark is None:
            raise _Fault("prompt", "a text may not use all 32 noncharacters U+FDD0 to U+FDEF", texts, "Remove them.")
        rendered = self._render([self._marked(message, mark) for message in messages], kwargs)
        pieces = self._special_token.split(rendered)  # plain, special, plain, ..., plain
        if self._encode_pieces(pieces) != self._encode(rendered):
            raise _Fault(
                "prompt", "this tokenizer reads a text between special tokens differently when alone", texts,
                "Write special tokens in the text another way, as '<im_end>'.",
            )  # fmt: skip
        return self._encode_pieces([piece.replace(mark, "") for piece in pieces])

    def _marked(self, message: Message, mark: str) -> Message:
        blocks = []
        for block in message["content"]:
            text = block.get("text", "")
            while self._special_token.search(text):  # again, as two may overlap
                text = self._special_token.sub(lambda match: match[0][0] + mark + match[0][1:], text)
            blocks.append({"type": "text", "text": text} if block["type"] == "text" else block)
        return message | {"content": blocks}

    def _encode_pieces(self, pieces: list[str]) -> list[int]:
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            is_special = i % 2 == 1
            ids += [self.tokenizer.convert_tokens_to_ids(piece)] if is_special else self._encode(piece, True)
        return ids

    def _render(self, messages: list[Message], kwargs: dict[str, Any]) -> str:
        if self.image_processor is None:
            messages = _as_strings(messages)  # text-only templates take a list of blocks for an empty content
        try:
            return self.processing_class.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **kwargs
            )
        except jinja2.TemplateError as error:
            raise _Fault(
                "prompt", f"the chat template refuses it ({error})", messages, "Rewrite the prompt."
            ) from error

    def _expand(self, ids: list[int], patches: list[int]) -> list[int]:
        """Each image placeholder as often as the image has tokens: patches / merge_size**2."""
        num_placeholders = 0 if self.image_token_id is None else ids.count(self.image_token_id)
        if num_placeholders != len(patches):
            raise _Fault(
                "images", f"the chat template must give each of the {len(patches)} images one placeholder",
                num_placeholders, "Use the chat template of the student's processor.",
            )  # fmt: skip
        if not patches:
            return ids
        counts = iter(num_patches // self.image_processor.merge_size**2 for num_patches in patches)
        expanded: list[int] = []
        for token in ids:
            expanded += [token] * next(counts) if token == self.image_token_id else [token]
        return expanded


def _as_strings(messages: list[Message]) -> list[Message]:
    return [m | {"content": "".join(block["text"] for block in m["content"])} for m in messages]


@contextmanager
def _row_named(row_index: int) -> Iterator[None]:
    try:
        yield
    except _Fault as error:
        raise RowError(f"Row {row_index}, {error}") from error


@contextmanager
def _column_named(column: str) -> Iterator[None]:
    try:
        yield
    except PictureError as error:
        raise _Fault(column, "a picture cannot be used", error, "Replace the picture or remove the row.") from error


# --- The whole dataset -----------------------------------------------------------------------------------------------


class _Rows:
    """A map-style dataset whose pictures arrive undecoded, so that a broken file is an error of its row."""

    def __init__(self, dataset: Any):
        if isinstance(dataset, datasets.IterableDataset | torch.utils.data.IterableDataset):
            raise ValueError(
                "The dataset must know its rows, to check them before training and to resume: an iterable dataset, got "
                f"{type(dataset).__name__}. Load it with streaming=False, or save it and load it from disk."
            )
        if isinstance(dataset, dict):
            raise ValueError(f"Pass one split, got a dict of {sorted(dataset)}. Use dataset['train'].")
        if len(dataset) == 0:
            raise ValueError("The dataset has no rows. Pass one with at least one row.")
        self.dataset: Any = dataset
        self.features: datasets.Features | None = None
        # A user's own transform (type "custom") decides itself what a row looks like.
        if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
            self.features = copy.deepcopy(dataset.features)
            for column in FORMAT_COLUMNS & set(self.features):
                self.features[column] = _undecoded(self.features[column])
            self.dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            if self.features is None:
                return self.dataset[index]
            return self.features.decode_example(self.dataset[index].to_pylist()[0])
        except (OSError, ValueError, SyntaxError) as error:
            # A column beside the prompt's (for rewards, say) may hold a broken file too.
            raise RowError(f"Row {index} cannot be read ({describe(str(error), 200)}). Remove it.") from error


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, datasets.Image):
        return datasets.Image(mode=feature.mode, decode=False)
    if isinstance(feature, datasets.List):
        return datasets.List(_undecoded(feature.feature), length=feature.length)
    if isinstance(feature, dict):
        return {key: _undecoded(item) for key, item in feature.items()}
    return feature


@dataclass
class Spread:
    """Least, middle, 95th percentile and largest of a list of counts."""

    min: int = 0
    median: int = 0
    p95: int = 0
    max: int = 0

    @staticmethod
    def of(values: list[int]) -> "Spread":
        """
        >>> Spread.of([5, 1, 3])
        Spread(min=1, median=3, p95=5, max=5)
        """
        if not values:
            return Spread()
        return Spread(*(int(value) for value in np.percentile(values, [0, 50, 95, 100], method="nearest")))


@dataclass
class DataReport:
    """What [`check_dataset`] found. Equal on all ranks, and can be sent to them."""

    num_rows: int
    kept: list[int] = field(default_factory=list)  # dataset indices to train on, ascending
    dropped: dict[str, list[int]] = field(default_factory=dict)  # reason -> dataset indices
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first such row's message
    num_cut_teachers: int = 0
    num_images: int = 0
    prompt_tokens: Spread = field(default_factory=Spread)  # of kept rows, after image expansion
    teacher_tokens: Spread = field(default_factory=Spread)  # of kept rows, with the end token
    image_tokens: Spread = field(default_factory=Spread)  # of each image in the kept rows

    def __str__(self) -> str:
        lines = [f"{len(self.kept)} of {self.num_rows} rows kept, {self.num_images} images"]
        if self.num_cut_teachers:
            lines.append(f"{self.num_cut_teachers} teacher responses cut, without an end token")
        spreads = {"prompt": self.prompt_tokens, "teacher": self.teacher_tokens, "image": self.image_tokens}
        lines += [
            f"{name + ' tokens':<15}min {spread.min}  median {spread.median}  p95 {spread.p95}  max {spread.max}"
            for name, spread in spreads.items()
            if spread.max > 0  # no rows, or no images
        ]
        for reason, rows in self.dropped.items():
            shown = ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")
            lines.append(f"dropped, {reason}: {len(rows)} (rows {shown}); the first: {self.examples[reason]}")
        return "\n".join(lines)


@dataclass
class _Refusal:
    """A `RowError` as a value: raised in a worker process, it would arrive wrapped in the worker's traceback."""

    kind: type[RowError]
    message: str


class _Read(torch.utils.data.Dataset):
    """Maps a list of row indices to what a method of the reader makes of each row."""

    def __init__(self, rows: _Rows, method: Callable[[int, dict[str, Any]], Any]):
        self.rows, self.method = rows, method

    def __getitem__(self, indices: list[int]) -> list[Any]:
        return [self._read(index) for index in indices]

    def _read(self, index: int) -> Any:
        try:
            return self.method(index, self.rows[index])
        except RowError as error:
            return _Refusal(type(error), str(error))


def check_dataset(
    dataset: Any,
    reader: RowReader,
    *,
    bad_rows: Literal["raise", "skip"] = "raise",
    num_workers: int = 0,
    progress: bool = True,
) -> DataReport:
    """Reads every row once, so that none fails in the middle of a run.

    Args:
        dataset (`datasets.Dataset`, or anything with a length and dicts under row numbers):
            Not an iterable dataset.
        reader ([`RowReader`]):
            Its `overlong_prompts` and `overlong_teachers` say what becomes of rows that are too long.
        bad_rows (`str`, *optional*, defaults to `"raise"`):
            `"raise"` stops at the first bad row; `"skip"` leaves it out, counts it and names it in the report.
        num_workers (`int`, *optional*, defaults to `0`):
            Processes that read; `0` reads in this one. The report does not depend on it.
        progress (`bool`, *optional*, defaults to `True`):
            Show a progress bar for more than 1000 rows.

    Raises:
        [`RowError`]: A row that the options do not drop.
        `ValueError`: A dataset without row numbers, or no row is left.
    """
    source = _Rows(dataset)
    is_dropped = {
        RowError: bad_rows == "skip",
        OverlongPromptError: reader.overlong_prompts == "drop",
        OverlongTeacherError: reader.overlong_teachers == "drop",
    }
    chunks = [list(range(i, min(i + CHUNK, len(source)))) for i in range(0, len(source), CHUNK)]
    outcomes = _ordered(_Read(source, reader.measure), chunks, num_workers, ahead=4 * num_workers)
    report = DataReport(num_rows=len(source))
    lengths: list[RowLengths] = []
    with tqdm(
        total=len(source), desc="checking rows", disable=not progress or len(source) <= PROGRESS_FROM_ROWS
    ) as bar:
        for chunk, results in zip(chunks, outcomes, strict=True):
            bar.update(len(chunk))
            for index, result in zip(chunk, results, strict=True):
                if isinstance(result, RowLengths):
                    lengths.append(result)
                    report.kept.append(index)
                elif is_dropped[result.kind]:
                    report.dropped.setdefault(result.kind.reason, []).append(index)
                    report.examples.setdefault(result.kind.reason, result.message)
                else:
                    way_out = " Or set bad_rows='skip'." if result.kind is RowError else ""
                    raise result.kind(result.message + way_out)
    images = [num_tokens for row in lengths for num_tokens in row.images]
    report.num_images = len(images)
    report.num_cut_teachers = sum(row.teacher_cut for row in lengths)
    report.prompt_tokens = Spread.of([row.prompt for row in lengths])
    report.teacher_tokens = Spread.of([row.teacher for row in lengths])
    report.image_tokens = Spread.of(images)
    if not lengths:
        raise ValueError(f"No row is left to train on. {report}\nMend the rows, or raise the limits named above.")
    return report


def _ordered(dataset: torch.utils.data.Dataset, keys: Iterable[Any], num_workers: int, ahead: int) -> Iterator[Any]:
    """`dataset[key]` for each key, in order, read by worker processes that run up to about `ahead` items ahead."""
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        sampler=keys,
        num_workers=num_workers,
        prefetch_factor=max(1, math.ceil(ahead / num_workers)) if num_workers else None,
        collate_fn=_as_it_is,
        # A generator of its own: the loader draws its workers' seed, and drawn from the global generator that would
        # change every later random number of the run.
        generator=torch.Generator(),
    )
    return iter(loader)


def _as_it_is(item: Any) -> Any:
    return item


# --- Order and loader ------------------------------------------------------------------------------------------------


def row_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    """Order of the rows in an epoch: a permutation that depends on seed and epoch only.

    >>> row_order(5, seed=0, epoch=0), row_order(5, seed=0, epoch=1)
    ([2, 4, 3, 0, 1], [1, 4, 3, 0, 2])
    >>> row_order(5, seed=0, epoch=1, shuffle=False)
    [0, 1, 2, 3, 4]
    """
    if not shuffle:
        return list(range(num_rows))
    return np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()


def prompts_of_rollout(
    num_rows: int, prompts_per_rollout: int, seed: int, rollout_index: int, shuffle: bool = True
) -> list[int]:
    """Rows of a rollout batch. The rollouts walk the epochs' orders laid end to end, so that nothing is dropped.

    With five rows and two prompts a rollout, the third rollout takes the last row of the first epoch and the first row
    of the second:

    >>> [prompts_of_rollout(5, 2, seed=0, rollout_index=i) for i in range(5)]
    [[2, 4], [3, 0], [1, 1], [4, 3], [0, 2]]
    >>> row_order(5, seed=0, epoch=0) + row_order(5, seed=0, epoch=1)
    [2, 4, 3, 0, 1, 1, 4, 3, 0, 2]
    """
    rows: list[int] = []
    position = rollout_index * prompts_per_rollout
    while len(rows) < prompts_per_rollout:
        epoch, start = divmod(position + len(rows), num_rows)
        missing = prompts_per_rollout - len(rows)
        rows += row_order(num_rows, seed, epoch, shuffle)[start : start + missing]
    return rows


class RolloutLoader:
    """Gives `(rollout_index, groups of this rank)`, from rollout `start` up to `stop` (not included).

    Each rank reads a contiguous, equal share of a rollout's prompts, and every picture once. Iterating again starts
    again at `start`; to resume, build a loader with a later `start`.

    Args:
        rows (`Sequence[int]`):
            The dataset indices to use: `DataReport.kept`.
        prompts_per_rollout (`int`):
            Over all ranks; a multiple of `num_processes`.
        num_workers (`int`, *optional*, defaults to `0`):
            Processes that decode and tokenize; `0` does it in this one, when a rollout is asked for. Groups travel
            through shared memory (in a container: its `--shm-size`), decoded pictures at their original size.
        prefetch_rows (`int`, *optional*, defaults to this rank's prompts of one rollout):
            Rows the workers read ahead while a rollout is being trained on.

    Raises:
        [`RowError`]: While iterating, when a file has changed since [`check_dataset`].
    """

    def __init__(
        self,
        dataset: Any,
        reader: RowReader,
        *,
        rows: Sequence[int],
        prompts_per_rollout: int,
        seed: int,
        stop: int,
        start: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        num_processes: int = 1,
        num_workers: int = 0,
        prefetch_rows: int | None = None,
    ):
        if prompts_per_rollout < 1 or prompts_per_rollout % num_processes:
            raise ValueError(
                f"A rollout's prompts are shared equally by all processes, got {prompts_per_rollout} prompts for "
                f"{num_processes} processes. Make the prompts a multiple of the processes."
            )
        if not rows:
            raise ValueError("The loader needs at least one row, got none. See the report of check_dataset.")
        self.read = _Read(_Rows(dataset), reader.read)
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.start, self.stop = start, stop
        self.prompts_per_rollout, self.rank = prompts_per_rollout, rank
        self.prompts_per_rank = prompts_per_rollout // num_processes
        self.num_workers = num_workers
        self.prefetch_rows = self.prompts_per_rank if prefetch_rows is None else prefetch_rows

    def __len__(self) -> int:
        """Rollouts from `start` to `stop`."""
        return max(0, self.stop - self.start)

    def rows_of_rollout(self, rollout_index: int) -> list[int]:
        """This rank's dataset indices of a rollout."""
        places = prompts_of_rollout(len(self.rows), self.prompts_per_rollout, self.seed, rollout_index, self.shuffle)
        first = self.rank * self.prompts_per_rank
        return [self.rows[place] for place in places[first : first + self.prompts_per_rank]]

    def __iter__(self) -> Iterator[tuple[int, list[Group]]]:
        results = _ordered(self.read, _Keys(self), self.num_workers, self.prefetch_rows)
        for rollout_index in range(self.start, self.stop):
            yield rollout_index, [self._own(next(results)[0]) for _ in range(self.prompts_per_rank)]

    def _own(self, result: Group | _Refusal) -> Group:
        if isinstance(result, _Refusal):
            raise result.kind(result.message)
        if self.num_workers:
            for picture in result.pictures:
                # A tensor from a worker keeps a file descriptor open for as long as it lives; a large rollout would
                # use them up.
                picture.pixel_values = picture.pixel_values.clone()
        return result


class _Keys:
    """The loader's row indices one by one, rollout after rollout, worked out when they are needed."""

    def __init__(self, loader: RolloutLoader):
        self.loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        for rollout_index in range(self.loader.start, self.loader.stop):
            yield from ([row] for row in self.loader.rows_of_rollout(rollout_index))
