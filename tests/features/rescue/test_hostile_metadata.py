"""A .metadata is a pickle: ours is read without running it, and without the memory it asks for."""

from __future__ import annotations

import io
import pickle
import random
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from holdfast.checkpoint.format.dcp import read_dcp_metadata
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, contents, load_into_other, newest_whole, optimizer_of, save_after
from tests.checkpoint.damage import Touch, rewrite_manifest
from tests.crash.processes import run_doomed


@pytest.fixture(scope="module")
def saved(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "step-00000001"
    pools(2).run(save_after, str(path), 1)
    return path


def hostile(saved: Path, place: Path, payload: bytes) -> Path:
    """Return a copy whose .metadata is replaced and whose manifest fits."""
    copy = Path(shutil.copytree(saved, place / "run" / saved.name))
    (copy / "dcp/.metadata").write_bytes(payload)
    rewrite_manifest(copy)
    return copy


def touches_alone(saved: Path, target: Path) -> bytes:
    return pickle.dumps(Touch(target))


def touches_inside_metadata(saved: Path, target: Path) -> bytes:
    metadata = pickle.loads((saved / "dcp/.metadata").read_bytes())
    metadata.planner_data = Touch(target)
    return pickle.dumps(metadata)


def opens_by_an_allowed_class(saved: Path, target: Path) -> bytes:
    """`pathlib.Path` is allowed; its methods must not be."""
    return b"\x80\x04cpathlib\nPath.touch\n" + pickle.dumps(target)[2:-1] + b"\x85R."


def opens_by_an_attribute(saved: Path, target: Path) -> bytes:
    """`getattr` is how some versions of Python write a member of an enumeration; of nothing else is it answered."""
    path_and_touch = pickle.dumps(Path)[2:-1] + pickle.dumps("touch")[2:-1]
    return b"\x80\x04cbuiltins\ngetattr\n" + path_and_touch + b"\x86R" + pickle.dumps(target)[2:-1] + b"\x85R."


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(touches_alone, id="14-hostile .metadata"),
        pytest.param(touches_inside_metadata, id="14-hostile object inside a real .metadata"),
        pytest.param(opens_by_an_allowed_class, id="14-method of an allowed class"),
        pytest.param(opens_by_an_attribute, id="14-attribute of an allowed class"),
    ],
)
def test_a_hostile_metadata_is_never_unpickled(pools: Any, saved: Path, tmp_path: Path, payload: Any) -> None:
    target = tmp_path / "executed"
    data = payload(saved, target)
    copy = hostile(saved, tmp_path, data)

    errors = pools(2).errors(load_into_other, str(copy))

    assert {name for name, _ in errors} == {"CheckpointCorrupt"}
    assert all(".metadata cannot be read: it asks for" in message for _, message in errors)
    with pytest.raises(CheckpointCorrupt, match=".metadata cannot be read: it asks for"):
        checkpoint.verify(str(copy))
    assert not target.exists()
    pickle.loads(data)
    assert target.exists(), "the payload does nothing, so the test shows nothing"


class PicklerOf(pickle.Pickler):
    """Writes members of enumerations as another version of Python does."""

    def __init__(self, file: io.BytesIO, *, by_name: bool) -> None:
        super().__init__(file)
        self.by_name = by_name

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Enum):
            return NotImplemented
        return (getattr, (type(value), value.name)) if self.by_name else (type(value), (value.value,))


@pytest.mark.parametrize("by_name", [pytest.param(True, id="3.11.0 to 3.11.3"), pytest.param(False, id="others")])
def test_metadata_of_any_version_of_python_is_read(saved: Path, by_name: bool) -> None:
    data = (saved / "dcp/.metadata").read_bytes()
    file = io.BytesIO()
    PicklerOf(file, by_name=by_name).dump(pickle.loads(data))

    metadata = read_dcp_metadata(file.getvalue(), "of another Python")

    assert (b"getattr" in file.getvalue()) == by_name
    assert metadata == pickle.loads(data)
    formats = {entry.properties.memory_format for entry in metadata.state_dict_metadata.values()}
    assert formats == {torch.contiguous_format}


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_path_of_any_version_of_python_is_read(saved: Path, module: str) -> None:
    """`dcp.save` notes where it wrote, as a path if it was called with one; Python 3.13 names its class otherwise."""
    metadata = pickle.loads((saved / "dcp/.metadata").read_bytes())
    metadata.storage_meta.checkpoint_id = Path("somewhere")
    data = re.sub(rb"cpathlib(\._local)?\n", f"c{module}\n".encode(), pickle.dumps(metadata, protocol=2))

    assert f"c{module}\nPosixPath".encode() in data
    assert read_dcp_metadata(data, "of another Python", foreign=True) == metadata


