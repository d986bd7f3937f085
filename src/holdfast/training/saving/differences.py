"""Compare the fingerprints of a run with those of a checkpoint, sections of the configuration key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from holdfast.config.base import Section
from holdfast.config.earlier import todays_form
from holdfast.config.tree import all_keys
from holdfast.config.verbs.training import TrainingConfig
from holdfast.text.shortening import shortened
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
    old, new = (todays_form({name: _plain(text)})[name] for text in (before, after))
    if before is None and (name in _LATER or has_default(config, name, new)):
        return
    has_values = kind in {"objective", "model"} or (kind in {"data", "tokenizer"} and name.startswith("data."))
    if has_values and after is None and is_gone(config, name):  # names of files begin with keys too
        return
    if before is None or after is None or name in _HASHES or not has_values:
        yield name
    else:
        yield from _changed_keys(name, old, new, config)


def _changed_keys(path: str, old: Any, new: Any, config: TrainingConfig | None) -> Iterator[str]:
    """Yield the keys below a path whose values differ, with both values."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = ({str(index): value for index, value in enumerate(values)} for values in (old, new))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old is _ABSENT or new is _ABSENT or not _same(old, new):
            yield f"{path} {_shown(old)} -> {_shown(new)}"
        return
    for key in sorted({*old, *new}):
        if not _is_later(path, key, old, new, config):
            yield from _changed_keys(f"{path}.{key}", old.get(key, _ABSENT), new.get(key, _ABSENT), config)


def _is_later(
    path: str, key: str, old: Mapping[str, Any], new: Mapping[str, Any], config: TrainingConfig | None
) -> bool:
    """Return whether one version lacks a key: this one, or the checkpoint's where the value here is the default."""
    below = f"{path}.{key}"
    return (key not in new and is_gone(config, below)) or (key not in old and has_default(config, below, new[key]))


def _same(one: Any, other: Any) -> bool:
    """Return whether two plain values are written alike, as true and 1 are not: a template may print them."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _plain(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text


def _shown(value: Any) -> str:
    text = "absent" if value is _ABSENT else str(value) if isinstance(value, str) else json.dumps(value)
    return shortened(text, 43)


def has_default(config: TrainingConfig | None, path: str, value: Any) -> bool:
    """Return whether a key of the configuration has a default, and a value is it."""
    section, last = _section_of(config, path)
    field = None if section is None else type(section).model_fields.get(last)
    if field is None or field.is_required():
        return False
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, Section) and isinstance(value, dict):  # of which some keys are left out
        whole = default.model_dump(mode="json")
        return all(key in whole and _same(whole[key], inner) for key, inner in value.items())
    return any(_same(value, form) for form in (_plain(json.dumps(default, default=str)), str(default)))


def is_gone(config: TrainingConfig | None, path: str) -> bool:
    """Return whether a section of the configuration, of whatever kind, has no such key in this version.

    Keys of free mappings, and names that begin with no key of the configuration, are never gone.
    """
    keys = frozenset[str]() if config is None else _keys_of(type(config))
    known = ""
    for part in path.split("."):
        here = (f"{known}{part}", f"{known}*")  # `*` stands for a name or number, and is listed with what is below it
        found = next((key for key in here if key in keys or any(other.startswith(f"{key}.") for other in keys)), None)
        if found is None:
            return known != "" and any(key.startswith(known) for key in keys)
        known = f"{found}."
    return False


@cache
def _keys_of(root: type[TrainingConfig]) -> frozenset[str]:
    return frozenset(all_keys(root))


def _section_of(config: TrainingConfig | None, path: str) -> tuple[Section | None, str]:
    """Return the section that a dotted key is in, and the key's own name; None where it is in a free mapping."""
    section: Any = config
    *inner, last = path.split(".")
    for key in inner:
        in_list = isinstance(section, list | tuple) and key.isdigit() and int(key) < len(section)
        section = section[int(key)] if in_list else getattr(section, key, None)
    return (section if isinstance(section, Section) else None), last
