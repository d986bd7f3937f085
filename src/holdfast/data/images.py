"""Images of rows: where they are named, how they are opened.

A row names its images in a column `images` (or `image`), with `<image>` in its text for each; or inside the parts of
its messages. Everything is brought to parts `{type: image}` and a list of what to open, as many as there are parts.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from holdfast.data.formats import Conversation, PlainText, PromptCompletion
from holdfast.data.messages import Message
from holdfast.data.rows import Row
from holdfast.errors import DataError

PLACEHOLDER = "<image>"
"""Stands for one image in the text of a row that has a column of images."""

_COLUMNS = ("images", "image")
_SOURCES = ("image", "path", "url", "bytes", "image_url")
"""Keys of an image part that may hold the image."""

Content = Conversation | PromptCompletion | PlainText
C = TypeVar("C", bound=Content)


def place_images(content: C, row: Row, where: str, blind: str | None = None) -> C:
    """Return the content with its images: one `{type: image}` part, or one placeholder, for each.

    Args:
        content: Of the row.
        row: Its columns.
        where: What an error calls it.
        blind: A sentence that says why no images can be trained on; None: they can.

    Raises:
        DataError: Placeholders and images do not match in number, a part is of another kind, or there are images and
            none can be trained on.
    """
    given = _column(row, where)
    if isinstance(content, Conversation):
        messages, inside = _parsed(content.messages, where, splits_text=bool(given))
        places = sum(_is_image(part) for message in messages for part in _parts(message))
        content = replace(content, messages=messages)
    else:
        inside, places = [], _text_of(content).count(PLACEHOLDER) if given else 0
    if blind is not None and (given or places):
        raise DataError(
            f"{where} has images. {blind}. Remove them; a column that holds none of the row's images can be given "
            "another name, as in data.columns={other: image}."
        )
    _refuse_mismatch(given, inside, places, where)
    found = given or inside
    return replace(content, images=tuple(found)) if found else content


def _refuse_mismatch(given: Sequence[Any], inside: Sequence[Any], places: int, where: str) -> None:
    if inside and given:
        raise DataError(
            f"{where} has a column of {len(given)} images, and its messages hold {len(inside)} themselves. Keep one of "
            "the two."
        )
    found = len(given or inside)
    if places != found:
        raise DataError(
            f"{where} has {found} image{'' if found == 1 else 's'} and places for {places}. Every image needs one "
            f"{PLACEHOLDER} in the text, or one part {{type: image}} in a message, in the images' order."
        )


def images_up_to(conversation: Conversation, message: int) -> int:
    """Return how many images the messages before this one hold."""
    return sum(_is_image(part) for earlier in conversation.messages[:message] for part in _parts(earlier))


def _text_of(content: PromptCompletion | PlainText) -> str:
    return content.prompt + content.completion if isinstance(content, PromptCompletion) else content.text


def _column(row: Row, where: str) -> list[Any]:
    """Return the images of the row's own column."""
    named = [name for name in _COLUMNS if row.get(name) is not None]
    if len(named) == len(_COLUMNS):
        raise DataError(f"{where} has both a column 'images' and a column 'image'. Keep one of the two.")
    if not named:
        return []
    value = row[named[0]]
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return list(value) if is_list else [value]


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _parsed(messages: Sequence[Message], where: str, *, splits_text: bool) -> tuple[list[Message], list[Any]]:
    """Return the messages with bare image parts, and what those parts held."""
    parsed: list[Message] = []
    inside: list[Any] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and splits_text and PLACEHOLDER in content:
            parsed.append({**message, "content": _split(content)})
        elif isinstance(content, Sequence) and not isinstance(content, str):
            parts = [_part(part, f"{where}, message {number}", inside) for part in content]
            split = [piece for part in parts for piece in (_divided(part) if splits_text else [part])]
            parsed.append({**message, "content": split})
        else:
            parsed.append(message)
    return parsed, inside


def _divided(part: Any) -> list[Any]:
    is_text = isinstance(part, Mapping) and part.get("type") == "text" and PLACEHOLDER in str(part.get("text"))
    return _split(part["text"]) if is_text else [part]


def _split(text: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(PLACEHOLDER)):
        if number:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _part(part: Any, where: str, inside: list[Any]) -> Any:
    """Return one part without the columns that other parts have, and without its image, which goes to `inside`."""
    if not isinstance(part, Mapping):
        return part
    part = {key: value for key, value in part.items() if value is not None}
    kind = part.get("type", "text" if "text" in part else None)
    if kind in {"video", "audio", "input_audio"}:
        raise DataError(f"{where}: a part of type {kind}; Holdfast trains on text and images. Remove the row.")
    if kind not in {"image", "image_url"}:
        return part
    held = next((part[key] for key in _SOURCES if key in part), None)
    if isinstance(held, Mapping) and "url" in held:
        held = held["url"]
    if held is not None:
        inside.append(held)
    return {"type": "image"}


@dataclass(frozen=True)
class ImageFiles:
    """Opens images. Relative paths start in `folder`, else in the current directory, else beside the YAML."""

    folder: str | None
    base: Path

    def open(self, image: Any, where: str) -> Any:
        """Return a PIL image in RGB, turned upright as its camera says.

        Args:
            image: A path, the bytes of a file, a PIL image, or a mapping with `bytes` or `path`.
            where: What an error calls it.

        Raises:
            DataError: There is no such file, it is no image, or it is damaged.
        """
        try:
            from PIL import Image, ImageOps
        except ImportError:
            raise DataError(f"{where}: reading images needs a package: pip install 'holdfast[vlm]'.") from None
        if isinstance(image, Mapping):
            image = image.get("bytes") or image.get("path")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                if isinstance(image, Image.Image):
                    return image.convert("RGB")
                opened = Image.open(io.BytesIO(image) if isinstance(image, bytes) else self._path(image, where))
                return ImageOps.exif_transpose(opened).convert("RGB")
        except (
            OSError,
            ValueError,
            SyntaxError,
            Image.DecompressionBombError,
            Image.DecompressionBombWarning,
        ) as error:
            what = f"{len(image)} bytes" if isinstance(image, bytes) else str(image)
            raise DataError(f"{where} ({what:.120}) cannot be read as an image: {error}.") from None

    def _path(self, image: Any, where: str) -> Path:
        if not isinstance(image, str | Path):
            raise DataError(
                f"{where} is a {type(image).__name__}; an image is a path, the bytes of a file, or a PIL image."
            )
        if str(image).startswith(("http://", "https://", "data:")):
            raise DataError(
                f"{where} is {str(image):.60}; images are read from files or from the rows. Download it and write its "
                "path, which may be relative to data.image_dir."
            )
        path = Path(str(image).removeprefix("file://")).expanduser()
        folders = [Path.cwd(), self.base]
        if self.folder is not None:
            folders = [place / self.folder for place in folders]
        tried = list(dict.fromkeys(folder / path for folder in folders))
        found = next((place for place in tried if place.is_file()), None)
        if found is None:
            raise DataError(
                f"{where}: there is no file {' or '.join(str(place) for place in tried)}. Relative paths start in "
                "data.image_dir."
            )
        return found
