"""A .metadata is a pickle: ours is read without running it, and without the memory it asks for."""

from __future__ import annotations

import pickle
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint
from holdfast.checkpoint.dcp_files import read_dcp_metadata
from holdfast.checkpoint.errors import CheckpointCorrupt
from tests.checkpoint.cases import load_into_other, save_after
from tests.checkpoint.damage import Touch, rewrite_manifest


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


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(touches_alone, id="14-hostile .metadata"),
        pytest.param(touches_inside_metadata, id="14-hostile object inside a real .metadata"),
        pytest.param(opens_by_an_allowed_class, id="14-method of an allowed class"),
    ],
)
def test_a_hostile_metadata_is_never_unpickled(pools: Any, saved: Path, tmp_path: Path, payload: Any) -> None:
    target = tmp_path / "executed"
    data = payload(saved, target)
    copy = hostile(saved, tmp_path, data)

    errors = pools(2).errors(load_into_other, str(copy))

    assert {name for name, _ in errors} == {"CheckpointCorrupt"}
    assert all(".metadata cannot be read: it asks for" in message for _, message in errors)
    with pytest.raises(CheckpointCorrupt):
        checkpoint.verify(str(copy))
    assert not target.exists()
    pickle.loads(data)
    assert target.exists(), "the payload does nothing, so the test shows nothing"


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
