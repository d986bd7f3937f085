"""Checkpoints on a real S3 server: named by one conditional put, verified, never overwritten."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint
from holdfast.checkpoint import verify
from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointUnreadable
from holdfast.checkpoint.format.manifest import NAME
from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.keep.retention import put_aside, remove_leftovers, steps
from holdfast.checkpoint.place.layout import QUARANTINE
from holdfast.checkpoint.place.storage import Storage, open_storage
from holdfast.features.object_store.bucket import FsspecBucket
from holdfast.features.object_store.storage import ObjectStorage
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, load_into_other, newest_whole, save_after
from tests.crash.runs import log_of, values_of
from tests.training.cases import run as train


@pytest.fixture(scope="module")
def saved(pools: Any, server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    # A worker that comes back to this file makes the fixture again, and the server has the earlier one still.
    path = f"s3://bucket/{tmp_path_factory.mktemp('run').name}/step-00000002"
    return path, pools(2).run(save_after, path, 2, server)[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_in_an_object_store_is_loaded_bit_for_bit(
    pools: Any, server: dict[str, str], saved: tuple[str, dict[str, Any]], ranks: int
) -> None:
    path, expected = saved

    found = pools(ranks).run(load_into_other, path, server)[0]

    assert {name: value for name, value in found.items() if "extra" not in name} == expected


def test_a_name_that_is_taken_is_refused_and_keeps_its_bytes(
    pools: Any, server: dict[str, str], saved: tuple[str, dict[str, Any]]
) -> None:
    path, _ = saved
    run = path.rpartition("/")[0]
    before = open_storage(run).read(f"step-00000002/{NAME}")

    errors = pools(2).errors(save_after, path, 1, server)

    assert {name for name, _ in errors} == {"SaveFailed"}
    assert "a checkpoint is never overwritten" in errors[0][1]
    assert errors[0] == errors[1]
    assert open_storage(run).read(f"step-00000002/{NAME}") == before
    assert verify(path).step == 2


def test_an_upload_that_an_error_breaks_off_is_no_object(server: dict[str, str]) -> None:
    storage = open_storage("s3://bucket/broken-off")

    with pytest.raises(ZeroDivisionError), storage.create("shard") as file:
        file.write(b"half")
        raise ZeroDivisionError

    gc.collect()  # which closes what is open
    assert not storage.exists("shard")


def test_a_changed_byte_is_found_and_its_tensor_named(pools: Any, server: dict[str, str]) -> None:
    path = "s3://bucket/damaged/step-00000001"
    pools(2).run(save_after, path, 1, server)
    flip_a_bit(open_storage("s3://bucket/damaged"), "step-00000001", shard_file(1))

    with pytest.raises(CheckpointCorrupt, match=rf"{shard_file(1)} is damaged.*Damaged tensors: (model|optim)\."):
        verify(path)


def flip_a_bit(storage: Storage, name: str, file: str) -> None:
    data = bytearray(storage.read(f"{name}/{file}"))
    data[-1] ^= 1
    storage.replace(f"{name}/{file}", bytes(data))


def train_there(world: World, values: dict[str, Any], variables: dict[str, str]) -> Any:
    os.environ.update(variables)
    return train(world, values)


@pytest.mark.slow
def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before_and_saves_that_step_again(
    pools: Any, server: dict[str, str], tmp_path: Path
) -> None:
    place = "s3://bucket/trained"
    values = values_of(tmp_path / "stopped", steps=4, checkpoint={"storage": place})
    pools(2).run(train_there, values, server)
    storage = open_storage(place)
    flip_a_bit(storage, "step-00000004", shard_file(1))
    damaged = {file: storage.hash(f"step-00000004/{file}") for file in storage.files("step-00000004")}

    pools(2).run(train_there, values | {"steps": 6}, server)

    assert list(steps(storage)) == [2, 4, 6]
    for name in steps(storage).values():
        verify(f"{place}/{name}")
    aside = [name for name in storage.names() if name.startswith(QUARANTINE)]
    assert len(aside) == 1
    assert {file: storage.hash(f"{aside[0]}/{file}") for file in storage.files(aside[0])} == damaged
    pools(2).run(train_there, values_of(tmp_path / "straight", steps=6), server)
    assert log_of(tmp_path / "stopped") == log_of(tmp_path / "straight")


@pytest.mark.slow
def test_a_run_goes_back_to_an_earlier_step_and_branches_by_an_address(
    pools: Any, server: dict[str, str], tmp_path: Path
) -> None:
    place = "s3://bucket/gone-back"
    values = values_of(tmp_path / "there", steps=4, checkpoint={"storage": place})
    pools(2).run(train_there, values, server)
    storage = open_storage(place)
    before = storage.read("step-00000004/manifest.json")

    back = {"storage": place, "resume": {"from": 2}}
    pools(2).run(train_there, values | {"steps": 6, "checkpoint": values["checkpoint"] | back}, server)
    branch = values_of(
        tmp_path / "branch", steps=6, checkpoint={"resume": {"from": f"{place}/step-00000004"}}, run={"name": "branch"}
    )
    pools(2).run(train_there, branch, server)

    assert list(steps(storage)) == [2, 4, 6]
    (later,) = (name for name in storage.names() if name.startswith(".later-step-00000004-"))
    assert storage.read(f"{later}/manifest.json") == before
    for name in steps(storage).values():
        verify(f"{place}/{name}")
    pools(2).run(train_there, values_of(tmp_path / "straight", steps=6), server)
    assert log_of(tmp_path / "there") == log_of(tmp_path / "straight")


@pytest.mark.parametrize("deletes", [False, True])
def test_a_checkpoint_that_is_half_put_aside_loses_no_file(server: dict[str, str], *, deletes: bool) -> None:
    class Dies(FsspecBucket):
        """Stops before a deletion, as a process that is killed does."""

        def delete(self, names: Sequence[str]) -> None:
            if not deletes:
                raise OSError(5, "killed")
            super().delete(names)

    run, name = f"s3://bucket/half-{deletes}", "step-00000004"
    files = {file: file.encode() for file in (NAME, shard_file(0), shard_file(1), "trainer.json")}
    storage = open_storage(run)
    for file, data in files.items():
        storage.put_new(f".staging-{name}-1a2b3c4d/{file}", data)
    storage.publish(f".staging-{name}-1a2b3c4d", name)

    with nullcontext() if deletes else pytest.raises(OSError, match="killed"):
        put_aside(ObjectStorage(run, Dies(run)), name)

    remove_leftovers(storage, wait=True)
    assert steps(storage) == ({} if deletes else {4: name})
    (aside,) = (other for other in storage.names() if other.startswith(QUARANTINE))
    assert {file: storage.read(f"{aside}/{file}") for file in storage.files(aside)} == files
    assert storage.files(name) == ([] if deletes else sorted(files))


def test_a_folder_gets_a_name_only_where_none_is(server: dict[str, str]) -> None:
    storage, name = open_storage("s3://bucket/conditional"), "step-00000001"
    for staging in (f".staging-{name}-1111aaaa", f".staging-{name}-2222bbbb"):
        storage.put_new(f"{staging}/{NAME}", staging.encode())

    storage.publish(f".staging-{name}-1111aaaa", name)

    with pytest.raises(FileExistsError):
        storage.publish(f".staging-{name}-2222bbbb", name)
    assert storage.read(f"{name}/{NAME}") == f".staging-{name}-1111aaaa".encode()
    assert storage.names() == [f".staging-{name}-2222bbbb", name]
    storage.remove(f".staging-{name}-1111aaaa")  # which has a name, and stays
    assert storage.read(f"{name}/{NAME}") == f".staging-{name}-1111aaaa".encode()


def test_what_a_killed_save_has_uploaded_is_cleared_away(server: dict[str, str]) -> None:
    storage = open_storage("s3://bucket/killed")
    storage.put_new(f".staging-step-00000004-1a2b3c4d/{shard_file(0)}", b"half")

    assert steps(storage) == {}
    remove_leftovers(storage, wait=True)

    assert storage.names() == []


def test_an_uploaded_folder_is_a_checkpoint_and_can_be_put_aside_and_saved_again(
    pools: Any, server: dict[str, str], saved: tuple[str, dict[str, Any]]
) -> None:
    path, _ = saved
    there, uploaded = open_storage(path.rpartition("/")[0]), open_storage("s3://bucket/uploaded")
    name = "step-00000002"
    for file in there.files(name):
        uploaded.replace(f"{name}/{file}", there.read(f"{name}/{file}"))
    assert verify(f"s3://bucket/uploaded/{name}").step == 2

    put_aside(uploaded, name)

    assert steps(uploaded) == {}
    assert not uploaded.exists(name)
    (aside,) = uploaded.names()
    assert uploaded.files(aside) == there.files(name)
    pools(2).run(save_after, f"s3://bucket/uploaded/{name}", 2, server)
    assert verify(f"s3://bucket/uploaded/{name}").step == 2
    uploaded.remove(aside)
    assert uploaded.names() == [name]
    assert verify(f"s3://bucket/uploaded/{name}").step == 2


def test_behind_a_damaged_reference_nothing_is_deleted(
    pools: Any, server: dict[str, str], saved: tuple[str, dict[str, Any]]
) -> None:
    url, name = "s3://bucket/damaged-reference", "step-00000001"
    pools(2).run(save_after, f"{url}/{name}", 1, server)
    bucket = FsspecBucket(url)
    reference = bucket.get(f"{name}.ref")
    objects = bucket.below("")
    bucket.put(f"{name}.ref", reference.replace(b"save-", b"save_"))

    with pytest.raises(CheckpointUnreadable, match=f"{name}.ref is damaged"):
        verify(f"{url}/{name}")
    remove_leftovers(open_storage(url), wait=True)

    assert bucket.below("") == objects
    bucket.put(f"{name}.ref", reference)
    assert verify(f"{url}/{name}").step == 1


def save_two_and_choose(world: World, url: str, variables: dict[str, str]) -> tuple[str, list[str], int]:
    """Save step 1, and step 2 with NaN; choose, and save step 2 again in the place of the one that was put aside."""
    os.environ.update(variables)
    toy = build(world)
    weight = toy.language_model.blocks[0].trained.weight  # type: ignore[union-attr]
    checkpoint.save(f"{url}/step-00000001", toy)
    weight.data.to_local()[:] = float("nan")  # type: ignore[union-attr, operator]
    checkpoint.save(f"{url}/step-00000002", toy)
    storage = open_storage(url)
    choice = newest_whole(storage, RankGroup())
    assert choice is not None
    weight.data.to_local()[:] = 1.0  # type: ignore[union-attr, operator]
    checkpoint.save(f"{url}/step-00000002", toy)
    return choice.message, storage.names(), verify(f"{url}/step-00000002").step


@pytest.mark.slow
def test_what_is_not_finite_in_a_store_makes_room_for_the_step_that_is_made_again(
    pools: Any, server: dict[str, str]
) -> None:
    found = pools(2).run(save_two_and_choose, "s3://bucket/spoiled", server)

    words, names, step = found[0]
    assert words.startswith(
        "resuming from step 1, verified in 5 files; skipped step 2 (a tensor in it holds NaN or inf"
    )
    assert [name[:-9] for name in names[:1]] == [".quarantine-not-finite-step-00000002"]
    assert (names[1:], step) == (["step-00000001", "step-00000002"], 2)
