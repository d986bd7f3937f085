"""Converts the keys in a file of another system; every key becomes a line that states the result of its conversion."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from holdfast.config.tree import all_keys
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.yaml12 import Document, KeyPath
from holdfast.errors import ConfigError
from holdfast.features.rescue.configuration.facts import Converted, ForeignKey, NotConverted, Provisional
from holdfast.features.rescue.configuration.rules import RULES
from holdfast.features.rescue.systems.table import READABLE, KeyEntry, KeyTable, load_key_table, spelled
from holdfast.text.shortening import shortened

_TRUTH_VALUES = {"yes": True, "on": True, "no": False, "off": False}
"""Truth values of YAML 1.1, which the other systems read."""
_READS_NULL = {"row_length", "longest_kept", "peft_targets", "scorer_loss"}
"""The rules of keys where null says something."""
_SETS, _MAPPINGS = "evaluation.sets.", {"data.columns"}
"""Keys whose own names are the user's."""
_OVERRIDING = {
    "packing_strategy", "lr_scheduler_kwargs", "bnb_4bit_quant_type", "quantization_type", "run_name", "wandb_name",
    "data.filter_overlong_prompts", "trainer.save_checkpoint_path", "trainer.default_local_dir",
    "worker.actor.loss_type", "worker.ref.offload.offload_params", "actor_rollout_ref.actor.policy_loss.loss_mode",
}  # fmt: skip
"""Keys that say more than an earlier one of their table, and replace what it became."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class ConvertedLine:
    """The conversion of one key of the other system: settings, nothing for a reason, or a person's decision."""

    key: str
    number: int
    """Line in the file; 0 for a default that the file does not write."""
    value: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys here with their values."""
    remark: str = ""
    """The arithmetic of this value, or why nothing is written for it."""
    undecided: bool = False
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
    paths = {".".join(map(str, path)): (path, value) for path, value in _leaves(document, table)}
    values = {
        key: _resolved(value, {name: own for name, (_, own) in paths.items()}) for key, (_, value) in paths.items()
    }
    _check_system(document.file, table, values)
    verb = verb or _verb(document, table, values)
    values = {key: _truth_value(value, table, key) for key, value in values.items()}
    defaults = {key: value for key, value in table.defaults_for(verb).items() if key not in values}
    facts = ForeignKey(None, "", {**defaults, **values, "verb": verb}, ranks, verb)
    lines = [_line(table, ConvertedLine(key, 0, value), facts) for key, value in defaults.items()]
    lines = [line for line in lines if line.settings or line.undecided]
    for key, value in values.items():
        lines.append(_line(table, ConvertedLine(key, document.place(paths[key][0]).line, value), facts))
    return _joined(table, facts, lines)


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


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """Follow `${a.b}`, which stands for the value of another key of the file, for a limited number of steps."""
    for _ in range(10):
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[1] not in values:
            break
        value = values[match[1]]
    return value


def _truth_value(value: Any, table: KeyTable, key: str) -> Any:
    """Return the truth value that a word of YAML 1.1 stands for, unless the table has the word itself."""
    if not isinstance(value, str) or any(value in (entry.values or {}) for entry in table.entries.get(key, ())):
        return value
    return _TRUTH_VALUES.get(value.lower(), value)


def _check_system(file: str, table: KeyTable, values: Mapping[str, Any]) -> None:
    """Refuse a file that has keys of another system alone."""
    tables = {name: load_key_table(name) for name in READABLE}
    having = {key: [name for name in READABLE if key in tables[name].entries] for key in values}
    marks = {
        name: [key for key, names in having.items() if names == [name] and key in tables[name].native_keys]
        for name in READABLE
    }
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


def _line(table: KeyTable, line: ConvertedLine, facts: ForeignKey) -> ConvertedLine:
    """Return a line with the keys of Holdfast that its value becomes, or with the reason why it becomes none."""
    entries = table.entries.get(line.key, ())
    entry = next((entry for entry in entries if entry.condition.holds(facts.values)), None)
    if line.value is None and (entry is None or entry.rule not in _READS_NULL):
        return replace(line, remark="null")
    if entry is None:
        conditions = " or ".join(entry.condition.text for entry in entries)
        return replace(line, remark=f"unread without {conditions}" if entries else "", undecided=not entries)
    if entry.word:
        return replace(line, remark=entry.word)
    line = replace(line, targets=entry.targets)
    if isinstance(line.value, str) and "${" in line.value:
        return replace(line, undecided=True, remark=f"{line.value} stands for another value")
    try:
        outcome = _outcome(entry, line.value, replace(facts, is_default=not line.number))
    except NotConverted as reason:
        return replace(line, undecided=True, remark=str(reason))
    settings, remark = _parts(outcome)
    refused = [key for key in settings if not _accepted(key, _keys(facts.verb))]
    if refused:
        return replace(
            line, undecided=line.number > 0, remark=f"holdfast {facts.verb} has no {' and no '.join(refused)}"
        )
    return replace(line, settings=settings, remark=remark, undecided=isinstance(outcome, Provisional))


def _parts(outcome: Converted) -> tuple[Mapping[str, Any], str]:
    if isinstance(outcome, Provisional):
        return outcome.settings, outcome.remark
    return outcome if isinstance(outcome, tuple) else (outcome, "")


@cache
def _keys(verb: str) -> frozenset[str]:
    """Return the keys of a command's tree, with one item in the place of a list."""
    return frozenset(key.replace(".*", "") for key in all_keys(ROOTS[verb]))