@pytest.mark.parametrize(
    ("of", "name"),
    [(_MEM_FORMAT_ENCODING, "mro"), (_MEM_FORMAT_ENCODING, "__class__"), (Path, "touch"), (torch.Size, "numel")],
)
def test_no_other_attribute_is_returned(saved: Path, of: Any, name: str) -> None:
    file = io.BytesIO()
    metadata = pickle.loads((saved / "dcp/.metadata").read_bytes())
    metadata.planner_data = Attribute(of, name)
    PicklerOf(file, by_name=True).dump(metadata)

    with pytest.raises(CheckpointCorrupt, match="an attribute that is no memory format"):
        read_dcp_metadata(file.getvalue(), "hostile")


CHANGES = {
    "attribute": b"cpathlib\nPosixPath\n(N}X\x0a\x00\x00\x00is_symlinkctorch\nSize\nstb.",
    "new attribute": b"cpathlib\nPosixPath\n(N}X\x04\x00\x00\x00evilctorch\nSize\nstb.",
    "base": b"cpathlib\nPosixPath\n(N}X\x09\x00\x00\x00__bases__cpathlib\nPath\n\x85stb.",
    "member": b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n(N}X\x04\x00\x00\x00evilK\x07stb.",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_class_that_a_pickle_would_change_stays_as_it_is(saved: Path, change: str) -> None:
    data, kinds = b"\x80\x02" + CHANGES[change], (type(saved), _MEM_FORMAT_ENCODING)
    before = [(kind.__bases__, dict(vars(kind))) for kind in kinds]

    with pytest.raises(CheckpointCorrupt, match="cannot be read: it sets attributes of the class"):
        read_dcp_metadata(data, "hostile")

    assert [(kind.__bases__, dict(vars(kind))) for kind in kinds] == before


def test_a_function_that_a_pickle_changes_is_its_own(saved: Path) -> None:
    change = b"\x80\x02c%s\n%s\n(N}X\x0c\x00\x00\x00__defaults__)stb."
    for module, name in ((b"builtins", b"getattr"), (b"torch.serialization", b"_get_layout")):
        with pytest.raises(CheckpointCorrupt):
            read_dcp_metadata(change % (module, name), "hostile")
    assert read_dcp_metadata((saved / "dcp/.metadata").read_bytes(), "ours")


class Attribute:
    """Pickled as an attribute of something."""

    def __init__(self, of: Any, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> Any:
        return getattr, (self.of, self.name)


def test_an_entry_that_would_be_unpickled_is_refused(pools: Any, saved: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata = pickle.loads((saved / "dcp/.metadata").read_bytes())
    metadata.state_dict_metadata["model.blocks.0.trained.weight"] = BytesStorageMetadata()
    copy = hostile(saved, tmp_path, pickle.dumps(metadata))

    errors = pools(2).errors(load_into_other, str(copy))

    assert {name for name, _ in errors} == {"CheckpointCorrupt"}
    assert "which is no tensor: reading it would unpickle it" in errors[0][1]


def test_metadata_that_leads_to_files_of_others_is_refused(pools: Any, saved: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((saved / "dcp/.metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../../../elsewhere"
    copy = hostile(saved, tmp_path, pickle.dumps(metadata))

    errors = pools(2).errors(load_into_other, str(copy))

    assert {name for name, _ in errors} == {"CheckpointCorrupt"}
    assert "it leads out of the checkpoint, to ../../../elsewhere" in errors[0][1]


def test_any_flip_in_metadata_that_its_manifest_hides_is_refused_or_changes_nothing(saved: Path) -> None:
    """Past the hash of the file; whatever the unpickler makes of it, nobody meets another error than ours."""
    data, chance = (saved / "dcp/.metadata").read_bytes(), random.Random(13)
    refused = 0

    for _ in range(1000):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if b"r" in damaged and damaged.count(b"r") > data.count(b"r"):
            continue  # the only opcode whose argument is an amount of memory
        try:
            read_dcp_metadata(bytes(damaged), "damaged")
        except CheckpointCorrupt:
            refused += 1

    assert refused > 500


MEMO = b"r\xff\xff\xff\x3f"
"""Remember under number 2^30 - 1: Python's unpickler then makes a table of 16 GiB."""

BOUNDED = """
import resource, sys
from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointCorrupt
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        checkpoint.verify(path)
    except CheckpointCorrupt as error:
        print("refused:", error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit_mib", [pytest.param(64, id="13-.metadata that asks for gigabytes")])
def test_a_damaged_metadata_that_asks_for_gigabytes_gets_none(saved: Path, tmp_path: Path, limit_mib: int) -> None:
    data = (saved / "dcp/.metadata").read_bytes()
    accident = Path(shutil.copytree(saved, tmp_path / saved.name))
    (accident / "dcp/.metadata").write_bytes(data[:2] + MEMO + data[7:])

    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, accident], capture_output=True, text=True, check=True, timeout=120
    )

    refused, grown = done.stdout.splitlines()
    assert refused.startswith("refused:")
    assert ".metadata is damaged: its hash is not the manifest's" in refused
    assert int(grown) < limit_mib


BITS = tuple(1 << bit for bit in range(8))
ASKS_FOR_MUCH = (b"r", b"\x8d", b"\x8e", b"\x96", b"B", b"X", b"\x95", b"T", b"\x8b")
"""Opcodes of pickles that are followed by an amount of memory, or by a length."""


def load_each_flip(world: World, directory: str, count: int) -> tuple[Counter[str], bool, int, list[str]]:
    """Flip bits of the newest .metadata, at random and into every opcode that asks for memory; try to load each time.

    Returns:
        What came of it; whether the live model stayed as it was; by how many MiB memory grew; what is chosen then.
    """
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    newest = Path(directory) / "step-00000002"
    file, chance = newest / "dcp/.metadata", random.Random(13)
    data = file.read_bytes()
    flips = [(chance.randrange(len(data)), 1 << chance.randrange(8)) for _ in range(count)]
    flips += [(at, bit) for at, byte in enumerate(data) for bit in BITS if bytes([byte ^ bit]) in ASKS_FOR_MUCH][::40]
    toy = build(world, seed=1)
    optimizer = optimizer_of(toy)
    before, memory = contents(toy, optimizer), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: Counter[str] = Counter()
    for at, bit in flips:
        if world.is_first:
            file.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        dist.barrier()
        try:
            checkpoint.load(str(newest), toy, optimizer)
            found["loaded silently"] += 1
        except CheckpointCorrupt as error:
            found["named" if ".metadata is damaged: its hash is not the manifest's" in str(error) else str(error)] += 1
        dist.barrier()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) // 1024
    untouched = contents(toy, optimizer) == before
    choice = newest_whole(LocalStorage(Path(directory)), RankGroup())
    return found, untouched, grown, [] if choice is None else [choice.name, choice.message]


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(50, marks=pytest.mark.slow, id="13-bit flips in .metadata, loaded by 2 ranks"),
        pytest.param(200, marks=pytest.mark.slow, id="13-more bit flips in .metadata, loaded by 2 ranks"),
    ],
)
def test_flips_in_metadata_are_refused_by_all_ranks_without_the_memory_they_ask_for(
    pools: Any, tmp_path: Path, count: int
) -> None:
    for step in (1, 2):
        pools(2).run(save_after, str(tmp_path / "run" / f"step-0000000{step}"), step)

    ended = run_doomed(load_each_flip, 2, str(tmp_path / "run"), count)

    assert [(end.code, end.error) for end in ended] == [(0, None)] * 2
    for found, untouched, grown, chosen in (end.value for end in ended):
        assert set(found) == {"named"}
        assert found["named"] > count + 20
        assert untouched
        assert grown < 200
        assert chosen[0] == "step-00000001"
        assert "skipped step 2 (dcp/.metadata is damaged: its hash is not the manifest's" in chosen[1]


def in_a_shard(copy: Path, target: Path) -> None:
    """Replace the first stored tensor by an archive of torch's whose pickle creates a file."""
    archive = io.BytesIO()
    torch.save(Touch(target), archive)
    metadata = pickle.loads((copy / "dcp/.metadata").read_bytes())
    index = next(iter(metadata.storage_data))
    info = metadata.storage_data[index]
    shard = copy / "dcp" / info.relative_path
    data = shard.read_bytes()
    metadata.storage_data[index] = replace(info, offset=len(data), length=len(archive.getvalue()))
    shard.write_bytes(data + archive.getvalue())
    (copy / "dcp/.metadata").write_bytes(pickle.dumps(metadata))


def in_a_rank_s_state(copy: Path, target: Path) -> None:
    (copy / "rank/shard-1.json").write_bytes(pickle.dumps(Touch(target)))


def in_the_run_s_state(copy: Path, target: Path) -> None:
    (copy / "trainer.json").write_bytes(pickle.dumps(Touch(target)))


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(in_a_shard, id="14-hostile tensor in a shard"),
        pytest.param(in_a_rank_s_state, id="14-hostile state of a rank"),
        pytest.param(in_the_run_s_state, id="14-hostile state of the run"),
    ],
)
def test_a_hostile_pickle_anywhere_else_is_never_run_either(
    pools: Any, saved: Path, tmp_path: Path, place: Callable[[Path, Path], None]
) -> None:
    target = tmp_path / "executed"
    copy = Path(shutil.copytree(saved, tmp_path / "run" / saved.name))
    place(copy, target)
    rewrite_manifest(copy)

    errors = pools(2).outcomes(load_into_other, str(copy), timeout_seconds=60)

    assert not any(ok for ok, _ in errors)
    assert {error[0] for _, error in errors} == {"TensorsDiffer" if place is in_a_shard else "CheckpointCorrupt"}
    if place is in_a_shard:
        with pytest.raises(CheckpointCorrupt):
            checkpoint.verify(str(copy))
    assert not target.exists()


def test_a_flip_in_metadata_is_found_by_its_hash_before_it_is_read(saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / saved.name))
    file = copy / "dcp/.metadata"
    data, chance = file.read_bytes(), random.Random(5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(100):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(CheckpointCorrupt, match="its hash is not the manifest's"):
            checkpoint.verify(str(copy))

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
