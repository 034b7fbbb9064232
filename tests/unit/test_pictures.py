"""Pictures in every form and mode (cases C5, F1, F3, F6). All files are real; the web server is a local one."""

import base64
import io
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
from datasets import Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image, PngImagePlugin

from tests import tiny
from trl_gad.pictures import PictureError, count_patches, describe, load_picture, process_picture


def make_picture(width: int = 40, height: int = 24) -> Image.Image:
    """Every pixel differs from its neighbours: a flip, a shift or a clip shows."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([x * 6 % 256, y * 10 % 256, (x * 3 + y * 5) % 256], axis=-1).astype(np.uint8))


def encode(image: Image.Image, file_format: str = "PNG", **kwargs) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **kwargs)
    return buffer.getvalue()


def largest_difference(a: Image.Image, b: Image.Image) -> int:
    assert a.size == b.size
    return int(np.abs(np.asarray(a).astype(int) - np.asarray(b).astype(int)).max())


@pytest.fixture
def web_folder(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield tmp_path, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class QuietHandler(SimpleHTTPRequestHandler):
    num_failures = 0

    def do_GET(self) -> None:
        if "busy" in self.path and QuietHandler.num_failures < 2:
            QuietHandler.num_failures += 1
            self.send_error(503)
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_every_form_of_one_picture_gives_the_same_pixels(web_folder: tuple[Path, str]) -> None:
    folder, address = web_folder
    picture = make_picture()
    data = encode(picture)
    path = folder / "a picture.png"
    path.write_bytes(data)
    (folder / "busy.png").write_bytes(data)
    column = Dataset.from_dict({"image": [data]}, features=Features({"image": ImageFeature()}))
    forms = [
        picture, Image.open(path), path, str(path), f"file://{quote(str(path))}", data, bytearray(data),
        {"bytes": data, "path": None}, {"bytes": None, "path": str(path)}, {"bytes": data, "path": "gone.png"},
        {"path": str(path)}, f"{address}/a%20picture.png", f"{address}/busy.png",
        f"data:image/png;base64,{base64.b64encode(data).decode()}", f"data:image/png,{quote(data)}",
        column[0]["image"], column.cast_column("image", ImageFeature(decode=False))[0]["image"],
    ]  # fmt: skip
    for form in forms:
        loaded = load_picture(form)
        assert loaded.mode == "RGB", describe(form)
        assert largest_difference(loaded, picture) == 0, describe(form)
    assert QuietHandler.num_failures == 2  # the server was busy twice before it answered


def test_the_callers_image_stays_as_it_is() -> None:
    picture = make_picture()
    loaded = load_picture(picture)
    loaded.putpixel((0, 0), (9, 9, 9))
    assert picture.getpixel((0, 0)) == (0, 0, 0)


def test_transparency_lies_over_white_in_every_mode() -> None:
    # Left half opaque grey, right half transparent with a red or dark colour hidden below.
    expected = Image.new("RGB", (8, 4), "white")
    expected.paste((100, 100, 100), (0, 0, 4, 4))
    rgba = Image.new("RGBA", (8, 4), (255, 0, 0, 0))
    rgba.paste((100, 100, 100, 255), (0, 0, 4, 4))
    la = Image.new("LA", (8, 4), (0, 0))
    la.paste((100, 255), (0, 0, 4, 4))
    palette = Image.new("P", (8, 4), 1)
    palette.putpalette([100, 100, 100, 255, 0, 0])
    palette.paste(0, (0, 0, 4, 4))
    rgb = Image.new("RGB", (8, 4), (255, 0, 0))
    rgb.paste((100, 100, 100), (0, 0, 4, 4))
    grey = Image.new("L", (8, 4), 7)
    grey.paste(100, (0, 0, 4, 4))
    deep = Image.fromarray(np.where(np.arange(8) < 4, 100 * 257, 7).astype(np.uint16)[None].repeat(4, axis=0))
    sources = {
        "RGBA": rgba, "RGBA file": encode(rgba), "LA": la, "LA file": encode(la), "WebP": encode(rgba, "WEBP",
        lossless=True), "P": encode(palette, transparency=1), "P alpha table": encode(palette, transparency=b"\xff\x00"),
        "GIF": encode(palette, "GIF", transparency=1), "RGB tRNS": encode(rgb, transparency=(255, 0, 0)),
        "L tRNS": encode(grey, transparency=7), "I;16 tRNS": encode_with_transparency(deep, 7),
    }  # fmt: skip
    for name, source in sources.items():
        assert largest_difference(load_picture(source), expected) == 0, name


def encode_with_transparency(image: Image.Image, value: int) -> bytes:
    """A 16-bit PNG with a tRNS chunk, which Pillow does not write for this mode."""
    data = encode(image)
    chunks = io.BytesIO()
    PngImagePlugin.putchunk(chunks, b"tRNS", value.to_bytes(2, "big"))
    place = data.index(b"IDAT") - 4
    return data[:place] + chunks.getvalue() + data[place:]


def test_half_transparency_is_mixed_with_white() -> None:
    loaded = load_picture(Image.new("RGBA", (2, 2), (100, 0, 200, 128)))
    # 100 * 128/255 + 255 * 127/255 = 177.2; 0 + 127 = 127; 200 * 128/255 + 127 = 227.4
    assert loaded.getpixel((0, 0)) == pytest.approx((177, 127, 227), abs=1)


def test_one_grey_picture_in_every_mode() -> None:
    grey = make_picture().convert("L")
    expected = grey.convert("RGB")
    values = np.asarray(grey)
    deep = values.astype(np.uint16) * 257  # 255 * 257 = 65535
    sources = {
        "L": grey, "LA": grey.convert("LA"), "RGBA": expected.convert("RGBA"), "P": grey.convert("P"),
        "CMYK": expected.convert("CMYK"), "CMYK TIFF": encode(expected.convert("CMYK"), "TIFF"),
        "I;16": Image.fromarray(deep), "I;16 PNG": encode(Image.fromarray(deep)),
        "I;16B TIFF": encode(Image.frombytes("I;16B", grey.size, deep.astype(">u2").tobytes()), "TIFF"),
        "I of 16 bit": Image.fromarray(deep.astype(np.int32)), "I of 8 bit": grey.convert("I"),
        "F to 255": grey.convert("F"), "F to 1": Image.fromarray((values / 255).astype(np.float32)),
    }  # fmt: skip
    for name, source in sources.items():
        assert largest_difference(load_picture(source), expected) == 0, name
    assert largest_difference(load_picture(expected.convert("YCbCr")), expected) <= 1
    # JPEG itself loses a little; what must not happen is an inverted CMYK file.
    assert largest_difference(load_picture(encode(expected.convert("CMYK"), "JPEG", quality=100)), expected) <= 6


def test_modes_give_the_same_number_of_tokens_and_near_patches() -> None:
    picture = make_picture()
    image_processor = tiny.processor().image_processor
    expected = process_picture(load_picture(picture), image_processor)
    for mode in ("RGBA", "CMYK"):
        processed = process_picture(load_picture(picture.convert(mode)), image_processor)
        assert processed.grid_thw == expected.grid_thw
        torch.testing.assert_close(processed.pixel_values, expected.pixel_values, atol=2 / 127.5, rtol=0)


def test_exif_orientation_is_applied_once() -> None:
    picture = make_picture(6, 4)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees clockwise
    data = encode(picture, exif=exif.tobytes())
    expected = picture.transpose(Image.Transpose.ROTATE_270)
    assert largest_difference(load_picture(data), expected) == 0
    assert largest_difference(load_picture(Image.open(io.BytesIO(data))), expected) == 0
    column = Dataset.from_dict({"image": [data]}, features=Features({"image": ImageFeature()}))
    assert largest_difference(load_picture(column[0]["image"]), expected) == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (encode(make_picture(), "JPEG")[:400], r"no whole picture.*<400 bytes>"),
        (encode(make_picture())[:60], r"no whole picture.*<60 bytes>"),
        (b"these bytes are no image", r"no whole picture.*<24 bytes>"),
        (b"", r"<0 bytes>"),
        ("/nowhere/picture.png", r"FileNotFoundError.*/nowhere/picture.png"),
        ({"bytes": None, "path": "/nowhere/picture.png"}, r"FileNotFoundError.*/nowhere/picture.png"),
        ({"bytes": None, "path": None}, r"needs 'bytes' or 'path'"),
        ("", r"The picture|no whole picture"),
        (Image.new("RGB", (0, 5)), r"at least one pixel, got 0 x 5"),
        (None, r"got NoneType"),
        (7, r"got int"),
        ("data:image/png;base64", r"needs a comma"),
        ("data:image/png;base64,!!!!", r"no valid base64"),
        (Image.fromarray(np.array([[-1.0, 3.0]], dtype=np.float32)), r"mode F lie in .*got \[-1, 3\]"),
        (Image.fromarray(np.array([[np.nan, 3.0]], dtype=np.float32)), r"got \[nan, nan\]"),
        (Image.fromarray(np.array([[0, 70000]], dtype=np.int32)), r"got \[0, 70000\]"),
        ("http://127.0.0.1:9/x.png", r"ConnectionError|no whole picture"),
    ],
)
def test_unusable_pictures_are_refused(source: object, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_gad.pictures.URL_RETRIES", 0)
    with pytest.raises(PictureError, match=message) as error:
        load_picture(source)
    assert len(str(error.value)) < 500


def test_an_address_that_gives_an_error_page_is_refused(web_folder: tuple[Path, str]) -> None:
    with pytest.raises(PictureError, match="404"):
        load_picture(f"{web_folder[1]}/none.png")


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_gad.pictures.URL_RETRIES", 0)
    monkeypatch.setattr("trl_gad.pictures.URL_TIMEOUT_S", 0.2)
    server = ThreadingHTTPServer(("127.0.0.1", 0), QuietHandler)  # listens, but nobody serves
    start = time.monotonic()
    try:
        with pytest.raises(PictureError, match="(?i)timed? ?out"):
            load_picture(f"http://127.0.0.1:{server.server_port}/x.png")
    finally:
        server.server_close()
    assert time.monotonic() - start < 5


def test_processing_equals_the_processors_own() -> None:
    image_processor = tiny.processor().image_processor
    for size in [(40, 24), (16, 16), (300, 200), (1, 1), (3, 90)]:
        picture = make_picture(*size)
        own = image_processor(images=[picture], return_tensors="pt")
        processed = process_picture(load_picture(encode(picture)), image_processor)
        assert torch.equal(processed.pixel_values, own["pixel_values"])
        assert processed.pixel_values.dtype == torch.float32
        assert processed.grid_thw == tuple(own["image_grid_thw"][0].tolist())
        assert count_patches(picture, image_processor) == len(processed.pixel_values)


def test_a_large_photo_is_bounded_by_the_processor() -> None:
    processed = process_picture(
        load_picture(encode(Image.new("RGB", (6000, 4000), "red"))), tiny.processor().image_processor
    )
    # At most 64 x 64 pixels: scale sqrt(4096 / 24e6) = 1/76.5, so 78.4 x 52.3, cut to the grid of 16: 64 x 48 pixels
    # = 8 x 6 patches of 8 pixels.
    assert processed.grid_thw == (1, 6, 8)


def test_extreme_aspect_ratio_is_refused() -> None:
    image_processor = tiny.processor().image_processor
    for function in (process_picture, count_patches):
        with pytest.raises(PictureError, match=r"1000 x 2 pixels.*200.*Crop it"):
            function(Image.new("RGB", (1000, 2)), image_processor)


def test_describe_never_shows_the_bytes() -> None:
    assert describe({"bytes": b"x" * 1000, "path": None}) == "{'bytes': <1000 bytes>, 'path': None}"
    assert describe([{"bytes": b"x" * 5}] * 9, limit=200).endswith(", ...]")
    assert len(describe("a" * 1000)) == 80
