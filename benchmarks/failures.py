"""State failures of sharded training, made to happen in the naive way and then asked of Holdfast, in one table.

    python benchmarks/failures.py [--only 1 6.3 ...]

Five failures that runs were lost to and fifteen beside them. The naive way is the upstream library where it runs on a
CPU, else the few lines that trainers share; for the five, also what the plug-ins, the two checks and an import make of
it where it was reported (with Lightning where it is installed: tools/test_rescue.sh makes such an environment). The
cases are those of `tests/failures`, where each number is compared with what it must be. 2 gloo ranks, tiny modules.
Exits with 1 where Holdfast does not hold, or where the naive way no longer fails: then the table is out of date.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

from measure import ENVIRONMENT, heading

os.environ.update(ENVIRONMENT)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the cases are the tests'

from tests.failures.lab import Failure, Lab, Observed  # noqa: E402
from tests.failures.rescue import HAS_LIGHTNING  # noqa: E402
from tests.failures.table import FAILURES  # noqa: E402
from tests.ranks import RankPool  # noqa: E402


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what this process and those it starts print: plans, progress bars, libraries' warnings."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for descriptor in (*kept, nowhere):
            os.close(descriptor)


def observe(way: Callable[[Lab], Observed], pool: Callable[[int], RankPool], folder: Path) -> tuple[bool | None, str]:
    """Return whether one way of a failure holds, None where the case itself broke, and what was observed."""
    folder.mkdir(parents=True)
    try:
        with silence():
            found = way(Lab(pool, folder))
    except Exception as error:  # noqa: BLE001 - a row of the table, whatever it is
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
    return found.holds, found.words.replace("|", "/")


_VERDICTS = {True: "holds", False: "does not hold", None: "was not seen"}


def row(failure: Failure, pool: Callable[[int], RankPool], folder: Path) -> list[str]:
    """Print a failure's row; return what was not as it should be."""
    words, wrong = [], []
    ways = [("naive", failure.naive, False), ("Holdfast", failure.ours, True)]
    if failure.rescued is not None:
        ways.append(("rescued", failure.rescued, True))
    for way, call, expected in ways:
        holds, said = observe(call, pool, folder / way)
        words.append(said if holds is expected else f"**unexpected:** {said}")
        if holds is not expected:
            wrong.append(f"{failure.number}: {way} {_VERDICTS[holds]}")
    print(f"| {failure.number}. {failure.title} | {' | '.join([*words, ''][:3])} |", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[failure.number for failure in FAILURES])
    chosen = [failure for failure in FAILURES if failure.number in parser.parse_args().only]
    pools: dict[int, RankPool] = {}
    wrong: list[str] = []
    libraries = ["transformers", "accelerate", "peft", "trl", *(["lightning"] if HAS_LIGHTNING else [])]
    print(f"{heading()}; {', '.join(f'{name} {version(name)}' for name in libraries)}\n")
    print("| failure | what the naive form does | what Holdfast does | where it was reported, with the plug-in |")
    print("|---|---|---|---|")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="failures-") as folder:
        for failure in chosen:
            wrong += row(failure, lambda size: pools.setdefault(size, RankPool(size)), Path(folder) / failure.number)
    with silence():
        for pool in pools.values():
            pool.close()
    print("\nNot run here:\n")
    print("\n".join(f"- {failure.number}: {failure.not_here}" for failure in chosen if failure.not_here))
    verdict = f"MISS {'; '.join(wrong)}" if wrong else "ok"
    print(f"\n{len(chosen)} failures, {time.monotonic() - began:.0f} s; {verdict}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
