"""Shows a run's configuration without anything that could be secret, and compares two configurations by key.

Nothing is validated: a configuration of an earlier version has other keys, which are shown as they stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.config.base import leaves
from holdfast.config.public import public_configuration, public_text
from holdfast.config.yaml12 import parse_file
from holdfast.errors import ConfigError
from holdfast.features.report.formats import NOT_THERE
from holdfast.files import read_json
from holdfast.metrics.progress import End
from holdfast.training.directory import IDENTITY

CONFIGURATION = "config.resolved.yaml"
_OF_THE_PLACE = ("run.name", "run.dir")


@dataclass(frozen=True)
class Parent:
    """The run or checkpoint that a run started from."""

    description: str
    configuration: Mapping[str, str] | None
    """Configuration of the parent run by dotted key; None where that run is in another directory."""


def read_configuration(directory: Path) -> tuple[dict[str, Any], str]:
    """Return a run's configuration as it stands, and a sentence where there is none."""
    try:
        values = parse_file(directory / CONFIGURATION).values
    except (OSError, ConfigError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
        return {}, f"{CONFIGURATION} {reason}, so the page shows no configuration."
    return dict(values), ""


def end_of(configuration: Mapping[str, Any]) -> End:
    """Return what a run with a configuration ends by."""
    steps, epochs = configuration.get("steps"), configuration.get("epochs")
    return End(
        steps if type(steps) is int else None,
        float(epochs) if isinstance(epochs, int | float) and not isinstance(epochs, bool) else None,
    )


def flat_public(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a configuration as text by dotted key: paths are names, addresses their host, no credentials."""
    return {key: _text(value) for key, value in leaves(public_configuration(values)) if key}


def _text(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:g}"
        case [] | {}:
            return "[]" if value == [] else "{}"
        case list():
            return ", ".join(_text(element) for element in value)
        case Mapping():
            return "{" + ", ".join(f"{key}: {_text(element)}" for key, element in value.items()) + "}"
    return str(value)


def setting_differences(first: Mapping[str, str], second: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (key, first value, second value) of each key in which two configurations differ, names of runs aside."""
    keys = [*first, *(key for key in second if key not in first)]
    pairs = [(key, first.get(key, NOT_THERE), second.get(key, NOT_THERE)) for key in keys if key not in _OF_THE_PLACE]
    return [(key, first_value, second_value) for key, first_value, second_value in pairs if first_value != second_value]


def read_parent(directory: Path, identity: Mapping[str, Any]) -> Parent | None:
    """Return what a run started from, with that run's configuration if it lies in the same directory of runs."""
    recorded = identity.get("parent")
    if not isinstance(recorded, Mapping):
        return None
    export = recorded.get("export")
    if not isinstance(export, Mapping):
        model = recorded.get("model")
        return Parent(f"the model {public_text(model)}", None) if isinstance(model, str) else None
    description = f"step {export.get('step')} of the run {public_text(str(export.get('run')))}"
    for path in sorted(directory.absolute().parent.glob(f"*/{IDENTITY}")):
        try:
            its_id = read_json(path).get("run_id")
        except (OSError, ValueError, AttributeError):
            continue
        if its_id and its_id == export.get("run_id"):
            values, _ = read_configuration(path.parent)
            return Parent(description, flat_public(values) if values else None)
    return Parent(description, None)
