"""The training loop around a recipe's steps: it logs, evaluates, saves, exports and stops; steps do no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

from holdfast.checkpoint.errors import CheckpointError
from holdfast.errors import RankFailed
from holdfast.training import directory
from holdfast.training.control import Control, Decision, StopRequests
from holdfast.training.forms import FormNews, record_forms, resume_forms
from holdfast.training.journal import Journal
from holdfast.training.numbers import NumbersOfSteps, Stragglers, measurements
from holdfast.training.profiling import StepProfiler
from holdfast.training.run import StepAbandoned, Training
from holdfast.training.saving.checkpoints import Checkpoints
from holdfast.training.saving.exports import (
    BEST,
    FINAL,
    due_exports,
    export_run,
    note_exported,
    rename_final_export,
)
from holdfast.training.step import Update
from holdfast.training.watched import (
    OWED,
    follows_steps,
    is_end,
    owe,
    owes_evaluation,
    reason_to_end,
    watch_metric,
)
from holdfast.types import StepEvent

Step = Callable[[], dict[str, float] | Update | None]
"""Makes one step and returns its metrics, or the update that has them, or None when the data has ended."""


class EvaluateRun(Protocol):
    """A function that measures a run on its evaluation sets."""

    def __call__(self, *, interrupted: Callable[[], bool]) -> dict[str, float]:
        """Return eval/<set>/<metric>, the same on every rank."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run, the same on every rank."""

    step: int
    """Number of steps done, those before a resume included."""
    metrics: dict[str, float]
    """Last value of every metric by its name."""
    stopped: str | None
    """Reason of an early stop; None if the run reached its end."""
    directory: str
    """Path of the run's directory."""
    export: str | None
    """Path of the exported model; None if none was exported."""
    export_command: str | None = None
    """Command that exports the newest checkpoint; None if there is no checkpoint."""


def fit(training: Training, step: Step, evaluate: EvaluateRun, *, reads_late: bool | None = None) -> Outcome:
    """Run steps until the end, from the newest verified checkpoint on, and leave the results in the run directory.

    Args:
        training: The run.
        step: Makes a step.
        evaluate: Measures the run.
        reads_late: Whether the numbers of an update are read when the next one is on its way, so that the device does
            not wait for the host. Default: on CUDA devices.
    """
    dry, first = training.run.config.dry_run, training.model.state.step
    signals = StopRequests(speaks_first=training.run.world.failure.directory is None)
    try:
        with Checkpoints(training) as checkpoints, Journal(training) as journal, signals as requests:
            training.continued()
            checkpoints.rehearse(requests)
            requests.start_clock(training)
            try:
                stopped = _Loop(training, step, evaluate, checkpoints, journal, requests, reads_late).run_to_end()
            except Exception as error:
                journal.failed(error)
                raise
            exports_at_end = training.run.config.checkpoint.export_at_end or dry
            export_path = export_run(training, FINAL, journal.latest) if exports_at_end and is_end(stopped) else None
            if stopped is None and training.model.state.step > first:
                journal.event("done")
    finally:
        training.stream.close()
        if dry and training.run.world.is_first:
            directory.remove(training.run.directory)
    training.run.ranks.close()
    command = None if dry else checkpoints.export_command
    return Outcome(
        training.model.state.step,
        journal.latest,
        stopped,
        str(training.run.directory),
        None if dry else export_path,
        command,
    )


