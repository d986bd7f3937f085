"""What tells the images of a source from others: rows name files, and a file of the same name may hold another image.

Reading all of them would take as long as a pass over the data, so a sample is read, spread over the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import xxhash

from holdfast.data.content.images import ImageFiles, held_images
from holdfast.data.rows.rows import Row, Source
from holdfast.errors import DataError

SAMPLED_ROWS = 32
"""Rows of a source whose images are read: spread evenly over a source with an index, the first ones of a stream."""

IMAGES_OF_A_ROW = 8
"""Of each of these rows, its first images or frames."""


def images_mark(source: Source, files: ImageFiles) -> str | None:
    """Return xxh3_128, in hexadecimal, of the images that a sample of a source's rows names or holds.

    Args:
        source: Rows.
        files: Finds what rows name.

    Returns:
        None if no row of the sample has an image.
    """
    digest, count = xxhash.xxh3_128(), 0
    for row in _sampled(source):
        for image in _images(row, source.name)[:IMAGES_OF_A_ROW]:
            content = _content(image, files)
            count += 1
            digest.update(f"{len(content)}:".encode())
            digest.update(content)
    return str(digest.hexdigest()) if count else None


def _sampled(source: Source) -> Iterator[Row]:
    size = source.size
    if size is None:
        yield from islice(source.scan(0), SAMPLED_ROWS)
        return
    for index in np.unique(np.linspace(0, size - 1, SAMPLED_ROWS).astype(int)):
        row: Row = {}
        with suppress(Exception):  # it says what is wrong with it when it is trained on, unless it is left out then
            row = source.row(int(index))
        yield row


def _images(row: Row, where: str) -> list[Any]:
    try:
        return list(held_images(row, where))
    except DataError:  # as above
        return []


def _content(image: Any, files: ImageFiles) -> bytes:
    try:
        return files.content(image)
    except Exception:  # noqa: BLE001 - as above; and what reads images raises whatever it likes
        return b"unreadable"
