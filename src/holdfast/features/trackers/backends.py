"""The trackers: files that Holdfast writes, and tracking libraries. Each is a `Backend` in a process of its own.

Every library is set up to collect only what Holdfast sends, by the settings below and by `environment.py`.
"""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.config.base import leaves
from holdfast.features.trackers.content import COLUMNS, Backend, TrackedRun
from holdfast.features.trackers.environment import setting
from holdfast.metrics.sink import REWIND, cut_torn_line
from holdfast.text.escaping import escaped

_PROJECT, _AXIS = "holdfast", "step"
_Rows = Sequence[Mapping[str, Any]]


class _Csv:
    """metrics.csv and completions.csv, one line a row, and run.json."""

    def __init__(self, run: TrackedRun) -> None:
        about = {"run_id": run.run_id, "name": run.name, "versions": run.versions, "configuration": run.configuration}
        (run.folder / "run.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        self._metrics = _Table(run.folder / "metrics.csv", ["step"])
        self._completions = _Table(run.folder / "completions.csv", list(COLUMNS))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.append({"step": step, **metrics})

    def completions(self, step: int, rows: _Rows) -> None:
        for row in rows:  # without line ends in texts, so that a kill tears one row at most
            texts = {name: escaped(row[name]) for name in ("prompt", "completion")}
            self._completions.append({**row, "step": step, **texts})

    def close(self, status: str) -> None:
        pass  # every row is on the disk


class _Table:
    """A CSV file whose columns may become more."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self._path, self._columns = path, columns
        if path.exists() and cut_torn_line(path) > 0:
            with path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file))
        else:
            self._write_all([])

    def append(self, row: Mapping[str, Any]) -> None:
        if new := [name for name in row if name not in self._columns]:
            with self._path.open(newline="", encoding="utf-8") as file:
                earlier = list(csv.DictReader(file))
            self._columns = self._columns + new
            self._write_all(earlier)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)

    def _write_all(self, rows: _Rows) -> None:
        temporary = self._path.with_suffix(".new")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self._path)


class _TensorBoard:
    """Event files in the run's tensorboard folder, made without torch."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._start, self._summary, self._text = Event, SessionLog(status=1), Summary, text_pb
        self._writer = EventFileWriter(str(run.folder))
        for name, facts in {"configuration": run.configuration, "versions": run.versions}.items():
            self._add(0, summary=text_pb(name, json.dumps(facts, indent=2)))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if REWIND in metrics:  # TensorBoard itself drops what it has of later steps
            self._add(step + 1, session_log=self._start)
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=self._summary(value=values))
        self._writer.flush()

    def completions(self, step: int, rows: _Rows) -> None:
        cells = [[str(row[name]).replace("|", "\\|").replace("\n", "<br>") for name in COLUMNS] for row in rows]
        lines = [COLUMNS, ["---"] * len(COLUMNS), *cells]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        self._add(step, summary=self._text("completions", table))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **content))

    def close(self, status: str) -> None:  # noqa: ARG002  it knows no status
        self._writer.close()


def _about(run: TrackedRun) -> dict[str, Any]:
    return {**run.configuration, "versions": dict(run.versions)}