def _accepted(key: str, keys: frozenset[str]) -> bool:
    """Return whether a tree has a key, or takes it as a name of the user's."""
    return key in keys or key.startswith(_SETS) or key.rpartition(".")[0] in _MAPPINGS


def _outcome(entry: KeyEntry, value: Any, facts: ForeignKey) -> Converted:
    if entry.values is not None and spelled(value) in entry.values:
        ours = entry.values[spelled(value)]
        if ours is None:
            return {}, "implied"
        return dict(ours) if isinstance(ours, Mapping) else {entry.targets[0]: ours}
    if entry.rule:
        return RULES[entry.rule](replace(facts, value=value, target=entry.targets[0]))
    if not entry.targets or (entry.values is not None and not _switches_off(entry.values)):
        raise NotConverted(f"{spelled(value)} has no counterpart" if entry.values else "")
    return {entry.targets[0]: value}


def _switches_off(values: Mapping[str, Any]) -> bool:
    """Return whether the values are numbers that stand for null, such as -1, beside which others keep their meaning."""
    return bool(values) and all(ours is None and theirs.lstrip("-").isdecimal() for theirs, ours in values.items())


def _joined(table: KeyTable, facts: ForeignKey, lines: Sequence[ConvertedLine]) -> ConvertedConfig:
    """Replace defaults by what the file says, and leave out evaluations where there are no rows to evaluate on."""
    keys = {key for line in lines for key in line.settings}
    if not any(key.startswith("evaluation.sets") or key == "data.validation_split" for key in keys):
        lines = [_unevaluated(line) if _evaluates(line.settings) else line for line in lines]
    settings: dict[str, Any] = {}
    origins: dict[str, tuple[ConvertedLine, ...]] = {}
    order = {key: number for number, key in enumerate(table.entries)}
    # Defaults give way to keys of the file. Among these the table's order decides, where a choice such as a schedule
    # stands before its options, so that the order of the file changes nothing.
    decided = {line.key: line for line in lines}
    for each in sorted(lines, key=lambda converted: (converted.number > 0, order.get(converted.key, 0))):
        decided[each.key] = line = _compared(each, settings, origins)
        for key, value in line.settings.items():
            agrees = key in settings and settings[key] == value
            origins[key] = (*origins[key], line) if agrees else (line,)
            settings[key] = value
    _share_columns(settings, origins)
    return ConvertedConfig(table, facts.verb, facts.ranks, tuple(decided.values()), _fitted(settings), origins)


def _compared(
    line: ConvertedLine, settings: Mapping[str, Any], origins: Mapping[str, tuple[ConvertedLine, ...]]
) -> ConvertedLine:
    """Return a line that is a person's decision where another line of the file sets the same key to another value."""
    if not line.number or line.key in _OVERRIDING:
        return line
    others = [
        f"{other.key} sets {key} to {shortened(spelled(settings[key]), 40)}"
        for key, value in line.settings.items()
        if key in settings and settings[key] != value
        for other in origins[key]
        if other.number
    ]
    return replace(line, undecided=True, remark="; ".join(filter(None, (line.remark, *others)))) if others else line


def _evaluates(keys: Iterable[str]) -> bool:
    return any(key.startswith("evaluation.") for key in keys)


def _unevaluated(line: ConvertedLine) -> ConvertedLine:
    return replace(line, settings={}, remark="unread without rows to evaluate on")


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
    if settings.get("model.dtype") == "bfloat16" and settings.get("optim.kind", "adamw") == "adamw":
        settings["optim.kind"] = "adamw_bf16"
    longest, room = settings.get("data.max_length"), settings.get("data.tokens_per_micro_batch")
    if isinstance(longest, int) and isinstance(room, int) and room < longest:
        settings["data.tokens_per_micro_batch"] = longest
    return settings
