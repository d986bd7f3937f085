"""Converts the keys in a file of another system; every key becomes a line that states the result of its conversion."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from holdfast.config.tree import all_keys
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.yaml12 import Document, KeyPath
from holdfast.errors import ConfigError
from holdfast.features.rescue.configuration.facts import Facts, ForeignKey, KeyOutcome, NotConverted
from holdfast.features.rescue.configuration.rules import RULES
from holdfast.features.rescue.systems.table import READABLE, VERBS, KeyEntry, KeyTable, load_key_table, spelled
from holdfast.text.shortening import shortened

_TRUTH_VALUES = {"yes": True, "on": True, "no": False, "off": False}
"""Truth values of YAML 1.1, which the other systems read."""
_RULES_OF_NULL = {"row_length"}
"""Rules of keys where null says something."""
_SETS, _MAPPINGS = "evaluation.sets.", {"data.columns"}
"""Keys whose own names are the user's."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class ConvertedLine:
    """The conversion of one key of the other system."""

    key: str
    number: int
    """Line in the file; 0 for a default that the file does not write."""
    value: Any
    status: Literal["same", "differs", "none", "unknown"]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys here with their values."""
    note: str = ""
    remark: str = ""
    """The arithmetic of this value, or why nothing is written for it."""
    by_hand: bool = False
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConvertedConfig:
    """A file of another system, converted to our configuration."""

    table: KeyTable
    verb: str
    ranks: int
    lines: tuple[ConvertedLine, ...]
    settings: Mapping[str, Any]
    """Dotted keys here with their values, in the order in which they were first set."""
    origins: Mapping[str, tuple[ConvertedLine, ...]]
    """The lines that set each of these keys."""

    def values(self) -> dict[str, Any]:
        """Return the configuration as a tree."""
        tree: dict[str, Any] = {}
        for dotted, value in self.settings.items():
            *above, last = dotted.split(".")
            branch = tree
            for key in above:
                branch = branch.setdefault(key, {})
            branch[last] = {**value, **branch.get(last, {})} if isinstance(value, Mapping) else value
        return tree


def convert(document: Document, system: str, verb: str | None, ranks: int) -> ConvertedConfig:
    """Convert a file that another system reads.

    Args:
        document: The file.
        system: One of `READABLE`.
        verb: The command it is for; None: what the file says.
        ranks: Of the run, where batches count rows of one device.

    Raises:
        ConfigError: The file is another system's, or no command here does what it asks for.
    """
    table = load_key_table(system)
    if document.twice:
        raise ConfigError("\n".join(f"{place.text}: {message}" for place, message in document.twice))
    leaves = dict(_leaves(document, table))
    keys = {".".join(map(str, path)): path for path in leaves}
    values = {dotted: _resolved(leaves[path], leaves, keys) for dotted, path in keys.items()}
    _check_system(document.file, table, values)
    verb = verb or _verb(document, table, values)
    values = {dotted: _truth_value(value, table, dotted) for dotted, value in values.items()}
    facts = Facts({**table.defaults_for(verb), **values}, ranks, verb)
    file_lines = [
        _line(table, dotted, value, document.place(keys[dotted]).line, facts) for dotted, value in values.items()
    ]
    defaults = [
        _line(table, key, value, 0, facts) for key, value in table.defaults_for(verb).items() if key not in values
    ]
    return _joined(table, facts, [line for line in defaults if line.settings or line.by_hand], file_lines)


def _leaves(document: Document, table: KeyTable) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every key that has an entry, or has nothing below it."""

    def walk(values: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
        for key, value in values.items():
            here = (*path, key)
            dotted = ".".join(map(str, here))
            is_section = any(name.startswith(f"{dotted}.") for name in table.entries)
            if is_section and dotted not in table.entries and not isinstance(value, Mapping) and value is not None:
                raise ConfigError(
                    f"{document.place(here).text}: {dotted} has keys of its own in {table.title}, and here it is "
                    f"{shortened(spelled(value), 40)!r}. Write keys and values below it."
                )
            if isinstance(value, Mapping) and value and dotted not in table.entries:
                yield from walk(value, here)
            else:
                yield here, value

    yield from walk(document.values, ())


def _resolved(value: Any, leaves: Mapping[KeyPath, Any], keys: Mapping[str, KeyPath]) -> Any:
    """Follow `${a.b}`, which stands for the value of another key of the file, for a limited number of steps."""
    for _ in range(10):
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[1] not in keys:
            break
        value = leaves[keys[match[1]]]
    return value


def _truth_value(value: Any, table: KeyTable, key: str) -> Any:
    """Return the truth value that a word of YAML 1.1 stands for, unless the table has the word itself."""
    is_in_table = (
        any(value in (entry.values or {}) for entry in table.entries.get(key, ())) if isinstance(value, str) else True
    )
    return value if is_in_table else _TRUTH_VALUES.get(value.lower(), value)


def _check_system(file: str, table: KeyTable, values: Mapping[str, Any]) -> None:
    """Refuse a file that has keys of another system alone."""
    tables = {name: load_key_table(name) for name in READABLE}
    marks = {
        name: [
            key for key in values if key in candidate.native_keys and not any(
                key in other_table.entries for other_name, other_table in tables.items() if other_name != name
            )
        ]
        for name, candidate in tables.items()
    }  # fmt: skip
    if marks[table.name]:
        return
    best = max(marks, key=lambda name: len(marks[name]))
    if marks[best]:
        raise ConfigError(
            f"{file} is no file of {table.title}: it has {', '.join(marks[best][:3])} of {tables[best].title}. "
            f"Use --from {best}."
        )
    if not any(key in table.entries for key in values):
        raise ConfigError(
            f"{file} has no key that {table.title} has ({table.version}), so there is nothing to convert."
        )


def _verb(document: Document, table: KeyTable, values: Mapping[str, Any]) -> str:
    for key, verbs in table.verb_by.items():
        kind = spelled(values.get(key))
        if kind in verbs:
            return verbs[kind]
        if kind and kind != "false":
            raise ConfigError(
                f"{document.place((key,)).text}: {key}: {kind} is no kind of run that `holdfast config import` writes; "
                f"there are {', '.join(verbs)}."
            )
    marked = (verb for verb, marks in table.verb_marks.items() if any(values.get(key) is not None for key in marks))
    return next(marked, table.verb_otherwise)


def _line(table: KeyTable, key: str, value: Any, number: int, facts: Facts) -> ConvertedLine:
    entry = table.entry(key, facts.verb)
    if entry is not None:
        line = ConvertedLine(key, number, value, entry.status, note=entry.note, targets=entry.targets)
        return _with_outcome(line, entry, facts)
    entries = table.entries.get(key)
    if entries is None:
        return ConvertedLine(key, number, value, "unknown")
    verbs = " and ".join(f"holdfast {verb}" for candidate in entries for verb in candidate.verbs)
    return ConvertedLine(key, number, value, "none", note=f"belongs to {verbs}, and this is for holdfast {facts.verb}")


def _with_outcome(line: ConvertedLine, entry: KeyEntry, facts: Facts) -> ConvertedLine:
    """Return a line with the keys of Holdfast that its value becomes, or with the reason why it becomes none."""
    value = line.value
    if value is None and entry.rule not in _RULES_OF_NULL:
        return replace(line, status="same", remark="null there, so nothing is written")
    if isinstance(value, str) and "${" in value:
        return replace(line, by_hand=True, remark=f"{value} stands for another value")
    if spelled(value) in entry.as_here:
        return replace(line, status="same", remark="as it is here in any case")
    if entry.status == "none":
        return line
    if unread := _unread(entry, facts):
        return replace(line, remark=f"not read there, since {unread}")
    try:
        outcome = _outcome(entry, value, facts)
    except NotConverted as reason:
        return replace(line, by_hand=True, remark=str(reason))
    settings = {key.replace(".*", ""): setting for key, setting in outcome.settings.items()}
    foreign = [key for key in settings if not _accepted(key, _keys(facts.verb))]
    if foreign:
        return replace(line, status="none", note=f"holdfast {facts.verb} has no {' and no '.join(foreign)}")
    return replace(line, settings=settings, remark=outcome.remark)


@cache
def _keys(verb: str) -> frozenset[str]:
    """Return the keys of a command's tree, with one item in the place of a list."""
    return frozenset(key.replace(".*", "") for key in all_keys(ROOTS[verb]))


def _accepted(key: str, keys: frozenset[str]) -> bool:
    """Return whether a tree has a key, or takes it as a name of the user's."""
    above = key.rpartition(".")[0]
    return key in keys or key.startswith(_SETS) or above in _MAPPINGS


def _unread(entry: KeyEntry, facts: Facts) -> str:
    """Return why the other system does not read a key; "" if it reads it."""
    for key, values in entry.when.items():
        if spelled(facts.get(key)) not in values:
            return f"{key} is {spelled(facts.get(key)) or 'not set'}"
    for key, values in entry.unless.items():
        if spelled(facts.get(key)) in values:
            return f"{key} is {spelled(facts.get(key)) or 'not set'}"
    return ""


def _outcome(entry: KeyEntry, value: Any, facts: Facts) -> KeyOutcome:
    if entry.values is not None and spelled(value) in entry.values:
        ours = entry.values[spelled(value)]
        if ours is None:
            return KeyOutcome({}, "nothing has to be written for it")
        return KeyOutcome(ours if isinstance(ours, Mapping) and "." in "".join(ours) else {entry.targets[0]: ours})
    if entry.rule:
        return RULES[entry.rule](ForeignKey(value, facts, entry.targets))
    if entry.values is not None and not _switches_off(entry.values):
        raise NotConverted(f"{spelled(value)} has no counterpart")
    return KeyOutcome({entry.targets[0]: value})


def _switches_off(values: Mapping[str, Any]) -> bool:
    """Return whether the values are numbers that stand for null, such as -1, beside which others keep their meaning."""
    return all(ours is None and theirs.lstrip("-").isdecimal() for theirs, ours in values.items())


def _joined(
    table: KeyTable, facts: Facts, defaults: list[ConvertedLine], file_lines: list[ConvertedLine]
) -> ConvertedConfig:
    """Replace defaults by what the file says, and leave out evaluations where there are no rows to evaluate on."""
    lines = _evaluable(table, facts.verb, [*defaults, *file_lines])
    settings: dict[str, Any] = {}
    origins: dict[str, tuple[ConvertedLine, ...]] = {}
    order = {key: number for number, key in enumerate(table.entries)}
    # Defaults give way to keys of the file. Among these the table's order decides, where a choice such as a schedule
    # stands before its options, so that the order of the file changes nothing.
    for line in sorted(lines, key=lambda converted: (converted.number > 0, order.get(converted.key, 0))):
        for key, value in line.settings.items():
            agrees = key in settings and settings[key] == value
            origins[key] = (*origins[key], line) if agrees else (line,)
            settings[key] = value
    _split_sets(settings, origins)
    _share_columns(settings, origins)
    return ConvertedConfig(table, facts.verb, facts.ranks, tuple(lines), _fitted(settings), origins)


def _split_sets(settings: dict[str, Any], origins: dict[str, tuple[ConvertedLine, ...]]) -> None:
    """Make an evaluation set of each file where one has a list of them."""
    for key in [key for key in settings if re.fullmatch(r"evaluation\.sets\.[^.]+\.path", key)]:
        if isinstance(settings[key], list):
            files, lines = settings.pop(key), origins.pop(key)
            for number, file in enumerate(files, start=1):
                target = f"{key.removesuffix('.path')}_{number}.path"
                settings[target], origins[target] = file, lines


def _share_columns(settings: dict[str, Any], origins: dict[str, tuple[ConvertedLine, ...]]) -> None:
    """Give evaluation sets the columns of the training rows: a key there that names one column speaks of all rows.

    A list of sources speaks of these alone, and evaluation sets that name their columns keep them.
    """
    columns: dict[str, Any] = {}
    lines: tuple[ConvertedLine, ...] = ()
    for key, value in settings.items():
        if key.startswith("data.columns") and all(isinstance(line.value, str) for line in origins[key]):
            columns |= value if key == "data.columns" else {key.removeprefix("data.columns."): value}
            lines += origins[key]
    if not columns:
        return
    several = settings.get("evaluation.sets", {})
    if several:
        settings["evaluation.sets"] = {name: {"columns": columns, **source} for name, source in several.items()}
    for key in [key for key in settings if re.fullmatch(r"evaluation\.sets\.[^.]+\.path", key)]:
        target = f"{key.removesuffix('.path')}.columns"
        settings.setdefault(target, columns)
        origins.setdefault(target, lines)


def _fitted(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings that go together: bfloat16 storage with its optimizer, and room for the longest row."""
    if settings.get("model.dtype") == "bfloat16" and settings.get("optim.kind") == "adamw":
        settings["optim.kind"] = "adamw_bf16"
    longest, room = settings.get("data.max_length"), settings.get("data.tokens_per_micro_batch")
    if isinstance(longest, int) and isinstance(room, int) and room < longest:
        settings["data.tokens_per_micro_batch"] = longest
    return settings


def _evaluable(table: KeyTable, verb: str, lines: list[ConvertedLine]) -> list[ConvertedLine]:
    """Remove the settings of lines about evaluations, unless some line names rows to evaluate on."""
    keys = {key for line in lines for key in line.settings}
    if any(key.startswith("evaluation.sets") or key == "data.validation_split" for key in keys):
        return lines
    return [_unevaluated(line) if _needs_evaluation(table, line, verb) else line for line in lines]


def _needs_evaluation(table: KeyTable, line: ConvertedLine, verb: str) -> bool:
    entry = table.entry(line.key, verb)
    return entry is not None and bool(entry.needs) and bool(line.settings)


def _unevaluated(line: ConvertedLine) -> ConvertedLine:
    return replace(
        line,
        settings={},
        by_hand=True,
        remark="there is no set to evaluate on; set evaluation.sets or data.validation_split",
    )


def check_convertible(verb: str) -> None:
    """Refuse a command that no file is converted for.

    Raises:
        ConfigError: There is no such command.
    """
    if verb not in VERBS:
        raise ConfigError(f"There is no command {verb!r} to convert a file for; there are {', '.join(VERBS)}.")