class _Wandb:
    """Weights & Biases. Its own step never goes back, and drops what does; so metrics have an axis of ours."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        settings = wandb.Settings(
            console="off", disable_git=True, disable_code=True, save_code=False, disable_job_creation=True, host="",
            program="holdfast", x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True,
            x_disable_viewer=True, x_save_requirements=False,
        )  # fmt: skip
        self._table = wandb.Table
        self._run = wandb.init(
            project=setting("WANDB_PROJECT", _PROJECT), name=run.name, id=run.run_id, resume="allow",
            dir=str(run.folder), config=_about(run), allow_val_change=True, settings=settings,
        )  # fmt: skip
        self._run.define_metric(_AXIS, hidden=True)
        self._run.define_metric("*", step_metric=_AXIS)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, _AXIS: step})

    def completions(self, step: int, rows: _Rows) -> None:
        data = [[row[name] for name in COLUMNS] for row in rows]
        self._run.log({"completions": self._table(columns=list(COLUMNS), data=data), _AXIS: step})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class _Mlflow:
    """MLflow, which chooses its own run id; ours is a tag, by which a resume gets the run back."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        database = run.folder.absolute() / "mlflow.db"
        local = f"sqlite:///{database}"
        address = setting("MLFLOW_TRACKING_URI", local)
        if address == local and not database.exists():
            _make_tables(database)
        self._client = client = MlflowClient(tracking_uri=address)
        name = setting("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        if (existing := client.get_experiment_by_name(name)) is not None:
            experiment = str(existing.experiment_id)
        else:
            artifacts = (run.folder.absolute() / "artifacts").as_uri() if address == local else None
            experiment = str(client.create_experiment(name, artifact_location=artifacts))
        marks = client.search_runs([experiment], f"tags.`holdfast.run_id` = '{run.run_id}'", max_results=1)
        if marks:
            self._id = marks[0].info.run_id
            client.update_run(self._id, status="RUNNING")
        else:
            tags = {"holdfast.run_id": run.run_id}
            self._id = client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
            settings = leaves(run.configuration, into_lists=True)
            params = [Param(_mlflow_name(key)[:250], str(value)[:500]) for key, value in settings if key]
            for start in range(0, len(params), 100):  # the most that one call takes
                client.log_batch(self._id, params=params[start : start + 100], synchronous=True)
        # Parameters cannot change, and a resume may change the configuration.
        client.log_dict(self._id, dict(run.configuration), "configuration.json")
        client.log_dict(self._id, dict(run.versions), "versions.json")
        self._last_time = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        # Its key is time, step and value: two lines of one millisecond would have no order.
        self._last_time = max(self._last_time + 1, int(time.time() * 1000))
        points = [Metric(_mlflow_name(name), value, self._last_time, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=points, synchronous=True)

    def completions(self, step: int, rows: _Rows) -> None:
        data = {name: [row[name] for row in rows] for name in COLUMNS}
        # One file a step: appending reads the whole table again.
        self._client.log_table(self._id, data, f"completions/step-{step:08d}.json")

    def close(self, status: str) -> None:
        self._client.set_terminated(self._id, {"finished": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))


def _make_tables(database: Path) -> None:
    """Make the tables of a new database, whole or not at all: no later start could finish what a kill left halfway."""
    from mlflow import MlflowClient

    half = database.with_name("new.db")
    for file in database.parent.glob("new.db*"):
        file.unlink()
    MlflowClient(tracking_uri=f"sqlite:///{half}").search_experiments()
    half.rename(database)


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


class _Trackio:
    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._table = trackio.Table
        self._run = trackio.init(
            project=setting("TRACKIO_PROJECT", _PROJECT), name=f"{run.name}-{run.run_id[:8]}", config=_about(run),
            resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def completions(self, step: int, rows: _Rows) -> None:
        self._run.log({"completions": self._table(data=[dict(row) for row in rows])}, step=step)

    def close(self, status: str) -> None:  # noqa: ARG002  it knows no status
        self._run.finish()


class _Swanlab:
    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        mode = setting("SWANLAB_MODE", "offline")
        nothing = swanlab.Settings.Probe(
            hardware=False, runtime=False, requirements=False, conda=False, git=False, swanlab=False, monitor=False
        )
        terminal = swanlab.Settings.Terminal(proxy_type="none")  # what the process prints names folders
        self._text = swanlab.Text
        self._run = swanlab.init(
            project=setting("SWANLAB_PROJ_NAME", _PROJECT), name=run.name, id=run.run_id, mode=mode,
            resume="allow" if mode in {"online", "cloud"} else None, log_dir=str(run.folder), config=_about(run),
            settings=swanlab.Settings(probe=nothing, interactive=False, terminal=terminal),
        )  # fmt: skip

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def completions(self, step: int, rows: _Rows) -> None:
        # Texts: the library's tables want a further package.
        texts = [
            self._text(f"{row['prompt']}\n---\n{row['completion']}", caption=f"reward {row['reward']}") for row in rows
        ]
        self._run.log({"completions": texts}, step=step)

    def close(self, status: str) -> None:
        self._run.finish("success" if status == "finished" else "crashed")


KINDS: Mapping[str, Callable[[TrackedRun], Backend]] = {
    "csv": _Csv, "tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _Mlflow, "trackio": _Trackio,
    "swanlab": _Swanlab,
}  # fmt: skip
"""By `kind` of metrics.sinks."""
