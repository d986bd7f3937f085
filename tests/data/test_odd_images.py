"""Images of unusual modes, turned, animated, or cut off: read as they look, or refused by name."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from holdfast.data.content.image_files import ImageFiles
from holdfast.errors import DataError

FILES = ImageFiles(None, Path())
PIXELS = np.random.default_rng(0).integers(0, 256, (24, 33, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)
DEEP = np.random.default_rng(1).integers(0, 65536, (24, 33)).astype(np.uint16)


def saved(image: Any, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("form", ["PNG", "TIFF", "memory"])
def test_of_sixteen_bits_the_higher_eight_are_seen(form: str) -> None:
    image = Image.fromarray(DEEP)

    opened = FILES.open(image if form == "memory" else saved(image, form), "row 3")

    expected = np.broadcast_to((DEEP // 256)[..., None], (24, 33, 3))
    np.testing.assert_array_equal(np.asarray(opened), expected)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_known_range_are_refused(mode: str) -> None:
    image = Image.fromarray(DEEP.astype({"I": np.int32, "F": np.float32}[mode]))

    for value in (image, saved(image, "TIFF")):
        with pytest.raises(DataError, match=rf"^row 3 .* its pixels have 32 bits \(mode {mode}\) and no known range"):
            FILES.open(value, "row 3")


TURNED = {
    1: lambda upright: upright,
    2: np.fliplr,
    3: lambda upright: np.rot90(upright, 2),
    4: np.flipud,
    5: lambda upright: upright.swapaxes(0, 1),
    6: np.rot90,
    7: lambda upright: np.rot90(upright.swapaxes(0, 1), 2),
    8: lambda upright: np.rot90(upright, -1),
}
"""How a camera stores an upright image, by EXIF's orientation."""


@pytest.mark.parametrize("orientation", TURNED)
def test_a_photo_is_turned_upright(orientation: int) -> None:
    stored = Image.fromarray(np.ascontiguousarray(TURNED[orientation](PIXELS)))
    marks = stored.getexif()
    marks[0x0112] = orientation

    opened = FILES.open(saved(stored, "PNG", exif=marks), "row 3")

    np.testing.assert_array_equal(np.asarray(opened), PIXELS)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame_is_seen(form: str) -> None:
    options = {"lossless": True} if form == "WEBP" else {}
    frames = [PICTURE.quantize(200), PICTURE.rotate(180).quantize(200), PICTURE.rotate(90).quantize(200)]

    file = saved(frames[0], form, save_all=True, append_images=frames[1:], duration=40, **options)

    assert Image.open(io.BytesIO(file)).n_frames == 3
    np.testing.assert_array_equal(np.asarray(FILES.open(file, "row 3")), np.asarray(frames[0].convert("RGB")))


def test_other_modes_look_as_they_did() -> None:
    inks = np.concatenate([255 - PIXELS, np.zeros((24, 33, 1), np.uint8)], axis=2)
    few = PICTURE.quantize(16)
    colours = np.asarray(few.getpalette()).reshape(-1, 3)

    np.testing.assert_array_equal(np.asarray(FILES.open(saved(Image.fromarray(inks, "CMYK"), "TIFF"), "row")), PIXELS)
    np.testing.assert_array_equal(np.asarray(FILES.open(saved(few, "PNG"), "row")), colours[np.asarray(few)])
    black_and_white = np.asarray(FILES.open(saved(Image.fromarray(PIXELS[..., 0] > 127), "PNG"), "row"))
    np.testing.assert_array_equal(black_and_white, np.where(PIXELS[..., :1] > 127, 255, 0).repeat(3, axis=2))


@pytest.mark.parametrize("quarter", [1, 2, 3])
@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_a_file_that_ends_at_a_quarter_is_refused_by_name(form: str, quarter: int) -> None:
    file = saved(PICTURE, form)

    assert FILES.open(file, "row 3").size == (33, 24)
    with pytest.raises(DataError, match=r"^row 3 \(\d+ bytes\) cannot be read as an image"):
        FILES.open(file[: len(file) * quarter // 4], "row 3")
