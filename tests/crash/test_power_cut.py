"""The power goes while a save runs, or when it has returned: the disk holds a whole checkpoint at every moment.

A file system in a file is mounted; its image is copied while it is mounted, without a sync. The copy holds what had
reached the disk and nothing else, as after a power cut.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.export.card import Papers
from holdfast.checkpoint.export.write import export
from holdfast.checkpoint.keep.retention import read_pins, write_pins
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.checkpoint.saving.writer import SAVE_PHASES
from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.models.setup.model import blueprint
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.training import directory as run_directory
from holdfast.training.setup.model import build_policy
from tests.checkpoint.cases import newest_whole, save_after
from tests.crash.cases import ALL_STEPS, STEPS, look_after, session_of, straight, train_and_save
from tests.crash.processes import acknowledged, run_doomed
from tests.settings import plain_setting
from tests.training.cases import tree


def mount(*words: object) -> bool:
    return subprocess.run(["mount", *map(str, words)], capture_output=True, check=False).returncode == 0


def unmount(place: Path) -> None:
    subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Return an image and where it is mounted; data that nobody syncs stays in memory for ten minutes."""
    image, place = tmp_path / "disk", tmp_path / "mounted"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    made = shutil.which("mkfs.ext4") is not None and os.geteuid() == 0
    made = made and subprocess.run(["mkfs.ext4", "-q", image], capture_output=True, check=False).returncode == 0
    if not made or not mount("-o", "loop,commit=600,noauto_da_alloc", image, place):
        pytest.skip("needs root, mkfs.ext4 and a loop device")
    yield image, place
    unmount(place)


@pytest.mark.parametrize("ranks", [pytest.param(2, id="06-power loss after a save returned")])
def test_power_loss_after_a_save_returned_keeps_the_checkpoint(
    pools: Any, tmp_path: Path, disk: tuple[Path, Path], ranks: int
) -> None:
    image, place = disk
    directory = place / "run" / "checkpoints"
    directory.mkdir(parents=True)
    os.sync()
    pools(ranks).run(save_after, str(directory / "step-00000001"), 1)
    (place / "unsynced").write_bytes(b"x" * 100_000)

    after, remains = tmp_path / "after", tmp_path / "remains"
    shutil.copyfile(image, after)
    remains.mkdir()
    assert mount("-o", "loop", after, remains)
    try:
        unsynced = remains / "unsynced"
        lost = not unsynced.exists() or unsynced.read_bytes() != b"x" * 100_000
        storage = LocalStorage(remains / "run" / "checkpoints")
        choice = newest_whole(storage, RankGroup())
    finally:
        unmount(remains)

    assert lost, "the power cut lost nothing, so the test shows nothing"
    assert choice is not None
    assert choice.manifest.step == 1


def test_power_loss_after_an_export_was_published_keeps_every_file_of_it(
    pools: Any, tmp_path: Path, disk: tuple[Path, Path]
) -> None:
    image, place = disk
    (place / "r" / "exports").mkdir(parents=True)
    os.sync()

    exported = place / "r" / "exports" / "final"
    pools(2).run(export_a_model, exported)
    after, remains = tmp_path / "after", tmp_path / "remains"
    shutil.copyfile(image, after)
    remains.mkdir()
    assert mount("-o", "loop", after, remains)
    try:
        found = {path.name: path.read_bytes() for path in (remains / "r" / "exports" / "final").iterdir()}
    finally:
        unmount(remains)

    assert found == {path.name: path.read_bytes() for path in exported.iterdir()}
    assert {"config.json", "holdfast.yaml", "model.safetensors.index.json", "tokenizer.json"} <= found.keys()


def test_power_loss_after_a_run_began_keeps_its_identity(tmp_path: Path, disk: tuple[Path, Path]) -> None:
    image, place = disk
    run_directory.create(place / "runs" / "r", from_mapping(tree("(nowhere)"), SFTConfig), "sft")
    identity = run_directory.run_id(place / "runs" / "r")

    LocalStorage(place).replace("later", b"what the file system wrote down together with the names before it")
    after, remains = tmp_path / "after", tmp_path / "remains"
    shutil.copyfile(image, after)
    remains.mkdir()
    assert mount("-o", "loop", after, remains)
    try:
        found = run_directory.run_id(remains / "runs" / "r")
    finally:
        unmount(remains)

    assert found == identity


MAKES = """
from pathlib import Path
from holdfast.checkpoint.place.storage import LocalStorage
LocalStorage(Path("runs/r/checkpoints").absolute()).make("step")
"""


