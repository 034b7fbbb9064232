"""What a dataset row may hold, and how it becomes messages.

A row is TRL's prompt-completion type, conversational, or `messages` (its last assistant turn is the teacher):

    {"prompt": [{"role": "user", "content": "What is it?"}], "images": [image],
     "completion": [{"role": "assistant", "content": "A cat."}]}

Nothing of a row is dropped, cut or changed in silence: what cannot be used as it stands is a `RowError` that names row,
column, value and the way out.
"""

from dataclasses import dataclass
from typing import Any

from trl.data_utils import is_conversational, prepare_multimodal_messages

from trl_gad.pictures import PictureError, describe


Message = dict[str, Any]
FORMAT_COLUMNS = {"prompt", "completion", "messages", "images", "image", "chat_template_kwargs"}
REFUSED_COLUMNS = ("video", "videos", "audio", "audios", "tools")
IMAGE_KEYS = ("image", "image_url", "url", "path", "base64")


class RowError(ValueError):
    """A dataset row that cannot be trained on. Names row, column, value and the way out."""

    reason = "bad row"


class OverlongPromptError(RowError):
    """A prompt of more than `max_prompt_length` tokens, counted after image expansion."""

    reason = "prompt too long"


class OverlongTeacherError(RowError):
    """A teacher response of more than `max_completion_length` tokens, counted with its end token."""

    reason = "teacher response too long"


class Fault(ValueError):
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


def is_given(value: Any) -> bool:
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
        if is_given(row.get(column)):
            raise Fault(column, "video, audio and tools are not supported", row[column], "Remove the column.")
    prompt, column, completion = _split_turns(row)
    prompt_column = "prompt" if column == "completion" else column
    messages = [_clean_message(prompt_column, message) for message in prompt]
    if messages[-1]["role"] != "user":
        raise Fault(
            prompt_column, "the turn before the teacher's must be the user's", prompt[-1], "Cut the row there."
        )
    teacher = _clean_message(column, completion)
    content = teacher["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if teacher["role"] != "assistant" or any(block["type"] != "text" for block in blocks):
        raise Fault(column, "the teacher's turn is a text of role 'assistant'", completion, "Rewrite it.")
    teacher_text = "".join(block["text"] for block in blocks)
    if not teacher_text.strip():
        raise Fault(column, "the teacher's response must not be empty", completion, "Query the teacher again.")

    image_column, sources = _image_column(row)
    try:
        messages = prepare_multimodal_messages(messages, images=sources)
    except ValueError as error:
        raise Fault(
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
        raise Fault("messages", "a row has `messages` or `prompt` and `completion`", names, "Remove one of them.")
    for name in ["messages"] if "messages" in names else ["prompt", "completion"]:
        value = row.get(name)
        if not value:
            raise Fault(name, "a row needs a prompt and the teacher's response", value, "Fill it or remove the row.")
        if not is_conversational({name: value}):
            raise Fault(
                name, "must be a list of messages", value,
                "Write a plain text as [{'role': 'user', 'content': text}] ('assistant' in `completion`).",
            )  # fmt: skip
    if "messages" in names:
        turns = row["messages"]
        if len(turns) < 2:
            raise Fault("messages", "a row needs a prompt and the teacher's response", turns, "Add the missing turn.")
        return turns[:-1], "messages", turns[-1]
    if len(row["completion"]) != 1:
        raise Fault("completion", "must be one message", row["completion"], "Move earlier turns to `prompt`.")
    return row["prompt"], "completion", row["completion"][0]


def _clean_message(column: str, message: Any) -> Message:
    """The message with its role and content only."""
    if not isinstance(message, dict):
        raise Fault(column, "a message is a dict with 'role' and 'content'", message, "Rewrite it.")
    for key, value in message.items():
        # Templates differ in what they do with other keys (most drop a 'reasoning_content'), none of it visible here.
        if key not in ("role", "content") and is_given(value):
            raise Fault(column, f"a message has no key {key!r} here", value, "Write it into 'content' or remove it.")
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant"):
        raise Fault(column, "a role is 'system', 'user' or 'assistant'", role, "Rewrite the message.")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list | tuple):
        raise Fault(column, f"the {role}'s content is a text or a list of blocks", content, "Rewrite the message.")
    blocks = [_clean_block(column, block) for block in content]
    if role != "user" and any(block["type"] == "image" for block in blocks):
        raise Fault(column, "only a user's turn holds images", content, f"Move them out of the {role}'s turn.")
    return {"role": role, "content": blocks}


def _clean_block(column: str, block: Any) -> dict[str, Any]:
    """A text block or an image block, with an image's source (if any) under 'image'."""
    if not isinstance(block, dict):
        raise Fault(column, "a content block is a dict with 'type'", block, "Rewrite it.")
    kind, text = block.get("type"), block.get("text")
    # `datasets` gives every block the keys of all the others, with None. A template that asks for the key alone would
    # see an image in each text.
    given = {key: value for key, value in block.items() if key != "type" and is_given(value)}
    if kind == "text" and isinstance(text, str) and not given.keys() - {"text"}:
        return {"type": "text", "text": text}
    if kind not in ("image", "image_url") or given.keys() - set(IMAGE_KEYS) or len(given) > 1:
        raise Fault(
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
    names = [name for name in ("images", "image") if is_given(row.get(name))]
    if len(names) == 2:
        raise Fault("image", "a row has `images` or `image`", row["image"], "Remove one of the two columns.")
    if not names:
        return "images", []
    value = row[names[0]]
    if names[0] == "images" and not isinstance(value, list | tuple):
        raise Fault("images", "must be a list", value, "Put a single image into the column `image`.")
    return names[0], list(value) if isinstance(value, list | tuple) else [value]


def _join_texts(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    joined: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": joined[-1]["text"] + block["text"]}
        else:
            joined.append(block)
    return joined
