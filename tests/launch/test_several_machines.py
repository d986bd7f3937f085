"""What several machines need, without machines: options, sightings, mistakes, logs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from signal import SIGABRT, SIGKILL
from typing import Any

import pytest

from holdfast.config.sections.launch import LaunchConfig
from holdfast.errors import ConfigError
from holdfast.features.cluster.ports import agreed_port, ports_to_ask
from holdfast.features.cluster.ray import RayOptions, _Rank, launch_ray
from holdfast.features.cluster.slurm import Job, JobStep, agent_options, batch_script, check_cluster, check_interfaces
from holdfast.launch.first_rank import leave
from holdfast.launch.verdict import lost_ranks
from holdfast.parallel.failure.heartbeat import Sightings, silences
from holdfast.parallel.rendezvous import store_of

PLACE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "20007"}


def job(directory: Path, *, nodes: int = 2, gpus: int = 0, elastic: bool = False) -> Job:
    return Job(["sft", "run.yaml"], directory, nodes, 2, gpus, None, None, 60.0, elastic)


def step(node: int) -> JobStep:
    return JobStep(2, 2, node, 0, "7", {**PLACE, "SLURM_NODEID": str(node), "PATH": ""})


def test_a_fixed_set_of_machines_meets_without_clocks() -> None:
    options = " ".join(agent_options(step(1), LaunchConfig(ranks=2)))

    assert "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 20007" in options
    assert "c10d" not in options


def test_machines_that_may_be_lost_meet_by_torchruns_own_rendezvous() -> None:
    options = " ".join(agent_options(step(0), LaunchConfig(ranks=2, min_ranks=2)))

    assert "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:20007" in options
    assert "is_host=true" in options
    assert "--max-restarts 3" in options


def test_more_min_ranks_than_ranks_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="min_ranks=5, but 2 nodes have 4 ranks"):
        agent_options(step(0), LaunchConfig(ranks=2, min_ranks=5))


def test_a_job_that_may_lose_nodes_is_not_killed_with_one(tmp_path: Path) -> None:
    fixed, elastic = batch_script(job(tmp_path)), batch_script(job(tmp_path, elastic=True))

    assert "srun --kill-on-bad-exit=1" in fixed
    assert "--no-kill" not in fixed
    assert "#SBATCH --no-kill" in elastic
    assert "srun --no-kill" in elastic


NODE = "127.0.0.2"
"""The address of the first node, which is this machine."""


def met_at(script: str, folder: Path, job_number: int) -> int:
    """Run a job's text on this machine, whose `srun` prints where the nodes meet, and return that port."""
    for name, answer in {"scontrol": f"NodeAddr={NODE}", "srun": "$MASTER_PORT"}.items():
        (folder / name).write_text(f"#!/bin/sh\necho {answer}\n")
        (folder / name).chmod(0o755)
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": str(job_number), "SLURM_JOB_NODELIST": "here"}
    done = subprocess.run(
        ["bash"], input=script, env=environ, cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


def test_jobs_whose_numbers_are_ten_thousand_apart_meet_at_two_ports_of_one_machine(tmp_path: Path) -> None:
    script = batch_script(job(tmp_path))
    first = met_at(script, tmp_path, 7)

    with socket.create_server(("", first)):
        second = met_at(script, tmp_path, 10_007)

    assert first != second
    socket.create_server(("", second)).close()


ASK = "import sys; from holdfast.features.cluster.ports import agreed_port as at; print(at('127.0.0.1', {}, {}, 3, 60))"


def test_two_steps_that_ask_at_the_same_ports_meet_at_two_ports() -> None:
    steps = ("12.0.0", "21.0.0")  # the same sum of characters, so the same ports to ask at
    tasks = [
        subprocess.Popen([sys.executable, "-c", ASK.format(repr(name), task)], stdout=subprocess.PIPE, text=True)
        for task in (2, 1, 0)
        for name in steps
    ]

    told = [task.communicate(timeout=90)[0].strip() for task in tasks]

    first, second = set(told[0::2]), set(told[1::2])
    assert len(first) == len(second) == 1 and first != second
    assert all(port.isdecimal() for port in told)


def ask_and_leave(name: str, task: int) -> None:
    """Ask the first task of a step as another one does, and end before its answer."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for place in ports_to_ask(name):
            with suppress(OSError), socket.create_connection(("127.0.0.1", place), 1) as first:
                first.sendall(f"{name} {task}\n".encode())
                return
    raise AssertionError("the first task listens nowhere")


def test_a_task_that_has_not_heard_where_the_others_meet_is_told_again() -> None:
    command = [sys.executable, "-c", ASK.format("'33.0.0'", 0).replace("3, 60", "2, 60")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        ask_and_leave("33.0.0", 1)

        port = agreed_port("127.0.0.1", "33.0.0", 1, 2, seconds=20)

        assert first.communicate(timeout=60)[0].strip() == str(port)


def test_tasks_that_say_nothing_keep_no_other_one_from_being_told() -> None:
    command = [sys.executable, "-c", ASK.format("'35.0.0'", 0).replace("3, 60", "2, 60")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        ask_and_leave("35.0.0", 1)  # it listens now
        place = next(place for place in ports_to_ask("35.0.0") if listens(place))
        silent = [socket.create_connection(("127.0.0.1", place), 1) for _ in range(4)]

        port = agreed_port("127.0.0.1", "35.0.0", 1, 2, seconds=20)

        assert first.communicate(timeout=60)[0].strip() == str(port)
    for each in silent:
        each.close()


def listens(port: int) -> bool:
    """Return whether somebody listens at a port of this machine."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_a_first_task_that_does_not_answer_is_told_with_what_to_set() -> None:
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        agreed_port("127.0.0.1", "7.0.0", 1, 2, seconds=0.1)


def test_without_sbatch_nothing_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match="There is no sbatch on this machine"):
        check_cluster(job(tmp_path))


