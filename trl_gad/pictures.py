"""Pictures: from whatever a dataset row holds to an RGB image, and from there to the vision tower's patches.

One rule for every source and mode, so that the same picture gives the same pixels however it is stored:

    EXIF orientation applied -> transparency laid over white -> 8 bit a channel -> RGB

It knows nothing about rows, text or tokens.
"""

import base64
import binascii
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlparse
from urllib.request import url2pathname

import numpy as np
import requests
import torch
from PIL import Image, ImageOps
from requests.adapters import HTTPAdapter
from transformers import Qwen2VLImageProcessor
from urllib3.util import Retry

from trl_gad.batch import Picture


URL_TIMEOUT_S = 30  # to connect, and between two pieces of the answer
URL_RETRIES = 3  # a picture server that is busy for a moment must not end a run
# What Pillow raises for broken files, by format: there is no common base class.
BROKEN_FILE_ERRORS = (
    OSError, SyntaxError, ValueError, TypeError, EOFError, IndexError, KeyError, OverflowError, MemoryError,
    struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip


class PictureError(ValueError):
    """A picture that cannot be used. The message names what was given, shortened."""


def describe(value: Any, limit: int = 80) -> str:
    """`repr(value)` for an error message: at most `limit` characters, bytes only by their number."""
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key!r}: {describe(item, limit)}" for key, item in value.items()) + "}"
    elif isinstance(value, list | tuple):
        # A list of pictures may hold megabytes: the first items say enough.
        text = "[" + ", ".join(describe(item, limit) for item in value[:4]) + (", ...]" if len(value) > 4 else "]")
    else:
        text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def load_picture(source: Any) -> Image.Image:
    """Gives the picture as an RGB image of its own (never the caller's object).

    Args:
        source (`PIL.Image.Image`, `str`, `Path`, `bytes` or `dict`):
            An image, a path, `file://`, `http(s)://` or `data:` address, the bytes of a file, or
            `{"bytes": ..., "path": ...}` (an undecoded `datasets` image; the bytes count first).

    Raises:
        [`PictureError`]: Nothing there, no image, a broken file, no pixels, or values without a known range.
    """
    try:
        image = source if isinstance(source, Image.Image) else Image.open(io.BytesIO(_file_bytes(source)))
        # Only here is the whole file read: a cut file opens well and fails now.
        image.load()
        if 0 in image.size:
            raise PictureError(f"A picture needs at least one pixel, got {image.width} x {image.height}.")
        return _to_rgb(ImageOps.exif_transpose(image))
    except PictureError as error:
        raise PictureError(f"{error} The picture: {describe(source)}") from error
    except BROKEN_FILE_ERRORS as error:
        raise PictureError(
            f"This is no whole picture in a format that Pillow reads ({type(error).__name__}: "
            f"{describe(str(error), 160)}): {describe(source)}"
        ) from error


def process_picture(image: Image.Image, image_processor: Qwen2VLImageProcessor) -> Picture:
    """Runs the image processor once on one RGB image of [`load_picture`].

    Raises:
        [`PictureError`]: The processor refuses the picture, as Qwen's does beyond an aspect ratio of 200.
    """
    try:
        features = image_processor(images=[image], return_tensors="pt")
    except ValueError as error:
        raise _refused(image, error) from error
    pixel_values = features["pixel_values"].to(torch.float32)
    frames, height, width = features["image_grid_thw"][0].tolist()
    assert len(pixel_values) == frames * height * width, "the processor's grid must count its patches"
    return Picture(pixel_values=pixel_values, grid_thw=(frames, height, width))


def count_patches(image: Image.Image, image_processor: Qwen2VLImageProcessor) -> int:
    """Patches that [`process_picture`] would give, without the work.

    Raises:
        [`PictureError`]: As [`process_picture`].
    """
    try:
        return image_processor.get_number_of_image_patches(image.height, image.width)
    except ValueError as error:
        raise _refused(image, error) from error


def _refused(image: Image.Image, error: ValueError) -> PictureError:
    return PictureError(
        f"The image processor refuses a picture of {image.width} x {image.height} pixels: {error}. Crop it."
    )


def _file_bytes(source: Any) -> bytes:
    """The bytes of the file that a source names."""
    if isinstance(source, dict):
        if source.get("bytes") is not None:
            return _file_bytes(source["bytes"])
        if source.get("path") is not None:
            return _file_bytes(source["path"])
        raise PictureError("A picture given as a dict needs 'bytes' or 'path'.")
    if isinstance(source, bytes | bytearray):
        return bytes(source)
    if isinstance(source, str) and source.lower().startswith(("http://", "https://")):
        return _download(source)
    if isinstance(source, str) and source.lower().startswith("data:"):
        return _data_uri_bytes(source)
    if isinstance(source, str) and source.lower().startswith("file://"):
        return Path(url2pathname(urlparse(source).path)).read_bytes()
    if isinstance(source, str | os.PathLike):
        return Path(source).read_bytes()
    raise PictureError(
        "A picture is a PIL image, a path, bytes, {'bytes': ..., 'path': ...}, an http(s) address or a data: URI, "
        f"got {type(source).__name__}."
    )


def _download(url: str) -> bytes:
    # Not `qwen_vl_utils.fetch_image`: it waits for ever, lays only RGBA over white and resizes by limits of its own,
    # before the image processor resizes again by the processor's.
    with requests.Session() as session:
        retry = Retry(total=URL_RETRIES, backoff_factor=0.2, status_forcelist=(429, 500, 502, 503, 504))
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retry))
        response = session.get(url, timeout=URL_TIMEOUT_S)
        response.raise_for_status()
        return response.content


def _data_uri_bytes(uri: str) -> bytes:
    header, comma, payload = uri.partition(",")
    if not comma:
        raise PictureError("A data: URI needs a comma before its data.")
    data = unquote_to_bytes(payload)
    if not header.lower().endswith(";base64"):
        return data
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise PictureError(f"The data: URI holds no valid base64 ({error}).") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _deep_to_rgb(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    # White, as on a page; Pillow's own conversion drops the alpha and shows the colour hidden below it.
    image = image.convert("RGBA")
    background = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(background, image).convert("RGB")


def _deep_to_rgb(image: Image.Image) -> Image.Image:
    """Scales more than 8 bit to 8 (Pillow's own conversion clips at 255, so that most such pictures turn white).

    Modes I and F state no range. Their values tell it: up to 1 (F only), up to 255, or up to 65535.
    """
    values = np.asarray(image).astype(np.float64)
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= 65535):  # also false for NaN
        raise PictureError(
            f"The values of a picture of mode {image.mode} lie in [0, 1], [0, 255] or [0, 65535], got "
            f"[{low:g}, {high:g}]. Scale it to 8 bit."
        )
    top = 65535 if image.mode.startswith("I;16") or high > 255 else 255
    if image.mode == "F" and high <= 1:
        top = 1
    grey = np.rint(values * (255 / top)).astype(np.uint8)
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return Image.fromarray(grey).convert("RGB")
