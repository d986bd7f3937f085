"""Fingerprint the images and films that rows hold or name.

Rows refer to files by name, and the contents of a file may change. To read all of them at a resume would take as long
as a pass over the data, so that the fingerprint of a source's images covers only a sample, spread over the rows.
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
"""How many of a row's first images or frames are looked at."""


def images_fingerprint(source: Source, files: ImageFiles) -> str | None:
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


def _images(row: Row, row_name: str) -> list[Any]:
    try:
        return list(held_images(row, row_name))
    except DataError:  # as above
        return []


def _content(image: Any, files: ImageFiles) -> bytes:
    try:
        return files.content(image)
    except Exception:  # noqa: BLE001 - as above; and what reads images raises whatever it likes
        return b"unreadable"
