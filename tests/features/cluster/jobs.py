"""Runs of the example as batch jobs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.features.cluster.slurm import Cluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "sft_sort.yaml"
HOLDFAST = [sys.executable, "-m", "holdfast.cli.main"]
SMALL = ["data.synthetic.rows=512", "data.batch_size=8", "evaluation.sets={}", "evaluation.completions=null"]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


def submitted(
    cluster: Cluster,
    name: str,
    *overrides: str,
    nodes: int = 2,
    options: tuple[str, ...] = (),
    **variables: str,
) -> str:
    """Submit the example and return the job's number."""
    options = ("launch", "slurm", str(EXAMPLE), "--nodes", str(nodes), "--interface", "lo", "--submit", *options)
    values = [*SMALL, "launch.ranks=1", "launch.device=cpu", f"run.dir={cluster.base}", f"run.name={name}", *overrides]
    answer = cluster.run(*HOLDFAST, *options, *values, **variables)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.split()[-1]


def await_step(cluster: Cluster, job: str, name: str, step: int) -> None:
    """Return when a run has a line for a step in its metrics; fail with the job's output if it ends before."""
    metrics, deadline = cluster.base / name / "metrics.jsonl", time.monotonic() + 90
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert time.monotonic() < deadline, cluster.output(job)
        assert cluster.state(job) not in ENDED, cluster.output(job)
        time.sleep(0.2)


def weights(cluster: Cluster, name: str) -> bytes:
    (file,) = (cluster.base / name / "exports").glob("*/model.safetensors")
    return file.read_bytes()


def events(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    file = cluster.base / name / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def saved_steps(cluster: Cluster, name: str) -> list[int]:
    return [event["saved"] for event in events(cluster, name) if event["event"] == "checkpoint"]
