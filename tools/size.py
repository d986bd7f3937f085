"""The size of the house beside its size at a commit, and how far a reader walks through it.

    python tools/size.py [--list] [--runs]
    python tools/size.py --limits

Printed are lines and code lines (without blanks, comments and docstrings) of `src`, its core, its features and the
tests, configuration keys, lengths of functions, equal windows of eight lines, the share of vague names
(`names.txt`), and the words and sentences of the documentation. `--runs` adds the files that an SFT step, a GRPO step,
a save and a resume enter, and the statements of the core that one SFT and one GRPO run execute; it takes a minute. All
of it is a trend; only a file above 400 lines or a function above 80 fails, which is all that `--limits` looks at.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
import threading
import typing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "holdfast"
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n(?=\s*[-*] |\s*\d+\. )")
FILE_LINES, FUNCTION_LINES, WINDOW = 400, 80, 8
FIRST_COMMIT = "db234e00"
FIRST = {
    "src": "573 files, 93,718 lines, 61,436 of code",
    "core": "445 files, 72,222 lines, 46,451 of code",
    "features": "128 files, 21,496 lines, 14,985 of code",
    "tests": "630 files, 88,999 lines, 66,057 of code",
    "configuration keys": "566",
    "functions": "5776, 10.3 lines on average, 62 at most",
    "equal windows": "0",
    "vague names": "0.6 %",
    "words of documentation": "58,391 on 39 pages",
    "words a sentence": "19.0",
    "files of sft step": "26",
    "files of sft save": "31",
    "files of sft resume": "38",
    "files of grpo step": "75",
    "files of grpo save": "31",
    "files of grpo resume": "38",
    "statements of the core that both runs execute": "7,005 of 24,176 (29 %)",
}
"""What this printed at the first commit, by name."""


# -- what stands there


@cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a module."""
    return ast.parse(source)


@cache
def code_lines(source: str) -> list[tuple[int, str]]:
    """Return (number, stripped text) of the lines that are no blank, comment or docstring."""
    docstrings = set[int]()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = ((number, line.strip()) for number, line in enumerate(source.splitlines(), start=1))
    return [(number, line) for number, line in lines if line and line[0] != "#" and number not in docstrings]


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, line, lines) of every function."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def equal_windows(sources: dict[Path, str]) -> list[str]:
    """Return the pairs of places with eight equal code lines in a row; imports, decorators and brackets aside."""
    places: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for path, source in sources.items():
        lines = [(number, line) for number, line in code_lines(source) if len(line) > 3]
        lines = [(number, line) for number, line in lines if not line.startswith(("import ", "from ", "@"))]
        for window in zip(*(lines[shift:] for shift in range(WINDOW)), strict=False):
            places[tuple(line for _, line in window)].append(f"{path}:{window[0][0]}")
    pairs = {
        (found[0].rpartition(":")[0], found[1].rpartition(":")[0]): found for found in places.values() if found[1:]
    }
    return [f"{first} and {second} have {WINDOW} equal lines" for first, second, *_ in pairs.values()]


