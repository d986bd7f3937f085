"""Damaged checkpoints are refused by name: bits, pages, whole files, other people's shards, and manifests."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointCorrupt, NoCheckpoint
from holdfast.checkpoint.format.manifest import FORMAT, NAME, Manifest, parse
from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.place.hashing import hash_bytes
from holdfast.errors import HoldfastError
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, contents, optimizer_of, save_after
from tests.checkpoint.damage import SHARDS, flip_a_bit, rewrite_manifest, zero_a_page

FLIPS, PAGES = 1000, 300
FAST_FLIPS, FAST_PAGES = 80, 30
# A call of the ranks has a limit of time, which many loads on a busy machine pass.
LOADS_A_CALL = 100
SHARD = SHARDS[1]
TRAINED = "model.blocks.0.trained.weight"


@pytest.fixture(scope="module")
def saved(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with two checkpoints; nobody changes it."""
    run = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        pools(2).run(save_after, str(run / f"step-0000000{step}"), step)
    return run


@pytest.fixture
def step_2(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of the newer one, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "run")) / "step-00000002"


def load_each_damage(world: World, path: str, kind: str, seed: int, count: int) -> tuple[Counter[str], bool]:
    """Damage, try to load, mend, and again; return what came of it, and whether the live model was touched."""
    import torch.distributed as dist

    damage = {"bit": flip_a_bit, "page": zero_a_page}[kind]
    chance = random.Random(seed)
    files = sorted(file for file in Path(path).rglob("*") if file.is_file())
    toy = build(world, seed=1)
    optimizer = optimizer_of(toy)
    before = contents(toy, optimizer)
    found: Counter[str] = Counter()
    for _ in range(count):
        undo = damage(files, chance) if world.is_first else None
        dist.barrier()
        try:
            checkpoint.load(path, toy, optimizer)
            found["loaded silently"] += 1
        except HoldfastError as error:
            found[type(error).__name__] += 1
        dist.barrier()
        if undo is not None:
            undo[0].write_bytes(undo[1])
        dist.barrier()
    return found, contents(toy, optimizer) == before


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        pytest.param("bit", FAST_FLIPS, id="07-bit flip in a shard or any other file"),
        pytest.param("page", FAST_PAGES, id="08-zeroed page of 4 KiB"),
        pytest.param("bit", FLIPS, marks=pytest.mark.slow, id="07-many flipped bits"),
        pytest.param("page", PAGES, marks=pytest.mark.slow, id="08-many zeroed pages"),
    ],
)
def test_no_flipped_bit_and_no_zeroed_page_is_ever_loaded(pools: Any, step_2: Path, kind: str, count: int) -> None:
    for first in range(0, count, LOADS_A_CALL):
        loads = min(LOADS_A_CALL, count - first)
        for found, untouched in pools(2).run(load_each_damage, str(step_2), kind, 20261121 + first, loads):
            assert found == {"CheckpointCorrupt": loads}
            assert untouched


def truncated(size: int) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        with (folder / SHARD).open("rb+") as file:
            file.truncate(size)

    return cut


def swapped(folder: Path) -> None:
    shutil.copyfile(folder.with_name("step-00000001") / SHARD, folder / SHARD)


def padded(folder: Path) -> None:
    with (folder / SHARD).open("ab") as file:
        file.write(b"\0")


def flipped_header(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[100] ^= 4
    (folder / SHARD).write_bytes(data)


def linked_elsewhere(folder: Path) -> None:
    (folder / "assets/extra").symlink_to("/etc/hostname")


DAMAGES: list[Any] = [
    pytest.param(truncated(0), rf"{SHARD} has 0 bytes, the manifest says", id="09-shard cut to nothing"),
    pytest.param(truncated(1000), rf"{SHARD} has 1000 bytes, the manifest says", id="09-shard truncated"),
    pytest.param(padded, rf"{SHARD} has \d+ bytes, the manifest says", id="09-shard with a byte more"),
    pytest.param(lambda folder: (folder / SHARD).unlink(), rf"lacks {SHARD}", id="10-shard missing"),
    pytest.param(swapped, rf"{SHARD} .*", id="11-shard of another step"),
    pytest.param(flipped_header, rf"{SHARD} is damaged: its hash is not", id="13-bit flip in a header"),
    pytest.param(
        lambda folder: (folder / shard_file(9)).write_bytes(b"x"),
        rf"holds {shard_file(9)}, which its manifest does not list",
        id="19-stale shard of a larger world",
    ),
    pytest.param(linked_elsewhere, r"holds assets/extra, which", id="19-a link out of the tree"),
]


def load_both_ways(world: World, path: str) -> tuple[tuple[str, str], bool]:
    """Try to load; return the error, and whether the live model is as it was."""
    toy = build(world, seed=1)
    optimizer = optimizer_of(toy)
    before = contents(toy, optimizer)
    try:
        checkpoint.load(path, toy, optimizer)
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return (type(error).__name__, str(error)), contents(toy, optimizer) == before
    return ("nothing", "loaded silently"), contents(toy, optimizer) == before


@pytest.mark.cases("all")
@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_missing_truncated_swapped_and_added_files_are_refused_by_name(
    pools: Any, step_2: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(step_2)

    outcomes = pools(2).run(load_both_ways, str(step_2))

    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1]
    assert outcomes[0][0][0] == "CheckpointCorrupt"
    with pytest.raises(CheckpointCorrupt, match=message):
        checkpoint.verify(str(step_2))


def test_a_swapped_shard_is_refused_even_where_its_size_and_its_file_hash_fit(pools: Any, step_2: Path) -> None:
    """The hashes of tensors were taken before anything was written."""
    swapped(step_2)
    rewrite_manifest(step_2)

    outcomes = pools(2).run(load_both_ways, str(step_2))

    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0][0] == "TensorsDiffer"
    assert "reads back differently from what was saved" in outcomes[0][0][1]
    assert outcomes[0][1]
    with pytest.raises(CheckpointCorrupt, match="its bytes are not those that were saved"):
        checkpoint.verify(str(step_2))


