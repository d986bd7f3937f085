"""Columns of a first configuration: which ones a verb reads, what a file calls them, and where its images are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from holdfast.cli.commands.init.draft import FirstFile
from holdfast.config.load import from_mapping
from holdfast.config.sections.model import ModelConfig
from holdfast.config.verbs.roots import ROOTS
from holdfast.errors import DataError

if TYPE_CHECKING:
    from holdfast.data.rows.rows import Row
    from holdfast.data.survey import Survey

LOOKED_AT = 500
"""Rows that columns and lengths are taken from."""
_CALLED = {
    "prompt": ("prompt", "question", "problem", "instruction", "query", "input"),
    "completion": ("completion", "response", "answer", "output", "solution", "target"),
    "chosen": ("chosen", "preferred", "accepted", "good", "better", "winner"),
    "rejected": ("rejected", "dispreferred", "bad", "worse", "loser"),
    "label": ("label",),
    "messages": ("messages", "conversation", "dialogue"),
    "text": ("text", "content"),
}
"""Our columns, and what files call them; the first name that is there counts."""
_IMAGES = re.compile(r"(image|img|picture|photo)s?(_(path|file)s?)?")
_IMAGE_FILES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"}


def named_columns(row: Row) -> dict[str, str]:
    """Return which of our columns a row has, and what the file calls them."""
    return {ours: theirs for ours, names in _CALLED.items() if (theirs := find_column(row, names))}


def find_column(row: Row, names: Sequence[str], without: Sequence[str] = ()) -> str | None:
    """Return the first of some names that a row's columns have, whatever their case."""
    lower = {column.lower(): column for column in row if column not in without}
    return next((lower[name] for name in names if name in lower), None)


def needed_columns(verb: str, columns: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return which of our columns a verb reads, and what the file calls them.

    Raises:
        DataError: Some are not there.
    """
    prompt = ["prompt"] if "prompt" in columns else []
    pairs, text = [*prompt, "chosen", "rejected"], [] if prompt else [["text"]]
    shapes = {
        "sft": [["messages"], *text, ["prompt", "completion"]],
        "dpo": [pairs, ["prompt", "completion", "label"], pairs],
        "reward": [pairs],
        "grpo": [["prompt"], ["messages"], ["prompt"]],
        "distill": [["messages"], *text, ["prompt", "completion"], ["prompt"]],
    }[verb]
    # Where none is there as a whole, the last one is asked for.
    shape = next((shape for shape in shapes if columns.keys() >= set(shape)), shapes[-1])
    missing = [ours for ours in shape if ours not in columns]
    if missing:
        unused = [name for name in names if name not in {columns.get(ours) for ours in shape}]
        theirs = {**columns, **dict(zip(missing, unused, strict=False))}
        advice = f"There is no column for {' and '.join(missing[len(unused) :])}: add it to the rows."
        if len(unused) >= len(missing):
            renamed = ", ".join(f"{ours}: {theirs[ours]}" for ours in shape if theirs[ours] != ours)
            advice = (
                f"Write a file by hand and name them, as in data.columns={{{renamed}}}, or rename them in the rows."
            )
        raise DataError(
            f"Rows for `holdfast {verb}` need {' and '.join(shape)}; there are the columns {', '.join(names)}. {advice}"
        )
    return {ours: columns[ours] for ours in shape}


def choose_columns(draft: FirstFile, base: Path, rows: Sequence[Row], needed: Mapping[str, str]) -> Survey:
    """Name the columns that the file calls otherwise; texts become a user's turns where a chat template can write them.

    Joined as they stand, a question and its answer would have nothing between them.

    Raises:
        UserError: The model has no tokenizer, or the rows cannot be read.
    """
    asks = needed.get("prompt") if isinstance(rows[0].get(needed.get("prompt", "")), str) else None
    media = _choose_images(draft, base, rows, asks)
    survey, why = None, ""
    if asks is not None:
        why = _why_no_turns(draft, base, asks, rows)
        if not why:
            survey, why = _as_turns(draft, base, asks, rows, {**needed, **media})
        if survey is None:
            alone = "prompts go to the model" if draft.verb == "grpo" else "prompt and answer are joined"
            why += f", so {alone} as they stand"
    if survey is None:
        _put_columns(draft, {**needed, **media}, rows[0])
        survey = _surveyed(draft, base)
    if why:
        key = "data.columns" if "data.columns" in draft.reasons else "data.path"
        draft.reasons[key] = "; ".join(filter(None, [draft.reasons.get(key), why]))
    return survey


def _surveyed(draft: FirstFile, base: Path) -> Survey:
    from holdfast.cli.commands.data.survey import survey_of

    return survey_of(from_mapping({"steps": 1, **draft.tree}, ROOTS[draft.verb], "the suggestion"), base, LOOKED_AT)


def _why_no_turns(draft: FirstFile, base: Path, asks: str, rows: Sequence[Row]) -> str:
    """Return why prompts are not written as a user's turns; "" if they can be."""
    from holdfast.models.files.origin import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(**draft.tree["model"]), base)
    if not tokenizer.chat_template:
        return "the tokenizer has no chat template"
    marks = [mark for mark in tokenizer.all_special_tokens if any(mark in str(row.get(asks)) for row in rows)]
    return f"the prompts hold {marks[0]} and are written in a template already" if marks else ""


