"""A machine without memory for a checkpoint says so; it never takes a whole checkpoint for a damaged one."""

from __future__ import annotations

import io
import os
import pickle
import resource
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast import checkpoint
from holdfast.checkpoint.choose import newest_verified
from holdfast.checkpoint.dcp_metadata import read_dcp_metadata
from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointUnreadable
from holdfast.checkpoint.reader import load
from holdfast.checkpoint.storage import LocalStorage
from holdfast.checkpoint.stored_chunks import chunk_from
from holdfast.parallel.collectives import ProcessExchange
from holdfast.parallel.mesh import World
from tests.checkpoint.damage import rewrite_manifest
from tests.crash.processes import run_doomed

MIB = 1 << 20
PART = 32 * MIB
"""What each of two ranks holds of one weight."""


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


def save_twice_and_resume_with(world: World, directory: str, mib: int) -> tuple[Any, Any, list[str]]:
    """Save steps 1 and 2; resume while rank 1 has little memory, and again when it has enough.

    Returns:
        What the first resume came to, the second, and what is in the directory between them.
    """
    torch.manual_seed(0)
    model = nn.Linear(2 * PART // 4 // 1024, 1024, bias=False)
    fully_shard(model)
    for step in (1, 2):
        with torch.no_grad():
            model.weight.fill_(step)
        checkpoint.save(f"{directory}/step-0000000{step}", model, None)
    storage, ranks = LocalStorage(Path(directory)), ProcessExchange()

    def resume() -> Any:
        with torch.no_grad():
            model.weight.zero_()
        try:
            choice = newest_verified(
                storage, ranks, use=lambda name, found: load(storage, name, model, None, ranks, verified=found)
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            return type(error).__name__, str(error), float(model.weight.detach().to_local().max())
        return choice and choice.name, choice and choice.words, float(model.weight.detach().to_local().max())

    if world.rank == 1:
        with no_more_than(mib * MIB):
            first = resume()
    else:
        first = resume()
    there = sorted(each.name for each in Path(directory).iterdir())
    return first, resume(), there


@pytest.mark.parametrize(
    "mib", [pytest.param(8, id="none for a part"), pytest.param(48, id="for a part, and not for the chunk it is from")]
)
def test_a_whole_checkpoint_is_not_put_aside_where_one_rank_has_no_memory_for_it(tmp_path: Path, mib: int) -> None:
    ended = run_doomed(save_twice_and_resume_with, 2, str(tmp_path), mib)

    assert [(end.code, end.error) for end in ended] == [(0, None)] * 2
    assert len({end.value[0] for end in ended}) == 1
    for (kind, words, weight), second, there in (end.value for end in ended):
        assert kind == "CheckpointUnreadable"
        assert f"{os.uname().nodename} has no memory left for 32.0 MiB of it. Nothing is known of its bytes" in words
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


def test_a_chunk_that_asks_for_more_than_it_holds_is_damaged_however_little_memory_there_is() -> None:
    whole = stored(torch.ones(PART // 4))
    bomb = packed(whole)

    with no_more_than(8 * MIB):
        with pytest.raises(CheckpointUnreadable, match="run/shard cannot be read: .* has no memory left"):
            chunk_from(whole, "run/shard")
        found = chunk_from(bomb, "run/shard")

    assert found is None
    part = chunk_from(whole, "run/shard")
    assert part is not None
    assert float(part.sum()) == PART // 4


def test_however_much_memory_lacks_a_whole_chunk_is_never_taken_for_a_damaged_one() -> None:
    whole = stored(torch.ones(PART // 4))  # so large that each allocation asks the system
    found = []

    for kib in (*range(0, 4 << 10, 64), *range(4 << 10, 48 << 10, 2 << 10)):
        with no_more_than(kib << 10):
            try:
                part = chunk_from(whole, "run/shard")
            except (CheckpointUnreadable, MemoryError) as error:
                found.append(type(error).__name__)
            else:
                found.append("damaged" if part is None else "whole")
                del part

    assert set(found) == {"CheckpointUnreadable", "whole"}


def test_a_metadata_that_asks_for_more_than_it_holds_is_damaged_however_little_memory_there_is(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    checkpoint.save(str(path), nn.Linear(3, 3), None)
    metadata = pickle.loads((path / "dcp/.metadata").read_bytes())
    name, entry = next(iter(metadata.state_dict_metadata.items()))
    metadata.state_dict_metadata |= {f"{name}.{number}": replace(entry) for number in range(100_000)}
    data = pickle.dumps(metadata)
    # Remember None under number 2^30 - 1: a table of 16 GiB.
    asking = [data[:2] + b"N" + number + b"0" + data[2:] for number in (b"r\xff\xff\xff\x3f", b"p1073741823\n")]

    with no_more_than(4 * MIB), pytest.raises(CheckpointUnreadable, match="Nothing is known of its bytes"):
        read_dcp_metadata(data, "run/.metadata")
    for asks in asking:
        with no_more_than(512 * MIB), pytest.raises(CheckpointCorrupt, match="cannot be read"):
            read_dcp_metadata(asks, "run/.metadata")

    assert len(read_dcp_metadata(data, "run/.metadata").state_dict_metadata) > 100_000


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
