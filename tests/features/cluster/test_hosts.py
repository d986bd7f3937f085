"""Two hosts with a cable between them: one is killed, frozen or cut off, and the other says so and goes on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.features.cluster.hosts import Host, Hosts, missing, two_hosts
from tests.features.cluster.page import WITH_PROGRAMS, commands, write_run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=f"no hosts here: {missing()}")]
EXAMPLE = Path(__file__).parents[3] / "examples" / "sft_sort.yaml"
SMALL = [
    *("data.synthetic.rows=512", "data.batch_size=8", "evaluation.sets={}", "evaluation.completions=null"),
    *("launch.device=cpu", "checkpoint.every_steps=3"),
]


_SLEEP = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
  return syscall(SYS_clock_nanosleep, clock, flags, until, left) == 0 ? 0 : errno;
}
"""
"""libfaketime 0.9.10 moves the end of a sleep by the monotonic clock, which it is told to leave alone."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def start(hosts: Hosts, base: Path, *overrides: str, **options: Any) -> list[subprocess.Popen[bytes]]:
    return [start_on(hosts, host, base, *overrides, **options) for host in (hosts.first, hosts.second)]


def start_on(hosts: Hosts, host: Host, base: Path, *overrides: str, **options: Any) -> subprocess.Popen[bytes]:
    base.mkdir(exist_ok=True)
    command = ["sft", str(EXAMPLE), *SMALL, f"run.dir={base}", "run.name=run", *overrides]
    if options.pop("elastic", False):
        options["options"] = hosts.elastic(host)
    return hosts.agent(host, base, *command, **options)


def events(base: Path, name: str) -> list[dict[str, Any]]:
    file = base / "run" / "events.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [event for event in lines if event["event"] == name]


def screen(base: Path, host: str) -> str:
    return (base / f"{host}.out").read_text(errors="replace")


def weights(base: Path) -> bytes:
    return (base / "run" / "exports" / "final" / "model.safetensors").read_bytes()


def log(base: Path, rank: int) -> str:
    return (base / "run" / "logs" / f"rank-{rank}.log").read_text(errors="replace")


def await_step(base: Path, step: int, seconds: float = 60.0) -> None:
    metrics, deadline = base / "run" / "metrics.jsonl", time.monotonic() + seconds
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert time.monotonic() < deadline, screen(base, "a") + screen(base, "b")
        time.sleep(0.1)


def await_event(base: Path, name: str, seconds: float) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while not (events_now := events(base, name)):
        assert time.monotonic() < deadline, screen(base, "a") + screen(base, "b")
        time.sleep(0.1)
    return events_now[0]


def verified(base: Path) -> bool:
    """Return whether every checkpoint of the run is whole."""
    command = [sys.executable, "-m", "holdfast.cli.main", "checkpoint", "verify", str(base / "run")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def resumed(hosts: Hosts, base: Path, *overrides: str) -> None:
    """Start the run again with a healthy cable, and see it end."""
    hosts.cable.up = True
    assert verified(base)
    step = len((base / "run" / "metrics.jsonl").read_text().splitlines())
    for agent in start(hosts, base, f"steps={step + 3}", *overrides):
        assert agent.wait(timeout=180) == 0, screen(base, "a") + screen(base, "b")
    assert "goes on from" in screen(base, "a") or "continu" in screen(base, "a") or "resum" in screen(base, "a")


def test_a_host_that_loses_its_power_is_named_and_the_run_resumes(hosts: Hosts, tmp_path: Path) -> None:
    first, _ = start(hosts, tmp_path, "steps=5000")
    await_step(tmp_path, 5)

    hosts.power_off(hosts.second)
    cut = time.time()
    silent = await_event(tmp_path, "silent", 20)

    assert silent["host"] == "b"
    assert silent["time"] - cut < 15
    assert first.wait(timeout=90) == 3
    failed = events(tmp_path, "failed")[-1]
    assert (failed["host"], failed["rank"]) == ("b", 1)
    assert failed["phase"]
    assert "Host b (rank 1) has not answered for" in log(tmp_path, 0)
    assert "Host b (rank 1) has not answered for" in screen(tmp_path, "a")
    assert "Traceback" not in screen(tmp_path, "a")
    resumed(hosts, tmp_path)


def test_a_frozen_host_of_the_rendezvous_is_named_by_the_other_and_harms_nothing(hosts: Hosts, tmp_path: Path) -> None:
    _, second = start(hosts, tmp_path, "steps=5000")
    await_step(tmp_path, 5)

    hosts.first.signal(signal.SIGSTOP)
    frozen = time.time()
    silent = await_event(tmp_path, "silent", 20)

    assert silent["host"] == "a"
    assert silent["time"] - frozen < 15
    assert second.wait(timeout=90) == 3
    assert "Host a (rank 0) has not answered for" in screen(tmp_path, "b")
    assert "Host a (rank 0) has not answered for" in log(tmp_path, 1)
    assert "Traceback" not in screen(tmp_path, "b")
    hosts.first.signal(signal.SIGCONT)  # it wakes up where everybody has gone
    hosts.first.started[-1].wait(timeout=120)
    assert "Traceback" not in screen(tmp_path, "a")
    resumed(hosts, tmp_path)


def test_a_host_that_is_cut_off_in_a_save_is_named_and_no_checkpoint_is_harmed(hosts: Hosts, tmp_path: Path) -> None:
    agents = start(hosts, tmp_path, "steps=5000", "checkpoint.every_steps=1")
    await_step(tmp_path, 5)

    while not list((tmp_path / "run" / "checkpoints").glob(".staging-*")):
        time.sleep(0.001)
    hosts.cable.up = False
    cut = time.time()
    silent = await_event(tmp_path, "silent", 20)

    assert silent["time"] - cut < 15
    assert [agent.wait(timeout=240) for agent in agents] == [3, 3]
    assert "Host b (rank 1) has not answered for" in screen(tmp_path, "a")
    assert "Host a (rank 0) has not answered for" in screen(tmp_path, "b")
    resumed(hosts, tmp_path)


def test_a_slow_host_is_named_and_not_killed(hosts: Hosts, tmp_path: Path) -> None:
    agents = start(hosts, tmp_path, "steps=60")
    await_step(tmp_path, 5)

    hosts.second.signal(signal.SIGSTOP)
    silent = await_event(tmp_path, "silent", 20)
    hosts.second.signal(signal.SIGCONT)

    assert silent["host"] == "b"
    assert [agent.wait(timeout=240) for agent in agents] == [0, 0]
    assert "host b answers again" in screen(tmp_path, "a")


def test_a_line_of_200_ms_that_loses_every_twentieth_frame_changes_no_weight(hosts: Hosts, tmp_path: Path) -> None:
    for agent in start(hosts, tmp_path / "good", "steps=3"):
        assert agent.wait(timeout=180) == 0

    hosts.cable.delay_seconds, hosts.cable.loss = 0.2, 0.05
    for agent in start(hosts, tmp_path / "bad", "steps=3", "checkpoint.rehearsal=false"):
        assert agent.wait(timeout=550) == 0, screen(tmp_path / "bad", "a")

    assert hosts.cable.dropped > 20
    assert weights(tmp_path / "bad") == weights(tmp_path / "good")


def test_clocks_a_day_apart_change_nothing(hosts: Hosts, tmp_path: Path) -> None:
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None or shutil.which("gcc") is None:
        pytest.skip("libfaketime or gcc is not installed: apt-get install libfaketime gcc")
    sleep = tmp_path / "sleep.so"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(sleep)]
    subprocess.run(command, input=_SLEEP, text=True, check=True)
    for agent in start(hosts, tmp_path / "same", "steps=6"):
        assert agent.wait(timeout=180) == 0

    late = {"LD_PRELOAD": f"{sleep}:{library}", "FAKETIME": "-1d", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    base = tmp_path / "apart"
    for steps in ("steps=4", "steps=6"):  # a resume too
        agents = [
            start_on(hosts, hosts.first, base, steps, **late),
            start_on(hosts, hosts.second, base, steps),
        ]
        assert [agent.wait(timeout=240) for agent in agents] == [0, 0], screen(base, "a") + screen(base, "b")

    assert weights(base) == weights(tmp_path / "same")
    assert verified(base)


def test_a_run_goes_from_two_hosts_to_one_and_back_to_two(hosts: Hosts, tmp_path: Path) -> None:
    first, _ = start(hosts, tmp_path, "steps=5000", elastic=True)
    await_step(tmp_path, 5)

    hosts.second.signal(signal.SIGKILL)
    deadline = time.monotonic() + 120
    while len(events(tmp_path, "start")) < 2:
        assert time.monotonic() < deadline, screen(tmp_path, "a")
        time.sleep(0.2)
    hosts.second.started[-1].wait()
    again = start_on(hosts, hosts.second, tmp_path, "steps=5000", elastic=True)
    while len(events(tmp_path, "start")) < 3:
        assert time.monotonic() < deadline + 120, screen(tmp_path, "a") + screen(tmp_path, "b")
        time.sleep(0.2)

    assert [event["ranks"] for event in events(tmp_path, "start")] == [2, 1, 2]
    assert events(tmp_path, "failed")[0]["host"] == "b"
    assert "Traceback" not in screen(tmp_path, "a")
    first.send_signal(signal.SIGTERM)
    again.send_signal(signal.SIGTERM)
    assert (first.wait(timeout=90), again.wait(timeout=90)) == (3, 3)
    assert verified(tmp_path)


def test_a_run_directory_that_the_second_host_does_not_see_is_refused_before_step_1(
    hosts: Hosts, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    hosts.second.own = runs

    agents = start(hosts, tmp_path, "steps=3", f"run.dir={runs}")

    assert [agent.wait(timeout=180) for agent in agents] == [2, 2]
    assert screen(tmp_path, "a").count("is not one directory for all ranks") == 1
    assert "is not there for rank 1 on b" in screen(tmp_path, "a")
    assert not (runs / "run").exists()


def test_a_folder_of_checkpoints_that_the_second_host_does_not_see_is_refused_before_step_1(
    hosts: Hosts, tmp_path: Path
) -> None:
    """The run's directory is shared, and the disk behind its checkpoints is not."""
    place = tmp_path / "disk"
    hosts.second.own = place

    agents = start(hosts, tmp_path, "steps=3", f"run.dir={tmp_path / 'runs'}", f"checkpoint.storage={place}")

    assert [agent.wait(timeout=180) for agent in agents] == [2, 2]
    assert "rank 1 on b" in screen(tmp_path, "a"), screen(tmp_path, "a")
    assert "Traceback" not in screen(tmp_path, "a") + screen(tmp_path, "b")
    assert not list(place.rglob("step-*"))


