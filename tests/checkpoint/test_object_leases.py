"""One job per place in an object store: of several one wins, and who was thought dead stops and deletes nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint, patience
from holdfast.checkpoint.errors import DirectoryTaken, PlaceLost
from holdfast.checkpoint.format.manifest import NAME
from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.keep.retention import remove_leftovers, steps
from holdfast.checkpoint.place.lease import Lease
from holdfast.checkpoint.place.storage import Storage, open_storage
from holdfast.cli.commands.checkpoint.views import pruned
from holdfast.files import machine, started
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, save_after
from tests.crash.runs import values_of
from tests.training.cases import run as train

FIRST, SECOND = ".lease-00000001.json", ".lease-00000002.json"


def held_by(storage: Storage, lease: str, pid: int) -> None:
    """Write another process into a lease, and another token, as a job of its own has."""
    held = json.loads(storage.read(lease)) | {"pid": pid, "started": started(pid), "token": "another"}
    storage.replace(lease, json.dumps(held).encode())


def test_a_second_job_is_refused_and_a_dead_one_is_not(server: dict[str, str]) -> None:
    storage = open_storage("s3://bucket/leased")

    with Lease(storage):
        held_by(storage, FIRST, 1)
        with pytest.raises(DirectoryTaken, match=r"s3://bucket/leased is in use by another job \(process 1 on "):
            Lease(storage).__enter__()
        assert storage.names() == [FIRST]
        held_by(storage, FIRST, 4194305)
        with Lease(storage):
            assert storage.names() == [SECOND]
    assert storage.names() == [SECOND]
    assert storage.read(SECOND) == b""


def test_a_start_leaves_a_save_under_way_of_another_process_alone(server: dict[str, str]) -> None:
    storage, name = open_storage("s3://bucket/under-way"), "step-00000007"
    staging = f".staging-{name}-1a2b3c4d"
    storage.put_new(f"{staging}/{shard_file(0)}", b"half of it")

    with Lease(storage), Lease(storage, name):
        held_by(storage, f".lease-{name}.00000001.json", 1)
        remove_leftovers(storage, wait=True)
        under_way = storage.names()
        held_by(storage, f".lease-{name}.00000001.json", 4194305)
        remove_leftovers(storage, wait=True)

    assert staging in under_way
    assert staging not in storage.names()
    assert not any(each.startswith(f".lease-{name}") for each in storage.names())


@pytest.mark.parametrize("damaged", [b"", b"{", b"[1]", b"[" * 100_000, b"\xff\xfe"])
def test_a_lease_that_names_nobody_is_nobodys(server: dict[str, str], damaged: bytes) -> None:
    storage = open_storage("s3://bucket/nobody-s")
    storage.replace(FIRST, damaged)

    with Lease(storage) as lease:
        lease.check()
    (name,) = storage.names()
    storage.remove(name)

    assert name == SECOND


def test_a_job_of_anothermachine_is_dead_when_its_lease_is_old_by_the_clock_of_the_store(
    server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage("s3://bucket/stale")
    elsewhere = {"host": "another", "pid": 7, "time": time.time() + 3600, "token": "theirs"}  # a clock that is ahead
    storage.put_new(FIRST, json.dumps(elsewhere).encode())
    with pytest.raises(DirectoryTaken, match="process 7 on another"):
        Lease(storage).__enter__()

    monkeypatch.setattr(patience, "current", replace(patience.current, lease_stale_seconds=1.0))
    time.sleep(2.1)  # the store tells whole seconds

    with Lease(storage):
        assert storage.names() == [SECOND]


@pytest.mark.slow
def test_a_start_waits_for_a_lease_of_another_machine_until_it_is_renewed_or_given_back(server: dict[str, str]) -> None:
    """A store has its own clock, which no test can set back: here the lease is given back before it is stale."""
    storage = open_storage("s3://bucket/waited-for")
    said: list[str] = []
    elsewhere = {"host": "another", "pid": 7, "time": 0.0, "token": "theirs"}
    storage.put_new(FIRST, json.dumps(elsewhere).encode())
    again = threading.Timer(3, storage.replace, (FIRST, json.dumps(elsewhere | {"time": 15.0}).encode()))
    again.start()

    with pytest.raises(DirectoryTaken, match="process 7 on another"):
        Lease(storage, notify=said.append).__enter__()
    again.join()
    gone = threading.Timer(3, storage.remove, (FIRST,))
    gone.start()
    with Lease(storage, notify=said.append):
        gone.join()
        assert len(storage.names()) == 1

    words = "s3://bucket/waited-for was held by process 7 on another: waiting up to 120 s for a sign that it lives"
    assert said == [words] * 2


def test_a_job_that_was_thought_dead_is_told_and_leaves_what_is_not_its_own(server: dict[str, str]) -> None:
    storage = open_storage("s3://bucket/overtaken")
    with Lease(storage) as slow:
        slow.check()
        held_by(storage, FIRST, 4194305)
        with pytest.raises(PlaceLost, match="It took the place over while"):
            slow.check()
        with Lease(storage) as fast:
            with pytest.raises(PlaceLost, match=f"process {os.getpid()} on .* It took the place over while"):
                slow.check()
            slow.__exit__(None, None, None)
            fast.check()
            assert storage.names() == [SECOND]
        with pytest.raises(PlaceLost):  # it is told also once the other job has ended
            slow.check()


def take_when_told(url: str, ready: Any, answered: Any, results: Any, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the server that forks may be older than the store
    storage = open_storage(url)
    storage.names()
    ready.wait(120)
    try:
        with Lease(storage):
            results.put("held")
            answered.wait(120)
    except DirectoryTaken:
        results.put("refused")


@pytest.mark.slow
def test_of_jobs_that_find_the_same_dead_one_at_once_only_one_takes_over(server: dict[str, str]) -> None:
    url = "s3://bucket/raced"
    open_storage(url).put_new(FIRST, json.dumps({"machine": machine(), "pid": 4194305}).encode())
    forked = multiprocessing.get_context("forkserver")
    results, ready, answered = forked.Queue(), forked.Barrier(3), forked.Event()
    jobs = [forked.Process(target=take_when_told, args=(url, ready, answered, results, server)) for _ in range(3)]
    for job in jobs:
        job.start()

    outcomes = sorted(results.get(timeout=120) for _ in jobs)

    answered.set()
    for job in jobs:
        job.join()
    assert outcomes == ["held", "refused", "refused"]
    assert open_storage(url).names() == [SECOND]


def test_a_store_that_lets_two_jobs_put_one_number_has_one_holder(server: dict[str, str]) -> None:
    class WritesOver(type(open_storage("s3://bucket/written-over"))):  # type: ignore[misc]
        """Lets another job, which found no object either, write behind this one."""

        def put_new(self, path: str, data: bytes) -> None:
            super().put_new(path, data)
            held_by(self, path, 7)

    storage = WritesOver("s3://bucket/written-over")

    with pytest.raises(DirectoryTaken, match=r"s3://bucket/written-over is in use by another job \(process 7 on "):
        Lease(storage).__enter__()

    assert json.loads(storage.read(FIRST))["token"] == "another"


def test_a_lease_that_could_not_be_taken_to_the_end_is_given_back(server: dict[str, str]) -> None:
    class FallsSilent(type(open_storage("s3://bucket/broken-off"))):  # type: ignore[misc]
        """Does not let go of the dead job's lease."""

        def remove(self, path: str) -> None:
            if path == FIRST:
                raise OSError(5, "the store fell silent")
            super().remove(path)

    storage = FallsSilent("s3://bucket/broken-off")
    storage.put_new(FIRST, json.dumps({"machine": machine(), "pid": 4194305}).encode())

    with pytest.raises(OSError, match="fell silent"):
        Lease(storage).__enter__()

    assert storage.names() == [FIRST]