def without_chunk(manifest: Manifest) -> Manifest:
    """Drop one chunk of a trained matrix, as a faulty writer would."""
    entry = manifest.tensors[TRAINED]
    return replace(manifest, tensors={**manifest.tensors, TRAINED: replace(entry, chunks=entry.chunks[:1])})


@pytest.mark.parametrize("ranks", [1, 2, 3], ids="15-manifest without a chunk, loaded by {} ranks".format)
def test_a_tensor_of_which_the_manifest_lists_no_chunk_is_refused_at_any_number_of_ranks(
    pools: Any, step_2: Path, ranks: int
) -> None:
    rewrite_manifest(step_2, without_chunk)

    (error, untouched), *_ = pools(ranks).run(load_both_ways, str(step_2))

    assert error[0] == "CheckpointCorrupt"
    assert "blocks.0.trained.weight" in error[1]
    assert untouched
    with pytest.raises(CheckpointCorrupt, match=rf"{TRAINED}: its chunks hold 15 elements of 25"):
        checkpoint.verify(str(step_2))


def edited(change: Callable[[dict[str, Any]], None], *, sealed: bool) -> Callable[[bytes], bytes]:
    """Change a manifest's body, with its own hash made to fit or not."""

    def edit(data: bytes) -> bytes:
        outer = json.loads(data)
        change(outer["manifest"])
        if sealed:
            body = json.dumps(outer["manifest"], sort_keys=True, separators=(",", ":")).encode()
            outer["xxh3_128"] = hash_bytes(body)
        return json.dumps(outer, sort_keys=True, separators=(",", ":")).encode()

    return edit


def newer(body: dict[str, Any]) -> None:
    body["format"] = FORMAT + 1


def earlier(body: dict[str, Any]) -> None:
    body["format"] = FORMAT - 1


MANIFESTS: list[Any] = [
    pytest.param(lambda data: data.replace(b'"step":2', b'"step":1,"step":2'), "a key stands twice", id="a key twice"),
    pytest.param(lambda data: data + b"\n", "its own hash does not fit", id="a byte behind its end"),
    pytest.param(lambda data: data.replace(b'"step":2', b'"step": 2'), "its own hash does not fit", id="a space"),
    pytest.param(lambda data: data[: len(data) // 2], "is damaged", id="half of it"),
    pytest.param(lambda data: b"", "is damaged", id="nothing"),
    pytest.param(lambda data: b"[" * 200_000, "is damaged", id="brackets without end"),
    pytest.param(lambda data: data.replace(b'"step":2', b'"step":7'), "its own hash does not fit", id="another step"),
    pytest.param(edited(newer, sealed=False), "is damaged", id="41-a bit flipped in the number of its format"),
]


@pytest.mark.parametrize(("damage", "message"), MANIFESTS)
def test_a_manifest_that_is_not_byte_for_byte_what_was_written_is_damaged(
    saved: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    data = (saved / "step-00000002" / NAME).read_bytes()

    with pytest.raises(CheckpointCorrupt, match=message):
        parse(damage(data), "manifest.json")


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        pytest.param(newer, "Upgrade Holdfast.", id="41-a later version's manifest"),
        pytest.param(earlier, "`holdfast checkpoint convert {path}`", id="an earlier version's manifest"),
    ],
)
def test_the_manifest_of_another_version_is_refused_with_both_numbers(
    pools: Any, step_2: Path, change: Callable[[dict[str, Any]], None], advice: str
) -> None:
    file = step_2 / NAME
    file.write_bytes(edited(change, sealed=True)(file.read_bytes()))
    number = json.loads(file.read_bytes())["manifest"]["format"]

    errors = pools(2).run(load_both_ways, str(step_2))

    assert errors[0] == errors[1]
    assert errors[0][1]
    assert errors[0][0][0] == "OtherFormat"
    assert f"has format {number}, this version of Holdfast reads format {FORMAT}. " in errors[0][0][1]
    assert advice.format(path=step_2) in errors[0][0][1]


def test_a_manifest_without_files_is_no_checkpoint_of_ours(tmp_path: Path) -> None:
    (tmp_path / "step-00000001" / "tensors").mkdir(parents=True)

    with pytest.raises(NoCheckpoint, match="is no checkpoint of Holdfast: it holds tensors"):
        checkpoint.verify(str(tmp_path / "step-00000001"))


def test_a_whole_manifest_says_the_same_when_it_is_read_and_written_again(saved: Path) -> None:
    data = (saved / "step-00000002" / NAME).read_bytes()
    manifest = parse(data, "manifest.json")

    assert manifest.to_json() == data
    assert replace(manifest, step=3).hash != manifest.hash


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["a directory", "a pipe"])
def test_a_manifest_that_is_no_file_is_damage_and_is_not_waited_for(step_2: Path, make: Callable[[Path], None]) -> None:
    (step_2 / NAME).unlink()
    make(step_2 / NAME)

    with pytest.raises(CheckpointCorrupt, match=r"manifest\.json is no file: it is a (pipe|directory)\."):
        checkpoint.verify(str(step_2))
