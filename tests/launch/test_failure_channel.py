"""The first cause reaches every survivor: real gloo ranks, killed and failing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch.distributed as dist

from holdfast.config.sections.launch import LaunchConfig
from holdfast.errors import ConfigError, RankFailed, RunStopped
from holdfast.launch.local import launch_local
from holdfast.parallel.failure.channel import FailureChannel
from holdfast.parallel.failure.reports import NoteBoard

WORKER = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from holdfast.errors import HoldfastError
from holdfast.parallel.failure.channel import FailureChannel
from holdfast.parallel.rendezvous import store_of

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
directory = Path(os.environ["HOLDFAST_LAUNCH_DIR"]) if "--files" in sys.argv else None
store = store_of(0, rank, world, timedelta(seconds=60), os.environ)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
channel = FailureChannel(store, rank, world, directory)
total = torch.ones(4)
try:
    with channel.guard():
        with channel.phase("rollout"):
            dist.all_reduce(total)
        channel.at_step(7)
        with channel.phase("update"):
            ACTION
            dist.all_reduce(total)
except HoldfastError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    os._exit(error.exit_code)
"""


def worker(action):
    return [sys.executable, "-c", WORKER.replace("ACTION", action)]


def run_ranks(action, tmp_path, ranks=3):
    """Run gloo ranks without the launcher; return exit codes, what each wrote, and the seconds since the failure."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            worker(action),
            env={**os.environ, **shared, "RANK": str(rank), "FAILED_AT": str(tmp_path / "failed")},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    words = [process.communicate(timeout=60)[1] for process in processes]
    seconds = time.time() - (tmp_path / "failed").stat().st_mtime
    return [process.returncode for process in processes], words, seconds


@pytest.mark.slow
def test_survivors_blocked_in_a_collective_name_rank_phase_and_cause(tmp_path):
    action = "rank == 1 and (Path(os.environ['FAILED_AT']).touch(), [][3])"

    codes, words, seconds = run_ranks(action, tmp_path)

    assert codes == [3, 1, 3]
    assert seconds < 10
    for survivor in (0, 2):
        assert "RankFailed: Rank 1 failed in phase 'update' at step 7: IndexError: list index out" in words[survivor]
        assert f"Rank {survivor} therefore stops in phase 'update'." in words[survivor]


@pytest.mark.slow
def test_survivors_of_a_killed_rank_say_that_it_died_without_a_word(tmp_path):
    action = "rank == 1 and (Path(os.environ['FAILED_AT']).touch(), os.kill(os.getpid(), signal.SIGKILL))"

    codes, words, seconds = run_ranks(action, tmp_path)

    assert codes == [3, -9, 3]
    assert seconds < 10
    for survivor in (0, 2):
        assert "RankFailed: Another rank died without a word at step 7: its connections closed" in words[survivor]


@pytest.mark.slow
def test_under_the_launcher_a_killed_rank_0_is_named_although_the_store_outlives_it(tmp_path, capfd):
    command = [*worker("rank == 0 and os.kill(os.getpid(), signal.SIGKILL)"), "--files"]

    code = launch_local(command, 2, LaunchConfig(), tmp_path / "runs" / "demo")

    shown = capfd.readouterr().err
    (log,) = tmp_path.glob("runs/.demo.launch-*/logs/rank-1.log")
    assert code == 3
    assert "Rank 0 was killed by SIGKILL in phase 'update' at step 7." in shown
    assert "RankFailed: Rank 0 died without a word in phase 'update' at step 7: it was killed by SIGKILL." in (
        log.read_text()
    )
    assert "frame #" not in log.read_text()


@pytest.mark.parametrize("error", ["ValueError", "ConfigError"])
def test_a_survivor_outside_any_collective_is_ended_with_the_cause(error):
    script = """
        import threading, time
        import torch.distributed as dist
        from holdfast.errors import ConfigError
        from holdfast.parallel.failure.channel import FailureChannel
        store = dist.HashStore()
        other = FailureChannel(store, 1, 2)
        other.phase("reward")
        threading.Timer(0.2, other.report, [ERROR("boom")]).start()
        with FailureChannel(store, 0, 2).guard(exit_seconds=0.5):
            time.sleep(60)
    """

    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script).replace("ERROR", error)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=30,
    )

    assert ended.returncode == 3
    assert ended.stderr.startswith(f"Rank 1 failed in phase 'reward': {error}: boom\nRank 0 therefore stops.")


def broken_collective():
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")


@pytest.fixture(params=["store", "files"])
def pair(request, tmp_path):
    """Two ranks that hear of each other by one way only."""
    if request.param == "store":
        store = dist.HashStore()
        return FailureChannel(store, 0, 2), FailureChannel(store, 1, 2)
    return FailureChannel(dist.HashStore(), 0, 2, tmp_path), FailureChannel(dist.HashStore(), 1, 2, tmp_path)


def test_an_error_is_reported_and_passes_unchanged(pair):
    mine, other = pair

    with pytest.raises(ValueError, match="boom"), other.guard(), other.phase("update"):
        raise ValueError("boom")

    failure = mine.reports.first(wait_seconds=1)
    assert (failure.rank, failure.kind, failure.phase, failure.type) == (1, "error", "update", "ValueError")


def test_a_rank_beats_inside_the_guard():
    store = dist.HashStore()
    channel, board = FailureChannel(store, 1, 2), NoteBoard(store, None)
    channel.at_step(7)

    with channel.guard(), channel.phase("update"):
        deadline = time.monotonic() + 20
        while not (beat := board.read("beat-rank-1")) and time.monotonic() < deadline:
            time.sleep(0.01)

    assert beat is not None
    assert beat.startswith("1|7|")


def test_a_rank_that_loses_its_peer_waits_for_the_report(pair):
    mine, other = pair
    late = threading.Timer(0.3, other.report, [MemoryError("no room")])

    late.start()
    with pytest.raises(RankFailed, match="Rank 1 failed: MemoryError: no room"), mine.guard():
        broken_collective()
    late.join()


def test_an_error_raised_while_handling_a_broken_collective_is_the_others_fault_if_they_say_so(pair):
    mine, other = pair
    other.report(MemoryError("no room"))

    with pytest.raises(RankFailed, match="MemoryError"), mine.guard():
        try:
            broken_collective()
        except RuntimeError as error:
            raise BaseException("the save failed") from error  # as DCP's CheckpointException


def test_an_error_raised_while_handling_a_broken_connection_counts_if_nobody_else_failed(pair):
    mine, _ = pair

    with pytest.raises(ValueError, match="own"), mine.guard(search_seconds=0.1):
        try:
            broken_collective()
        except RuntimeError:
            raise ValueError("own")  # noqa: B904  implicit chaining is what is tested


def test_the_first_writer_wins():
    store = dist.HashStore()
    first, second = FailureChannel(store, 0, 2), FailureChannel(store, 1, 2)

    first.report(ValueError("first"))
    counted = second.report(ValueError("second"))

    assert (counted.rank, counted.message) == (0, "first")


def test_a_user_error_stays_what_it_is_and_is_marked_as_such(pair):
    mine, other = pair

    with pytest.raises(ConfigError), other.guard():
        raise ConfigError("optim.lr=-1 is negative")

    assert mine.reports.first(wait_seconds=1).kind == "user"


def test_a_rank_that_only_lost_another_is_no_first_cause(pair):
    mine, other = pair

    with pytest.raises(RankFailed), other.guard():
        raise RankFailed("rank 7 failed")

    assert mine.reports.first(wait_seconds=0.7) is None


@pytest.mark.parametrize("error", [RunStopped("saved"), KeyboardInterrupt(), SystemExit(0)])
def test_a_run_that_stops_in_good_order_is_no_failure(pair, error):
    mine, other = pair

    with pytest.raises(type(error)), other.guard():
        raise error

    assert mine.reports.first(wait_seconds=0.7) is None


def test_a_phase_returns_to_the_earlier_one_and_stays_where_an_error_was(tmp_path):
    channel = FailureChannel(dist.HashStore(), 0, 1, tmp_path)
    told = tmp_path / "phase-rank-0"

    with channel.guard(), channel.phase("step"):
        with channel.phase("rollout"):
            assert told.read_text().strip() == "rollout"
        assert told.read_text().strip() == "step"
        channel.at_step(12)

    with pytest.raises(ValueError), channel.guard(), channel.phase("step"), channel.phase("save"):
        raise ValueError("boom")

    assert (tmp_path / "step").read_text().strip() == "12"
    assert json.loads((tmp_path / "failure-rank-0.json").read_text())["phase"] == "save"


def test_a_directory_that_has_gone_does_not_stop_a_run(tmp_path):
    channel = FailureChannel(dist.HashStore(), 0, 1, tmp_path / "gone")

    with channel.guard(), channel.phase("update"):
        channel.at_step(1)

    assert channel.report(ValueError("boom")).message == "boom"
