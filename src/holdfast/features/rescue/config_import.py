"""`holdfast config import`: converts the configuration of another system to a Holdfast configuration.

A conversion becomes text: our YAML, with the origin of each key, and what came of all other keys.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from holdfast.config.load import from_mapping
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.yaml12 import Document, parse_file, to_yaml
from holdfast.errors import ConfigError
from holdfast.features.rescue.configuration.convert import ConvertedConfig, ConvertedLine, convert
from holdfast.features.rescue.systems.table import READABLE, VERBS
from holdfast.text.escaping import escaped
from holdfast.text.shortening import shortened

_WIDTH = 110
_LONGEST_VALUE = 60
_RANKS_IN_FILE = {"easyr1", "verl"}
"""Systems whose files say how many ranks there are, and whose batches count the rows of all of them."""


def import_config(file: Path, system: str, verb: str | None, ranks: int, to: Path | None) -> int:
    """Print our YAML, or write it to a file; return 1 if a key is undecided or the result does not load yet.

    Raises:
        ConfigError: The file cannot be read, or is not what it is said to be.
    """
    if system not in READABLE:
        raise ConfigError(f"There is no table of {system!r} to read a file by; there are {', '.join(READABLE)}.")
    if verb is not None and verb not in VERBS:
        raise ConfigError(f"There is no command {verb!r} to convert a file for; there are {', '.join(VERBS)}.")
    if to is not None and to.exists():
        raise ConfigError(f"{to} exists, and nothing is overwritten. Give another name.")
    conversion = convert(_document(file), system, verb, ranks)
    text = run_yaml(conversion, str(file))
    if to is None:
        print(text, end="")
    else:
        to.write_text(text, "utf-8")
    missing = _missing(conversion, "The file" if to is None else str(to))
    print(conversion_summary(conversion), *missing, sep="\n", file=sys.stderr)
    return 1 if missing or any(line.undecided for line in conversion.lines) else 0


def _document(file: Path) -> Document:
    if file.suffix == ".py":
        raise ConfigError(
            f"{file} is a Python script, which is not read. Write its arguments as keys and values into a YAML file, "
            "as the system's own command line takes them."
        )
    return parse_file(file)


def _missing(conversion: ConvertedConfig, file: str) -> list[str]:
    """Return what a person has to add or change before the file loads; nothing if it loads as it is."""
    try:
        from_mapping(conversion.values(), ROOTS[conversion.verb], "config")
    except ConfigError as error:
        mistakes = [line.removeprefix("config: ") for line in str(error).splitlines() if not line.endswith("mistakes:")]
        return [f"{file} does not load yet; it needs a hand here:", *(f"  {line}" for line in mistakes)]
    return []


def run_yaml(conversion: ConvertedConfig, file: str) -> str:
    """Return our YAML for a file of another system."""
    values = conversion.values()
    ordered = {key: values[key] for key in ROOTS[conversion.verb].model_fields if key in values}
    body = "\n".join(_section(ordered, "", conversion, set()))
    comments = "\n".join(_unwritten(conversion))
    return f"{_heading(conversion, file)}\n{body}\n" + (f"\n{comments}\n" if comments else "")


def conversion_summary(conversion: ConvertedConfig) -> str:
    """Return how many keys of the file are written, need nothing, or are left to a person, with undecided defaults."""
    lines = [line for line in conversion.lines if line.number]
    undecided = sum(line.undecided for line in lines)
    written = sum(bool(line.settings) and not line.undecided for line in lines)
    defaults = sum(line.undecided for line in conversion.lines) - undecided
    more = f", and {defaults} of {conversion.table.title}'s defaults" if defaults else ""
    return (
        f"{len(lines)} keys: {written} written, {len(lines) - written - undecided} without effect, "
        f"{undecided} undecided{more}."
    )


def _heading(conversion: ConvertedConfig, file: str) -> str:
    count = conversion.ranks
    ranks = "" if conversion.table.name in _RANKS_IN_FILE else f" and {count} rank{'s' if count > 1 else ''}"
    text = (
        f"{PurePath(file).name} of {conversion.table.title}, converted for `holdfast {conversion.verb}`{ranks} by the "
        f"table of {conversion.table.version}. {conversion_summary(conversion)}"
    )
    return "\n".join(_comment(text, ""))


def _section(values: Mapping[str, Any], prefix: str, conversion: ConvertedConfig, told: set[str]) -> Iterator[str]:
    """Yield the lines of a section.

    Args:
        values: Its keys.
        prefix: Its dotted name with a dot; "" for the whole.
        conversion: What came of each key of the other system.
        told: Keys of the other system whose remark stands above already.
    """
    indent = "  " * prefix.count(".")
    for key, value in values.items():
        lines = conversion.origins.get(f"{prefix}{key}", ())
        for line in lines:
            if line.remark and line.key not in told:
                told.add(line.key)
                yield from _comment(f"{_origin(line, conversion)}: {line.remark}", indent)
        if isinstance(value, dict) and any(name.startswith(f"{prefix}{key}.") for name in conversion.settings):
            yield f"{indent}{key}:"
            yield from _section(value, f"{prefix}{key}.", conversion, told)
        else:
            first, newline, following = textwrap.indent(to_yaml({key: value}).rstrip("\n"), indent).partition("\n")
            origin = f"  # {', '.join(_origin(line, conversion) for line in lines)}" if lines else ""
            yield f"{first}{origin}{newline}{following}"


def _origin(line: ConvertedLine, conversion: ConvertedConfig) -> str:
    return line.key if line.number else f"{conversion.table.title}'s default of {line.key}"


def _unwritten(conversion: ConvertedConfig) -> Iterator[str]:
    """Yield, as comments, the keys that a person decides, and those that nothing was written for."""
    listed = [line for line in conversion.lines if line.undecided or not line.settings]
    for heading, undecided in (("# Undecided:", True), ("# Without effect:", False)):
        lines = [line for line in listed if line.undecided == undecided]
        if lines:
            yield heading
        for line in lines:
            label = f"line {line.number}, {escaped(line.key)}" if line.number else _origin(line, conversion)
            targets = f" -> {' and '.join(line.targets)}" if undecided and line.targets else ""
            remark = f" ({line.remark})" if line.remark else ""
            yield from _comment(f"{label}: {_shown(line.value)}{targets}{remark}", "", "#   ")


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else escaped(str(value))
    return shortened(text, _LONGEST_VALUE)


def _comment(text: str, indent: str, begin: str = "# ") -> list[str]:
    wrapped = textwrap.wrap(escaped(text), _WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    follow = "# " + " " * (len(begin) - 2 + (2 if begin != "# " else 0))
    return [f"{indent}{begin if number == 0 else follow}{line}" for number, line in enumerate(wrapped)]
