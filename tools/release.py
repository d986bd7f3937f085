"""Makes a release of what is checked out: `python tools/release.py 0.2.0`.

First the public names (docs/stability.md) are compared with those of the tag before. One that is gone, and that no
release of an earlier minor version lists under Deprecated, ends it with exit code 1. Then the fragments of
`changelog.d` move under a new heading of CHANGELOG.md, kind by kind, and the version goes into pyproject.toml. Commit
and tag what it leaves.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
UNRELEASED = "## [Unreleased]\n"
_VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
PACKAGES = ("holdfast", "holdfast.checkpoint")
ERRORS = "holdfast.checkpoint.errors"
_TITLE = re.compile(r"^##+ (.+)\n((?:(?!##+ ).*\n)*)", re.MULTILINE)
_ROW = re.compile(r"^\| (`[^|]+) \|((?:[^|\\]|\\.)*)\|", re.MULTILINE)
_WORD = re.compile(r"`([^`]+)`")


def public_names(folder: Path) -> dict[str, set[str]]:
    """Return what is public in a checkout, by kind, as its packages and its pages list it.

    A key that stands in the trees of several verbs counts once.

    Raises:
        ValueError: A kind has no names: the files have another form than this function reads.
    """
    names = {
        "name": set(_exported(folder / "src")),
        "command": set(_commands(_text(folder / "docs/reference/cli.md"))),
        "exit code": set(_exit_codes(_text(folder / "docs/reference/cli.md"))),
        "key": set(_keys(_text(folder / "docs/reference/config.md"))),
        "metric": {name for page in sorted((folder / "docs").glob("*.md")) for name in _metrics(_text(page))},
    }
    if empty := [kind for kind, found in names.items() if not found]:
        raise ValueError(f"{folder} lists no public names of these kinds: {', '.join(empty)}.")
    return names


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _exported(source: Path) -> Iterator[str]:
    """Yield the names of `__all__` of each public package, and the classes of the module of errors."""
    for package in PACKAGES:
        for node in ast.parse(_text(source / package.replace(".", "/") / "__init__.py")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                yield from (f"{package}.{name}" for name in ast.literal_eval(node.value))
    for node in ast.parse(_text(source / f"{ERRORS.replace('.', '/')}.py")).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield f"{ERRORS}.{node.name}"


def _commands(page: str) -> Iterator[str]:
    """Yield each command, and each of its options behind it."""
    for command, body in _TITLE.findall(page):
        yield command
        yield from (f"{command} {option}" for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", body, re.MULTILINE))


def _exit_codes(page: str) -> Iterator[str]:
    for line in re.findall(r"^Exit codes: (.+)$", page, re.MULTILINE):
        yield from re.findall(r"(\d+) ", line)


def _keys(page: str) -> Iterator[str]:
    """Yield each key, and each word that it may have, as in `data.packing: none`."""
    for title, body in _TITLE.findall(page):
        section = "" if title == "Top level" else title.partition(",")[0] + "."
        for key, values in _ROW.findall(body):
            dotted = section + key.strip("`")
            yield dotted
            yield from (f"{dotted}: {word}" for word in _WORD.findall(values))


def _metrics(page: str) -> Iterator[str]:
    """Yield the names in the tables of metrics; `<set>`, `<group>` and `SET` are one placeholder."""
    for title, body in _TITLE.findall(page):
        if title == "Metrics":
            for cell, _ in _ROW.findall(body):
                yield from (re.sub("<[^>]*>|[A-Z]{2,}", "*", name) for name in _WORD.findall(cell))


def vanished(root: Path, tag: str) -> list[tuple[str, str]]:
    """Return kind and name of all that was public at a tag and is not in the checkout."""
    packed = subprocess.run(["git", "-C", str(root), "archive", tag], capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as before, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(before, filter="data")
        earlier = public_names(Path(before))
    present = public_names(root)
    return sorted((kind, name) for kind, names in earlier.items() for name in names - present[kind])


def deprecated(changelog: str, version: str) -> set[str]:
    """Return the names that the changelog deprecates in a release of a minor version before this one."""
    names: set[str] = set()
    for major, minor, body in re.findall(
        r"^## \[(\d+)\.(\d+)\.[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE
    ):
        if (int(major), int(minor)) < tuple(int(part) for part in version.split(".")[:2]):
            for kind, entries in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", body, re.DOTALL | re.MULTILINE):
                names |= set(_WORD.findall(entries)) if kind == "Deprecated" else set()
    return names


def undeclared_removals(root: Path, changelog: str, version: str) -> int:
    """Print what is public no longer, and return how much of that was not deprecated before."""
    asked = ["git", "-C", str(root), "describe", "--tags", "--abbrev=0", "--match", "v*"]
    tag = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if not tag:
        print("There is no tag before this release: public names have nothing to be compared with.")
        return 0
    declared, count = deprecated(changelog, version), 0
    for kind, name in vanished(root, tag):
        whole = next((word for word in declared if re.match(rf"{re.escape(word)}(?![\w-])", name)), None)
        count += whole is None
        print(f"{kind} {name}, public at {tag}, is gone: {'not deprecated' if whole is None else 'deprecated before'}")
    return count


def by_kind(text: str, where: str) -> dict[str, str]:
    """Return the entries below each heading of a kind.

    Raises:
        ValueError: There is text before the first kind, or a kind that is none of Keep a Changelog's.
    """
    before, *parts = re.split(r"^### +(.+?) *$", text, flags=re.MULTILINE)
    if before.strip():
        raise ValueError(f"{where} begins with {before.strip().splitlines()[0]!r}, not with one of ### {KINDS}.")
    entries: dict[str, str] = {}
    for kind, body in zip(parts[::2], parts[1::2], strict=True):
        if kind not in KINDS:
            raise ValueError(f"{where} has entries of kind {kind!r}, which is none of {', '.join(KINDS)}.")
        entries[kind] = "\n".join(filter(None, [entries.get(kind), body.strip("\n")]))
    return entries


def released(changelog: str, fragments: dict[str, str], version: str, date: str) -> str:
    """Return the changelog with all entries that have no release yet below a heading of their own.

    Raises:
        ValueError: It is no version, it is there already, there is nothing to release, or a fragment cannot be read.
    """
    if not _VERSION.fullmatch(version):
        raise ValueError(f"{version} is no version: 1.2.3, or 1.2.3rc1.")
    if f"## [{version}]" in changelog:
        raise ValueError(f"CHANGELOG.md has a release {version} already.")
    head, _, rest = changelog.partition(UNRELEASED)
    own, heading, earlier = rest.partition("\n## [")
    collected: dict[str, list[str]] = defaultdict(list)
    for where, text in {"CHANGELOG.md": own, **fragments}.items():
        for kind, body in by_kind(text, where).items():
            collected[kind].append(body)
    if not collected:
        raise ValueError("There is nothing to release: no fragment and no entry below Unreleased.")
    sections = [f"### {kind}\n\n" + "\n".join(collected[kind]).rstrip() + "\n" for kind in KINDS if kind in collected]
    return f"{head}{UNRELEASED}\n## [{version}] - {date}\n\n" + "\n".join(sections) + heading + earlier


def main(arguments: list[str] | None = None) -> int:
    """Release; say what is left to do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    changelog, project = options.root / "CHANGELOG.md", options.root / "pyproject.toml"
    paths = sorted(path for path in (options.root / "changelog.d").glob("*.md") if path.name != "README.md")
    try:
        # Links of a fragment begin in its folder.
        fragments = {
            f"changelog.d/{path.name}": path.read_text(encoding="utf-8").replace("](../", "](") for path in paths
        }
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        text = released(changelog.read_text(encoding="utf-8"), fragments, options.version, today)
        removals = undeclared_removals(options.root, changelog.read_text(encoding="utf-8"), options.version)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if removals:
        print(f"{removals} public names are gone undeclared. Put them back, or release them as ### Deprecated first.")
        return 1
    changelog.write_text(text, encoding="utf-8")
    settings = project.read_text(encoding="utf-8")
    settings = re.sub(r'^version = ".*"$', f'version = "{options.version}"', settings, flags=re.MULTILINE)
    project.write_text(settings, encoding="utf-8")
    for path in paths:
        path.unlink()
    print(f"{len(paths)} fragments are in CHANGELOG.md now. Commit that, then: git tag v{options.version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
