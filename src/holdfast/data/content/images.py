"""Find and open the images and videos of rows.

A row has its images in a column `images` (or `image`), with `<image>` in its text for each, or inside the parts of its
messages. Videos, lists of frames or films, stand in a column `videos`, with `<video>` in the text, or inside parts.
Both forms are normalised to parts `{type: image}` and `{type: video}`, and a list of what to open in the order of the
parts.
"""

from __future__ import annotations

import io
import re
import struct
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from holdfast.data.content.formats import Conversation, Message, PlainText, PromptCompletion
from holdfast.data.content.video_files import excerpt, first_frame
from holdfast.data.content.videos import Video, refuse_unread, video_of
from holdfast.data.rows.rows import Row
from holdfast.errors import ConfigError, DataError
from holdfast.files import PASSING, expanded

PLACEHOLDERS = {"image": "<image>", "video": "<video>"}
"""Stands for one image or video in the text of a row that has a column of them."""

_SOURCES = {"image": ("image", "path", "url", "bytes", "image_url"), "video": ("video", "frames", "path", "url")}
"""Keys of a part that may hold what is to be opened."""

RowMedia = dict[str, list[Any]]
"""What a row holds of each kind."""

Content = Conversation | PromptCompletion | PlainText
C = TypeVar("C", bound=Content)


class LeftOutByRun(str):
    """A sentence that says why a run takes no images, whatever its model can; no row is at fault."""

    __slots__ = ()


def place_images(content: C, row: Row, row_name: str, blind: str | None = None) -> C:
    """Return the content with its images and videos: one part, or one placeholder, for each.

    Args:
        content: Of the row.
        row: Its columns.
        row_name: What an error calls it.
        blind: A sentence that says why no images can be trained on; None: they can.

    Raises:
        DataError: Placeholders and images do not match in number, a part is of another kind, there is sound, or there
            are images and none can be trained on.
        ConfigError: There are images, and the run's own settings leave them out; no row is skipped for that.
    """
    in_columns: RowMedia = {kind: _column(row, kind, row_name) for kind in PLACEHOLDERS}
    _refuse_audio(content, row, row_name)
    content, placeholders, inside = _located(content, row_name, [kind for kind in PLACEHOLDERS if in_columns[kind]])
    kinds = [kind for kind in PLACEHOLDERS if in_columns[kind] or kind in placeholders]
    if blind is not None and kinds:
        _refuse_seen(blind, kinds[0], row_name)
    iterators = {}
    for kind in PLACEHOLDERS:
        _refuse_mismatch(kind, in_columns[kind], inside[kind], placeholders.count(kind), row_name)
        iterators[kind] = iter(_opened_later(in_columns[kind] or inside[kind], kind, row_name))
    return replace(content, images=tuple(next(iterators[kind]) for kind in placeholders)) if placeholders else content


def _refuse_seen(blind: str, kind: str, row_name: str) -> NoReturn:
    if isinstance(blind, LeftOutByRun):
        raise ConfigError(f"{blind}. {row_name} has {kind}s.")
    raise DataError(
        f"{row_name} has {kind}s. {blind}. Remove them; a column that holds none of the row's images can be given "
        "another name, as in data.columns={other: image}."
    )


def _located(content: C, row_name: str, column_kinds: Sequence[str]) -> tuple[C, list[str], RowMedia]:
    """Return the content with bare parts, the kinds of its places in their order, and what its parts held."""
    inside: RowMedia = {kind: [] for kind in PLACEHOLDERS}
    if not isinstance(content, Conversation):
        return content, _marks(_text_of(content), column_kinds), inside
    messages = _parsed(content.messages, row_name, inside, column_kinds)
    placeholders = [
        content_part["type"] for message in messages for content_part in _parts(message) if _is_image(content_part)
    ]
    return replace(content, messages=messages), placeholders, inside


def held_images(row: Row, row_name: str) -> Iterator[Any]:
    """Yield what a row holds or names of images, then of the frames of videos: in its columns, and in messages.

    A film is yielded as its `Video`.

    Raises:
        DataError: As `place_images`.
    """
    contents: RowMedia = {kind: _column(row, kind, row_name) for kind in PLACEHOLDERS}
    for value in row.values():
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            _parsed([message for message in value if isinstance(message, Mapping)], row_name, contents, ())
    yield from contents["image"]
    for video in _opened_later(contents["video"], "video", row_name):
        yield from video.frames if video.film is None else [video]


def _refuse_audio(content: Content, row: Row, row_name: str) -> None:
    columns = [name for name in ("audio", "audios") if row.get(name) is not None]
    text = str(content.messages) if isinstance(content, Conversation) else _text_of(content)
    if columns and "<audio>" in text:
        raise DataError(
            f"{row_name} has a column {columns[0]!r} and a place for it, <audio>; Holdfast trains on text, images and "
            "videos. Remove the row."
        )


def _opened_later(contents: Sequence[Any], kind: str, row_name: str) -> list[Any]:
    if kind == "image":
        return list(contents)
    return [
        content if isinstance(content, Video) else video_of(content, f"{row_name}, video {n}")
        for n, content in enumerate(contents)
    ]