@dataclass
class _Loop:
    training: Training
    step: Step
    evaluate: EvaluateRun
    checkpoints: Checkpoints
    journal: Journal
    requests: StopRequests
    reads_late: bool | None
    """Whether numbers that nothing waits for are read one update late; None: on CUDA devices."""
    evaluated_at: int = -1

    def __post_init__(self) -> None:
        """Open the profiler, and decide when numbers are read."""
        self.numbers = NumbersOfSteps(self.training.run.log, self.journal.report)
        self.profiler = StepProfiler(self.training.run)
        self.form_news = FormNews(self.training)
        if self.reads_late is None:
            self.reads_late = self.training.run.world.device.type == "cuda"

    def run_to_end(self) -> str | None:
        """Return why the run stopped early; None if it did not."""
        training, state, dry = self.training, self.training.model.state, self.training.run.config.dry_run
        evaluation = training.run.config.evaluation
        if self._has_ended():
            return reason_to_end(training)
        for line in resume_forms(training):
            self.journal.say(line)
        self.journal.started()
        stopped = self._begin() or self._train()
        if is_end(stopped) and (evaluation.at_end or dry) and self.evaluated_at != state.step:
            self._evaluate_at_end()
        if stopped is not None or training.run.config.checkpoint.at_end:
            self.journal.saved(self.checkpoints.save_last(self.numbers.line))
            self.checkpoints.check_grace(self.requests)
        self.journal.saved(self.checkpoints.collect("The run ends without it"))
        return stopped

    def _has_ended(self) -> bool:
        """Return whether the run has already ended, and print why."""
        if owes_evaluation(self.training):
            return False
        run_directory, step = self.training.run.directory, self.training.model.state.step
        reason = reason_to_end(self.training)
        if self.training.finished:
            self.journal.say(
                f"nothing to do: step {step} is the last one of {run_directory}. Raise steps to "
                "go on, or give another run.name to begin a new run"
            )
        elif reason is not None:
            self.journal.say(
                f"nothing to do: {run_directory} has ended at step {step}. {reason}. Raise stop_when.patience or leave "
                "stop_when out to go on, or give another run.name to begin a new run"
            )
        return self.training.finished or reason is not None

    def _begin(self) -> str | None:
        """Make the evaluations that come before the first step of a start; return why the run ends with them."""
        config, step = self.training.run.config, self.training.model.state.step
        for message in rename_final_export(self.training):
            self.journal.say(message)
        if (config.evaluation.at_start and step == 0) or config.dry_run:
            self.journal.report(self._evaluate())
        return self._evaluate_owed() if self.training.model.state.watched.get(OWED) else None

    def _evaluate_owed(self) -> str | None:
        """Make the evaluation that an earlier start left; return why the run ends with it."""
        metrics = self._evaluate()
        request = self.requests.pending(self.training.run.ranks)
        stopped = watch_metric(self.training, metrics, due=True, stopped=None if request is None else request.text)
        self._report_evaluation(metrics)
        if stopped is not None:
            self.journal.event("stop", reason=stopped)
        return stopped

    def _evaluate_at_end(self) -> None:
        """Evaluate before the last save, which holds the numbers; if that fails, the last step is saved."""
        try:
            self._report_evaluation(self._evaluate())
        except Exception as error:
            self._save_before(error)
            raise

    def _report_evaluation(self, metrics: dict[str, float]) -> None:
        """Export the model of an evaluation between two steps if it is the best one, and report the numbers.

        An evaluation that is reported is not made again, so that its export comes first.
        """
        self.numbers.line |= metrics
        self._export([name for name in due_exports(self.training, metrics) if name == BEST])
        self.journal.report(metrics)

    def _train(self) -> str | None:
        """Make steps; return why they stopped early."""
        try:
            stopped = self._steps()
        finally:
            self.profiler.close()
        if skipped := self.training.stream.bad_rows:
            self.journal.say(f"{skipped} bad rows were skipped since this start (data/bad_rows)")
        return stopped

    def _steps(self) -> str | None:
        training, state, run = self.training, self.training.model.state, self.training.run
        control, stragglers = Control(training, self.requests), Stragglers(run.ranks, run.world.device.type)
        run.log.clock.read()  # what came before is no part of the first step's time
        run.log.peaks.note_load()
        first = state.step
        while not training.finished:
            run.world.failure.at_step(state.step)
            self.checkpoints.mark()
            self.profiler.before(state.step + 1)
            try:
                result = self.step()
                if result is None:
                    self.numbers.report_read()
                    return None
                self.profiler.after(state.step)
                self.numbers.add(state.step, result, training.stream.epoch)
                if self.numbers.waits and self._needs_numbers(first):
                    self.numbers.read()
                self.numbers.last.update(measurements(training, self.numbers.last) | stragglers.look(state.step))
                self.journal.saved(self.checkpoints.check_first_step(self.requests))
                event = StepEvent(state.step, training.stream.epoch, self.numbers.line)
                stopped = self._follow(control.decide(event, self.checkpoints.session.status))
            except StepAbandoned:
                stopped = self._abandoned(first)
            except Exception as error:
                self._save_before(error)
                raise
            if stopped is not None:
                self.journal.event("stop", reason=stopped)
                return stopped
        return None

    def _needs_numbers(self, first: int) -> bool:
        """Return whether something waits for the numbers of the step that was made last.

        Args:
            first: Steps that were done when this start began.
        """
        training, config, state = self.training, self.training.run.config, self.training.model.state
        every = config.checkpoint.export_every
        return (
            not self.reads_late
            or training.finished
            or state.step == first + 1
            or bool(training.observers)
            or follows_steps(training)
            or reason_to_end(training) is not None
            or (every is not None and state.step % every == 0)
            or state.skipped_in_a_row + 1 >= config.optim.max_nonfinite_steps
        )

    def _abandoned(self, first: int) -> str:
        """Report what is pending after a step that was abandoned for a request to stop; return why the run stops."""
        self.numbers.report_read()
        request = self.requests.pending(self.training.run.ranks)
        assert request is not None
        if self.training.model.state.step == first and not request.by_signal:
            return (
                f"{request.text} before this start had made a step; the next one makes none either unless it is longer"
            )
        return request.text

    def _follow(self, decision: Decision) -> str | None:
        """Evaluate, report, export and save after a step, as was decided; return why the run stops.

        The evaluation comes first: the save has its numbers, and a kill between the two repeats the step with it.
        """
        training, stopped = self.training, decision.stop
        self._tell_forms(decision)
        if decision.collect:
            self.journal.saved(self.checkpoints.collect())
        if self.numbers.waits:
            if not decision.needs_numbers:
                return None
            self.numbers.read()
        measured = self.numbers.line
        if decision.evaluate:
            owe(training, measured)
            measured = self._evaluate_in_step()
            request = self.requests.pending(training.run.ranks)
            if request is not None and (request.by_signal or stopped is None):
                stopped = request.text
        stopped = watch_metric(training, measured, due=decision.due, stopped=stopped)
        self.numbers.report_read()
        self._export(due_exports(training, self.numbers.line))  # before the save, which remembers the best one
        is_last = training.finished and training.run.config.checkpoint.at_end  # saved behind the last evaluation
        if decision.save and stopped is None and not is_last:
            self.journal.saved(self.checkpoints.save(self.numbers.line))
        return stopped

    def _evaluate_in_step(self) -> dict[str, float]:
        """Return the evaluation of a step, whose time is no part of the next one, and add it to the step's line."""
        began = time.perf_counter()
        with self.training.run.log.clock.stopped():
            metrics = self._evaluate()
        metrics["timing/evaluation"] = time.perf_counter() - began
        self.numbers.line |= metrics
        return metrics

    def _tell_forms(self, decision: Decision) -> None:
        """Record the optional forms in use; a change gets an event and a column of the step."""
        record_forms(self.training)
        events, columns = self.form_news.take(decision.lost)
        self.journal.forms(events)
        self.numbers.last.update(columns)

    def _export(self, names: list[str]) -> None:
        for name in names:
            self.journal.event("export", path=export_run(self.training, name, self.numbers.line))
            note_exported(self.training, name, self.numbers.line)

    def _save_before(self, error: Exception) -> None:
        """Save the last whole step before an error that all ranks raise ends the run."""
        if isinstance(error, RankFailed) or self.training.run.world.failure.broken_by_peer(error):
            return
        with suppress(Exception):  # the error that ends the run counts
            self.numbers.report_read()
        if isinstance(error, CheckpointError):
            return
        self.checkpoints.count_again()
        manifest = self.checkpoints.save_before_leaving()
        if manifest is not None:
            print(f"checkpoint of step {manifest.step} is on disk, saved before the error", flush=True)

    def _evaluate(self) -> dict[str, float]:
        training = self.training
        self.evaluated_at = training.model.state.step
        training.stream.settle()  # sets may share sources, a filter and a tokenizer with the rows of training
        ema = training.run.config.optim.ema
        with training.model.averaged() if ema is not None and ema.evaluate else nullcontext():
            return self.evaluate(interrupted=lambda: self.requests.pending(training.run.ranks) is not None)
