"""An image in a terminal: two pixels a character, in their colours."""

from __future__ import annotations

import numpy as np
from PIL import Image

from holdfast.cli.commands.data.preview import COLUMNS, ROWS, half_blocks


def test_a_small_image_is_shown_pixel_by_pixel() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 2, 3), dtype=np.uint8)

    text = half_blocks(Image.fromarray(pixels))

    colours = [["#" + bytes(pixel).hex() for pixel in row] for row in pixels]
    assert text.plain == "▀▀\n▀▀\n"
    assert [str(span.style) for span in text.spans] == [
        *(f"{colours[0][column]} on {colours[1][column]}" for column in (0, 1)),
        *(colours[2][column] for column in (0, 1)),
    ]


def test_any_image_fits_in_a_few_rows() -> None:
    for width, height in ((10_000, 10), (10, 10_000), (1, 1), (640, 480)):
        lines = half_blocks(Image.new("RGB", (width, height))).plain.splitlines()

        assert 1 <= len(lines) <= ROWS
        assert 1 <= max(map(len, lines)) <= COLUMNS
