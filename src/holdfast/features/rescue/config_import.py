"""`holdfast config import`: converts the configuration of another system to a Holdfast configuration.

A conversion becomes text: our YAML, with the origin of each key and what differs, and what came of all other keys.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from holdfast.config.load import from_mapping
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.yaml12 import Document, parse_file, to_yaml
from holdfast.errors import ConfigError
from holdfast.features.rescue.configuration.convert import ConvertedConfig, ConvertedLine, check_convertible, convert
from holdfast.features.rescue.systems.table import READABLE
from holdfast.text.escaping import escaped
from holdfast.text.shortening import shortened


def import_config(file: Path, system: str, verb: str | None, ranks: int, to: Path | None) -> int:
    """Print our YAML, or write it to a file, and say on standard error what is missing; return 1 if something is.

    Raises:
        ConfigError: The file cannot be read, or is not what it is said to be.
    """
    if system not in READABLE:
        raise ConfigError(f"There is no table of {system!r} to read a file by; there are {', '.join(READABLE)}.")
    if verb is not None:
        check_convertible(verb)
    if to is not None and to.exists():
        raise ConfigError(f"{to} exists, and nothing is overwritten. Give another name.")
    conversion = convert(_document(file), system, verb, ranks)
    text = run_yaml(conversion, str(file))
    if to is None:
        print(text, end="")
    else:
        to.write_text(text, "utf-8")
    print(conversion_summary(conversion), file=sys.stderr)
    missing = _missing(conversion, "The file" if to is None else str(to))
    if missing:
        print(missing, file=sys.stderr)
    return 1 if missing else 0


def _document(file: Path) -> Document:
    if file.suffix == ".py":
        raise ConfigError(
            f"{file} is a Python script, which is not read. Write its arguments as keys and values into a YAML file, "
            "as the system's own command line takes them."
        )
    return parse_file(file)


def _missing(conversion: ConvertedConfig, file: str) -> str:
    """Return what a person has to add or change before the file loads; "" if it loads as it is."""
    try:
        from_mapping(conversion.values(), ROOTS[conversion.verb], "config")
    except ConfigError as error:
        lines = [line.removeprefix("config: ") for line in str(error).splitlines() if not line.endswith("mistakes:")]
        return f"{file} does not load yet; it needs a hand here:\n" + "\n".join(f"  {line}" for line in lines)
    return ""


_WIDTH = 110
_LONGEST_VALUE = 60
_RANKS_IN_FILE = {"easyr1", "verl"}
"""Systems whose files say how many ranks there are, and whose batches count the rows of all of them."""


def run_yaml(conversion: ConvertedConfig, file: str) -> str:
    """Return our YAML for a file of another system."""
    values = conversion.values()
    order = list(ROOTS[conversion.verb].model_fields)
    ordered = {key: values[key] for key in sorted(values, key=order.index)}
    body = "\n".join(_section(ordered, "", conversion, set()))
    comments = "\n".join(_unwritten(conversion))
    return f"{_heading(conversion, file)}\n{body}\n" + (f"\n{comments}\n" if comments else "")


def conversion_summary(conversion: ConvertedConfig) -> str:
    """Return how many keys of the file are the same, differ, have no counterpart, or are not in the table."""
    file_lines = [line for line in conversion.lines if line.number]
    counts = [sum(line.status == status for line in file_lines) for status in ("same", "differs", "none", "unknown")]
    by_hand = sum(line.by_hand for line in file_lines)
    return (
        f"{len(file_lines)} keys: {counts[0]} the same, {counts[1]} that differ ({by_hand} to decide by hand), "
        f"{counts[2]} without counterpart, {counts[3]} not in the table."
    )


def _heading(conversion: ConvertedConfig, file: str) -> str:
    count = conversion.ranks
    ranks = "" if conversion.table.name in _RANKS_IN_FILE else f" and {count} rank{'s' if count > 1 else ''}"
    text = (
        f"{PurePath(file).name} of {conversion.table.title}, converted for `holdfast {conversion.verb}`{ranks} by the "
        f"table of {conversion.table.version}. {conversion_summary(conversion)}"
    )
    return "\n".join(_comment(text, ""))


def _section(values: Mapping[str, Any], prefix: str, conversion: ConvertedConfig, explained: set[str]) -> Iterator[str]:
    """Yield the lines of a section.

    Args:
        values: Its keys.
        prefix: Its dotted name; "" for the whole.
        conversion: What came of each key of the other system.
        explained: Keys of the other system about which a comment stands above already.
    """
    indent = "  " * (prefix.count(".") + 1 if prefix else 0)
    for key, value in values.items():
        dotted = f"{prefix}.{key}" if prefix else key
        lines = conversion.origins.get(dotted, ())
        news = [line for line in lines if _explanation(line) and line.key not in explained]
        explained |= {line.key for line in lines}
        for line in news:
            yield from _comment(_about(line, conversion), indent)
        if isinstance(value, dict) and _has_keys_below(dotted, conversion):
            yield f"{indent}{key}:"
            yield from _section(value, dotted, conversion, explained)
        else:
            yield _leaf(indent, key, value, [] if news else [_origin(line, conversion) for line in lines])


def _leaf(indent: str, key: str, value: Any, names: Sequence[str]) -> str:
    """Return a key with its value, and behind its first line where it comes from."""
    first, newline, following = textwrap.indent(to_yaml({key: value}).rstrip("\n"), indent).partition("\n")
    origin = f"  # {', '.join(names)}" if names else ""
    return f"{first}{origin}{newline}{following}"


def _has_keys_below(dotted: str, conversion: ConvertedConfig) -> bool:
    return any(key.startswith(f"{dotted}.") for key in conversion.settings)


def _origin(line: ConvertedLine, conversion: ConvertedConfig) -> str:
    return line.key if line.number else f"{conversion.table.title}'s default of {line.key}"


def _explanation(line: ConvertedLine) -> str:
    """Return what differs, and the arithmetic."""
    note = f"Differs: {line.note}" if line.status == "differs" and line.note else line.note
    return ". ".join(text for text in (note, line.remark) if text)


def _about(line: ConvertedLine, conversion: ConvertedConfig) -> str:
    value = f": {_shown(line.value)}" if line.number else ""
    return f"{_origin(line, conversion)}{value}. {_explanation(line)}"


def _unwritten(conversion: ConvertedConfig) -> Iterator[str]:
    """Yield, as comments, the keys that nothing was written for."""
    silent = [line for line in conversion.lines if not line.settings]
    groups: dict[str, Sequence[ConvertedLine]] = {
        "To decide by hand:": [line for line in silent if line.by_hand],
        "Without counterpart:": [line for line in silent if line.status == "none"],
        "Nothing to write:": [line for line in silent if line.status in {"same", "differs"} and not line.by_hand],
        f"Not in the table of {conversion.table.title}:": [line for line in silent if line.status == "unknown"],
    }
    for heading, lines in groups.items():
        if lines:
            yield f"# {heading}"
        for line in lines:
            yield from _comment(_unwritten_line(line, conversion), "", "#   ")


def _unwritten_line(line: ConvertedLine, conversion: ConvertedConfig) -> str:
    label = f"line {line.number}, {escaped(line.key)}" if line.number else _origin(line, conversion)
    targets = f" -> {' and '.join(line.targets)}" if line.by_hand else ""
    silent = line.status in {"same", "differs"} and not line.by_hand
    explanation = line.remark if silent else "; ".join(text for text in (line.remark, line.note) if text)
    return f"{label}: {_shown(line.value)}{targets}" + (f" - {explanation}" if explanation else "")


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else escaped(str(value))
    return shortened(text, _LONGEST_VALUE)


def _comment(text: str, indent: str, begin: str = "# ") -> list[str]:
    wrapped = textwrap.wrap(escaped(text), _WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    follow = "# " + " " * (len(begin) - 2 + (2 if begin != "# " else 0))
    return [f"{indent}{begin if number == 0 else follow}{line}" for number, line in enumerate(wrapped)]