def test_a_job_that_withdraws_leaves_the_living_one_its_place(server: dict[str, str]) -> None:
    """It is found alive at the second look, as after an outage in which it was not heard of."""
    storage = open_storage("s3://bucket/withdrawn")
    with Lease(storage) as slow:
        held = storage.read(FIRST)
        held_by(storage, FIRST, 4194305)

        class Heard(type(storage)):  # type: ignore[misc]
            """A store in which the other job is heard of again when this one has put its number."""

            def put_new(self, path: str, data: bytes) -> None:
                super().put_new(path, data)
                self.replace(FIRST, json.dumps(json.loads(held) | {"machine": ["another"]}).encode())

        with pytest.raises(DirectoryTaken):
            Lease(Heard("s3://bucket/withdrawn")).__enter__()

        storage.replace(FIRST, held)
        slow.check()
        assert storage.names() == [FIRST]


def test_names_are_no_patterns(server: dict[str, str]) -> None:
    pattern, beside = open_storage("s3://bucket/exp[1]"), open_storage("s3://bucket/exp1")
    for storage in (pattern, beside):
        storage.replace("pins.json", b"[1]")

    pattern.remove("pins.json")

    assert pattern.names() == []
    assert beside.names() == ["pins.json"]


def save_while_held(world: World, url: str, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    checkpoint.save(f"{url}/step-00000001", build(world))


def test_two_jobs_that_save_one_name_do_not_mix(pools: Any, server: dict[str, str]) -> None:
    storage = open_storage("s3://bucket/twice")
    with Lease(storage, "step-00000001"):
        storage.put_new(f"step-00000001/{shard_file(0)}", b"in flight")
        lease = next(name for name in storage.names() if name.startswith(".lease-"))
        held_by(storage, lease, 1)

        errors = pools(2).errors(save_while_held, "s3://bucket/twice", server)

        assert {name for name, _ in errors} == {"DirectoryTaken"}
        assert "s3://bucket/twice/step-00000001 is in use by another job (process 1 on " in errors[0][1]
        assert storage.read(f"step-00000001/{shard_file(0)}") == b"in flight"


class Overtaken:
    """A failure channel; while the second checkpoint is written, another job takes over the place."""

    def __init__(self, inner: Any, storage: Storage) -> None:
        self._inner, self._storage = inner, storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def in_background(self, name: str) -> None:
        self._inner.in_background(name)
        if name == "collect" and self._storage.exists(f"step-00000002/{NAME}"):
            self._storage.put_new(SECOND, json.dumps({"host": "another", "pid": 7, "token": "theirs"}).encode())


def overtake(world: World, values: dict[str, Any], variables: dict[str, str]) -> Any:
    os.environ.update(variables)
    channel: Any = Overtaken(world.failure, open_storage(values["checkpoint"]["storage"]))
    return train(replace(world, failure=channel) if world.is_first else world, values)


@pytest.mark.slow
def test_a_run_whose_place_is_taken_over_while_it_saves_does_not_publish(
    pools: Any, server: dict[str, str], tmp_path: Path
) -> None:
    place = "s3://bucket/fenced"
    values = values_of(tmp_path, steps=6, checkpoint={"storage": place})

    errors = pools(2).errors(overtake, values, server)

    assert {name for name, _ in errors} == {"PlaceLost"}
    assert "s3://bucket/fenced is in use by another job (process 7 on another)" in errors[0][1]
    assert list(steps(open_storage(place))) == [2]
    assert open_storage(place).exists(SECOND)


def test_prune_is_refused_while_a_job_writes_to_the_store(pools: Any, server: dict[str, str]) -> None:
    storage = open_storage("s3://bucket/pruned")
    pools(1).run(save_after, "s3://bucket/pruned/step-00000002", 1, server)

    with Lease(storage):
        held_by(storage, FIRST, 1)
        with pytest.raises(DirectoryTaken, match=r"s3://bucket/pruned is in use by another job \(process 1 on "):
            list(pruned("s3://bucket/pruned", 2, None, [], None, dry_run=False))

    storage.remove(FIRST)
    assert list(pruned("s3://bucket/pruned", 2, None, [], None, dry_run=False)) == ["1 checkpoints stay"]
    assert storage.read(FIRST) == b""
