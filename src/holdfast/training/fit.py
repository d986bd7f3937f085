"""The loop around the steps: log, evaluate, export, stop. Steps return numbers; only this file talks to sinks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from holdfast.checkpoint.export import EXPORTED_CONFIG, export
from holdfast.metrics.progress import Progress, open_progress
from holdfast.metrics.sink import JsonlSink, Sink, TensorBoardSink
from holdfast.rollout.replica import Replica
from holdfast.training import directory
from holdfast.training.control import EvaluationTimes, StopRequests, decide
from holdfast.training.evaluate import evaluate_completions, evaluate_loss, write_completions
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
    started = time.monotonic()
    screen = open_progress(
        run.config.metrics.progress if run.world.is_first else "off", run.total_steps, run.state.step
    )
    sinks = _open_directory(run) if run.world.is_first else []
    evaluation, dry = run.config.evaluation, run.config.dry_run
    latest: dict[str, float] = {}
    stopped = None
    try:
        with StopRequests() as requests:
            if evaluation.at_start or dry:
                _report(run, sinks, screen, latest, evaluate(run))
            times = EvaluationTimes(evaluation, run.stream.epoch)
            while stopped is None and (run.total_steps is None or run.state.step < run.total_steps):
                line = step(run)
                if line is None:
                    break
                line |= {"epoch": run.stream.epoch} | _measurements(run, line)
                event = StepEvent(run.state.step, run.stream.epoch, line)
                decision = decide(run, event, requests, times, time.monotonic() - started)
                if decision.evaluate:
                    line |= evaluate(run)
                _report(run, sinks, screen, latest, line)
                if decision.save:
                    _export(run, f"step-{run.state.step:08d}")
                stopped = decision.stop
            if stopped is None and (evaluation.at_end or dry) and not _has_fresh_evaluation(run, line_of=latest):
                _report(run, sinks, screen, latest, evaluate(run))
        place = _export(run, "final") if run.config.checkpoint.export_at_end or dry else None
    finally:
        for sink in sinks:
            sink.close()
        screen.close()
    if dry and run.world.is_first:
        directory.remove(run.directory)
    return Outcome(run.state.step, latest, stopped, str(run.directory), None if dry else place)


def evaluate(run: Run) -> dict[str, float]:
    """Return eval/<set>/<metric> for every evaluation set; all ranks call this together."""
    metrics: dict[str, float] = {}
    options = run.config.evaluation.completions
    with run.clock.phase("evaluation"):
        replica = None
        for held_out in run.evaluation_sets:
            found = evaluate_loss(run.policy, run.objective, held_out.open_stream(), run.world.device)
            if options is not None:
                if replica is None:
                    replica = Replica(run.origin, run.world.device, getattr(torch, run.plan.compute_dtype))
                    replica.refresh(run.policy)
                examples = held_out.read_prompts(options.samples)
                more, answered = evaluate_completions(replica, run.origin.tokenizer, examples, options, run.exchange)
                found |= more
                if run.world.is_first:
                    name = f"step-{run.state.step:08d}.{held_out.name.replace('/', '-')}.jsonl"
                    write_completions(run.directory / "completions" / name, answered)
            metrics |= {f"eval/{held_out.name}/{name}": value for name, value in found.items()}
    return metrics


def _open_directory(run: Run) -> list[Sink]:
    directory.create(run.directory, run.config, "sft")
    sinks: list[Sink] = [JsonlSink(run.directory / "metrics.jsonl")]
    if "tensorboard" in run.config.metrics.sinks:
        sinks.append(TensorBoardSink(run.directory / "tensorboard"))
    return sinks


def _report(run: Run, sinks: list[Sink], screen: Progress, latest: dict[str, float], line: dict[str, float]) -> None:
    latest.update(line)
    step = run.state.step
    every = run.config.metrics.log_every
    if step % every == 0 or step == run.total_steps or any(name.startswith("eval/") for name in line):
        for sink in sinks:
            sink.write(step, line)
    if "loss" in line:
        screen.update(step, line)
    evaluated = {name: value for name, value in line.items() if name.startswith("eval/")}
    if evaluated and run.world.is_first:
        text = "  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in evaluated.items())
        screen.say(f"evaluation at step {step}: {text}")


def _has_fresh_evaluation(run: Run, line_of: dict[str, float]) -> bool:
    every = run.config.evaluation.every_steps
    return every is not None and run.state.step % every == 0 and any(name.startswith("eval/") for name in line_of)


def _measurements(run: Run, line: dict[str, float]) -> dict[str, float]:
    """Return times, throughput and memory since the last step."""
    times = run.clock.read()
    tokens = line.get("data/tokens", 0.0)
    measured = {**times, "throughput/tokens_per_second": tokens / max(times["step_time"], 1e-9)}
    if run.peak_flops is not None and tokens:
        flops = run.cost.flops(tokens, line.get("data/mean_length", 0.0))
        measured["throughput/mfu"] = flops / max(times["step_time"], 1e-9) / (run.peak_flops * run.world.size)
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
