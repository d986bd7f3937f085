"""Load the configuration and tokenizer of an export with transformers and compare them with those in memory.

Correct hashes only show that the intended bytes were written. The classes are those of the objects in memory, so that
no code that came with a model is looked up or run again.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from holdfast.errors import RunStopped
from holdfast.models.files.origin import TOKENIZER_PROBE
from holdfast.models.setup.model import Blueprint

_OF_LOADING = {"_name_or_path", "transformers_version"}


class ExportFailed(RunStopped):  # noqa: N818 - the name says what happened
    """An export could not be written, or read back differently; nothing was left in its place."""


def check_readable(folder: Path, origin: Blueprint) -> None:
    """Load configuration and tokenizer, and compare them with those in memory.

    Args:
        folder: Where `write_assets` wrote them.
        origin: What was written.

    Raises:
        ExportFailed: One cannot be loaded, or is another than was to be written.
    """
    config: Any = origin.original_config
    reloaded = _loaded(folder, "configuration", config)
    _refuse(folder, "configuration", _differing(_as_read(config), _plain(reloaded)))
    if origin.tokenizer is None:
        return
    tokenizer = _loaded(folder, "tokenizer", origin.tokenizer)
    _refuse(folder, "tokenizer", _differing(_marks(origin.tokenizer), _marks(tokenizer)))


def _as_read(config: Any) -> dict[str, Any]:
    """Return the values of a configuration after a way through a file: a class may normalise what it reads."""
    with tempfile.TemporaryDirectory(prefix="holdfast-config-") as folder:
        (Path(folder) / "config.json").write_text(config.to_json_string(), encoding="utf-8")
        return _plain(type(config).from_pretrained(folder))


def _loaded(folder: Path, label: str, written: Any) -> Any:
    try:
        return type(written).from_pretrained(str(folder))
    except Exception as error:  # the tokenizers library raises Exception itself
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ExportFailed(
            f"The {label} that was written to {folder} cannot be loaded: {type(error).__name__}: {reason} The "
            f"directory was thrown away; save_pretrained of {type(written).__name__} must write what its "
            "from_pretrained reads."
        ) from error


def _refuse(folder: Path, label: str, differing: list[str]) -> None:
    if differing:
        raise ExportFailed(
            f"The {label} that was written to {folder} is another one when it is loaded: {'; '.join(differing[:4])}. "
            "The directory was thrown away. Look at what model.path and model.tokenizer name: saved and loaded by "
            "transformers, they must stay the same."
        )


def _plain(config: Any) -> dict[str, Any]:
    values = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in _OF_LOADING}


def _marks(tokenizer: Any) -> dict[str, Any]:
    """Return what tells a tokenizer from another one."""
    return {
        "tokens of a probe text": tokenizer(TOKENIZER_PROBE)["input_ids"],
        "words": len(tokenizer),
        "special tokens": {key: str(value) for key, value in tokenizer.special_tokens_map.items()},
        "chat template": getattr(tokenizer, "chat_template", None),
    }


def _differing(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    return [
        f"{key} {actual.get(key)!r:.60} instead of {expected.get(key)!r:.60}"
        for key in sorted({*expected, *actual})
        if expected.get(key) != actual.get(key)
    ]
