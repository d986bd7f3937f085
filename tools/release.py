"""Makes a release of what is checked out: `python tools/release.py 0.2.0`.

The fragments of `changelog.d` move under a new heading of CHANGELOG.md, kind by kind, and the version goes into
pyproject.toml. Commit and tag what it leaves.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
UNRELEASED = "## [Unreleased]\n"
_VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


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
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
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
