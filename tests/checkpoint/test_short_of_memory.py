"""A machine without memory for a checkpoint says so; it never takes a whole checkpoint for a damaged one."""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import resource
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from holdfast.checkpoint.format.dcp import read_dcp_metadata
from holdfast.checkpoint.format.stored_chunks import chunk_from
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointUnreadable
from holdfast.checkpoint.keep.choose import newest_verified
from holdfast.checkpoint.loading.reader import load_state
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from tests.checkpoint.damage import rewrite_manifest
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
    library.malloc_trim(0)


def save_twice_and_resume_with(world: World, directory: str, mib: int) -> tuple[Any, Any, list[str]]:
    """Save steps 1 and 2; resume while rank 1 has little memory, and again when it has enough.

    Returns:
        What the first resume came to, the second, and what is in the directory between them.
    """
    keep_nothing_back()
    torch.manual_seed(0)
    model = nn.Linear(2 * PART // 4 // 1024, 1024, bias=False)
    fully_shard(model)
    for step in (1, 2):
        with torch.no_grad():
            model.weight.fill_(step)
        checkpoint.save(f"{directory}/step-0000000{step}", model, None)
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
    "mib", [pytest.param(8, id="none for a part"), pytest.param(112, id="for a part, and not for the chunk it is from")]
)
@pytest.mark.cases(1)
def test_a_whole_checkpoint_is_not_put_aside_where_one_rank_has_no_memory_for_it(tmp_path: Path, mib: int) -> None:
    ended = run_doomed(save_twice_and_resume_with, 2, str(tmp_path), mib)

    assert [(end.code, end.error) for end in ended] == [(0, None)] * 2
    assert len({end.value[0] for end in ended}) == 1
    for (kind, words, weight), second, there in (end.value for end in ended):
        assert kind == "CheckpointUnreadable"
        assert f"{os.uname().nodename} has no memory left for 80 MiB of it. Nothing is known of its bytes" in words
        assert weight == 0, "nothing live was touched"
        assert there == ["step-00000001", "step-00000002"]
        assert second[0] == "step-00000002"
        assert "skipped" not in second[1]
        assert second[2] == 2


def stored(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def packed(data: bytes) -> bytes:
    """Return the same archive, compressed, as nobody writes it: a few bytes that ask for many."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as small:
        for each in archive.infolist():
            small.writestr(each.filename, archive.read(each.filename))
    return file.getvalue()


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


def read_chunks(world: World) -> dict[str, Any]:
    keep_nothing_back()
    whole = stored(torch.ones(PART // 4))
    bomb = packed(whole)
    sizes = (*np.arange(0, 4, 1 / 16), *range(4, 120, 4))
    return {
        "whole": outcome(lambda: chunk_from(whole, "run/shard"), 8),
        "bomb": outcome(lambda: chunk_from(bomb, "run/shard"), 8),
        "each": [outcome(lambda: chunk_from(whole, "run/shard"), mib) for mib in sizes],
        "bomb in ample memory": chunk_from(bomb, "run/shard") is None,
    }


def test_however_little_memory_there_is_only_a_chunk_that_asks_for_more_than_it_holds_is_damaged() -> None:
    found = alone(read_chunks)

    assert found["whole"] == "CheckpointUnreadable"
    assert found["bomb"] == "None"
    assert set(found["each"]) == {"CheckpointUnreadable", "read"}
    assert found["bomb in ample memory"]  # no writer of ours packs, so nothing is unpacked


def read_metadata(world: World, data: bytes) -> list[str]:
    keep_nothing_back()
    # Remember None under number 2^30 - 1: a table of 16 GiB.
    asking = [data[:2] + b"N" + number + b"0" + data[2:] for number in (b"r\xff\xff\xff\x3f", b"p1073741823\n")]
    return [
        outcome(lambda: read_dcp_metadata(data, "run/.metadata"), 4),
        *(outcome(lambda each=each: read_dcp_metadata(each, "run/.metadata"), 512) for each in asking),
        outcome(lambda: read_dcp_metadata(data, "run/.metadata"), 4096),
    ]


def test_however_little_memory_there_is_only_a_metadata_that_asks_for_more_than_it_holds_is_damaged(
    tmp_path: Path,
) -> None:
    path = tmp_path / "step-00000001"
    checkpoint.save(str(path), nn.Linear(3, 3), None)
    metadata = pickle.loads((path / "dcp/.metadata").read_bytes())
    name, entry = next(iter(metadata.state_dict_metadata.items()))
    metadata.state_dict_metadata |= {f"{name}.{number:0{MIB}}": replace(entry) for number in range(100)}

    found = alone(read_metadata, pickle.dumps(metadata))

    assert found == ["CheckpointUnreadable", "CheckpointCorrupt", "CheckpointCorrupt", "read"]


def test_a_place_beyond_the_end_of_its_file_is_damaged_without_the_memory_it_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    checkpoint.save(str(path), nn.Linear(3, 3), None)
    metadata = pickle.loads((path / "dcp/.metadata").read_bytes())
    index, info = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = replace(info, length=1 << 45)
    (path / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
    rewrite_manifest(path)

    with pytest.raises(CheckpointCorrupt, match=rf"{index.fqn} is damaged: its bytes are not those that were saved"):
        checkpoint.verify(str(path))
