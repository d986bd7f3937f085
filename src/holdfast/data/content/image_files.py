"""Open the images that rows hold or name, write them for servers, and fingerprint a sample of them.

Rows refer to files by name, and the contents of a file may change. To read all of them at a resume would take as long
as a pass over the data, so that the fingerprint of a source's images covers only a sample, spread over the rows.
"""

from __future__ import annotations

import base64
import io
import struct
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from holdfast import registry
from holdfast.data.content.images import Film, Video, held_images
from holdfast.data.rows.rows import Row, Source
from holdfast.errors import DataError
from holdfast.files import PASSING, expanded

SAMPLED_ROWS = 32
"""Rows of a source whose images are read: spread evenly over a source with an index, the first ones of a stream."""

IMAGES_OF_A_ROW = 8
"""How many of a row's first images or frames are looked at."""

_FILTERS = threading.Lock()


@dataclass(frozen=True)
class ImageFiles:
    """Opens images. Relative paths start in `folder`, else in the current directory, else beside the YAML."""

    folder: str | None
    base: Path

    def open(self, image: Any, name: str) -> Any:
        """Return a PIL image in RGB, turned upright as its camera says; of an animation the first frame.

        Args:
            image: A path, the bytes of a file, a PIL image, or a mapping with `bytes` or `path`; of a film the first
                frame.
            name: What an error calls it.

        Raises:
            DataError: There is no such file, it is not an image, or it is damaged.
            OSError: The file system does not answer for now.
        """
        if isinstance(image, Video):
            return self.film(image, name).first_frame()
        try:
            from PIL import Image, ImageOps
        except ImportError:
            raise DataError(f"{name}: reading images needs a package: pip install 'holdfast[vlm]'.") from None
        image = _named(image)
        try:
            if isinstance(image, Image.Image):
                return _in_rgb(image)
            with io.BytesIO(image) if isinstance(image, bytes) else self.path(image, name).open("rb") as file:
                # Filters of warnings are the process's: two threads that set them in turn would leave one behind.
                with _FILTERS, warnings.catch_warnings():
                    warnings.simplefilter("error", Image.DecompressionBombWarning)
                    opened = Image.open(file)
                return _in_rgb(ImageOps.exif_transpose(opened))
        except (
            OSError,
            ValueError,
            SyntaxError,
            EOFError,
            struct.error,  # of EXIF whose lengths or types are wrong, as the next one
            TypeError,
            LookupError,
            ArithmeticError,
            Image.DecompressionBombError,
            Image.DecompressionBombWarning,
        ) as error:
            if getattr(error, "errno", None) in PASSING:
                raise  # it says nothing of the row
            description = f"{len(image)} bytes" if isinstance(image, bytes) else str(image)
            raise DataError(f"{name} ({description:.120}) cannot be read as an image: {error}.") from None

    def film(self, video: Video, name: str) -> Film:
        """Return a film, not decoded yet.

        Raises:
            DataError: The file does not exist.
            ConfigError: Nothing decodes it here.
        """
        file = video.film if isinstance(video.film, bytes) else self.path(video.film, name)
        film: Film = registry.load(registry.FILM)(file, name)
        return film

    def content(self, image: Any) -> bytes:
        """Return what tells an image from others: the bytes of its file, or mode, size and pixels of one in memory.

        Of a film, its size, beginning and end: containers list the sizes of all frames in one of them.

        Raises:
            DataError: The value is not an image, or the file it names does not exist.
            OSError, ValueError, RuntimeError: The image cannot be read.
        """
        from PIL import Image

        if isinstance(image, Video):
            return self.film(image, "a film").excerpt()
        image = _named(image)
        if isinstance(image, Image.Image):
            return f"{image.mode} {image.size} ".encode() + image.convert("RGB").tobytes()
        return image if isinstance(image, bytes) else self.path(image, "an image").read_bytes()

    def path(self, image: Any, name: str) -> Path:
        """Return the file that a row names.

        Raises:
            DataError: The file does not exist or cannot be looked up, or the value is not a path.
            OSError: The file system does not answer for now.
        """
        if not isinstance(image, str | Path):
            raise DataError(
                f"{name} is a {type(image).__name__}; an image is a path, the bytes of a file, or a PIL image."
            )
        if str(image).startswith(("http://", "https://", "data:")):
            raise DataError(
                f"{name} is {str(image):.60}; images and films are read from files or from the rows. Download it and "
                "write its path, which may be relative to data.image_dir."
            )
        path = expanded(str(image).removeprefix("file://"))
        folders = [Path.cwd(), self.base]
        if self.folder is not None:
            folders = [candidate / self.folder for candidate in folders]
        tried = list(dict.fromkeys(folder / path for folder in folders))
        try:
            file = next((candidate for candidate in tried if candidate.is_file()), None)
        except OSError as error:
            if error.errno in PASSING:
                raise
            raise DataError(
                f"{name} ({str(image):.80}) cannot be looked up: {error.strerror}. A path or the bytes of a file is "
                "expected; base64 text is not read."
            ) from None
        if file is None:
            raise DataError(
                f"{name}: there is no file {' or '.join(str(candidate) for candidate in tried)}. Relative paths start "
                "in data.image_dir."
            )
        return file


def _in_rgb(image: Any) -> Any:
    """Return a PIL image in RGB; of 16 bits the higher eight.

    Raises:
        ValueError: Its pixels have no range that is known.
    """
    if image.mode in {"I", "F"}:
        raise ValueError(f"its pixels have 32 bits (mode {image.mode}) and no known range; save it with 8 or 16 bits")
    if image.mode.startswith("I;16"):  # Pillow would make 255 of whatever is above
        from PIL import Image

        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _named(image: Any) -> Any:
    """Return the bytes or the path of an image that is a mapping of them, as `datasets` has it."""
    return image.get("bytes") or image.get("path") if isinstance(image, Mapping) else image


def png_url(image: Any) -> str:
    """Return a PIL image as a PNG file, which loses nothing, within a URL."""
    bare = image.copy()
    bare.info = {}  # a colour profile or a transparency would be written too, and may make a file that nobody reads
    file = io.BytesIO()
    bare.save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def pixel_digest(image: Any) -> str:
    """Return xxh3_128, in hexadecimal, of the size and the pixels of a PIL image."""
    return xxhash.xxh3_128_hexdigest(f"{image.mode} {image.size} ".encode() + image.tobytes())


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
            content = _content_or_mark(image, files)
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


def _content_or_mark(image: Any, files: ImageFiles) -> bytes:
    try:
        return files.content(image)
    except Exception:  # noqa: BLE001 - as above; and what reads images raises whatever it likes
        return b"unreadable"