def assigned(source: str) -> Iterator[str]:
    """Yield the name of every assignment and parameter."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def vague_names(sources: Iterable[str]) -> tuple[Counter[str], int]:
    """Return how often each word of `names.txt` or its plural is assigned, and the number of all assignments."""
    words = (ROOT / "tools" / "names.txt").read_text(encoding="utf-8").split()
    count = Counter(name for source in sources for name in assigned(source))
    return Counter({name: count[name] for name in {*words, *(f"{word}s" for word in words)}}), count.total()


def configuration_keys() -> set[str]:
    """Return the dotted keys of all verbs, sections included."""
    from pydantic import BaseModel

    from holdfast.config.verbs.roots import ROOTS

    def sections(annotation: Any) -> Iterator[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        for argument in typing.get_args(annotation):
            yield from sections(argument)

    def keys(section: type[BaseModel], prefix: str, above: tuple[type, ...]) -> Iterator[str]:
        for name, field in section.model_fields.items():
            yield f"{prefix}{name}"
            for below in sections(field.annotation):
                if below not in above:
                    yield from keys(below, f"{prefix}{name}.", (*above, below))

    return {key for root in ROOTS.values() for key in keys(root, "", ())}


def _part(path: Path) -> str:
    return "features" if "features" in path.parts else "core"


# -- how far a run walks

OPENS = {
    "step": ("recipes/sft.py:sft_step", "recipes/grpo.py:grpo_step"),
    "save": ("training/saving/checkpoints.py:Checkpoints._begin",),
    "resume": ("training/saving/resume.py:go_on",),
}
"""Window to the functions that open it; a step and a resume end with them."""
SAVED = "training/saving/checkpoints.py:Checkpoints.collect"
"""Ends a save, which goes on in a thread, when it returns what is verified."""


class Walk:
    """What a run enters while a window is open, and every line that it executes; used as a tracing function."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {}
        self.lines: set[tuple[str, int]] = set()
        self._open = dict.fromkeys(OPENS, 0)

    def __call__(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        """Take one event of `sys.settrace`; other packages are not looked into."""
        name = frame.f_code.co_filename
        if not name.startswith(f"{SOURCE}{os.sep}"):
            return None
        file = name.removeprefix(f"{SOURCE}{os.sep}")
        if event == "line":
            self.lines.add((file, frame.f_lineno))
        elif event in {"call", "return"}:
            self._turn(file, f"{file}:{frame.f_code.co_qualname}", event, argument)
        return self

    def _turn(self, file: str, function: str, event: str, result: object) -> None:
        for window, opening in OPENS.items():
            if function in opening and event == "call":
                if not self._open[window]:
                    self.files[window] = set()
                self._open[window] += 1
            elif function in opening and window != "save":
                self._open[window] -= 1
            if self._open[window] and event == "call":
                self.files[window].add(file)
        if function == SAVED and event == "return" and result:
            self._open["save"] = 0


def walk(verb: str, folder: Path) -> Walk:
    """Make the run of `tests/earlier` of a verb on one rank, go back two steps and continue it, traced."""
    from holdfast.config.sections.launch import LaunchConfig
    from holdfast.config.verbs.roots import load_run
    from holdfast.parallel.mesh import joined_world
    from holdfast.recipes import grpo, sft

    recipe: Any = {"sft": sft.sft, "grpo": grpo.grpo}[verb]
    for name in (f"{verb}.yaml", "digits.py"):
        shutil.copy(ROOT / "tests" / "earlier" / name, folder)
    walked = Walk()
    for _ in range(2):
        loaded = load_run(folder / f"{verb}.yaml", ["launch.ranks=1", "rewards.workers=1"][: 1 + (verb == "grpo")])
        with joined_world(LaunchConfig(ranks=1, device="cpu")) as world:
            threading.settrace(walked)
            sys.settrace(walked)
            try:
                recipe(loaded.config, loaded.base, world)
            finally:
                sys.settrace(None)
                threading.settrace(None)
        shutil.rmtree(folder / "runs" / verb / "checkpoints" / "step-00000004")
    return walked


def walks() -> dict[str, Walk]:
    """Return the walks of an SFT and of a GRPO run."""
    from holdfast.config.quiet import hush

    hush()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    of_verbs = {}
    for verb in ("sft", "grpo"):
        silent = contextlib.redirect_stdout(io.StringIO())
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), silent:
            of_verbs[verb] = walk(verb, Path(folder))
    return of_verbs


def executed(of_verbs: Iterable[Walk]) -> str:
    """Return how many statements of functions of the core were executed."""
    lines = set[tuple[str, int]]().union(*(each.lines for each in of_verbs))
    total = done = 0
    for path in SOURCE.rglob("*.py"):
        if _part(path) == "core":
            name = str(path.relative_to(SOURCE))
            statements = _statements(path.read_text(encoding="utf-8"))
            total, done = total + len(statements), done + sum((name, line) in lines for line in statements)
    return f"{done:,} of {total:,} ({100 * done / total:.0f} %)"


