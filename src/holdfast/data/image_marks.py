"""What tells the images of a source from others: rows name files, and a file of the same name may hold another image.

Reading all of them would take as long as a pass over the data, so a sample is read, spread over the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from holdfast.data.images import ImageFiles
from holdfast.data.rows import Row, Source
from holdfast.errors import DataError

SAMPLED_ROWS = 32
"""Rows of a source whose images are read: spread evenly over a source with an index, the first ones of a stream."""

_HOLDERS = {"image", "images", "videos", "video", "frames", "path", "url", "bytes", "image_url"}
"""Columns of rows, and keys of the parts of messages, that may hold an image."""


def images_mark(source: Source, files: ImageFiles) -> str | None:
    """Return xxh3_128, in hexadecimal, of the images that a sample of a source's rows names or holds.

    Args:
        source: Rows.
        files: Finds what rows name.

    Returns:
        None if no row of the sample has an image.
    """
    digest, found = xxhash.xxh3_128(), 0
    for row in _sampled(source):
        for image in _images(row):
            data = _bytes_of(image, files)
            found += 1
            digest.update(f"{len(data)}:".encode())
            digest.update(data)
    return str(digest.hexdigest()) if found else None


def _sampled(source: Source) -> Iterator[Row]:
    if source.size is None:
        yield from islice(source.scan(0), SAMPLED_ROWS)
        return
    for index in np.unique(np.linspace(0, source.size - 1, SAMPLED_ROWS).astype(int)):
        yield source.row(int(index))


def _images(value: Any, *, held: bool = False) -> Iterator[Any]:
    """Yield what may be an image below a value of a row, in the row's order.

    Args:
        value: A row, or part of one.
        held: It stands where an image may.
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _images(each, held=key in _HOLDERS)
    elif isinstance(value, str | bytes | Path) or not isinstance(value, Sequence):
        if held and (isinstance(value, str | bytes | Path) or hasattr(value, "tobytes")):
            yield value
    else:
        for each in value:
            yield from _images(each, held=held)


def _bytes_of(image: Any, files: ImageFiles) -> bytes:
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str | Path):
        return bytes(image.tobytes())
    try:
        return files.path(image, "").read_bytes()
    except (DataError, OSError):  # if it is to be an image, the row that holds it will say what is wrong
        return b"no file"
