"""The same faults on several ways to save: what is loaded silently, what raises, what survives.

    python benchmarks/faults.py [--flips 100] [--kills 12] [--fault WORDS] [--write docs/reliability.md]

Two gloo ranks. Every tensor of model and optimizer is filled with 1 in the first state that is saved and with 2 in the
second, so what a load returns says which state it is. `survives`: exactly one state that was saved, nothing else.
`raises`: an error, on every rank. `silent`: no error, and a state that never existed. A library that is not installed
is said to be missing. `transformers` is `save_pretrained` in shards, weights only, written by rank 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from faults_lab import Lab, Ranks, first_step_save, per_rank_state
from faults_more import more_rows
from faults_systems import SYSTEMS
from measure import heading

BEGIN, END = "<!-- table of faults.py -->", "<!-- end of the table -->"


def rows(lab: Lab, flips: int, kills: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield every fault and how to make it."""
    yield f"one bit flipped in a data file ({flips} times)", partial(lab.many, "bit", flips)
    yield f"a page of 4 KiB zeroed ({flips} times)", partial(lab.many, "page", flips)
    yield "a data file cut in the middle", lab.truncated
    yield "a data file missing", lab.missing
    yield "a data file of another step", lab.swapped
    yield f"kill -9 of a rank in a second save to the same run ({kills} moments)", partial(lab.killed, kills)
    yield "two jobs save one step into one directory (4 times)", lab.two_jobs
    yield "disk full in a second save to the same run", lab.limited
    yield "the model lacks a layer that was saved", partial(lab.changed, "dropped")
    yield "the model has a layer that was not saved", partial(lab.changed, "added")
    yield "the model has another dtype (float32, bfloat16)", partial(lab.changed, "dtype")
    yield "trained when saved, frozen when loaded", partial(lab.changed, "frozen")
    yield "gradients live while loading", partial(lab.changed, "gradients")
    yield "a rank's own state under a key of all", lambda: special(lab, per_rank_state)
    yield "a save before the first step", lambda: special(lab, first_step_save)
    yield "a hostile pickle in the checkpoint", lab.hostile
    yield from more_rows(lab, flips, kills)


def special(lab: Lab, function: Callable[..., Any]) -> str:
    """Run a function of its own and judge what ranks say."""
    results = Ranks(lab.name, function, str(lab.folder / function.__name__)).results()
    kinds = {kind for kind, _ in results}
    if kinds != {"ok"}:
        return "not offered" if any("NotImplementedError" in str(value) for _, value in results) else "raises"
    if function is first_step_save:
        return "survives" if all(value for _, value in results) else "silent: training changes"
    return "silent" if any(value == "silent" for _, value in results) else "survives"


def column(name: str, flips: int, kills: int, words: str) -> dict[str, str]:
    """Return every verdict of a system on the faults that have some words in their names."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for fault, make in rows(Lab(name, Path(folder)), flips, kills):
            if words not in fault:
                continue
            found[fault] = make()
            print(f"{name}: {fault}: {found[fault]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--only", nargs="*", default=list(SYSTEMS))
    parser.add_argument("--fault", default="", help="make only the faults that have these words in their names")
    parser.add_argument("--write", type=Path, help="a page whose table is written anew, between its two marks")
    began = time.monotonic()
    arguments = parser.parse_args()
    columns: dict[str, dict[str, str]] = {}
    for name in arguments.only:
        try:
            title = f"{name} {version(SYSTEMS[name].distribution)}"
        except PackageNotFoundError:
            columns[f"{name} (not installed)"] = {}
            continue
        SYSTEMS[name].preload()
        columns[title] = column(name, arguments.flips, arguments.kills, arguments.fault)
    text = f"{heading()}; {(time.monotonic() - began) / 60:.0f} minutes\n\n{table(columns)}"
    print(text)
    if arguments.write is not None:
        write_into(arguments.write, text)


def table(columns: dict[str, dict[str, str]]) -> str:
    """Return a table of all verdicts."""
    faults = next(found for found in columns.values() if found)
    lines = ["| fault | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    lines += [
        f"| {fault} | " + " | ".join(found.get(fault, "-") for found in columns.values()) + " |" for fault in faults
    ]
    return "\n".join(lines)


def write_into(page: Path, text: str) -> None:
    """Replace what stands between the marks of a page."""
    before, mark, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{page} lacks {BEGIN} or {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
