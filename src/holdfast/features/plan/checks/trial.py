"""The check of `holdfast doctor` that makes a run's two steps: `dry_run=true`, as a command of its own."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.config.base import leaves
from holdfast.config.verbs.training import TrainingConfig, as_plain
from holdfast.features.plan.checks.findings import Finding, fail, ok, unknown, warn
from holdfast.files import python_module
from holdfast.launch.environment import under_torchrun
from holdfast.training.directory import run_directory

TRIAL = "run"
_DOCTOR_RUN_SECONDS = 1200.0
"""For two steps of a run, where `holdfast doctor` makes them."""
_END_SECONDS = 30.0
"""For a dry run to end once it is told to."""


def look_at_trial(
    config: TrainingConfig, path: Path, overrides: Sequence[str], *, runs_code: bool
) -> Iterator[Finding]:
    """Make a dry run, and remove its directory."""
    if under_torchrun():
        yield unknown(TRIAL, "not tried under torchrun", "Start the run's own command with dry_run=true.")
        return
    if not runs_code and names_code(config):
        yield unknown(TRIAL, "not tried (--no-code): the configuration names code of yours")
        return
    directory = run_directory(config.model_copy(update={"dry_run": True}))
    made = [place for place in (directory, *directory.parents) if not place.exists()]
    try:
        # A rank that dies is what is looked for: nothing goes on without it.
        alone = ("launch.max_restarts=0", "launch.min_ranks=null", "dry_run=true")
        yield from _tried([*python_module("holdfast.cli.main"), config.verb, str(path), *overrides, *alone])
    finally:
        if directory in made:
            shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else may write there
            for place in made[1:]:
                place.rmdir()


def names_code(config: TrainingConfig) -> bool:
    """Return whether a run executes code of its user, of its rows, or of its model."""
    values = dict(leaves(as_plain(config), into_lists=True))
    by_kind = any(value in {"path", "code"} for key, value in values.items() if key.rpartition(".")[2] == "kind")
    others = (
        config.observers,
        config.data.filter,
        getattr(config, "environment", None),
        config.model.trust_remote_code,
    )
    return by_kind or any(others)


def end_launcher(process: subprocess.Popen[str]) -> None:
    """End a command that starts ranks; a guard of its own ends ranks which do not end with it."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_END_SECONDS)
    process.kill()
    process.communicate()


def _tried(command: list[str]) -> Iterator[Finding]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said, complaints = process.communicate(timeout=_DOCTOR_RUN_SECONDS)
        except KeyboardInterrupt:
            end_launcher(process)
            raise
        except subprocess.TimeoutExpired:
            end_launcher(process)
            seconds = f"{_DOCTOR_RUN_SECONDS:g} s"
            yield unknown(
                TRIAL, f"two steps were not done within {seconds}", "Start it with dry_run=true where it runs."
            )
            return
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for line in lines:
        if line.startswith("warning: "):
            yield warn(TRIAL, line.removeprefix("warning: "))
    if process.returncode == 0:
        yield ok(TRIAL, lines[-1])
        return
    reason = " ".join(line.strip() for line in complaints.splitlines()[-6:]) or "it says nothing"
    yield fail(TRIAL, f"it ended with exit code {process.returncode}: {reason}")
