"""Find the images and videos of rows.

A row has its images in a column `images` (or `image`), with `<image>` in its text for each, or inside the parts of its
messages. Videos, lists of frames or films, stand in a column `videos`, with `<video>` in the text, or inside parts.
Both forms are normalised to parts `{type: image}` and `{type: video}`, and a list of what to open in the order of the
parts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from holdfast.data.content.formats import Conversation, Message, PlainText, PromptCompletion
from holdfast.data.rows.rows import Row
from holdfast.errors import ConfigError, DataError

PLACEHOLDERS = {"image": "<image>", "video": "<video>"}
"""Stands for one image or video in the text of a row that has a column of them."""

_SOURCES = {"image": ("image", "path", "url", "bytes", "image_url"), "video": ("video", "frames", "path", "url")}
"""Keys of a part that may hold what is to be opened."""

RowMedia = dict[str, list[Any]]
"""What a row holds of each kind."""

_VIDEO_KEYS = ("frames", "bytes", "path")
"""Of a mapping; `datasets` stores films with the last two."""

_UNREAD = {
    *("video_start", "video_end", "nframes", "min_frames", "max_frames"),
    *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"),
}
"""Keys by which qwen-vl-utils would choose other frames or sizes."""

Content = Conversation | PromptCompletion | PlainText
C = TypeVar("C", bound=Content)


class Frames(NamedTuple):
    """A video as the model gets it: frames with times."""

    images: Sequence[Any]
    """PIL images in RGB, at even distances in time."""
    fps: float
    """How many of them belong to a second."""


class Film(Protocol):
    """A film, which a feature decodes (`registry.FILM`)."""

    def frames(self, fps: float, most: int | None) -> Frames:
        """Return frames at a rate, at most so many."""

    def first_frame(self) -> Any:
        """Return the first frame, in PIL."""

    def excerpt(self) -> bytes:
        """Return bytes that tell it from others."""


@dataclass(frozen=True)
class Video:
    """One video of a row."""

    frames: tuple[Any, ...]
    """Each what an image is: a path, the bytes of a file, a PIL image. None for a film."""
    fps: float | None
    """Frames of a second that are in the list, or that are taken of a film; None: what `data.video_fps` says."""
    original: Any
    """As the row has it, by which two contents of a row know that they share it."""
    film: str | bytes | Path | None = None
    """A file to decode, or its bytes."""


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


def video_of(content: Any, video_name: str, fps: Any = None) -> Video:
    """Return a video as a row holds it.

    Args:
        content: A list of frames, or a mapping with `frames`; the path of a film, its bytes, or a mapping with `bytes`
            or `path`. A mapping may have `fps`.
        video_name: What an error calls it.
        fps: Where `content` has none.

    Raises:
        DataError: It is none of these, or empty, its rate is not a number above 0, or as `refuse_unread`.
    """
    frames = content
    if isinstance(content, Mapping):
        refuse_unread(content, video_name)
        frames = next((content[key] for key in _VIDEO_KEYS if content.get(key) is not None), None)
        fps = content.get("fps", fps)
    is_film = isinstance(frames, str | bytes | Path)
    if not is_film and not isinstance(frames, Sequence):
        raise DataError(
            f"{video_name} is a {type(content).__name__}; a video is a list of frames, or a film: the path of a file, "
            "or its bytes."
        )
    if not is_film and not len(frames):
        raise DataError(f"{video_name} has no frames. Remove it and its place in the text.")
    rate = _rate_of(fps, video_name)
    return Video((), rate, content, frames) if is_film else Video(tuple(frames), rate, content)


def refuse_unread(keys: Mapping[str, Any], video_name: str) -> None:
    """Raise where a row says of a video what is not followed.

    Raises:
        DataError: It has a key that would change which frames are taken, or their size.
    """
    unread = [key for key in keys if key in _UNREAD and keys[key] is not None]
    if unread:
        raise DataError(
            f"{video_name}: {', '.join(unread)} of a video are not read. Cut the file, or set data.max_frames, "
            "data.video_fps or the bounds of pixels (data.video_min_pixels, data.video_max_pixels)."
        )


def _rate_of(fps: Any, video_name: str) -> float | None:
    if fps is None:
        return None
    if isinstance(fps, bool) or not (isinstance(fps, int | float) and 0 < fps < 1e9):
        raise DataError(f"{video_name} has fps={fps!r}; it is the number of its frames that belong to one second.")
    return float(fps)
