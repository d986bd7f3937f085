"""Make small files of the images of prompts, for pages that show completions."""

from __future__ import annotations

import io
from contextlib import suppress
from itertools import islice
from typing import Any

import xxhash

from holdfast.data.content.image_files import ImageFiles
from holdfast.data.content.images import held_images
from holdfast.errors import DataError
from holdfast.types import Prompt

_SIDE = 96
"""Pixels of the longer side."""
_MOST = 4
"""Images of a prompt, or frames."""


def small_images(prompt: Prompt, files: ImageFiles) -> tuple[bytes, ...]:
    """Return JPEG files of a prompt's first images; those up to one that cannot be read again."""
    if not prompt.model_inputs:
        return ()
    small = []
    with suppress(DataError, OSError, MemoryError):  # the rollout read them, but files may be gone since
        for image in islice(held_images(prompt.row, "a prompt"), _MOST):
            small.append(_small(files.open(image, "an image")))
    return tuple(small)


def _small(image: Any) -> bytes:
    image.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=70)
    return file.getvalue()


def image_name(data: bytes) -> str:
    """Return the name of an image's file."""
    return f"{xxhash.xxh3_64_hexdigest(data)}.jpg"
