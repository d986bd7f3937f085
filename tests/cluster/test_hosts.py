"""Two hosts with a cable between them: one is killed, frozen or cut off, and the other says so and goes on."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Hosts, missing, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=f"no hosts here: {missing()}")]
EXAMPLE = Path(__file__).parents[2] / "examples" / "sft_sort.yaml"
SMALL = [
    *("data.synthetic.rows=512", "data.batch_size=8", "evaluation.sets={}", "evaluation.completions=null"),
    *("launch.device=cpu", "checkpoint.every_steps=3"),
]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def start(hosts: Hosts, base: Path, *overrides: str, **options: Any) -> list[subprocess.Popen[bytes]]:
    command = ["sft", str(EXAMPLE), *SMALL, f"run.dir={base}", "run.name=run", *overrides]
    return [hosts.agent(host, base, *command, **options) for host in (hosts.first, hosts.second)]


def events(base: Path, name: str) -> list[dict[str, Any]]:
    file = base / "run" / "events.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [event for event in lines if event["event"] == name]


def screen(base: Path, host: str) -> str:
    return (base / f"{host}.out").read_text(errors="replace")


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


def test_a_host_that_loses_its_power_is_named_and_the_run_resumes(hosts: Hosts, tmp_path: Path) -> None:
    first, _ = start(hosts, tmp_path, "steps=2000")
    await_step(tmp_path, 5)

    hosts.power_off(hosts.second)
    cut = time.time()
    silent = await_event(tmp_path, "silent", 20)

    assert silent["host"] == "b"
    assert silent["time"] - cut < 15
    assert first.wait(timeout=90) == 3
    failed = events(tmp_path, "failed")[-1]
    assert (failed["host"], failed["rank"]) == ("b", 1)
    assert "Host b (rank 1) has not answered for" in log(tmp_path, 0)
    assert "Traceback" not in screen(tmp_path, "a")

    hosts.cable.up = True
    for agent in start(hosts, tmp_path, "steps=12"):
        assert agent.wait(timeout=90) == 0, screen(tmp_path, "a")
