"""Write docs/reference from the code: the configuration tree, the command line, and other systems' keys.

    python tools/reference.py [--check]

Nothing in these pages is written by hand, so they cannot differ from what runs. `--check` writes nothing and exits 1
if a page on disk is not the one that would be written.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from typer.testing import CliRunner

from holdfast.cli import main as command_line
from holdfast.config.base import keys_of, kinds_of
from holdfast.config.tree import KeyType
from holdfast.config.verbs.roots import ROOTS
from holdfast.features.rescue.systems.table import WORDS, load_key_table

FOLDER = Path("docs/reference")
KEY_TABLES = ("verl", "easyr1", "trl")
"""Of the systems whose checkpoints are read; the others have no files of keys."""
NOTE = "<!-- Written by tools/reference.py. Change the docstrings in src/holdfast, then run it again. -->\n"
CONFIG_HEAD = """# Configuration reference

Every key of a run's YAML, with its type, its default and what it does. `optim.lr` in a title or on the command line is
`lr` inside `optim` in the file. A `*` stands for an item of a list, or for a name that you choose.

`holdfast config show RUN.yaml` prints the whole tree of a run with its defaults filled in; `holdfast config schema`
prints the JSON schema, which editors use to complete and check a file.

Where a key says *one of*, its `kind` chooses the section that stands there. A kind alone is a section too:
`recompute: full` is `recompute: {kind: full}`.
"""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "null"}


@dataclass(frozen=True)
class Place:
    """Where a section stands in the tree."""

    path: str
    section: type[BaseModel]
    is_alternative: bool = False

    @property
    def title(self) -> str:
        """The heading."""
        if not self.path:
            return "Top level"
        return f"{self.path}, kind: {', '.join(kinds_of(self.section))}" if self.is_alternative else self.path

    @property
    def anchor(self) -> str:
        """The heading as GitHub makes an anchor of it."""
        return self.title.lower().replace(" ", "-").translate({ord(sign): None for sign in ".*,:"})


def places(place: Place, known: dict[type[BaseModel], Place]) -> None:
    """Note a section and those below it, each where it stands first."""
    if place.section in known:
        return
    known[place.section] = place
    fields = keys_of(place.section)
    for name in sorted(fields, key=lambda name: not fields[name].is_required()):
        held = KeyType((place.section,)).below(name)
        path = f"{place.path}.{name}".lstrip(".") + (".*" if held.several else "")
        for section in held.sections:
            places(Place(path, section, held.is_union), known)


def type_text(schema: Mapping[str, Any]) -> str:
    """Say in words what a plain value may be."""
    if "anyOf" in schema:
        return " or ".join(type_text(part) for part in schema["anyOf"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    kind = schema.get("type")
    if kind == "array" and "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}: {type_text(schema['prefixItems'][0])} each"
    if kind == "array":
        return f"list of {type_text(schema.get('items', {}))}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"mapping to {type_text(values if isinstance(values, Mapping) else {})}"
    bounds = " and ".join(f"{sign} {schema[word]:g}" for word, sign in BOUNDS.items() if word in schema)
    return f"{TYPES.get(str(kind), 'any value')} {bounds}".rstrip()


def held_text(held: KeyType, known: Mapping[type[BaseModel], Place]) -> str:
    """Link to the sections that a key holds."""
    if not held.is_union:
        place = known[held.sections[0]]
        return f"{'several: ' if held.several else ''}[{place.title}](#{place.anchor})"
    kinds = [f"[`{kind}`](#{known[section].anchor})" for section in held.sections for kind in kinds_of(section)]
    return f"one of {', '.join(kinds)}"


def value_text(value: object) -> str:
    """Write a default as it would stand in the YAML."""
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case BaseModel():
            written = value.model_dump(exclude_unset=True)
            kind = getattr(value, "kind", None)
            return value_text({"kind": kind, **written} if kind and written else kind or written)
        case dict():
            return "{" + ", ".join(f"{key}: {value_text(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(value_text(item) for item in value) + "]"
        case _:
            return str(value)


def rows(place: Place, known: Mapping[type[BaseModel], Place]) -> Iterator[str]:
    properties = place.section.model_json_schema()["properties"]
    for name, field in keys_of(place.section).items():
        if place.is_alternative and name == "kind" and len(kinds_of(place.section)) == 1:
            continue
        held = KeyType((place.section,)).below(name)
        kind = held_text(held, known) if held.sections else type_text(properties[name])
        default = "required" if field.is_required() else value_text(field.get_default(call_default_factory=True))
        shown = default if default == "required" else f"`{default}`"
        cells = [f"`{name}`", kind, "" if default == "{}" and held.sections else shown, meaning(place.section, name)]
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def meaning(section: type[BaseModel], name: str) -> str:
    """Return the docstring under a field, or under the field of the same name that it replaces."""
    described = (keys_of(base).get(name) for base in section.__mro__ if issubclass(base, BaseModel))
    return next((field.description for field in described if field is not None and field.description), "")


def config_page() -> str:
    known: dict[type[BaseModel], Place] = {}
    parts = [CONFIG_HEAD]
    for verb, root in ROOTS.items():
        before = len(known)
        places(Place("", root), known)
        for place in list(known.values())[before:]:
            depth = "##" if "." not in place.path else "###"
            title = f"{depth} {place.title}\n\n" if place.path else f"## Top level\n\nOf `holdfast {verb}`. "
            about = inspect.cleandoc(place.section.__doc__ or "")
            table = "\n".join(rows(place, known))
            head = "| key | type | default | meaning |\n|---|---|---|---|\n"
            parts.append(f"{title}{about}\n\n{head}{table}\n" if table else f"{title}{about} No keys of its own.\n")
    return NOTE + "\n".join(parts)


def cli_page() -> str:
    runner = CliRunner()
    about = inspect.getdoc(command_line) or ""
    parts = [f"# Command line reference\n\n{about}\n"]
    for name in command_line.COMMANDS:
        words = name.split()
        shown = runner.invoke(
            command_line.app, [*words, "--help"], prog_name="holdfast", env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"}
        )
        if shown.exit_code != 0:
            raise SystemExit(f"holdfast {' '.join(words)} --help failed: {shown.output}")
        text = "\n".join(line.rstrip() for line in shown.output.strip().splitlines())
        parts.append(f"## holdfast {' '.join(words)}\n\n```text\n{text}\n```\n")
    return NOTE + "\n".join(parts)


def keys_page(name: str) -> str:
    """Return every key of another system with its counterpart here, or with what it concerns."""
    table = load_key_table(name)
    lines = [
        NOTE.replace("docstrings in src/holdfast", "tables in src/holdfast/features/rescue/systems"),
        f"# Keys of {table.title}\n",
        f"The table of {table.version}. A `*` marks another value or another unit here, which `holdfast config import` "
        "computes; without a key here, a person decides.\n",
        "| key there | here | read where |",
        "|---|---|---|",
    ]
    for key, entries in table.entries.items():
        for entry in entries:
            changed = " *" if entry.rule or entry.values else ""
            here = ", ".join(f"`{target}`" for target in entry.targets) + changed if entry.targets else ""
            read = f"`{entry.condition.text}`".replace("|", "\\|") if entry.condition.text else ""
            lines.append(f"| `{key}` | {WORDS.get(entry.word, here)} | {read} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    check = "--check" in sys.argv[1:]
    stale = []
    pages = {"config.md": config_page(), "cli.md": cli_page()}
    pages |= {f"keys_{name}.md": keys_page(name) for name in KEY_TABLES}
    for name, text in pages.items():
        path = FOLDER / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(str(path))
        if not check:
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for path_text in stale:
        print(f"{path_text}: {'not what the code says; run python tools/reference.py' if check else 'written'}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