def _as_turns(
    draft: FirstFile, base: Path, asks: str, rows: Sequence[Row], columns: Mapping[str, str]
) -> tuple[Survey | None, str]:
    """Write prompts as a user's turns; return the survey, None where the template cannot be used, and the reason."""
    others = {ours: theirs for ours, theirs in columns.items() if ours != "prompt"}
    if others.keys() - {"images"} == {"completion"}:
        others = {"output" if ours == "completion" else ours: theirs for ours, theirs in others.items()}
    _put_columns(draft, {"instruction": asks, **others}, rows[0])
    try:
        survey = _surveyed(draft, base)
    except DataError as error:  # a template that cannot be taken apart into turns
        return None, f"the tokenizer's chat template cannot be used ({str(error).partition('. ')[0]})"
    why = f"the tokenizer has a chat template, so a {asks} is a user's turn"
    if survey.counts.get("no_end_of_turn"):
        why += "; it does not close answers, so a model does not learn to stop: see data.chat_template"
    return survey, why


def _put_columns(draft: FirstFile, columns: Mapping[str, str], row: Row) -> None:
    draft.tree["data"].pop("columns", None)
    draft.reasons.pop("data.columns", None)
    if renamed := {ours: theirs for ours, theirs in columns.items() if theirs != ours}:
        draft.put("data.columns", renamed, f"the rows have {', '.join(row)}")


def _choose_images(draft: FirstFile, base: Path, rows: Sequence[Row], asks: str | None) -> dict[str, str]:
    """Name the folder of images, and write a placeholder where texts have none; return what their column is called."""
    from holdfast.data.content.images import PLACEHOLDERS

    for column in image_columns(rows[0])[:1]:
        images = [_images(row.get(column)) for row in rows]
        paths = [image for of_row in images for image in of_row if isinstance(image, str)]
        folder = Path(draft.tree["data"]["path"]).parent
        if paths and not (base / paths[0]).is_file() and (base / folder / paths[0]).is_file():
            draft.put("data.image_dir", str(folder), "the files of images lie beside the rows")
        mark = PLACEHOLDERS["image"]
        unmarked = asks is not None and all(mark not in str(row.get(asks)) for row in rows)
        if unmarked and all(len(of_row) == 1 for of_row in images):
            reason = f"no {asks} says by {mark} where its image goes: before it"
            draft.put("data.format", f"{mark}{{{{ content }}}}", reason)
        return {} if column in {"images", "image"} else {"images": column}
    return {}


def image_columns(row: Row) -> list[str]:
    """Return the columns that hold images by name and by value, ours first."""
    names = [name for name in row if _IMAGES.fullmatch(name.lower()) and _images(row[name])]
    return sorted(names, key=lambda name: name not in {"images", "image"})


def _images(value: Any) -> list[Any]:
    """Return what a column holds of images; nothing if it holds something else."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    return values if values and all(_is_image(item) for item in values) else []


def _is_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value.get("bytes") or value.get("path"))
    if isinstance(value, str):
        return PurePath(value).suffix.lower() in _IMAGE_FILES
    return isinstance(value, bytes) or hasattr(value, "getexif")
