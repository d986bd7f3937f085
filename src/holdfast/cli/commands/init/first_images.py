"""Finds for `holdfast init` the column that has a row's images, where their files are, and whether texts mark them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from holdfast.cli.commands.init.first_columns import FirstFile
from holdfast.data.content.images import PLACEHOLDERS

if TYPE_CHECKING:
    from holdfast.data.rows.rows import Row

_OURS = ("images", "image")
_CALLED = ("img", "imgs", "picture", "pictures", "photo", "photos")
_ENDINGS = ("", "s", "_path", "_paths", "_file", "_files")
_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"}


def choose_images(draft: FirstFile, base: Path, rows: Sequence[Row], prompt: str | None) -> None:
    """Name the column of images where it is called otherwise, the folder of files, and where texts lack placeholders.

    Args:
        draft: Composed so far; its `data.path` names the rows.
        base: Where paths begin.
        rows: The first ones.
        prompt: The column of prompts, if they are texts.
    """
    column = _column(rows[0])
    if column is None:
        return
    if column not in _OURS:
        draft.put("data.columns", draft.tree["data"].get("columns", {}) | {"images": column}, f"{column} has images")
    images = [_images(row.get(column)) for row in rows]
    _choose_folder(draft, base, images)
    mark = PLACEHOLDERS["image"]
    unmarked = prompt is not None and all(mark not in str(row.get(prompt)) for row in rows)
    if unmarked and all(len(of_row) == 1 for of_row in images):
        draft.put(
            "data.format", f"{mark}{{{{ content }}}}", f"no {prompt} says by {mark} where its image goes: before it"
        )


def _choose_folder(draft: FirstFile, base: Path, images: Sequence[Sequence[Any]]) -> None:
    paths = [image for of_row in images for image in of_row if isinstance(image, str)]
    folder = Path(draft.tree["data"]["path"]).parent
    if paths and not (base / paths[0]).is_file() and (base / folder / paths[0]).is_file():
        draft.put("data.image_dir", str(folder), "the files of images lie beside the rows")


def _column(row: Row) -> str | None:
    names = {name.lower(): name for name in row}
    usual = [f"{stem}{ending}" for stem in (*_CALLED, "image") for ending in _ENDINGS]
    candidates = [names[name] for name in dict.fromkeys((*_OURS, *usual)) if name in names]
    return next((name for name in candidates if _images(row[name])), None)


def _images(value: Any) -> list[Any]:
    """Return what a column holds of images; nothing if it holds something else."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    return values if values and all(_is_image(item) for item in values) else []


def _is_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value.get("bytes") or value.get("path"))
    if isinstance(value, str):
        return PurePath(value).suffix.lower() in _SUFFIXES
    return isinstance(value, bytes) or hasattr(value, "getexif")
