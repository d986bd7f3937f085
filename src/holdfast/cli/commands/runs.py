"""`holdfast runs`: lists the runs in a directory, with the state of each.

Only small files are read and nothing is written. What a run recorded is believed: no checkpoint is hashed here, that is
what `holdfast checkpoint verify` does.
"""

# As cli/main.py, without `from __future__ import annotations`.
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.arguments import takes
from holdfast.config.path_kinds import PathKind
from holdfast.config.yaml12 import parse_file
from holdfast.errors import ConfigError, UserError
from holdfast.files import RegularFile, read_json, read_text
from holdfast.metrics.sink import METRICS
from holdfast.text.escaping import escaped
from holdfast.training.directory import CHECKPOINTS, EVENTS, IDENTITY
from holdfast.training.run_state import json_lines, newest_lease, state_of

WIDTH = 100
_LEAST_STATE = 24
"""Cells that the state and its reason have, if they need so many."""
_TAIL_BYTES = 1 << 18
_ABOUT = "holdfast_export.json"
"""As `checkpoint.export.about` and `training.saving.exports` name them; these import torch."""


def list_runs(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="[DIR]",
            help="Where runs are, or one run.",
            callback=takes(PathKind.RUNS, PathKind.RUN, PathKind.ROWS),
        ),
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """List runs, the one that was active last first: verb, step, checkpoint, best metric, state and why."""
    runs, passed = listed(directory)
    if as_json:
        passed_over = [{"path": path, "reason": reason} for path, reason in passed]
        typer.echo(json.dumps({"runs": runs, "passed_over": passed_over}, indent=2))
        return
    for line in runs_table(runs):
        typer.echo(line)
    if not runs:
        typer.echo(f"no run is in {escaped(str(directory))}", err=True)
    for path, reason in passed:
        sys.stdout.flush()
        typer.echo(_grid([[f"passed over {escaped(path)}: {escaped(reason)}"]], [WIDTH])[0], err=True)


def runs_table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return one line per run, none wider than `WIDTH` cells; the reason of a state comes last and is cut."""
    rows = [
        (
            escaped(run["name"]),
            escaped(run["verb"]),
            f"step {'-' if run['step'] is None else run['step']}",
            f"checkpoint {'-' if run['checkpoint'] is None else run['checkpoint']}",
            f"best {escaped(run['best']['metric'])}={run['best']['value']:.5g}" if run["best"] else "",
            run["state"] + (f": {escaped(run['why'])}" if run["why"] else ""),
        )
        for run in runs
    ]
    return _grid(rows, [28, 8, 14, 20, 30, WIDTH])


def _grid(rows: Sequence[Sequence[str]], widest: Sequence[int]) -> list[str]:
    """Return the lines of a table whose columns are as wide as their texts; the last one gives way to the others."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    used = [number for number in range(len(widest)) if any(row[number] for row in rows)]
    cells = {number: min(widest[number], max(cell_len(row[number]) for row in rows)) for number in used}
    others = used[:-1]
    while others and sum(cells[number] + 2 for number in others) + min(cells[used[-1]], _LEAST_STATE) > WIDTH:
        cells[max(others, key=cells.__getitem__)] -= 1  # rich would take all from the last one
    for number in used:
        table.add_column(no_wrap=number != used[-1], max_width=cells[number])
    for row in rows:
        table.add_row(*(Text(row[number], no_wrap=True, overflow="ellipsis") for number in used))
    console = Console(width=WIDTH, color_system=None, highlight=False)
    with console.capture() as printed:
        console.print(table)
    return [line.rstrip() for line in printed.get().splitlines() if line]