def test_an_interface_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME=ib9, but .* has no such network interface; it has .*lo"):
        check_interfaces({"GLOO_SOCKET_IFNAME": "ib9"})


def test_a_port_in_use_is_one_paragraph() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

        with pytest.raises(ConfigError, match=f"cannot meet at 127.0.0.1:{port}: another program on .* listens"):
            store_of(0, 0, 2, timedelta(seconds=5), environ)


def test_without_ray_a_run_on_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[ray\]'"):
        launch_ray(["sft"], RayOptions(2, 0, None), LaunchConfig())


@pytest.mark.parametrize(
    "rank_1",
    [
        {"code": -SIGKILL, "ended_at": 1.0},
        {"code": -SIGABRT, "ended_at": 1.0},
        {"gone": "The actor died.", "ended_at": 1.0},
        {"code": -SIGKILL, "ended_at": 9.0, "ended_by_launcher": True, "hung": True},
    ],
)
@pytest.mark.parametrize("rank_0", [{"code": 3}, {"code": -SIGKILL, "ended_by_launcher": True}])
def test_in_ray_a_rank_is_lost_as_on_one_machine(rank_0: dict[str, Any], rank_1: dict[str, Any]) -> None:
    ranks = [_Rank(0, None, "a", ended_at=5.0, **rank_0), _Rank(1, None, "b", **rank_1)]

    assert lost_ranks([rank.death for rank in ranks]) == {1}


def seen(sightings: Sightings, beats: dict[int, tuple[str, str]]) -> None:
    """Let ranks be heard with a count each, from a host each."""
    sightings.take({rank: f"{count}|7|{host}|forward" for rank, (count, host) in beats.items()})


def test_a_host_is_silent_when_all_its_ranks_are_and_a_rank_alone_is_not_a_host() -> None:
    sightings = Sightings()
    seen(sightings, {0: ("1", "a"), 2: ("1", "b"), 3: ("1", "b")})
    time.sleep(0.2)
    seen(sightings, {0: ("2", "a"), 2: ("2", "b"), 3: ("1", "b")})

    (one,) = silences(sightings, "a", time.monotonic(), 0.1)

    assert (one.host, one.ranks, one.whole_host) == ("b", (3,), False)
    time.sleep(0.2)
    seen(sightings, {0: ("3", "a"), 2: ("2", "b"), 3: ("1", "b")})
    (both,) = silences(sightings, "a", time.monotonic(), 0.1)
    assert (both.host, both.ranks, both.whole_host) == ("b", (2, 3), True)
    assert "host b (ranks 2, 3) has not answered for 0 s; last heard in phase 'forward' at step 7" in both.words()


def test_while_the_store_says_nothing_its_own_host_alone_is_silent() -> None:
    sightings = Sightings()
    seen(sightings, {0: ("1", "a"), 2: ("1", "c")})

    (silence,) = silences(sightings, "b", time.monotonic() + 11, 10)

    assert (silence.host, silence.whole_host) == ("a", True)


def test_a_store_of_this_machine_that_says_nothing_is_given_up_too() -> None:
    sightings = Sightings()
    seen(sightings, {1: ("1", "a"), 2: ("1", "b")})

    (silence,) = silences(sightings, "a", time.monotonic() + 11, 10)

    assert (silence.host, silence.ranks, silence.whole_host) == ("a", (), True)
    assert "the place where the ranks meet has not answered for 11 s" in silence.words()


def test_time_in_which_this_process_did_not_run_is_nobodys_silence() -> None:
    sightings = Sightings()
    seen(sightings, {0: ("1", "a"), 2: ("1", "c")})
    sightings.forgive(60)

    assert silences(sightings, "b", time.monotonic() + 60, 10) == []


def test_an_orderly_end_is_a_zero_where_torchrun_would_start_ranks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert leave(3) == 3
    monkeypatch.setenv("HOLDFAST_EXIT_FILE", str(tmp_path / "exit"))

    assert leave(3) == 0
    assert (tmp_path / "exit").read_text() == "3"


@pytest.mark.parametrize(("rank", "screen"), [(0, "before\nout\nerror\n"), (1, "before\nshown\n")])
def test_a_rank_prints_into_its_log_and_only_the_first_on_the_screen(tmp_path: Path, rank: int, screen: str) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom holdfast.parallel.rank_log import RankLog\n"
        f"log = RankLog({rank}, 2, 'n1')\nprint('before', flush=True)\nlog.begin(Path('run/logs'))\n"
        "print('out', flush=True)\nprint('error', file=sys.stderr)\n"
        f"if {rank}: log.show('shown')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )

    assert done.stdout == screen
    log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
    assert f"--- rank {rank} of 2 on n1, " in log
    assert log.endswith("error\n")
