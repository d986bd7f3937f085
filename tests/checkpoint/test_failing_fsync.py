"""A disk that takes bytes and then cannot make them durable: whatever was being written is named by its path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.format.snapshot import take
from holdfast.checkpoint.place.layout import TENSORS
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.parallel.mesh import World
from tests.checkpoint.adapter_files import write_adapters_of
from tests.checkpoint.cases import build, optimizer_of, step
from tests.crash.cases import session_of
from tests.crash.kernel import KNOWN_MACHINE, refuse_to_sync
from tests.crash.processes import run_doomed

pytestmark = KNOWN_MACHINE

STAGED = r"\.staging-step-00000002-\w+"


def save_twice(world: World, place: Path, victim: int, phase: str) -> None:
    """Save two steps; from a phase of the second save on, the kernel refuses a rank's fsyncs."""
    toy = build(world)
    optimizer = optimizer_of(toy)
    phases: list[str] = []

    def reached(name: str) -> None:
        phases.append(name)
        if world.rank == victim and name == phase and phases.count(phase) == 2:
            refuse_to_sync()

    session = session_of(LocalStorage(place), world, background=False, reached=reached)
    for number in (1, 2):
        step(world, toy, optimizer, number)
        session.save(take(toy, optimizer), number)
        session.collect()


@pytest.mark.parametrize(
    ("victim", "phase", "path"),
    [
        (1, "shards", rf"/{STAGED}/{shard_file(1)}"),
        (1, "rank state", rf"/{STAGED}/rank/rank-00001\.json"),
        (0, "manifest", rf"/{STAGED}/manifest\.json"),
        (0, "sync", rf"/{STAGED}/{TENSORS}"),
        (0, "publish", ""),
    ],
    ids=["shard", "state of a rank", "manifest", "directory of shards", "directory of checkpoints"],
)
def test_a_save_whose_fsync_fails_names_the_file_on_all_ranks(
    tmp_path: Path, victim: int, phase: str, path: str
) -> None:
    place = tmp_path / "checkpoints"

    ended = run_doomed(save_twice, 2, place, victim, phase)

    assert ended[0].error == ended[1].error
    assert ended[0].error is not None
    kind, message = ended[0].error
    assert kind == "SaveFailed"
    assert re.match(rf"rank {victim} could not save .*: Input/output error \({re.escape(str(place))}{path}\)", message)
    left = ["step-00000001", *["step-00000002"] * (phase == "publish")]  # its rename is done, and may not outlive a cut
    assert sorted(found.name for found in place.iterdir() if found.name.startswith(("step", ".s"))) == left


def export_over_another(_: World, place: Path, phase: str) -> None:
    write_adapters_of(1.0, place)
    write_adapters_of(1.0, place, lambda name: refuse_to_sync() if name == phase else None)


@pytest.mark.parametrize(
    ("phase", "path"),
    [("read back", r"/\.staging-best-adapter-\w+/adapter_model\.safetensors"), ("publish", "")],
    ids=["weights", "directory of exports"],
)
def test_an_export_whose_fsync_fails_names_the_file_or_the_directory(tmp_path: Path, phase: str, path: str) -> None:
    place = tmp_path / "exports" / "best-adapter"

    (ended,) = run_doomed(export_over_another, 1, place, phase)

    assert ended.error is not None
    kind, message = ended.error
    assert kind == "ExportFailed"
    assert re.search(rf"Input/output error: '{re.escape(str(place.parent))}{path}'", message), message