def _refuse_mismatch(
    kind: str, in_columns: Sequence[Any], inside: Sequence[Any], placeholder_count: int, row_name: str
) -> None:
    if inside and in_columns:
        raise DataError(
            f"{row_name} has a column of {len(in_columns)} {kind}s, and its messages hold {len(inside)} themselves. "
            "Keep one of the two."
        )
    count = len(in_columns or inside)
    if placeholder_count != count:
        raise DataError(
            f"{row_name} has {count} {kind}{'' if count == 1 else 's'} and places for {placeholder_count}. Every "
            f"{kind} needs one {PLACEHOLDERS[kind]} in the text, or one part {{type: {kind}}} in a message, in the "
            f"{kind}s' order."
        )


def images_up_to(conversation: Conversation, message: int) -> int:
    """Return how many images and videos the messages before this one hold."""
    return sum(
        _is_image(content_part) for earlier in conversation.messages[:message] for content_part in _parts(earlier)
    )


def _text_of(content: PromptCompletion | PlainText) -> str:
    return content.prompt + content.completion if isinstance(content, PromptCompletion) else content.text


def _marks(text: str, kinds: Collection[str]) -> list[str]:
    """Return the kinds of the placeholders in a text, in their order."""
    return [mark["kind"] for mark in re.finditer("<(?P<kind>image|video)>", text) if mark["kind"] in kinds]


def _column(row: Row, kind: str, row_name: str) -> list[Any]:
    """Return the images or videos of the row's own column."""
    names = (f"{kind}s", kind)
    columns = [name for name in names if row.get(name) is not None]
    if len(columns) > 1:
        raise DataError(f"{row_name} has both a column '{kind}s' and a column '{kind}'. Keep one of the two.")
    if not columns:
        return []
    value = row[columns[0]]
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return list(value) if is_list else [value]


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _is_image(content_part: Any) -> bool:
    return isinstance(content_part, Mapping) and content_part.get("type") in PLACEHOLDERS


def _parsed(messages: Sequence[Message], row_name: str, inside: RowMedia, column_kinds: Sequence[str]) -> list[Message]:
    """Return the messages with bare parts, after moving what those parts held to `inside`.

    Args:
        messages: Of the row.
        row_name: What an error calls it.
        inside: By kind; filled.
        column_kinds: Kinds that have a column, whose placeholders in texts become parts.
    """
    parsed: list[Message] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and _marks(content, column_kinds):
            parsed.append({**message, "content": _split(content, column_kinds)})
        elif isinstance(content, Sequence) and not isinstance(content, str):
            content_parts = [_part(content_part, f"{row_name}, message {number}", inside) for content_part in content]
            split = [piece for content_part in content_parts for piece in _divided(content_part, column_kinds)]
            parsed.append({**message, "content": split})
        else:
            parsed.append(message)
    return parsed


def _divided(content_part: Any, column_kinds: Sequence[str]) -> list[Any]:
    is_text = (
        isinstance(content_part, Mapping)
        and content_part.get("type") == "text"
        and _marks(str(content_part.get("text")), column_kinds)
    )
    return _split(content_part["text"], column_kinds) if is_text else [content_part]


def _split(text: str, column_kinds: Sequence[str]) -> list[dict[str, Any]]:
    content_parts: list[dict[str, Any]] = []
    for piece in re.split(f"(<(?:{'|'.join(column_kinds)})>)", text):
        if piece[1:-1] in column_kinds and piece == PLACEHOLDERS[piece[1:-1]]:
            content_parts.append({"type": piece[1:-1]})
        elif piece:
            content_parts.append({"type": "text", "text": piece})
    return content_parts


def _part(content_part: Any, message_name: str, inside: RowMedia) -> Any:
    """Return one part without the columns that other parts have, and without its image, which goes to `inside`."""
    if not isinstance(content_part, Mapping):
        return content_part
    content_part = {key: value for key, value in content_part.items() if value is not None}
    kind = {"image_url": "image"}.get(
        content_part.get("type", ""), content_part.get("type", "text" if "text" in content_part else None)
    )
    if kind in {"audio", "input_audio", "video_url"}:
        raise DataError(
            f"{message_name}: a part of type {kind}; Holdfast trains on text, images and videos. Remove the row."
        )
    if kind not in PLACEHOLDERS:
        return content_part
    content = next((content_part[key] for key in _SOURCES[kind] if key in content_part), None)
    if isinstance(content, Mapping) and "url" in content:
        content = content["url"]
    if kind == "video":
        refuse_unread(content_part, f"{message_name}, a video")
    if content is not None:
        inside[kind].append(
            video_of(content, f"{message_name}, a video", content_part.get("fps")) if kind == "video" else content
        )
    return {"type": kind}


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
            return first_frame(self.film(image, name), name)
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

    def film(self, video: Video, name: str) -> Path | bytes:
        """Return the file of a film, or its bytes.

        Raises:
            DataError: The file does not exist.
        """
        return video.film if isinstance(video.film, bytes) else self.path(video.film, name)

    def content(self, image: Any) -> bytes:
        """Return what tells an image from others: the bytes of its file, or mode, size and pixels of one in memory.

        Of a film, its size, beginning and end: containers list the sizes of all frames in one of them.

        Raises:
            DataError: The value is not an image, or the file it names does not exist.
            OSError, ValueError, RuntimeError: The image cannot be read.
        """
        from PIL import Image

        if isinstance(image, Video):
            return excerpt(self.film(image, "a film"))
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
