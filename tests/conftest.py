"""Fixtures that many suites share."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

import tests.short_times  # noqa: F401 - for what is waited for in this process
from tests.orphans import end_with_this_process

if TYPE_CHECKING:
    from tests.cli.warm import WarmPython

pytest_plugins = ["tests.cli.fixtures", "tests.messages"]

settings.register_profile("shared machine", deadline=None)  # a neighbour's work is no failure
settings.load_profile("shared machine")

# A shell that starts a command with & has it ignore Ctrl-C, and its children, whose Ctrl-C is tested, inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

multiprocessing.set_forkserver_preload(["tests.imported"])  # the one server from which all processes are forked

MEMORY = Path("/dev/shm")  # noqa: S108 - not a file of ours
ROOM_BYTES = 6 * 2**30


def _may_hold_files(place: Path) -> bool:
    """Return whether there is a file system in memory with room for what tests write and permission to run it."""
    if not place.is_dir() or not os.access(place, os.W_OK):
        return False
    there = os.statvfs(place)
    return there.f_bavail * there.f_frsize > ROOM_BYTES and not there.f_flag & os.ST_NOEXEC


# A run of a test calls fsync sixty times, which is half of its time where disks are shared.
if _may_hold_files(MEMORY):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_configure() -> None:
    """Let nothing that tests start outlive them."""
    end_with_this_process()


PROCESSES = {"pools", "warm", "trained", "ground", "server"}
"""Fixtures that start processes or a run."""


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark all but two cases of a function `slow` where its own parameters name a fixture that starts processes.

    The two are the first and the last. Of any function, `cases(n)` keeps n cases, spread evenly, `cases("all")` keeps
    all, and `cases("pairs")` as many as have every pair of values of two arguments. A fixture behind another one does
    not count: copies of what a session made once cost no process.
    """
    functions = defaultdict(list)
    for item in items:
        if not any(item.get_closest_marker(mark) for mark in ("slow", "gpu")):
            functions[item.nodeid.partition("[")[0]].append(item)
    for alike in functions.values():
        mark = alike[0].get_closest_marker("cases")
        values = getattr(alike[0], "callspec", _NoCase).params
        starts = PROCESSES & {*alike[0]._fixtureinfo.argnames} - {*values}
        number = mark.args[0] if mark else 2 if starts else "all"
        if number != "all":
            stay = (
                covering([item.callspec.indices for item in alike]) if number == "pairs" else spread(number, len(alike))
            )
            for place in {*range(len(alike))} - stay:
                alike[place].add_marker("slow")
    for item in items:
        if _shares_with_its_file(item) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def spread(number: int, total: int) -> set[int]:
    """Return `number` places of `total`, spread evenly: the first, and from two on the last."""
    return {round(place * (total - 1) / max(number - 1, 1)) for place in range(number)}


def covering(indices: list[Mapping[str, int]]) -> set[int]:
    """Return places of cases that have every pair of values of two arguments, the case with most new ones first.

    Args:
        indices: Of each case the arguments' names with the numbers of their values.
    """
    pairs = [{*combinations(sorted(case.items()), 2)} for case in indices]
    stay, missing = set(), set().union(*pairs)
    while missing:
        best = max(range(len(indices)), key=lambda place: len(pairs[place] & missing))
        stay.add(best)
        missing -= pairs[best]
    return stay


def _shares_with_its_file(item: Any) -> bool:
    """Return whether a test has a fixture that its file makes once, so that one worker should run the file."""
    definitions = item._fixtureinfo.name2fixturedefs.values() if hasattr(item, "_fixtureinfo") else ()
    return any(each[-1].scope == "module" for each in definitions if each)


class _NoCase:
    params: Mapping[str, object] = {}


def pytest_collection_finish() -> None:
    """Leave what all tests share out of every later collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """Return a directory where other programs keep temporary files: on a disk, if the machine has one for them."""
    with tempfile.TemporaryDirectory(prefix="holdfast-test-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], object]]:
    """Return the rank pool of a size; pools live as long as the session."""
    from tests.ranks import RankPool

    made: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        return made.setdefault(size, RankPool(size))

    yield pool
    for each in made.values():
        each.close()


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Return a Python with everything imported; a worker of the tests has one."""
    from tests.cli.warm import WarmPython

    python = WarmPython(tmp_path_factory.mktemp("warm"))
    yield python
    python.close()


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """Return the GSM8K training rows where a copy lies beside the checkout."""
    path = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k" / "train.jsonl"
    if not path.exists():
        pytest.skip("no copy of GSM8K beside this checkout")
    return path