def _statements(source: str) -> list[int]:
    """Return the lines of the statements inside functions, docstrings aside."""
    bodies = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    statements = {inner for body in bodies for inner in ast.walk(body) if isinstance(inner, ast.stmt)} - {*bodies}
    return [
        each.lineno for each in statements if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    ]


# -- the table


def trees() -> dict[str, dict[Path, str]]:
    """Return the sources of each part of the house."""
    source = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    tests = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("tests/**/*.py"))}
    return {
        "src": source,
        "core": {path: text for path, text in source.items() if _part(path) == "core"},
        "features": {path: text for path, text in source.items() if _part(path) == "features"},
        "tests": tests,
    }


def measured() -> Iterator[tuple[str, str, list[str]]]:
    """Yield (name, value, places) of everything that is read from the sources."""
    parts = trees()
    for name, sources in parts.items():
        lines = sum(text.count("\n") for text in sources.values())
        code = sum(len(code_lines(text)) for text in sources.values())
        yield name, f"{len(sources)} files, {lines:,} lines, {code:,} of code", []
    yield "configuration keys", str(len(configuration_keys())), []
    lengths = [length for text in parts["src"].values() for _, _, length in functions(text)]
    yield "functions", f"{len(lengths)}, {sum(lengths) / len(lengths):.1f} lines on average, {max(lengths)} at most", []
    windows = equal_windows(parts["src"])
    yield "equal windows", str(len(windows)), windows
    vague, total = vague_names(parts["src"].values())
    yield (
        "vague names",
        f"{100 * vague.total() / total:.1f} %",
        [f"{name} {count}" for name, count in vague.most_common(20)],
    )


def documentation() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the words of the pages that people write, and the length of their sentences, both without code."""
    pages, lengths = Counter[str](), list[int]()
    for path in sorted(ROOT.glob("docs/**/*.md")):
        if path.parent.name != "reference":
            text = _FENCED.sub("", path.read_text(encoding="utf-8"))
            pages[str(path.relative_to(ROOT))] = len(text.split())
            prose = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "#", "!")))
            lengths += [words for sentence in _SENTENCE_END.split(prose) if (words := len(sentence.split())) > 2]
    listed = [f"{words:6,} {page}" for page, words in pages.most_common()]
    yield "words of documentation", f"{pages.total():,} on {len(pages)} pages", listed
    yield "words a sentence", f"{sum(lengths) / len(lengths):.1f}", []


def runs() -> Iterator[tuple[str, str, list[str]]]:
    """Yield what is seen when runs are traced.

    Raises:
        SystemExit: A window saw nothing: the functions that open it have other names.
    """
    of_verbs = walks()
    for verb, walked in of_verbs.items():
        if blind := [window for window in OPENS if not walked.files.get(window)]:
            sys.exit(f"{verb}: nothing was seen of {', '.join(blind)}; see OPENS")
        for window, files in walked.files.items():
            yield f"files of {verb} {window}", str(len(files)), sorted(files)
    yield "statements of the core that both runs execute", executed(of_verbs.values()), []


def beyond_limits() -> list[str]:
    """Return the files and functions that are longer than a file or a function may be."""
    paths = [path for folder in ("src", "tools", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) > FILE_LINES:
            found.append(f"{path.relative_to(ROOT)} has {lines} lines, more than {FILE_LINES}; split it by meaning")
        for name, line, length in functions(text):
            if length > FUNCTION_LINES:
                found.append(f"{path.relative_to(ROOT)}:{line}: {name} has {length} lines, more than {FUNCTION_LINES}")
    return found


def main() -> int:
    """Print the table; return 1 where a limit is passed."""
    arguments = set(sys.argv[1:])
    further = runs() if "--runs" in arguments else ()
    measures = () if "--limits" in arguments else [*measured(), *documentation(), *further]
    for name, value, places in measures:
        first = f"   ({FIRST[name]} at {FIRST_COMMIT})" if name in FIRST else ""
        print(f"{name}: {value}{first}")
        if "--list" in arguments:
            print("".join(f"    {place}\n" for place in places), end="")
    too_long = beyond_limits()
    print("".join(f"{line}\n" for line in too_long), end="")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