def listed(directory: Path) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Return the runs in a directory, the last active first, and what was passed over there with the reason.

    Raises:
        UserError: It is not a directory, or cannot be read.
    """
    try:
        single = (directory / IDENTITY).exists()
        paths = [directory] if single else sorted(entry for entry in directory.iterdir() if entry.is_dir())
    except OSError as error:
        raise UserError(
            f"{directory} is no directory of runs: {error.strerror or error}. Name one: holdfast runs ls DIR."
        ) from error
    runs: list[tuple[float, dict[str, Any]]] = []
    passed: list[tuple[str, str]] = []
    for path in paths:
        if path.name.startswith(".") and not single:  # launches and dry runs
            continue
        try:
            runs.append(_looked_at(path))
        except FileNotFoundError as error:
            missing = Path(str(error.filename)).name == IDENTITY
            passed.append((path.name, f"it has no {IDENTITY}, so it is no run" if missing else str(error)))
        except (OSError, ValueError, UserError) as error:
            passed.append((path.name, str(error)))
    runs.sort(key=lambda pair: pair[0], reverse=True)
    return [run for _, run in runs], passed


def _looked_at(directory: Path) -> tuple[float, dict[str, Any]]:
    """Return when a run was last active, and what `--json` prints of it.

    Raises:
        OSError: A file of it is missing or is none.
        ValueError: A file of it is damaged.
    """
    verb, run_id = _identity(directory)
    step, events = last_step(directory / METRICS), read_events(directory / EVENTS)
    state = state_of(directory, events, step)
    paths = [*(directory / name for name in (IDENTITY, METRICS, EVENTS)), newest_lease(directory)]
    active = max(path.stat().st_mtime for path in paths if path is not None and path.exists())
    return active, {
        "name": directory.absolute().name,
        "path": str(directory),
        "verb": verb,
        "run_id": run_id,
        "step": step,
        "state": state.name,
        "why": state.why,
        "checkpoint": _newest_checkpoint(directory, events),
        "best": _rating(directory / "exports" / "best"),
        "last_activity": datetime.fromtimestamp(active).astimezone().isoformat(timespec="seconds"),
    }


def _identity(directory: Path) -> tuple[str, str]:
    path = directory / IDENTITY
    try:
        values = read_json(path)
    except ValueError as error:
        raise ValueError(f"{IDENTITY} is damaged: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(values.get(name), str) for name in ("verb", "run_id")):
        raise ValueError(f"{IDENTITY} is not what Holdfast writes")
    return values["verb"], values["run_id"]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the lines of an events.jsonl, oldest first; none if it is not there."""
    return json_lines(read_text(path)) if path.exists() else []


def last_step(path: Path) -> int | None:
    """Return the step of the last line of metrics.jsonl, of which only the end is read; a resume may go back."""
    if not path.exists():
        return None
    with RegularFile(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    steps = [line.get("to" if line.get("event") == "rewind" else "step") for line in json_lines(text)]
    return next((step for step in reversed(steps) if type(step) is int), None)


def _newest_checkpoint(directory: Path, events: Sequence[dict[str, Any]]) -> int | None:
    saved: set[int] = {
        event["saved"] for event in events if event.get("event") == "checkpoint" and type(event.get("saved")) is int
    }
    folder = directory / CHECKPOINTS
    if saved and not any(folder.glob("step-*")):
        storage = _storage(directory)
        if storage is not None and "://" in storage and not storage.startswith("file://"):
            return max(saved)  # a store that only torch's side can ask
        folder = Path((storage or str(folder)).removeprefix("file://"))
    complete = (
        step for step in sorted(saved, reverse=True) if (folder / f"step-{step:08d}" / "manifest.json").is_file()
    )
    return next(complete, None)


def _storage(directory: Path) -> str | None:
    """Return the run's checkpoint.storage, None where it has none."""
    try:
        section = parse_file(directory / "config.resolved.yaml").values.get("checkpoint")
    except (OSError, ConfigError):
        return None
    storage = section.get("storage") if isinstance(section, dict) else None
    return storage if isinstance(storage, str) else None


def _rating(export: Path) -> dict[str, Any] | None:
    """Return what the best export is the best of."""
    try:
        rating = read_json(export / _ABOUT)["rating"]
        return {"metric": str(rating["metric"]), "value": float(rating["value"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
