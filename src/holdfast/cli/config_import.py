"""`holdfast config import`: a file of another system as one of ours."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.config.conversion.convert import Converted, check_verb, convert
from holdfast.config.conversion.written import conversion_summary, run_yaml
from holdfast.config.load import from_mapping
from holdfast.config.other_systems.table import READABLE
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.yaml12 import Document, parse_file
from holdfast.errors import ConfigError


def import_config(file: Path, system: str, verb: str | None, ranks: int, to: Path | None) -> int:
    """Print our YAML, or write it to a file, and say on standard error what is missing; return 1 if something is.

    Raises:
        ConfigError: The file cannot be read, or is not what it is said to be.
    """
    if system not in READABLE:
        raise ConfigError(f"There is no table of {system!r} to read a file by; there are {', '.join(READABLE)}.")
    if verb is not None:
        check_verb(verb)
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


def _missing(conversion: Converted, file: str) -> str:
    """Return what a person has to add or change before the file loads; "" if it loads as it is."""
    try:
        from_mapping(conversion.values(), ROOTS[conversion.verb], "config")
    except ConfigError as error:
        lines = [line.removeprefix("config: ") for line in str(error).splitlines() if not line.endswith("mistakes:")]
        return f"{file} does not load yet; it needs a hand here:\n" + "\n".join(f"  {line}" for line in lines)
    return ""
