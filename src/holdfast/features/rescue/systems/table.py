"""Reads the tables of other systems' keys: each key's counterpart here, or one word for what it concerns.

`docs/developers/import_tables.md` says how a table is written. A key that stands in no table is left to a person.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.config.base import leaves
from holdfast.config.yaml12 import parse_text

READABLE = ("trl", "easyr1", "verl", "axolotl", "llamafactory")
"""Systems whose files `holdfast config import` reads."""
HINTED = ("transformers", *READABLE, "others")
"""All tables, in the order in which a hint looks into them."""
VERBS = ("sft", "dpo", "reward", "grpo")
"""Commands that a file may be for."""
WORDS = {
    "speed": "concerns speed and memory alone",
    "display": "concerns what is shown, logged or uploaded",
    "launch": "concerns how processes are started",
    "implied": "follows from the command, the files or other keys",
}
"""Why nothing is written for a key, in one word and in several."""
_CONVERSION = re.compile(r"(\w+)\((.*)\)")
_CONDITION = re.compile(r"([\w.]+)(!?=)(.*)")


@dataclass(frozen=True)
class Condition:
    """What the other system reads a key under: other keys that have, or have not, one of some values."""

    text: str = ""

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Return whether it does, where `values` has the keys of a file, with defaults, and `verb`."""
        parts = [_CONDITION.fullmatch(part) for part in self.text.split(" & ")]
        return all(
            (spelled(values.get(part[1])) in part[3].split("|")) == (part[2] == "=")
            for part in parts
            if part is not None
        )


@dataclass(frozen=True)
class KeyEntry:
    """The counterpart of one key of another system."""

    key: str
    targets: tuple[str, ...] = ()
    """Dotted keys here."""
    values: Mapping[str, Any] | None = None
    """Its values and ours: a value of the target, or keys with values; null: nothing is written."""
    rule: str = ""
    """Name of a conversion in holdfast.features.rescue.configuration.rules."""
    word: str = ""
    """One of `WORDS`, in place of a target."""
    condition: Condition = Condition()


@dataclass(frozen=True)
class KeyTable:
    """The keys of one system, with those of the system that it extends."""

    name: str
    title: str
    version: str
    entries: Mapping[str, tuple[KeyEntry, ...]]
    """Key to its entries, which have different conditions."""
    defaults: Mapping[str, Mapping[str, Any]]
    """Command, or `all`, to values that hold there where a file says nothing, and decide a run's numbers."""
    verb_by: Mapping[str, Mapping[str, str]]
    """Keys whose value says the command."""
    verb_marks: Mapping[str, tuple[str, ...]]
    """Command to keys that no other command there has."""
    verb_otherwise: str
    native_keys: frozenset[str]
    """Keys that are not those of the extended system."""

    def defaults_for(self, verb: str) -> dict[str, Any]:
        """Return the values that hold there where a file says nothing."""
        return {**self.defaults.get("all", {}), **self.defaults.get(verb, {})}


@cache
def load_key_table(name: str) -> KeyTable:
    """Read the table of a system."""
    raw = parse_text(_text(name), f"{name}.yaml").values
    below = load_key_table(raw["extends"]) if "extends" in raw else None
    entries: dict[str, tuple[KeyEntry, ...]] = {}
    for entry in _entries(raw):
        entries[entry.key] = (*entries.get(entry.key, ()), entry)
    verbs = raw.get("verbs", {})
    return KeyTable(
        name,
        raw["system"],
        raw["version"] if below is None else f"{raw['version']}, {below.version}",
        {**(below.entries if below else {}), **entries},
        {verb: dict(leaves(values)) for verb, values in raw.get("defaults", {}).items()},
        verbs.get("by", {}),
        {verb: tuple(marks) for verb, marks in verbs.get("marks", {}).items()},
        verbs.get("otherwise", "sft"),
        frozenset(entries),
    )


@cache
def _text(name: str) -> str:
    return Path(__file__).with_name(f"{name}.yaml").read_text("utf-8")


def _entries(raw: Mapping[str, Any]) -> Iterator[KeyEntry]:
    for text, keys in {"": raw["keys"], **raw.get("if", {})}.items():
        for key, counterpart in keys.items():
            yield _entry(key, counterpart, Condition(text))
    for word, names in raw.get("without", {}).items():
        yield from (KeyEntry(key, word=word) for key in names)


def _entry(key: str, counterpart: Any, condition: Condition) -> KeyEntry:
    listed = counterpart if isinstance(counterpart, list) else [counterpart]
    target: str = listed[0] if isinstance(listed[0], str) else ""
    values: Mapping[str, Any] | None = listed[-1] if isinstance(listed[-1], Mapping) else None
    conversion = _CONVERSION.fullmatch(target)
    rule, named = (conversion[1], conversion[2]) if conversion else ("", target)
    own = {name for ours in (values or {}).values() if isinstance(ours, Mapping) for name in ours if "." in name}
    targets = tuple(named.split(", ")) if named else tuple(sorted(own))
    return KeyEntry(key, targets, values, rule, condition=condition)


def spelled(value: Any) -> str:
    """Return a value as the tables spell it; "" for null."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe_key(name: str, keys_here: Sequence[str]) -> str:
    """Say what a key of another system is here; "" where no system has it.

    Args:
        name: The unknown key.
        keys_here: Dotted keys of the tree that was meant.
    """
    found = hint(name)
    if found is None:
        return ""
    title, entry = found
    owner = f"{title}'{'' if title.endswith('s') else 's'} {entry.key}"
    if entry.word:
        return f"{owner} {WORDS[entry.word]}"
    if not entry.targets:
        return f"{owner} is for you to decide"
    scope = "here" if set(entry.targets) & set(keys_here) else "here, in files of another command"
    keys = " and ".join(entry.targets)
    changed = entry.rule or entry.values is not None
    return f"{owner} becomes {keys} {scope}" if changed else f"it is called {keys} {scope}"


def hint(key: str) -> tuple[str, KeyEntry] | None:
    """Return the title and entry of the first system that has a key, whole or as the last word of a nested one.

    A file that does not have the word is not parsed, since most unknown keys are misspelt ones of ours.
    """
    tables = [load_key_table(name) for name in HINTED if key in _text(name)]
    for table in tables:
        if key in table.native_keys:
            return table.title, table.entries[key][0]
    for table in tables:
        nested = [entries[0] for dotted, entries in table.entries.items() if dotted.endswith(f".{key}")]
        if len({(entry.targets, entry.word) for entry in nested}) == 1:
            return table.title, nested[0]
    return None


def system_of_keys(keys: set[str], more_than: int) -> dict[str, str]:
    """Return `system` and `title` of the system whose files have most of some dotted keys.

    Args:
        keys: Of a file.
        more_than: How many of them are ours; a system must have more, or the answer is empty.
    """
    tables = [load_key_table(name) for name in READABLE]
    best = max(tables, key=lambda table: (len(keys & table.entries.keys()), len(keys & table.native_keys)))
    if len(keys & best.entries.keys()) <= more_than:
        return {}
    return {"system": best.name, "title": best.title}
