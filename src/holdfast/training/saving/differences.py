"""Compare the fingerprints of a run with those of a checkpoint, sections of the configuration key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from holdfast.config.base import Section
from holdfast.config.verbs.training import TrainingConfig
from holdfast.training.fingerprints import IMAGE_RULES
from holdfast.training.run import Identity

_LATER = {IMAGE_RULES}
"""Names that earlier versions did not save, and that no key of the configuration has."""
_HASHES = {"model.path", "model.lora.path"}
"""Names of kinds with values, whose value is a hash."""
_ABSENT = object()


def changed_fingerprints(
    saved: Identity, current: Identity, config: TrainingConfig | None = None
) -> dict[str, list[str]]:
    """Return the differences by kind: a changed key with its values there and here, or the name of other bytes.

    Sections are compared key by key. A key that the checkpoint lacks is equal if it has its default here; a key that
    this version lacks is not compared.

    Args:
        saved: Of the checkpoint.
        current: Of this run.
        config: Of this run, which knows the defaults; None: no key has one.
    """
    changes = {}
    for kind, values in current.items():
        before = saved.get(kind, {})
        names = sorted({*before, *values})
        differences = [
            text
            for name in names
            if before.get(name) != values.get(name)
            for text in _differences(kind, name, before.get(name), values.get(name), config)
        ]
        if differences:
            changes[kind] = differences
    return changes


def _differences(
    kind: str, name: str, before: str | None, after: str | None, config: TrainingConfig | None
) -> Iterator[str]:
    """Yield the differences between two values of one name; None where a side lacks it."""
    old, new = _plain(before), _plain(after)
    if before is None and (name in _LATER or has_default(config, name, new)):
        return
    has_values = kind in {"objective", "model"} or (kind in {"data", "tokenizer"} and name.startswith("data."))
    if before is None or after is None or name in _HASHES or not has_values:
        yield name
    else:
        yield from _changed_keys(name, old, new, config)


def _changed_keys(path: str, old: Any, new: Any, config: TrainingConfig | None) -> Iterator[str]:
    """Yield the keys below a path whose values differ, with both values."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = ({str(index): value for index, value in enumerate(values)} for values in (old, new))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield f"{path} {_shown(old)} -> {_shown(new)}"
        return
    for key in sorted({*old, *new}):
        below = f"{path}.{key}"
        if key not in new and is_gone(config, below):
            continue
        if key not in old and has_default(config, below, new[key]):
            continue
        yield from _changed_keys(below, old.get(key, _ABSENT), new.get(key, _ABSENT), config)


def _plain(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text


def _shown(value: Any) -> str:
    text = "absent" if value is _ABSENT else str(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def has_default(config: TrainingConfig | None, path: str, value: Any) -> bool:
    """Return whether a key of the configuration has a default, and a value is it."""
    section, last = _section_of(config, path)
    field = None if section is None else type(section).model_fields.get(last)
    if field is None or field.is_required():
        return False
    default = field.get_default(call_default_factory=True, validated_data={})
    return value in (default, str(default), _plain(json.dumps(default, default=str)))


def is_gone(config: TrainingConfig | None, path: str) -> bool:
    """Return whether the section of a key of the configuration has no such key in this version."""
    section, last = _section_of(config, path)
    return section is not None and last not in type(section).model_fields


def _section_of(config: TrainingConfig | None, path: str) -> tuple[Section | None, str]:
    """Return the section that a dotted key is in, and the key's own name; None where it is in a free mapping."""
    section: Any = config
    *inner, last = path.split(".")
    for key in inner:
        in_list = isinstance(section, list | tuple) and key.isdigit() and int(key) < len(section)
        section = section[int(key)] if in_list else getattr(section, key, None)
    return (section if isinstance(section, Section) else None), last
