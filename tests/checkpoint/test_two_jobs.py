"""One job per directory, one checkpoint per name: nobody overwrites anybody."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint
from holdfast.checkpoint import api
from holdfast.checkpoint.errors import DirectoryTaken, PlaceLost
from holdfast.checkpoint.place.layout import lease_name
from holdfast.checkpoint.place.lease import Lease
from holdfast.checkpoint.place.storage import LocalStorage, rename_new
from holdfast.files import machine, started
from holdfast.parallel.mesh import World
from holdfast.patience import Patience
from holdfast.training.run_state import state_of
from tests.checkpoint.cases import build, contents, load_into_other, optimizer_of, save_after, step
from tests.crash.processes import DoomedRanks
from tests.training.cases import run, tree

FIRST, SECOND = lease_name(1), lease_name(2)


def save_when_told(world: World, path: str, seed: int, start: str) -> dict[str, Any]:
    toy = build(world, seed=seed)
    optimizer = optimizer_of(toy)
    step(world, toy, optimizer, seed)
    Path(f"{start}.{seed}.{world.rank}").touch()
    while not Path(start).exists():
        time.sleep(0.001)
    checkpoint.save(path, toy, optimizer)
    return contents(toy, optimizer)


@pytest.mark.parametrize("ranks", [pytest.param(2, id="20-second job saves the same name at the same time")])
def test_of_two_jobs_that_save_one_name_at_once_one_wins_whole(pools: Any, tmp_path: Path, ranks: int) -> None:
    path, start = tmp_path / "run" / "step-00000001", tmp_path / "start"
    jobs = [DoomedRanks(save_when_told, ranks, str(path), seed, str(start)) for seed in (1, 2)]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("start.*"))) < 2 * ranks and time.monotonic() < deadline:
        time.sleep(0.01)
    start.touch()

    outcomes = [job.wait() for job in jobs]

    for job in jobs:
        job.close()
    won = [ended for ended in outcomes if ended[0].error is None]
    lost = [ended for ended in outcomes if ended[0].error is not None]
    assert (len(won), len(lost)) == (1, 1)
    assert {end.error for end in lost[0]} == {lost[0][0].error}
    assert lost[0][0].error is not None
    assert lost[0][0].error[0] in {"DirectoryTaken", "SaveFailed"}  # beside the other job's save, or after it
    found = pools(ranks).run(load_into_other, str(path))[0]
    assert {name: value for name, value in found.items() if "extra" not in name} == won[0][0].value
    assert [entry.name for entry in path.parent.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("ranks", [pytest.param(2, id="20-second job on a run's directory")])
def test_a_second_job_on_a_run_s_directory_is_refused_on_all_ranks(pools: Any, tmp_path: Path, ranks: int) -> None:
    with Lease(LocalStorage(tmp_path / "r" / "checkpoints")):
        errors = pools(ranks).errors(run, tree(str(tmp_path)))

    assert errors[0] == errors[1]
    assert errors[0][0] == "DirectoryTaken"
    assert f"{tmp_path / 'r'} is in use by another job (process {os.getpid()} on " in errors[0][1]
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["checkpoints"]


def test_a_second_job_on_a_place_of_checkpoints_is_refused_on_all_ranks(pools: Any, tmp_path: Path) -> None:
    store, left = tmp_path / "store", tmp_path / "store" / ".staging-step-00000007-5f"
    values = tree(str(tmp_path / "runs"), checkpoint={"storage": f"file://{store}"})
    with Lease(LocalStorage(store)):
        left.mkdir()
        errors = pools(2).errors(run, values)
        kept = left.is_dir()

    assert errors[0] == errors[1]
    assert errors[0][0] == "DirectoryTaken"
    assert f"{store} is in use by another job (process {os.getpid()} on " in errors[0][1]
    assert "another checkpoint.storage" in errors[0][1]
    assert kept
    assert list((tmp_path / "runs").iterdir()) == []


PRUNES = """
from holdfast.checkpoint.errors import DirectoryTaken
from holdfast.cli.commands.checkpoint.views import pruned

def prunes(event):
    if event.step == 3:
        try:
            list(pruned({store!r}, 2, None, [], None, dry_run=False))
        except DirectoryTaken as error:
            open({told!r}, "w").write(str(error))