def test_every_directory_that_is_made_above_the_checkpoints_is_flushed_into_the_one_above_it(tmp_path: Path) -> None:
    """ext4 flushes them with anything else, so that a power cut on it would not show a name that nobody flushed."""
    trace = ["strace", "-f", "--seccomp-bpf", "-y", "-e", "trace=fsync", "-o", "trace"]
    if shutil.which("strace") is None or subprocess.run([*trace, "true"], cwd=tmp_path, check=False).returncode != 0:
        pytest.skip("needs strace")
    subprocess.run([*trace, sys.executable, "-c", MAKES], cwd=tmp_path, check=True)

    flushed = set(re.findall(r"fsync\(\d+<([^>]*)>\) += 0", (tmp_path / "trace").read_text()))

    assert {str(tmp_path), str(tmp_path / "runs"), str(tmp_path / "runs" / "r")} <= flushed


def test_power_loss_after_a_pin_keeps_it(tmp_path: Path, disk: tuple[Path, Path]) -> None:
    image, place = disk
    (place / "checkpoints").mkdir()
    storage = LocalStorage(place / "checkpoints")
    write_pins(storage, [1])
    os.sync()

    write_pins(storage, [1, 4])
    after, remains = tmp_path / "after", tmp_path / "remains"
    shutil.copyfile(image, after)
    remains.mkdir()
    assert mount("-o", "loop", after, remains)
    try:
        found = read_pins(LocalStorage(remains / "checkpoints"))
    finally:
        unmount(remains)

    assert found == {1, 4}
    assert storage.names() == ["pins.json"]


def export_a_model(world: World, directory: Path) -> None:
    config = from_mapping(tree("(nowhere)"), SFTConfig)
    ranks = RankGroup()
    origin = blueprint(config.model, Path(), seed=0)
    policy = build_policy(plain_setting(config, world), origin).module
    papers = Papers(texts={"holdfast.yaml": "steps: 4"})
    export(policy, origin, directory, ranks, largest_file_bytes=20_000, papers=papers)


def save_and_photograph(world: World, directory: Path, image: Path, photos: Path, background: bool) -> None:
    """Save three steps; at each phase of the last save, copy what is on the disk, as a power cut leaves it."""
    counted: Counter[str] = Counter()

    def reached(phase: str) -> None:
        counted[phase] += 1
        if world.is_first and counted[phase] == STEPS:
            place = photos / f"{len(list(photos.iterdir())):02} {phase} {acknowledged(photos)[-1]}"
            subprocess.run(["cp", "--sparse=always", image, place], check=True)

    session = session_of(LocalStorage(directory), world, background=background, reached=reached)
    train_and_save(world, session, photos)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "background",
    [
        pytest.param(False, id="06-power loss in each phase of a save, waiting"),
        pytest.param(True, id="06-power loss in each phase of a save, in the background"),
    ],
)
def test_power_loss_in_any_phase_of_a_save_loses_nothing_that_was_confirmed(
    pools: Any, tmp_path: Path, disk: tuple[Path, Path], background: bool
) -> None:
    image, mounted = disk
    photos, remains = tmp_path / "photos", tmp_path / "remains"
    photos.mkdir()
    remains.mkdir()
    states, losses = pools(2).run(straight)[0]

    ended = run_doomed(save_and_photograph, 2, mounted / "run" / "checkpoints", image, photos, background)

    assert [(end.code, end.error) for end in ended] == [(0, None)] * 2
    cuts = [photo.name.split(" ", 1)[1].rpartition(" ") for photo in sorted(photos.iterdir())]
    assert [phase for phase, _, _ in cuts] == [*SAVE_PHASES, "read back", "retention"]
    places = []
    for photo in sorted(photos.iterdir()):
        assert mount("-o", "loop", photo, remains)
        places.append(tmp_path / photo.name)
        shutil.copytree(remains / "run" / "checkpoints", places[-1])
        unmount(remains)
    for (phase, _, confirmed), found in zip(cuts, pools(2).run(look_after, places)[0], strict=True):
        assert found["chosen"] == (STEPS if phase in {"published", "read back", "retention"} else STEPS - 1), phase
        assert found["chosen"] >= int(confirmed)
        assert found["contents"] == states[found["chosen"]]
        assert found["losses"] == {step: losses[step] for step in range(found["chosen"] + 1, ALL_STEPS + 1)}
        assert "skipped" not in found["words"]
