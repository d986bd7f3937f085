"""What each library reads back of its own files after a kill and a resume; one environment each has the library.

`tools/test_trackers.sh` makes the environments; where a package is missing its tests are skipped by name.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.features.trackers.cases import RUN_ID, WrittenRun, effective, logged, skip_without, text_of, wait_for

Value = tuple[int, str, float]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # what libraries warn of is their own

THERE = {
    "wandb": "trackers/wandb/wandb/offline-run-*/run-*.wandb",
    "mlflow": "trackers/mlflow/mlflow.db",
    "trackio": "trackers/trackio/*.db",
    "swanlab": "trackers/swanlab/run-*",
}
"""What stands on the disk before the kill."""


def wandb_values(directory: Path) -> list[Value]:
    """Read transaction logs by the library's own messages; the format around them is LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2 as pb

    # A folder that begins in the second of an earlier one has a number behind the id.
    files = sorted(directory.glob(f"trackers/wandb/wandb/offline-run-*-{RUN_ID}*/run-{RUN_ID}.wandb"))
    values = []
    for file in files:
        for data in leveldb_records(file.read_bytes()):
            record = pb.Record()
            record.ParseFromString(data)
            items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            step = items.get("step")
            values += [
                (int(step), name, float(value))
                for name, value in items.items()
                if name != "step" and not name.startswith(("_", "completions")) and isinstance(value, int | float)
            ]
    return values


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Yield records: blocks of 32 KiB, 7 bytes before each piece, whose kind says whether it is whole."""
    place, parts = 7, b""  # a header of the library's own
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        piece = data[place + 7 : place + 7 + size]
        if len(piece) < size or kind == 0:  # torn by the kill
            return
        parts += piece
        if kind in {1, 4}:
            yield parts
            parts = b""
        place += 7 + size


def mlflow_values(directory: Path) -> list[Value]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{directory}/trackers/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("holdfast")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.tags["holdfast.run_id"] == RUN_ID
    assert run.data.params["optim.lr"] == "0.001"
    points = [point for name in run.data.metrics for point in client.get_metric_history(run.info.run_id, name)]
    return [
        (point.step, point.key, point.value) for point in sorted(points, key=lambda each: (each.timestamp, each.step))
    ]


def trackio_values(directory: Path) -> list[Value]:
    from trackio import sqlite_storage
    from trackio.sqlite_storage import SQLiteStorage

    sqlite_storage.TRACKIO_DIR = directory / "trackers" / "trackio"  # of the environment only while it is imported
    (record,) = SQLiteStorage.get_run_records("holdfast")
    logs = SQLiteStorage.get_logs("holdfast", record["name"], run_id=record["id"])
    return [
        (line["step"], name, float(value))
        for line in sorted(logs, key=lambda each: each["timestamp"])
        for name, value in line.items()
        if name not in {"step", "timestamp"} and isinstance(value, int | float)
    ]


def swanlab_values(directory: Path) -> list[Value]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    values = []
    for file in sorted(directory.glob(f"trackers/swanlab/run-*-{RUN_ID}*/*.swanlab")):
        if file.stat().st_size == 0:  # the kill came before its first flush
            continue
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            if record.HasField("scalar"):
                values.append((int(record.scalar.step), record.scalar.key, record.scalar.value.number))
        reader.close()
    return values


READ: dict[str, Callable[[Path], list[Value]]] = {
    "wandb": wandb_values, "mlflow": mlflow_values, "trackio": trackio_values, "swanlab": swanlab_values
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_the_last_value_per_step_is_the_effective_log_after_a_kill_and_a_resume(kind: str, tmp_path: Path) -> None:
    skip_without(kind)
    directory = tmp_path / "r"
    run = WrittenRun(directory, [kind])
    run.start()
    for step in range(1, 8):
        run.step(step, loss=1 / step, **({"eval__held_out__nll": 2.0} if step == 4 else {}))
    wait_for(lambda: list(directory.glob(THERE[kind])), 300)
    for process in run.processes():
        os.killpg(process.pid, signal.SIGKILL)
    run.end()

    run.start(to=5)
    for step in range(6, 11):
        run.step(step, loss=3 / step)
    run.sample(10, ("What is 2 + 2?", "4", 1.0))
    run.end()
    run.catch_up(kind)

    values = READ[kind](directory)
    assert {key: value for key, value in effective(values).items() if not key[1].startswith("event/")} == pytest.approx(
        logged(directory)
    )
    assert (0, "event/rewind", 0.0) in values
    everything = b"".join(text_of(directory / "trackers").values())
    assert b"What is 2 + 2?" in everything


def most_bytes(folder: Path) -> int:
    """Return the size of the largest file."""
    sizes = [0]
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return max(sizes)


@pytest.mark.parametrize("least", [1, 60_000, 180_000])
@pytest.mark.parametrize("kind", READ)
def test_a_kill_while_a_library_begins_is_made_good_by_the_next_start(kind: str, least: int, tmp_path: Path) -> None:
    """MLflow makes 900 kB of tables in seconds, longer than a run that is done waits for trackers on a busy machine."""
    skip_without(kind)
    directory = tmp_path / "r"
    folder = directory / "trackers" / kind
    run = WrittenRun(directory, [kind])
    run.start()
    run.step(1, loss=0.5)
    wait_for(lambda: any(folder.rglob("*")), 120)
    latest = time.monotonic() + 2  # most libraries write little
    wait_for(lambda: most_bytes(folder) >= least or (kind != "mlflow" and time.monotonic() > latest))
    for process in run.processes():
        os.killpg(process.pid, signal.SIGKILL)
    run.end()

    run.catch_up(kind)

    values = effective(READ[kind](directory))
    assert {key: value for key, value in values.items() if not key[1].startswith("event/")} == {(1, "loss"): 0.5}


@pytest.mark.parametrize("kind", READ)
def test_numbers_that_are_not_finite_stop_no_library(kind: str, tmp_path: Path) -> None:
    skip_without(kind)
    run = WrittenRun(tmp_path / "r", [kind])
    run.start()
    run.step(1, loss=math.nan, grad_norm=1.0)
    run.end()
    run.catch_up(kind)


def connects(trace: Path) -> list[str]:
    """Return calls to the network that strace saw, those of children too, but for the own machine's."""
    lines = trace.read_text(errors="replace").splitlines()
    calls = [line for line in lines if re.search(r"sa_family=AF_INET6?\b", line)]
    return [line for line in calls if not re.search(r'"127\.0\.0\.1"|"::1"', line)]


def traced(command: list[str], trace: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    calls = "trace=connect,sendto,sendmsg,sendmmsg"
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}  # of a user
    subprocess.run(
        [strace, "-f", "-qq", "-e", calls, "-o", str(trace), *command], check=True, env=environment, timeout=300
    )


@pytest.mark.parametrize("kind", [*READ, "tensorboard"])
def test_a_tracker_that_is_local_asks_for_no_connection(kind: str, tmp_path: Path) -> None:
    skip_without(kind)
    run = WrittenRun(tmp_path / "r", [kind])
    run.start_nothing()
    run.step(1, loss=1.0)
    run.lines.close()
    run.samples.close()
    command = [sys.executable, "-P", "-m", "holdfast.features.trackers.process", str(tmp_path / "r"), kind]

    traced(command, tmp_path / "trace")

    assert connects(tmp_path / "trace") == []


def test_the_count_of_connections_sees_one(tmp_path: Path) -> None:
    program = "import socket; s = socket.socket(); s.setblocking(False); s.connect_ex(('192.0.2.1', 80))"

    traced([sys.executable, "-c", program], tmp_path / "trace")

    assert len(connects(tmp_path / "trace")) == 1