"""


def test_a_run_holds_the_place_of_its_checkpoints_while_it_goes_on(pools: Any, tmp_path: Path) -> None:
    store, told = tmp_path / "store", tmp_path / "told"
    (tmp_path / "watch.py").write_text(PRUNES.format(store=str(store), told=str(told)))
    checkpoint = {"storage": str(store), "every_steps": 1, "background": False}

    pools(2).run(run, tree(str(tmp_path), observers=["watch.py:prunes"], checkpoint=checkpoint), str(tmp_path))

    assert told.read_text().startswith(f"{store} is in use by another job (process ")
    with Lease(LocalStorage(store)):
        pass


def test_a_checkpoint_storage_that_is_the_run_s_own_folder_is_held_once(pools: Any, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "r" / "checkpoints")

    pools(2).run(run, tree(str(tmp_path), checkpoint={"storage": str(tmp_path / "link")}))

    assert (tmp_path / "r" / "checkpoints" / "step-00000004").is_dir()


def test_a_place_of_checkpoints_that_cannot_be_is_refused_and_leaves_nothing(pools: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    values = tree(str(tmp_path / "runs"), checkpoint={"storage": str(tmp_path / "file" / "store")})

    errors = pools(2).errors(run, values)

    assert errors[0] == errors[1]
    assert errors[0][0] == "ConfigError"
    assert f"checkpoint.storage={tmp_path / 'file' / 'store'} cannot be written: Not a directory" in errors[0][1]
    assert list((tmp_path / "runs").iterdir()) == []


def hold(directory: str, held: str) -> None:
    with Lease(LocalStorage(Path(directory))):
        Path(held).touch()
        time.sleep(600)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, id="20-holder of the directory killed")])
def test_a_holder_that_was_killed_holds_nothing(tmp_path: Path, number: int) -> None:
    holder = multiprocessing.get_context("forkserver").Process(
        target=hold, args=(str(tmp_path / "c"), str(tmp_path / "held"))
    )
    holder.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with pytest.raises(DirectoryTaken, match=rf"process {holder.pid} on "):
        Lease(LocalStorage(tmp_path / "c")).__enter__()

    os.kill(holder.pid or 0, number)
    holder.join()

    with Lease(LocalStorage(tmp_path / "c")):
        pass


OTHER_HOST = """
import sys, time
from pathlib import Path
from holdfast.checkpoint.place.lease import Lease
from holdfast.checkpoint.place.storage import LocalStorage

with Lease(LocalStorage(Path(sys.argv[1]))):
    Path(sys.argv[2]).touch()
    time.sleep(600)
