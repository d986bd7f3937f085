"""The loop around the steps: log, evaluate, export, stop. Steps return numbers and touch neither files nor screen."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from holdfast.checkpoint.export import EXPORTED_CONFIG, export
from holdfast.training import directory
from holdfast.training.control import EvaluationTimes, StopRequests, decide
from holdfast.training.evaluate import evaluate
from holdfast.training.journal import Journal
from holdfast.training.run import Run
from holdfast.types import StepEvent

Step = Callable[[Run], dict[str, float] | None]
"""Makes one update and returns its metrics, or None when the data has ended."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    metrics: dict[str, float]
    """The last value of every metric."""
    stopped: str | None
    """Why it stopped before its end; None if it reached it."""
    directory: str
    export: str | None
    """Where the exported model stands."""


def fit(run: Run, step: Step) -> Outcome:
    """Run steps until the end, and leave the results in the run directory."""
    evaluation, dry = run.config.evaluation, run.config.dry_run
    with Journal(run) as journal, StopRequests() as requests:
        if evaluation.at_start or dry:
            journal.report(evaluate(run))
        stopped, evaluated_at = _train(run, step, journal, requests)
        if stopped is None and (evaluation.at_end or dry) and evaluated_at != run.state.step:
            journal.report(evaluate(run))
        place = _export(run, "final") if run.config.checkpoint.export_at_end or dry else None
    if dry and run.world.is_first:
        directory.remove(run.directory)
    return Outcome(run.state.step, journal.latest, stopped, str(run.directory), None if dry else place)


def _train(run: Run, step: Step, journal: Journal, requests: StopRequests) -> tuple[str | None, int]:
    """Return why the run stopped early (None if it did not), and the step of its last evaluation."""
    started = time.monotonic()
    times = EvaluationTimes(run.config.evaluation, run.stream.epoch)
    evaluated_at = -1
    while run.total_steps is None or run.state.step < run.total_steps:
        run.world.failure.at_step(run.state.step)
        line = step(run)
        if line is None:
            break
        line |= {"epoch": run.stream.epoch} | _measurements(run, line)
        event = StepEvent(run.state.step, run.stream.epoch, line)
        decision = decide(run, event, requests, times, time.monotonic() - started)
        if decision.evaluate:
            line |= evaluate(run)
            evaluated_at = run.state.step
        journal.report(line)
        if decision.save:
            journal.event("export", path=_export(run, f"step-{run.state.step:08d}"))
        if decision.stop is not None:
            journal.event("stop", reason=decision.stop)
            return decision.stop, evaluated_at
    return None, evaluated_at


def _measurements(run: Run, line: dict[str, float]) -> dict[str, float]:
    """Return times, throughput and memory since the last step."""
    times = run.clock.read()
    tokens = line.get("data/tokens", 0.0)
    seconds = max(times["step_time"], 1e-9)
    measured = {**times, "throughput/tokens_per_second": tokens / seconds}
    if run.peak_flops is not None and tokens:
        flops = run.cost.flops(tokens, line.get("data/mean_length", 0.0))
        measured["throughput/mfu"] = flops / seconds / (run.peak_flops * run.world.size)
    if run.world.device.type == "cuda":
        measured["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    else:
        measured["memory/resident_gib"] = psutil.Process().memory_info().rss / 2**30
    return measured


def _export(run: Run, name: str) -> str:
    wanted = run.config.checkpoint.export_dtype
    place = run.directory / "exports" / name
    export(
        run.policy,
        run.origin,
        place,
        run.exchange,
        dtype=None if wanted == "same" else getattr(torch, wanted),
        largest_file_bytes=run.config.checkpoint.export_shard_bytes,
        extra_files={EXPORTED_CONFIG: directory.resolved_yaml(run.config)},
    )
    return str(place)
