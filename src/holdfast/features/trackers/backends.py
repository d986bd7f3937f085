"""The trackers: files that Holdfast writes, tracking libraries, and classes of users. Each opens in its own process.

Every library is set up to collect only what Holdfast sends, by the settings below.
"""

from __future__ import annotations

import csv
import inspect
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.features.trackers.content import COLUMNS, TrackedRun, flat
from holdfast.features.trackers.environment import setting
from holdfast.files import load_module
from holdfast.metrics.sink import cut_torn_line
from holdfast.text.escaping import escaped

REWIND = "event/rewind"
"""The metric that says at step N: what was logged for later steps is void, they are made again."""


class CsvTracker:
    """metrics.csv and completions.csv, one line a row, and run.json."""

    settle_seconds = 0.0

    def __init__(self, run: TrackedRun) -> None:
        about = {"run_id": run.run_id, "name": run.name, "versions": run.versions, "configuration": run.configuration}
        (run.folder / "run.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        self._metrics = _Table(run.folder / "metrics.csv", ["step"])
        self._completions = _Table(run.folder / "completions.csv", list(COLUMNS))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a row; where a metric is new, the file gets its column first."""
        self._metrics.append({"step": step, **metrics})

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:  # noqa: ARG002  a column has it
        """Append rows; line ends within texts are escaped, so that a kill tears one row at most."""
        for row in rows:
            self._completions.append(
                {name: escaped(value) if isinstance(value, str) else value for name, value in row.items()}
            )

    def close(self, status: str) -> None:
        """Do nothing: every row is on the disk."""


class _Table:
    """A CSV file whose columns may become more."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self._path = path
        if path.exists() and cut_torn_line(path) > 0:
            with path.open(newline="", encoding="utf-8") as file:
                columns = next(csv.reader(file))
        else:
            path.write_text(_line(columns), encoding="utf-8", newline="")
        self._columns = columns

    def append(self, row: Mapping[str, Any]) -> None:
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            file.write(_line(["" if row.get(name) is None else row[name] for name in self._columns]))

    def _widen(self, names: list[str]) -> None:
        temporary = self._path.with_suffix(".new")
        with (
            self._path.open(newline="", encoding="utf-8") as before,
            temporary.open("w", newline="", encoding="utf-8") as after,
        ):
            rows = csv.reader(before)
            after.write(_line(next(rows) + names))
            for row in rows:
                after.write(_line(row + [""] * len(names)))
        temporary.replace(self._path)
        self._columns = self._columns + names


def _line(values: Sequence[Any]) -> str:
    """Return one line of CSV; a kill between two writes leaves whole lines and at most one torn one."""
    texts = [str(value) for value in values]
    return ",".join('"' + text.replace('"', '""') + '"' if set(text) & set(',"') else text for text in texts) + "\n"


class TensorBoardTracker:
    """Event files in the run's tensorboard folder, made without torch."""

    settle_seconds = 0.0

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder))
        self._text("configuration", 0, json.dumps(run.configuration, indent=2))
        self._text("versions", 0, json.dumps(run.versions, indent=2))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one scalar per metric; after a rewind TensorBoard itself drops what it has of later steps."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if REWIND in metrics:
            self._add(step + 1, session_log=SessionLog(status=SessionLog.START))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=Summary(value=values))
        self._writer.flush()

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a table in Markdown."""
        cells = [[str(row[name]).replace("|", "\\|").replace("\n", "<br>") for name in COLUMNS] for row in rows]
        lines = [COLUMNS, ["---"] * len(COLUMNS), *cells]
        self._text("completions", step, "\n".join(f"| {' | '.join(line)} |" for line in lines))

    def _text(self, tag: str, step: int, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        self._add(step, summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]))

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))

    def close(self, status: str) -> None:  # noqa: ARG002
        """Flush and close."""
        self._writer.close()


class UserTracker:
    """A class of the user's: `write(step, metrics)` and `close(status)`; `completions(step, rows)` if it likes."""

    settle_seconds = 30.0

    def __init__(self, run: TrackedRun, file: Path, name: str, kwargs: Mapping[str, Any]) -> None:
        module = load_module(file, f"holdfast_tracker_{file.stem}")
        self._tracker = getattr(module, name)(run, **kwargs)
        self._takes_completions = callable(inspect.getattr_static(self._tracker, "completions", None))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of a step to the user's class."""
        self._tracker.write(step, metrics)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Pass completions to the user's class, if it takes them."""
        if self._takes_completions:
            self._tracker.completions(step, rows)

    def close(self, status: str) -> None:
        """Pass the final status to the user's class."""
        self._tracker.close(status)