"""


def test_a_job_of_another_machine_of_the_same_name_holds_the_directory_until_it_renews_no_more(tmp_path: Path) -> None:
    """Process numbers of its own, as a container or a second machine has them."""
    held = tmp_path / "held"
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root for process numbers of its own")
    holder = subprocess.Popen([*apart, sys.executable, "-c", OTHER_HOST, str(tmp_path / "c"), str(held)])
    while not held.exists():
        assert holder.poll() is None
        time.sleep(0.01)
    file = tmp_path / "c" / FIRST
    assert json.loads(file.read_text())["host"] == socket.gethostname()

    with pytest.raises(DirectoryTaken):
        Lease(LocalStorage(tmp_path / "c")).__enter__()
    holder.kill()
    holder.wait()
    with pytest.raises(DirectoryTaken):
        Lease(LocalStorage(tmp_path / "c")).__enter__()  # nobody here knows whether it is gone

    for jump in (-3_600, 3_600, -86_400, 86_400):  # what its clock said is nobody's business
        told = json.loads(file.read_text())
        file.write_text(json.dumps(told | {"time": told["time"] + jump}))
        with pytest.raises(DirectoryTaken):
            Lease(LocalStorage(tmp_path / "c")).__enter__()
    renewed = file.stat().st_mtime - Patience().lease_stale_seconds - 1
    os.utime(file, (renewed, renewed))
    with Lease(LocalStorage(tmp_path / "c")):
        assert json.loads((tmp_path / "c" / SECOND).read_text())["pid"] == os.getpid()


def test_a_run_of_another_machine_of_the_same_name_is_shown_as_alive_while_it_renews(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "1"}))
    lease = leave_lease(tmp_path / "checkpoints", 1)
    holder = json.loads(lease.read_text()) | {"host": socket.gethostname(), "pid": 2**22 + 1}

    lease.write_text(json.dumps(holder | {"machine": ["another boot", "pid:[1]"]}))
    there = state_of(tmp_path, [], None)
    lease.write_text(json.dumps(holder | {"machine": machine()}))
    here = state_of(tmp_path, [], None)

    assert (there.name, here.name) == ("running", "failed")


def test_a_job_of_this_machine_that_is_stopped_holds_the_directory_until_it_is_killed(tmp_path: Path) -> None:
    held = tmp_path / "held"
    holder = subprocess.Popen([sys.executable, "-c", OTHER_HOST, str(tmp_path / "c"), str(held)])
    while not held.exists():
        assert holder.poll() is None
        time.sleep(0.01)
    os.kill(holder.pid, signal.SIGSTOP)
    long_ago = time.time() - 2 * Patience().lease_stale_seconds
    os.utime(tmp_path / "c" / FIRST, (long_ago, long_ago))

    with pytest.raises(DirectoryTaken, match=rf"process {holder.pid} on "):
        Lease(LocalStorage(tmp_path / "c")).__enter__()

    holder.kill()
    while started(holder.pid) is not None:  # then it is a zombie, until its parent asks for its exit code
        time.sleep(0.01)
    with Lease(LocalStorage(tmp_path / "c")):
        holder.wait()


def test_another_process_that_has_the_number_of_a_dead_one_by_now_holds_nothing(tmp_path: Path) -> None:
    file = leave_lease(tmp_path / "c", 1)
    holder = {"pid": os.getppid(), "machine": machine(), "started": 1.0, "token": "theirs"}
    file.write_text(json.dumps(holder))

    with Lease(LocalStorage(tmp_path / "c")):
        pass

    file.write_text(json.dumps(holder | {"started": started(os.getppid())}))
    with pytest.raises(DirectoryTaken):
        Lease(LocalStorage(tmp_path / "c")).__enter__()


def test_a_job_of_an_earlier_version_holds_the_directory_while_it_renews(tmp_path: Path) -> None:
    file = tmp_path / "c" / ".lease.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"host": "far-away", "pid": 7, "token": "theirs"}).ljust(512))

    with pytest.raises(DirectoryTaken, match="process 7 on far-away"):
        Lease(LocalStorage(tmp_path / "c")).__enter__()

    long_ago = time.time() - 2 * Patience().lease_stale_seconds
    os.utime(file, (long_ago, long_ago))
    with Lease(LocalStorage(tmp_path / "c")):
        pass


def test_a_save_that_was_suspended_until_another_job_cleaned_up_reports_nothing(pools: Any, tmp_path: Path) -> None:
    """The lease of its name was taken over meanwhile."""
    errors = pools(2).errors(save_and_lose, str(tmp_path / "run"))

    assert errors[0] == errors[1]
    assert errors[0][0] == "PlaceLost"
    assert [
        name for name in (path.name for path in (tmp_path / "run").iterdir()) if not name.startswith(".lease")
    ] == []


def save_and_lose(world: World, directory: str) -> None:
    name = "step-00000001"

    class Loses(Lease):
        """Is overtaken as soon as it is held."""

        def check(self) -> None:
            held = Path(directory) / lease_name(1, name)
            held.rename(held.with_name(lease_name(2, name)))
            super().check()

    api.Lease = Loses  # type: ignore[misc]
    try:
        checkpoint.save(f"{directory}/{name}", build(world))
    finally:
        api.Lease = Lease  # type: ignore[misc]


def test_a_job_that_was_thought_dead_is_told_and_leaves_the_other_one_s_lease(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "c")
    with Lease(storage) as slow:
        slow.check()
        file = tmp_path / "c" / FIRST
        file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": 4194305}))
        with Lease(storage) as fast:
            theirs = (tmp_path / "c" / SECOND).read_bytes()
            with pytest.raises(PlaceLost, match=rf"process {os.getpid()} on .* It took the place over while"):
                slow.check()
            slow._renew()
            slow.__exit__(None, None, None)
            assert (tmp_path / "c" / SECOND).read_bytes() == theirs
            fast.check()
        assert (tmp_path / "c" / SECOND).read_bytes() == b""
        with pytest.raises(PlaceLost):  # it is told also once the other job has ended
            slow.check()


def leave_lease(directory: Path, age_seconds: float) -> Path:
    """Write the lease of a job of another host, which renewed it for the last time so long ago."""
    directory.mkdir(parents=True, exist_ok=True)
    file, then = directory / FIRST, time.time() - age_seconds
    file.write_text(json.dumps({"host": "far-away", "pid": 7, "time": then, "token": "theirs"}).ljust(512))
    os.utime(file, (then, then))
    return file


def train_aloud(world: World, values: dict[str, Any], lease: Path, age_seconds: float) -> tuple[Any, str]:
    leave_lease(lease, age_seconds)  # here: a pool that must first start takes longer than is left of its age
    with contextlib.redirect_stdout(io.StringIO()) as said:
        outcome = run(world, values)
    return outcome, said.getvalue()


@pytest.mark.slow
def test_a_start_waits_for_a_job_of_another_host_that_may_be_dead_and_says_so(pools: Any, tmp_path: Path) -> None:
    lease = tmp_path / "r" / "checkpoints"

    outcome, said = pools(1).run(train_aloud, tree(str(tmp_path)), lease, Patience().lease_stale_seconds - 6)[0]

    assert outcome.step == 4
    words = f"{tmp_path / 'r'} was held by process 7 on far-away: waiting up to 120 s for a sign that it lives\n"
    assert said.count(words) == 1


def test_a_start_is_refused_as_soon_as_the_job_of_another_host_is_heard_of(tmp_path: Path) -> None:
    said: list[str] = []
    file, began = leave_lease(tmp_path / "c", 1), time.monotonic()
    renewal = threading.Timer(3, leave_lease, (tmp_path / "c", 0))
    renewal.start()

    with pytest.raises(DirectoryTaken, match="process 7 on far-away"):
        Lease(LocalStorage(tmp_path / "c"), notify=said.append).__enter__()

    assert len(said) == 1
    assert 3 <= time.monotonic() - began < 15
    assert json.loads(file.read_text())["host"] == "far-away"


@pytest.mark.parametrize("ranks", [pytest.param(2, id="45-step saved again after a rollback")])
def test_a_step_that_is_there_is_never_written_again(pools: Any, tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "step-00000001"
    pools(ranks).run(save_after, str(path), 1)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    errors = pools(ranks).errors(save_after, str(path), 2)

    assert errors[0] == errors[1]
    assert errors[0][0] == "SaveFailed"
    assert "a checkpoint is never overwritten" in errors[0][1]
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("ranks", [pytest.param(2, id="45-empty directory of that name")])
def test_not_even_an_empty_directory_is_replaced(pools: Any, tmp_path: Path, ranks: int) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "other").mkdir()

    errors = pools(ranks).errors(save_after, str(tmp_path / "step-00000001"), 1)

    assert "a checkpoint is never overwritten" in errors[0][1]
    with pytest.raises(FileExistsError):
        rename_new(tmp_path / "other", tmp_path / "step-00000001")
    assert (tmp_path / "other").is_dir()


@pytest.mark.parametrize("how", ["moved", "linked", "copied"], ids="46-{} run directory".format)
def test_a_run_that_was_moved_linked_or_copied_loads_from_its_new_place(pools: Any, tmp_path: Path, how: str) -> None:
    old, new = tmp_path / "old", tmp_path / "elsewhere" / "new"
    new.parent.mkdir()
    expected = pools(2).run(save_after, str(old / "step-00000001"), 1)[0]
    match how:
        case "moved":
            shutil.move(old, new)
        case "linked":
            new.symlink_to(old)
        case "copied":
            shutil.copytree(old, new)
            shutil.rmtree(old)

    found = pools(2).run(load_into_other, str(new / "step-00000001"))[0]

    assert {name: value for name, value in found.items() if "extra" not in name} == expected
