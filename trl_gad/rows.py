"""Messages and pictures to token ids: one dataset row to one `Group`.

Special tokens written in a user's or teacher's text stay text. Knows nothing of models and processes.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import jinja2
from PIL import Image
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from trl_gad.batch import Group
from trl_gad.config import GADConfig
from trl_gad.messages import (
    FORMAT_COLUMNS,
    REFUSED_COLUMNS,
    Fault,
    Message,
    OverlongPromptError,
    OverlongTeacherError,
    ParsedRow,
    RowError,
    RowLengths,
    parse_row,
)
from trl_gad.pictures import PictureError, count_patches, describe, load_picture, process_picture


MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters: no text has a use for them


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

    @classmethod
    def of(cls, processing_class: ProcessorMixin | PreTrainedTokenizerBase, args: GADConfig) -> "RowReader":
        """The reader of a run with these arguments."""
        assert args.max_completion_length is not None, "checked by GADConfig"
        return cls(
            processing_class,
            max_prompt_length=args.max_prompt_length,
            max_completion_length=args.max_completion_length,
            overlong_prompts=args.overlong_prompts,  # type: ignore[arg-type]
            overlong_teachers=args.overlong_teachers,  # type: ignore[arg-type]
            chat_template_kwargs=args.chat_template_kwargs,  # type: ignore[arg-type] - a dict: transformers parsed it
            max_pixels=args.max_pixels,
        )

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
            raise Fault(
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
            raise Fault("chat_template_kwargs", "must hold no special token", kwargs, "Remove it.")
        kwargs = self.chat_template_kwargs | {key: value for key, value in kwargs.items() if value is not None}
        texts = "".join(b["text"] for message in messages for b in message["content"] if b["type"] == "text")
        if not self._special_token.search(texts):
            return self._encode(self._render(messages, kwargs))
        mark = next((mark for mark in MARKS if mark not in texts), None)
        if mark is None:
            raise Fault("prompt", "a text may not use all 32 noncharacters U+FDD0 to U+FDEF", texts, "Remove them.")
        rendered = self._render([self._marked(message, mark) for message in messages], kwargs)
        pieces = self._special_token.split(rendered)  # plain, special, plain, ..., plain
        if self._encode_pieces(pieces) != self._encode(rendered):
            raise Fault(
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
            raise Fault(
                "prompt", f"the chat template refuses it ({error})", messages, "Rewrite the prompt."
            ) from error

    def _expand(self, ids: list[int], patches: list[int]) -> list[int]:
        """Each image placeholder as often as the image has tokens: patches / merge_size**2."""
        num_placeholders = 0 if self.image_token_id is None else ids.count(self.image_token_id)
        if num_placeholders != len(patches):
            raise Fault(
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
    except Fault as error:
        raise RowError(f"Row {row_index}, {error}") from error


@contextmanager
def _column_named(column: str) -> Iterator[None]:
    try:
        yield
    except PictureError as error:
        raise Fault(column, "a picture cannot be used", error, "Replace the picture or remove the row.") from error