def numbered(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Return a configuration as flat text by dotted path, for trackers that know no tree."""
    return {name: str(value) for name, value in flat(configuration).items()}


PROJECT = "holdfast"
_AXIS = "step"


def _about(run: TrackedRun) -> dict[str, Any]:
    return {**run.configuration, "versions": dict(run.versions)}


class WandbTracker:
    """Weights & Biases; offline unless WANDB_MODE says otherwise.

    Its own step never goes back, and drops what does; so metrics have an axis of ours.
    """

    settle_seconds = 30.0  # its transaction log is flushed every 15 s

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        settings = wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            disable_job_creation=True,
            host="",
            program="holdfast",
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_disable_viewer=True,
            x_save_requirements=False,
        )
        self._wandb = wandb
        self._run = wandb.init(
            project=setting("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.folder),
            config=_about(run),
            allow_val_change=True,
            settings=settings,
        )
        self._run.define_metric(_AXIS, hidden=True)
        self._run.define_metric("*", step_metric=_AXIS)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a row to the history."""
        self._run.log({**metrics, _AXIS: step})

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a table."""
        data = [[row[name] for name in COLUMNS] for row in rows]
        self._run.log({"completions": self._wandb.Table(columns=list(COLUMNS), data=data), _AXIS: step})

    def close(self, status: str) -> None:
        """Flush, upload if online, and mark a run that failed."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MlflowTracker:
    """MLflow; a SQLite file and artifacts below the run's directory unless MLFLOW_TRACKING_URI is set.

    MLflow chooses its own run id; ours is a tag, by which a resume gets the run back.
    """

    settle_seconds = 0.0

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        database = run.folder.absolute() / "mlflow.db"
        local = f"sqlite:///{database}"
        address = setting("MLFLOW_TRACKING_URI", local)
        if address == local and not database.exists():
            _make_tables(database)
        self._client = MlflowClient(tracking_uri=address)
        experiment = self._experiment(run, local=address == local)
        marks = self._client.search_runs([experiment], f"tags.`holdfast.run_id` = '{run.run_id}'", max_results=1)
        if marks:
            self._id = marks[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {"holdfast.run_id": run.run_id}
            self._id = self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
            params = [Param(_mlflow_name(name)[:250], text[:500]) for name, text in numbered(run.configuration).items()]
            for start in range(0, len(params), 100):  # the most that one call takes
                self._client.log_batch(self._id, params=params[start : start + 100], synchronous=True)
        # Parameters cannot change, and a resume may change the configuration.
        self._client.log_dict(self._id, dict(run.configuration), "configuration.json")
        self._client.log_dict(self._id, dict(run.versions), "versions.json")
        self._last_time = 0

    def _experiment(self, run: TrackedRun, *, local: bool) -> str:
        name = setting("MLFLOW_EXPERIMENT_NAME", PROJECT)
        existing = self._client.get_experiment_by_name(name)
        if existing is not None:
            return str(existing.experiment_id)
        artifacts = (run.folder.absolute() / "artifacts").as_uri() if local else None
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point per metric; of a step's several, the one with the latest time counts."""
        from mlflow.entities import Metric

        # Its key is time, step and value: two lines of one millisecond would have no order.
        self._last_time = max(self._last_time + 1, int(time.time() * 1000))
        points = [Metric(_mlflow_name(name), value, self._last_time, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=points, synchronous=True)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a table, one file a step: appending reads the whole table again."""
        data = {name: [row[name] for row in rows] for name in COLUMNS}
        self._client.log_table(self._id, data, f"completions/step-{step:08d}.json")

    def close(self, status: str) -> None:
        """Set the status of the run."""
        statuses = {"finished": "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self._id, statuses.get(status, "KILLED"))


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


class TrackioTracker:
    """Trackio; a SQLite file below the run's directory unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set."""

    settle_seconds = 10.0  # its thread writes twice a second

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._table = trackio.Table
        self._run = trackio.init(
            project=setting("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.run_id[:8]}",
            config=_about(run),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a row at the step, on our axis."""
        self._run.log(dict(metrics), step=step)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a table."""
        self._run.log({"completions": self._table(data=[dict(row) for row in rows])}, step=step)

    def close(self, status: str) -> None:  # noqa: ARG002  it knows no status
        """Flush."""
        self._run.finish()


class SwanlabTracker:
    """SwanLab; its offline files unless SWANLAB_MODE says otherwise."""

    settle_seconds = math.inf  # it flushes its file when it is closed; what a kill took is sent again

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        nothing = swanlab.Settings.Probe(
            hardware=False, runtime=False, requirements=False, conda=False, git=False, swanlab=False, monitor=False
        )
        online = setting("SWANLAB_MODE", "offline") in {"online", "cloud"}
        self._swanlab = swanlab
        self._run = swanlab.init(
            project=setting("SWANLAB_PROJ_NAME", PROJECT),
            name=run.name,
            id=run.run_id,
            resume="allow" if online else None,
            mode=setting("SWANLAB_MODE", "offline"),
            log_dir=str(run.folder),
            config=_about(run),
            # What the process prints names folders.
            settings=swanlab.Settings(
                probe=nothing, interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")
            ),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point per metric."""
        self._run.log(dict(metrics), step=step)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add texts: the library's tables want a further package."""
        texts = [
            self._swanlab.Text(f"{row['prompt']}\n---\n{row['completion']}", caption=f"reward {row['reward']}")
            for row in rows
        ]
        self._run.log({"completions": texts}, step=step)

    def close(self, status: str) -> None:
        """Flush, and mark a run that failed."""
        self._run.finish("success" if status == "finished" else "crashed")
