"""Check every relative link and anchor of the project's Markdown files.

    python tools/links.py [FOLDER]

Prints `file:line` of each link that leads nowhere, and exits 1 if there is one. Addresses on the web are not asked.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

SKIPPED = {".git", "runs", "build", "dist", "node_modules"}
FENCE = re.compile(r"^\s*(`{3,}|~{3,})")
INLINE_CODE = re.compile(r"(`+).+?\1")
INLINE_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'(][^)]*)?\s*\)")
DEFINITION = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$")
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
NAMED = re.compile(r"<a\s+(?:id|name)=[\"']([^\"']+)[\"']")
OBJECT = re.compile(r"^::: (\S+)$")
"""A public name, to which mkdocstrings gives its own name as anchor."""
ELSEWHERE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)", flags=re.IGNORECASE)


def markdown_files(root: Path) -> list[Path]:
    paths = ((path, path.relative_to(root).parts) for path in root.rglob("*.md"))
    # Environments of tests stand beside .venv.
    return sorted(path for path, parts in paths if not SKIPPED & set(parts) and not parts[0].startswith(".venv"))


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of what stands outside fenced code."""
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif fence:
            if mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        else:
            yield number, line


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def anchors(path: Path) -> frozenset[str]:
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for _, line in prose(path.read_text(encoding="utf-8")):
        found.update(NAMED.findall(line))
        found.update(OBJECT.findall(line))
        if heading := HEADING.match(line):
            name = slug(heading[1])
            found.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
    return frozenset(found)


def links(text: str) -> Iterator[tuple[int, str]]:
    for number, line in prose(text):
        plain = INLINE_CODE.sub("", line)
        yield from ((number, target) for target in INLINE_LINK.findall(plain))
        if definition := DEFINITION.match(plain):
            yield number, definition[1]


def broken(path: Path, root: Path) -> Iterator[str]:
    shown = path.relative_to(root)
    for number, target in links(path.read_text(encoding="utf-8")):
        if ELSEWHERE.match(target):
            continue
        file, _, anchor = unquote(target).partition("#")
        goal = (root / file.lstrip("/") if file.startswith("/") else path.parent / file) if file else path
        if not goal.exists():
            yield f"{shown}:{number}: {target}: there is no {file} here"
        elif goal.is_dir() and shown.parts[0] == "docs":
            yield f"{shown}:{number}: {target}: the site holds files, and this is a directory"
        elif anchor and (goal.suffix != ".md" or anchor not in anchors(goal.resolve())):
            yield f"{shown}:{number}: {target}: {goal.name} has no heading #{anchor}"


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    found = [line for path in markdown_files(root) for line in broken(path, root)]
    for line in found:
        print(line)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