def test_two_hosts_without_a_shared_disk_save_in_an_object_store(hosts: Hosts, tmp_path: Path) -> None:
    server = hosts.first.start(
        *(sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5555"), log=tmp_path / "store.out"
    )
    keys = {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_ENDPOINT_URL": f"http://{hosts.first.address}:5555",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    make = (
        "import s3fs, time\n"
        "for _ in range(60):\n"
        "    try: s3fs.S3FileSystem(skip_instance_cache=True).mkdir('runs'); break\n"
        "    except Exception: time.sleep(0.5)\n"
    )
    assert hosts.second.start(sys.executable, "-c", make, log=tmp_path / "make.out", **keys).wait(timeout=90) == 0
    runs = tmp_path / "runs"
    hosts.first.own = hosts.second.own = runs
    overrides = (f"run.dir={runs}", "checkpoint.storage=s3://runs/run")

    for steps in ("steps=4", "steps=6"):
        for agent in start(hosts, tmp_path, steps, *overrides, **keys):
            assert agent.wait(timeout=240) == 0, screen(tmp_path, "a") + screen(tmp_path, "b")

    server.kill()
    assert "is not shared" in screen(tmp_path, "a")
    assert (Path(f"{runs}.b") / "run" / "logs" / "rank-1.log").exists()
    assert not (Path(f"{runs}.b") / "run" / "run.json").exists()


def test_a_port_in_use_is_one_paragraph(hosts: Hosts, tmp_path: Path) -> None:
    code = "import socket, time; s = socket.create_server(('0.0.0.0', 29500)); print('up', flush=True); time.sleep(60)"
    hosts.first.start(sys.executable, "-c", code, log=tmp_path / "port.out")
    while "up" not in (tmp_path / "port.out").read_text():
        time.sleep(0.1)

    first = start_on(hosts, hosts.first, tmp_path, "steps=3")

    assert first.wait(timeout=60) == 2
    assert screen(tmp_path, "a").count("another program on a listens at that port") == 1
    assert "Traceback" not in screen(tmp_path, "a")
    assert screen(tmp_path, "a").count("\n") == 1


def test_the_commands_of_the_page_run_as_they_stand(hosts: Hosts, tmp_path: Path) -> None:
    write_run(tmp_path / "page", EXAMPLE, [*SMALL, "steps=2", "run.dir=runs"])
    agents = [
        host.start(
            "bash", "-c", f"cd {tmp_path / 'page'} && {line}", log=tmp_path / f"{host.name}.out", **WITH_PROGRAMS
        )
        for host, line in zip((hosts.first, hosts.second), commands("Without a scheduler"), strict=True)
    ]

    assert [agent.wait(timeout=240) for agent in agents] == [0, 0], screen(tmp_path, "a") + screen(tmp_path, "b")
    assert "done after step 2" in screen(tmp_path, "a")
    assert screen(tmp_path, "b") == ""
    assert len(list((tmp_path / "page" / "runs").glob("*/logs/rank-*.log"))) == 4
