"""What each library reads back of its own files after a kill and a resume; one environment each has the library.

`tools/test_trackers.sh` makes the environments; where a package is missing its tests are skipped by name.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.metrics.trackers.cases import RUN_ID, WrittenRun, effective, logged, text_of, wait_for

Value = tuple[int, str, float]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # what libraries warn of is their own

SECRETS = [f"planted-{number:02d}-{place}" for place in ("variable", "address", "path") for number in range(10)]
THERE = {
    "wandb": "trackers/wandb/wandb/offline-run-*/run-*.wandb",
    "mlflow": "trackers/.mlflow.json",
    "trackio": "trackers/trackio/*.db",
    "swanlab": "trackers/swanlab/run-*",
}
"""What stands on the disk before the kill."""


def wandb_values(directory: Path) -> list[Value]:
    """Read transaction logs by the library's own messages; the format around them is LevelDB's log format."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    files = sorted(directory.glob(f"trackers/wandb/wandb/offline-run-*-{RUN_ID}/run-{RUN_ID}.wandb"))
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
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{directory}/trackers/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("holdfast")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.tags["holdfast.run_id"] == RUN_ID
    assert run.data.params["optim.lr"] == "0.001"
    points = [point for name in run.data.metrics for point in client.get_metric_history(run.info.run_id, name)]
    return [
        (point.step, point.key, point.value) for point in sorted(points, key=lambda each: (each.timestamp, each.step))
    ]


def trackio_values(directory: Path) -> list[Value]:
    pytest.importorskip("trackio")
    os.environ["TRACKIO_DIR"] = str(directory / "trackers" / "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    (record,) = SQLiteStorage.get_run_records("holdfast")
    logs = SQLiteStorage.get_logs("holdfast", record["name"], run_id=record["id"])
    return [
        (line["step"], name, float(value))
        for line in sorted(logs, key=lambda each: each["timestamp"])
        for name, value in line.items()
        if name not in {"step", "timestamp"} and isinstance(value, int | float)
    ]


def swanlab_values(directory: Path) -> list[Value]:
    pytest.importorskip("swanlab")
    raise NotImplementedError


READ: dict[str, Callable[[Path], list[Value]]] = {
    "wandb": wandb_values, "mlflow": mlflow_values, "trackio": trackio_values, "swanlab": swanlab_values
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_the_last_value_per_step_is_the_effective_log_after_a_kill_and_a_resume(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(kind)
    directory = tmp_path / "r"
    run = WrittenRun(directory, [kind])
    run.start()
    for step in range(1, 8):
        run.step(step, loss=1 / step, **({"eval__held_out__nll": 2.0} if step == 4 else {}))
    wait_for(lambda: list(directory.glob(THERE[kind])), 120)
    for process in run.processes():
        os.killpg(process.pid, signal.SIGKILL)
    run.end()

    run.start(to=5)
    for step in range(6, 11):
        run.step(step, loss=3 / step)
    run.sample(10, "What is 2 + 2?", "4", 1.0)
    run.end()
    run.catch_up(kind)

    values = READ[kind](directory)
    assert {key: value for key, value in effective(values).items() if not key[1].startswith("event/")} == pytest.approx(
        logged(directory)
    )
    assert (5, "event/rewind", 5.0) in values
    everything = b"".join(text_of(directory / "trackers").values())
    assert b"What is 2 + 2?" in everything


def planted(directory: Path) -> dict[str, Any]:
    """Return a configuration with secrets in addresses and paths."""
    addresses = {
        f"server_{number}": f"https://user:{secret}@host.example:8000/v1?token={secret}"
        for number, secret in enumerate(SECRETS[10:20])
    }
    paths = {f"file_{number}": f"/home/{secret}/rows.jsonl" for number, secret in enumerate(SECRETS[20:30])}
    return {"data": paths, "servers": addresses, "reward": [{"kind": "path", "kwargs": {"key": SECRETS[0]}}]}


@pytest.mark.parametrize("kind", [*READ, "csv", "tensorboard"])
def test_no_planted_secret_reaches_a_tracker(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "csv":
        pytest.importorskip(kind)
    for number, secret in enumerate(SECRETS[:10]):
        monkeypatch.setenv(
            ["OPENAI_API_KEY", "MY_TOKEN", "AWS_PROFILE", "DATABASE_URL"][number % 4] + str(number), secret
        )
    monkeypatch.setenv("HF_TOKEN", SECRETS[0])
    run = WrittenRun(tmp_path / "r", [kind], **planted(tmp_path))
    run.start()
    run.step(1, loss=1.0)
    run.sample(1, "a prompt", "an answer", 1.0)
    run.end()
    run.catch_up(kind)

    files = text_of(tmp_path / "r" / "trackers") | text_of(tmp_path / "r" / "tensorboard")
    assert files
    assert [(path.name, secret) for path, data in files.items() for secret in SECRETS if secret.encode() in data] == []


def test_numbers_that_are_not_finite_stop_no_library(tmp_path: Path) -> None:
    kinds = [kind for kind in READ if __import__("importlib.util").util.find_spec(kind)]
    if not kinds:
        pytest.skip("none of the libraries is installed")
    for kind in kinds:
        run = WrittenRun(tmp_path / kind, [kind])
        run.start()
        run.step(1, loss=math.nan, grad_norm=1.0)
        run.end()
        run.catch_up(kind)
