"""Which tests enter which files of src: records it, and chooses tests by it.

    python tools/record_map.py record FOLDER         prepares FOLDER; prints the variables to run pytest with
    python tools/record_map.py write FOLDER          makes tests/entered/map.json.gz of what was recorded there
    python tools/record_map.py near [--seconds 90] [--since REV]      prints tests of what changed, cheapest first

`make record-map` does the first two around all lanes. Tests that were not run between them keep their rows of the map
that is there, so one lane can be recorded alone. Ranks, rewards and servers count: tests/entered marks functions
in every process that a test starts. A file of which no function is entered, and a test that is newer than the map, are
unknown.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "holdfast"
MAP = ROOT / "tests" / "entered" / "map.json.gz"
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class EnteredMap:
    """The files that each test function enters, and how long it takes."""

    files: dict[str, frozenset[str]]
    """Test function, without its cases, to files of src below `src/holdfast`."""
    seconds: dict[str, float]

    def entering(self, files: Iterable[str]) -> set[str]:
        """Return the test functions that enter any of some files."""
        changed = set(files)
        return {test for test, entered in self.files.items() if entered & changed}

    def known_files(self) -> set[str]:
        """Return the files that some test enters."""
        return set().union(*self.files.values())


def read_map() -> EnteredMap | None:
    """Return the recorded map; None where none was recorded."""
    if not MAP.exists():
        return None
    content = json.loads(gzip.decompress(MAP.read_bytes()))
    names, sets = content["files"], [frozenset(content["files"][n] for n in numbers) for numbers in content["sets"]]
    assert names
    return EnteredMap(
        {test: sets[number] for test, (number, _) in content["tests"].items()},
        {test: seconds for test, (_, seconds) in content["tests"].items()},
    )


def function_of(nodeid: str) -> str:
    """Return a test's name without its case."""
    return nodeid.partition("[")[0]


def changed_files(since: str) -> list[str] | None:
    """Return the paths that differ from a commit, untracked ones included; None where git does not know it."""
    listed = _git("diff", "--name-only", since)
    untracked = _git("ls-files", "--others", "--exclude-standard")
    return None if listed is None or untracked is None else [*listed.split(), *untracked.split()]


def _git(*arguments: str) -> str | None:
    answer = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout if answer.returncode == 0 else None


def prepare(folder: Path) -> None:
    """Number the functions of src, and print the variables that let Python mark them."""
    from tests.entered.sitecustomize import functions

    (folder / "code").mkdir(parents=True, exist_ok=True)
    offsets: dict[str, int] = {}
    count = 0
    for path in sorted(SOURCE.rglob("*.py")):
        offsets[str(path)] = count
        count += len(functions(path.read_bytes())[1])
    (folder / "offsets.json").write_text(json.dumps(offsets | {"count": count}))
    print(f"HOLDFAST_RECORD={folder} PYTHONPATH={ROOT / 'tests' / 'entered'}")


def recorded(folder: Path) -> dict[str, tuple[set[int], float]]:
    """Return the functions that each test entered and its seconds, its cases together."""
    tests: defaultdict[str, tuple[set[int], list[float]]] = defaultdict(lambda: (set(), []))
    for file in folder.glob("tests-*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            nodeid, seconds, entered = json.loads(line)
            numbers, times = tests[function_of(nodeid)]
            numbers.update(entered)
            times.append(seconds)
    return {test: (numbers, sum(times)) for test, (numbers, times) in tests.items()}


def earlier_rows(names: list[str]) -> dict[str, tuple[set[int], float]]:
    """Return the rows of the map on disk whose test files are there still, with the files' indices in `names`."""
    earlier = read_map()
    if earlier is None:
        return {}
    index = {name: number for number, name in enumerate(names)}
    return {
        test: ({index[file] for file in files if file in index}, earlier.seconds[test])
        for test, files in earlier.files.items()
        if (ROOT / test.partition("::")[0]).exists()
    }


def write(folder: Path) -> None:
    """Make the map of what was recorded, with the rows of the earlier map for tests that were not run."""
    offsets = json.loads((folder / "offsets.json").read_text())
    offsets.pop("count")
    starts = sorted((start, str(Path(path).relative_to(SOURCE))) for path, start in offsets.items())
    names = [name for _, name in starts]
    first_functions = [start for start, _ in starts]
    tests = earlier_rows(names) | {
        test: ({bisect_right(first_functions, number) - 1 for number in entered}, seconds)
        for test, (entered, seconds) in recorded(folder).items()
    }
    sets: dict[tuple[int, ...], int] = {}
    rows: dict[str, tuple[int, float]] = {}
    for test, (files, seconds) in sorted(tests.items()):
        rows[test] = (sets.setdefault(tuple(sorted(files)), len(sets)), round(seconds, 2))
    content: dict[str, Any] = {"files": names, "sets": list(sets), "tests": rows}
    MAP.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))
    print(f"{MAP}: {len(rows)} test functions, {len(sets)} sets of files, {MAP.stat().st_size:,} bytes")


def near(since: str, seconds: float) -> list[str]:
    """Return the test functions that enter what changed, cheapest first, as many as take so long by the map.

    Changed test files come whole, before the others.
    """
    entered, changed = read_map(), changed_files(since)
    if changed is None:
        raise SystemExit(f"git knows no commit {since}.")
    tests = [path for path in changed if path.startswith("tests/") and Path(path).name.startswith("test_")]
    files = [path.removeprefix("src/holdfast/") for path in changed if path.startswith("src/holdfast/")]
    chosen = [path for path in tests if (ROOT / path).exists()]
    if entered is None:
        return chosen
    left = seconds
    for test in sorted(entered.entering(files), key=lambda name: entered.seconds[name]):
        left -= entered.seconds[test]
        if left < 0:
            break
        if test.partition("::")[0] not in chosen and (ROOT / test.partition("::")[0]).exists():
            chosen.append(test)
    return chosen


def main() -> int:
    """Run as the module's first lines say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("act", choices=("record", "write", "near"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--since", default="HEAD")
    options = parser.parse_args()
    if options.act == "near":
        print("\n".join(near(options.since, options.seconds)))
        return 0
    if options.folder is None:
        parser.error("which folder?")
    (prepare if options.act == "record" else write)(options.folder.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
