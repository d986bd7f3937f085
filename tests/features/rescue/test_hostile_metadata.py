"""A .metadata of DCP is a pickle: it is read without running it, and without the memory it asks for."""

from __future__ import annotations

import io
import pickle
import random
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.features.rescue.reading.dcp_directory import METADATA, DcpDirectory
from holdfast.features.rescue.reading.dcp_metadata import read_dcp_metadata
from holdfast.features.rescue.reading.record import DamagedFile, ForeignCheckpoint
from holdfast.parallel.mesh import World
from tests.checkpoint.damage import Touch
from tests.checkpoint.test_short_of_memory import MIB, alone, keep_nothing_back, outcome

WEIGHT = "model.0.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what torch's own writer leaves of one process."""
    folder = tmp_path_factory.mktemp("dcp")
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    state: dict[str, Any] = {"model": model.state_dict(), "step": torch.tensor(2)}
    with warnings.catch_warnings(action="ignore"):  # one process is meant
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def opened(folder: Path) -> DcpDirectory:
    return DcpDirectory(folder, ForeignCheckpoint("DCP", "a directory", folder))


def with_metadata(place: Path, payload: bytes) -> Path:
    (place / METADATA).write_bytes(payload)
    return place


def metadata_of(saved: Path) -> Any:
    return pickle.loads((saved / METADATA).read_bytes())


def touches_alone(saved: Path, target: Path) -> bytes:
    return pickle.dumps(Touch(target))


def touches_inside_metadata(saved: Path, target: Path) -> bytes:
    metadata = metadata_of(saved)
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
def test_a_hostile_metadata_is_never_unpickled(saved: Path, tmp_path: Path, payload: Any) -> None:
    target = tmp_path / "executed"
    data = payload(saved, target)

    with pytest.raises(DamagedFile, match=r"\.metadata cannot be read: it asks for"):
        opened(with_metadata(tmp_path, data))

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
    data = (saved / METADATA).read_bytes()
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
    metadata = metadata_of(saved)
    metadata.storage_meta.checkpoint_id = Path("somewhere")
    data = re.sub(rb"cpathlib(\._local)?\n", f"c{module}\n".encode(), pickle.dumps(metadata, protocol=2))

    assert f"c{module}\nPosixPath".encode() in data
    assert read_dcp_metadata(data, "of another Python") == metadata


@pytest.mark.parametrize(
    ("of", "name"),
    [(_MEM_FORMAT_ENCODING, "mro"), (_MEM_FORMAT_ENCODING, "__class__"), (Path, "touch"), (torch.Size, "numel")],
)
def test_no_other_attribute_is_returned(saved: Path, of: Any, name: str) -> None:
    file = io.BytesIO()
    metadata = metadata_of(saved)
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

    with pytest.raises(CheckpointCorrupt, match="cannot be read: sets attributes of a class"):
        read_dcp_metadata(data, "hostile")

    assert [(kind.__bases__, dict(vars(kind))) for kind in kinds] == before


def test_a_function_that_a_pickle_changes_is_its_own(saved: Path) -> None:
    change = b"\x80\x02c%s\n%s\n(N}X\x0c\x00\x00\x00__defaults__)stb."
    for module, name in ((b"builtins", b"getattr"), (b"torch.serialization", b"_get_layout")):
        with pytest.raises(CheckpointCorrupt):
            read_dcp_metadata(change % (module, name), "hostile")
    assert read_dcp_metadata((saved / METADATA).read_bytes(), "ours")


