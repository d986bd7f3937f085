"""A machine without memory for a checkpoint says so; it never takes a whole checkpoint for a damaged one."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointUnreadable
from holdfast.checkpoint.keep.choose import newest_verified
from holdfast.checkpoint.keep.find import one
from holdfast.checkpoint.loading.reader import load_state
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from tests.crash.processes import run_doomed

MIB = 1 << 20
PART = 80 * MIB
"""What each of two ranks holds of one weight: more than the 64 MiB that an allocator may have reserved per thread."""


@contextmanager
def no_more_than(size: int) -> Iterator[None]:
    """Let this process have so many bytes beyond those it has."""
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (has + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def keep_nothing_back() -> None:
    """Let this process return memory to the system when it is freed, so that all it gets is counted by the limit."""
    library = ctypes.CDLL(None)
    library.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: larger blocks are mappings of their own
    library.mallopt(-8, 1)  # M_ARENA_MAX: a thread that allocates first reserves 64 MiB otherwise, at any time
    library.malloc_trim(0)


def save_twice_and_resume_with(world: World, directory: str, mib: int, whole: bool) -> tuple[Any, Any, list[str]]:
    """Save steps 1 and 2; resume while rank 1 has little memory, and again when it has enough.

    Args:
        world, directory: The rank, and where it saves.
        mib: Memory of rank 1 at the first resume.
        whole: Whether the weight was whole on both ranks when it was saved, so that it is one chunk.

    Returns:
        What the first resume came to, the second, and what is in the directory between them.
    """
    keep_nothing_back()
    torch.manual_seed(0)
    model = nn.Linear(2 * PART // 4 // 1024, 1024, bias=False)
    if not whole:
        fully_shard(model)
    for step in (1, 2):
        with torch.no_grad():
            model.weight.fill_(step)
        checkpoint.save(f"{directory}/step-0000000{step}", model, None)
    if whole:
        fully_shard(model)
    storage, ranks = LocalStorage(Path(directory)), RankGroup()

    def resume() -> Any:
        with torch.no_grad():
            model.weight.zero_()
        try:
            choice = newest_verified(
                storage, ranks, use=lambda name, found: load_state(storage, name, model, None, ranks, manifest=found)
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            return type(error).__name__, str(error), float(model.weight.detach().to_local().max())
        return choice and choice.name, choice and choice.message, float(model.weight.detach().to_local().max())

    if world.rank == 1:
        with no_more_than(mib * MIB):
            first = resume()
    else:
        first = resume()
    there = sorted(each.name for each in Path(directory).iterdir())
    return first, resume(), there


@pytest.mark.parametrize(
    ("mib", "whole", "lacks"),
    [
        pytest.param(8, False, 80, id="none for a part"),
        pytest.param(200, True, 160, id="for a part, and not for the chunk it is from"),
    ],
)
@pytest.mark.cases(1)
def test_a_whole_checkpoint_is_not_put_aside_where_one_rank_has_no_memory_for_it(
    tmp_path: Path, mib: int, whole: bool, lacks: int
) -> None:
    ended = run_doomed(save_twice_and_resume_with, 2, str(tmp_path), mib, whole)

    assert [(end.code, end.error) for end in ended] == [(0, None)] * 2
    assert len({end.value[0] for end in ended}) == 1
    for (kind, words, weight), second, there in (end.value for end in ended):
        assert kind == "CheckpointUnreadable"
        assert f"{os.uname().nodename} has no memory left for {lacks} MiB of it. Nothing is known of its bytes" in words
        assert weight == 0, "nothing live was touched"
        assert there == ["step-00000001", "step-00000002"]
        assert second[0] == "step-00000002"
        assert "skipped" not in second[1]
        assert second[2] == 2


def outcome(read: Callable[[], Any], mib: float) -> str:
    """Return what a read comes to with so much memory: "read", "None", or the name of its error."""
    try:
        with no_more_than(int(mib * MIB)):
            return "None" if read() is None else "read"
    except (CheckpointUnreadable, CheckpointCorrupt, MemoryError) as error:
        return type(error).__name__


def alone(look: Callable[..., Any], *args: Any) -> Any:
    """Return what a new process finds: an old one has memory of its own that it can give again."""
    (ended,) = run_doomed(look, 1, *args)
    assert (ended.code, ended.error) == (0, None)
    return ended.value


def read_tensor(world: World, path: str) -> list[str]:
    keep_nothing_back()
    stored = one(path)
    sizes = (*np.arange(0, 4, 1 / 16), *range(4, 120, 4))
    return [outcome(lambda: stored.read("model.weight"), mib) for mib in sizes]


def test_however_little_memory_there_is_a_tensor_is_read_or_nothing_is_known_of_it(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path / "step-00000001"), nn.Linear(PART // 4 // 1024, 1024, bias=False), None)

    found = alone(read_tensor, str(tmp_path / "step-00000001"))

    assert set(found) == {"CheckpointUnreadable", "read"}


def verify_with_little(world: World, path: str) -> list[str]:
    keep_nothing_back()
    return [outcome(lambda: checkpoint.verify(path), mib) for mib in (1, 2, 3, 4, 6, 16)]


def test_a_verification_needs_a_few_blocks_of_memory_and_never_a_tensor_s(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path / "step-00000001"), nn.Linear(PART // 4 // 1024, 1024, bias=False), None)

    found = alone(verify_with_little, str(tmp_path / "step-00000001"))

    assert set(found) <= {"CheckpointUnreadable", "read"}
    assert found[-1] == "read"
