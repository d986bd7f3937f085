"""An image in a planned row: the largest that the run allows, as long as the row has room for it."""

from __future__ import annotations

from dataclasses import replace

from holdfast.config.sections.data import TextConfig
from holdfast.data.content.lengths import Stretch, example_of
from holdfast.data.tokens.vision import ImageSide
from holdfast.types import Example

_SIDE = 1024
"""Pixels of a side where `data.max_pixels` does not say; the image processor scales it."""


def with_image(example: Example, images: ImageSide, config: TextConfig) -> tuple[Example, str]:
    """Return a row with one image, and what a user should know of it."""
    from PIL import Image

    side = _SIDE if config.max_pixels is None else max(32, int(config.max_pixels**0.5))
    length = example.tokens.size
    prepared = images.prepare(Image.new("RGB", (side, side)), "a planned image")
    while len(prepared.tokens) > length - 2 and side > 32:
        side //= 2
        prepared = images.prepare(Image.new("RGB", (side, side)), "a planned image")
    text = length - len(prepared.tokens) - 1
    if text < 1:
        return example, "images: none is planned, since the smallest one has no room in data.max_length"
    stretch = Stretch([0, images.image_id, *[0] * text], [False, False, *[True] * text])
    laid = images.expanded(stretch, [prepared])
    made = example_of(laid, 0, "", images.positions(laid))
    return replace(made, sample_id=0), f"images: one of {side}x{side} pixels in every row"