class Attribute:
    """Pickled as an attribute of something."""

    def __init__(self, of: Any, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> Any:
        return getattr, (self.of, self.name)


def test_an_entry_that_is_no_tensor_is_not_read_as_one(saved: Path, tmp_path: Path) -> None:
    metadata = metadata_of(saved)
    metadata.state_dict_metadata[WEIGHT] = BytesStorageMetadata()
    directory = opened(with_metadata(tmp_path, pickle.dumps(metadata)))

    assert not directory.is_tensor(WEIGHT)
    with pytest.raises(DamagedFile, match="is no tensor"):
        directory.tensor(WEIGHT)


def test_metadata_that_leads_to_files_of_others_is_refused(saved: Path, tmp_path: Path) -> None:
    metadata = metadata_of(saved)
    next(iter(metadata.storage_data.values())).relative_path = "../../../elsewhere"

    with pytest.raises(DamagedFile, match=r"it leads out of the checkpoint, to \.\./\.\./\.\./elsewhere"):
        opened(with_metadata(tmp_path, pickle.dumps(metadata)))


def test_any_flip_in_metadata_is_refused_or_read(saved: Path, tmp_path: Path) -> None:
    """DCP keeps no hash of it; whatever the unpickler makes of it, nobody meets another error than ours."""
    data, chance = (saved / METADATA).read_bytes(), random.Random(13)
    refused = 0

    for _ in range(1000):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        try:
            opened(with_metadata(tmp_path, bytes(damaged)))
        except DamagedFile:
            refused += 1

    assert refused > 500


MEMO = b"r\xff\xff\xff\x3f"
"""Remember under number 2^30 - 1: Python's unpickler then makes a table of 16 GiB."""

BITS = tuple(1 << bit for bit in range(8))
ASKS_FOR_MUCH = (b"r", b"\x8d", b"\x8e", b"\x96", b"B", b"X", b"\x95", b"T", b"\x8b")
"""Opcodes of pickles that are followed by an amount of memory, or by a length."""

BOUNDED = """
import resource, sys
from pathlib import Path
import holdfast.features.rescue.reading.dcp_metadata
from holdfast.features.rescue.reading.dcp_directory import DcpDirectory
from holdfast.features.rescue.reading.record import DamagedFile, ForeignCheckpoint
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
refused = 0
for path in map(Path, sys.argv[1:]):
    try:
        DcpDirectory(path, ForeignCheckpoint("DCP", "a directory", path))
    except DamagedFile as error:
        refused += 1
print(refused, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit_mib", [pytest.param(64, id="13-.metadata that asks for gigabytes")])
def test_a_damaged_metadata_that_asks_for_gigabytes_gets_none(saved: Path, tmp_path: Path, limit_mib: int) -> None:
    data, folders = (saved / METADATA).read_bytes(), []
    flips = [(at, bit) for at, byte in enumerate(data) for bit in BITS if bytes([byte ^ bit]) in ASKS_FOR_MUCH]
    damaged = [data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :] for at, bit in flips]
    for number, each in enumerate([data[:2] + MEMO + data[7:], *damaged]):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        folders.append(with_metadata(folder, each))

    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, *folders], capture_output=True, text=True, check=True, timeout=120
    )

    refused, grown = map(int, done.stdout.split())
    assert 1 + len(flips) // 2 < refused <= 1 + len(flips)
    assert grown < limit_mib


def read_metadata(world: World, data: bytes) -> list[str]:
    keep_nothing_back()
    # Remember None under number 2^30 - 1: a table of 16 GiB.
    asking = [data[:2] + b"N" + number + b"0" + data[2:] for number in (MEMO, b"p1073741823\n")]
    return [
        outcome(lambda: read_dcp_metadata(data, "run/.metadata"), 4),
        *(outcome(lambda each=each: read_dcp_metadata(each, "run/.metadata"), 512) for each in asking),
        outcome(lambda: read_dcp_metadata(data, "run/.metadata"), 4096),
    ]


def test_however_little_memory_there_is_only_a_metadata_that_asks_for_more_than_it_holds_is_damaged(
    saved: Path,
) -> None:
    metadata = metadata_of(saved)
    name, entry = next(iter(metadata.state_dict_metadata.items()))
    metadata.state_dict_metadata |= {f"{name}.{number:0{MIB}}": replace(entry) for number in range(100)}

    found = alone(read_metadata, pickle.dumps(metadata))

    assert found == ["CheckpointUnreadable", "CheckpointCorrupt", "CheckpointCorrupt", "read"]
