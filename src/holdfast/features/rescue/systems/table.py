"""Reads the table that maps other systems' keys to Holdfast's, with the differences in meaning.

Entries never guess: a key without an entry is not in the table, and nothing is made of it. `docs/other_systems.md`
says how the files are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

from holdfast.config.yaml12 import parse_text

KeyStatus = Literal["same", "differs", "none"]
READABLE = ("trl", "easyr1", "verl", "axolotl", "llamafactory")
"""Systems whose files `holdfast config import` reads."""
HINTED = ("transformers", *READABLE, "lightning", "deepspeed", "others")
"""All files of the table, in the order in which a hint looks into them."""
VERBS = ("sft", "dpo", "reward", "grpo")
"""Commands that an entry may belong to."""


@dataclass(frozen=True)
class KeyEntry:
    """The counterpart of one key of another system."""

    key: str
    status: KeyStatus
    targets: tuple[str, ...]
    """Dotted keys here; `*` stands for a name or for an item of a list."""
    note: str = ""
    """What differs, or what to do instead, without a period."""
    values: Mapping[str, Any] | None = None
    """Its values and ours, as text and as a value or as several keys with values; null: nothing has to be written."""
    rule: str = ""
    """Name of the conversion in holdfast.features.rescue.configuration.rules; without one a value stays as it is."""
    when: Mapping[str, list[str]] = field(default_factory=dict)
    """Other keys and the values one of which they must have, for this one to be read by its system."""
    unless: Mapping[str, list[str]] = field(default_factory=dict)
    """Other keys and the values none of which they may have; "" is a key that is not there."""
    as_here: tuple[str, ...] = ()
    """Values that say what Holdfast does in any case."""
    needs: str = ""
    """`evaluation`: it means something only where there is a set to evaluate on."""
    verbs: tuple[str, ...] = VERBS
    """Commands here that it belongs to."""
    earlier: bool = False
    """A name of earlier versions."""


@dataclass(frozen=True)
class KeyTable:
    """The keys of one system, with those of the system that it takes over."""

    name: str
    title: str
    version: str
    entries: Mapping[str, tuple[KeyEntry, ...]]
    """Key to its entries; several belong to different commands."""
    defaults: Mapping[str, Mapping[str, Any]]
    """Command, or `all`, to values that decide a run's numbers there and are not ours."""
    verb_by: Mapping[str, Mapping[str, str]]
    """Keys whose value says the command."""
    verb_marks: Mapping[str, tuple[str, ...]]
    """Command to keys that no other command there has."""
    verb_otherwise: str
    native_keys: frozenset[str]
    """Keys that are not taken over."""

    def entry(self, key: str, verb: str) -> KeyEntry | None:
        """Return what a key is for a command; None where the table has no such key, or the command no use for it."""
        return next((entry for entry in self.entries.get(key, ()) if verb in entry.verbs), None)

    def defaults_for(self, verb: str) -> dict[str, Any]:
        """Return the values that hold there where a file says nothing."""
        return {**self.defaults.get("all", {}), **self.defaults.get(verb, {})}


@cache
def load_key_table(name: str) -> KeyTable:
    """Read the table of a system."""
    raw = parse_text(_text(name), f"{name}.yaml").values
    below = load_key_table(raw["extends"]) if "extends" in raw else None
    entries = {key: tuple(_entries(key, entry)) for key, entry in raw["keys"].items()}
    verbs = raw.get("verbs", {})
    return KeyTable(
        name,
        raw["system"],
        raw["version"] if below is None else f"{raw['version']}, {below.version}",
        {**(below.entries if below else {}), **entries},
        raw.get("defaults", {}),
        verbs.get("by", {}),
        {verb: tuple(marks) for verb, marks in verbs.get("marks", {}).items()},
        verbs.get("otherwise", "sft"),
        frozenset(entries),
    )


@cache
def _text(name: str) -> str:
    return Path(__file__).with_name(f"{name}.yaml").read_text("utf-8")


def _entries(key: str, raw: Mapping[str, Any]) -> Iterator[KeyEntry]:
    """Yield the entries of a key: one, or one for each command that is named."""
    if set(raw) <= set(VERBS):
        for verb, options in raw.items():
            yield _entry(key, {**options, "verbs": [verb]})
        return
    yield _entry(key, raw)


def _entry(key: str, raw: Mapping[str, Any]) -> KeyEntry:
    status = next(name for name in get_args(KeyStatus) if name in raw)
    targets = [] if status == "none" else raw[status]
    options = {name: raw[name] for name in ("values", "rule", "when", "unless", "needs", "earlier") if name in raw}
    for name in ("when", "unless"):
        if name in options:
            options[name] = {
                condition: [spelled(value) for value in values] for condition, values in options[name].items()
            }
    return KeyEntry(
        key,
        cast("KeyStatus", status),
        tuple([targets] if isinstance(targets, str) else targets),
        raw[status] if status == "none" else raw.get("note", ""),
        as_here=tuple(spelled(value) for value in raw.get("as_here", [])),
        verbs=tuple(raw.get("verbs", VERBS)),
        **options,
    )


def spelled(value: Any) -> str:
    """Return a value as the table's files spell it; "" for null."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class KeyHint:
    """What a key that is unknown here is in another system."""

    system: str
    entry: KeyEntry


def describe_key(name: str, keys_here: Sequence[str]) -> str:
    """Say what a key of another system is here, and what differs; "" where no system has it.

    Args:
        name: The unknown key.
        keys_here: Dotted keys of the tree that was meant.
    """
    key_hint = hint(name)
    if key_hint is None:
        return ""
    entry = key_hint.entry
    if entry.status == "none":
        return f"{key_hint.system} {entry.key} has no counterpart here: {entry.note}"
    keys = " and ".join(entry.targets)
    scope = "here" if set(entry.targets) & set(keys_here) else "here, in files of another command"
    if entry.status == "same":
        return f"it is called {keys} {scope}"
    return f"{key_hint.system} {entry.key} differs from {keys} {scope}: {entry.note}"


def hint(key: str) -> KeyHint | None:
    """Return the entry of the first system that has a key of this name, whole or as the last word of a nested one.

    A file that does not have the word is not parsed, since most unknown keys are misspelt ones of ours.
    """
    names = [name for name in HINTED if f"{key}:" in _text(name)]
    for name in names:
        table = load_key_table(name)
        if key in table.native_keys:
            return KeyHint(f"{table.title}'{'' if table.title.endswith('s') else 's'}", table.entries[key][0])
    for name in names:
        table = load_key_table(name)
        matches = [entries[0] for dotted, entries in table.entries.items() if dotted.endswith(f".{key}")]
        if len({(entry.status, entry.targets, entry.note) for entry in matches}) == 1:
            return KeyHint(f"{table.title}'s", matches[0])
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
