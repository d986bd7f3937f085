"""The training loop around a recipe's steps: it logs, evaluates, saves, exports and stops; steps do no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.checkpoint.errors import CheckpointError
from holdfast.errors import RankFailed
from holdfast.training import directory
from holdfast.training.control import Control, Decision, StopRequests
from holdfast.training.forms import FormNews, record_forms, resume_forms
from holdfast.training.journal import Journal
from holdfast.training.numbers import StepNumbers, measurements
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
from holdfast.training.step import StartedUpdate
from holdfast.training.stragglers import Stragglers
from holdfast.training.watched import (
    MADE_LATER,
    OWED,
    follows_steps,
    is_end,
    owe,
    reason_to_end,
    set_standings,
    standings,
    watch_metric,
)
from holdfast.types import StepEvent

Step = Callable[[], dict[str, float] | StartedUpdate | None]
"""Makes one step and returns its metrics or the update that tells them, or None when the data has ended."""


class EvaluateRun(Protocol):
    """A function that measures a run on its evaluation sets."""

    def __call__(self, *, interrupted: Callable[[], bool]) -> dict[str, float]:
        """Return eval/<set>/<metric>, the same on every rank."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    metrics: dict[str, float]
    """The last value of every metric."""
    stopped: str | None
    """Why the run stopped early; None if it reached its end."""
    directory: str
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
    line: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step that was read, its evaluation included."""
    evaluated_at: int = -1
    pending: list[StepNumbers] = field(default_factory=list)
    """Of the last steps, in their order, those that are not reported; more than one only while one is being read."""

    def __post_init__(self) -> None:
        """Open the profiler, and decide when numbers are read."""
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
            self.journal.saved(self.checkpoints.save_last(self.line))
            self.checkpoints.check_grace(self.requests)
        self.journal.saved(self.checkpoints.collect("The run ends without it"))
        return stopped

    def _has_ended(self) -> bool:
        """Return whether the run has already ended, and print why."""
        if self._owes_evaluation():
            return False
        run_directory, step, reason = (
            self.training.run.directory,
            self.training.model.state.step,
            reason_to_end(self.training),
        )
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

    def _owes_evaluation(self) -> bool:
        """Say whether an evaluation of the step the run stands at is left to make; one that was made later counts.

        Its checkpoint cannot say so: it was on disk before.
        """
        training, newest = self.training, self.checkpoints.session.newest
        if not training.model.state.watched.get(OWED):
            return False
        if newest is not None:
            run_directory = training.run.directory
            records = training.run.ranks.on_first_rank(
                lambda: [
                    line["watched"]
                    for line in directory.events(run_directory, MADE_LATER)
                    if line["checkpoint"] == newest.hash
                ]
            )
            if records:
                set_standings(training, records[-1])
        return bool(training.model.state.watched.get(OWED))

    def _begin(self) -> str | None:
        """Make the evaluations that come before the first step of a start; return why the run ends with them."""
        config, step = self.training.run.config, self.training.model.state.step
        for message in rename_final_export(self.training):
            self.journal.say(message)
        if (config.evaluation.at_start and step == 0) or config.dry_run:
            self.journal.report(self._evaluate())
        return self._evaluate_later() if self.training.model.state.watched.get(OWED) else None

    def _evaluate_later(self) -> str | None:
        """Make the evaluation that an earlier start left; return why the run ends with it."""
        metrics = self._evaluate()
        stop_reason = self.requests.pending(self.training.run.ranks)
        stopped = watch_metric(
            self.training, metrics, due=True, stopped=None if stop_reason is None else stop_reason.text
        )
        self.line |= metrics
        self.journal.report(metrics)
        self._export_best(metrics)
        newest = self.checkpoints.session.newest
        if newest is not None and OWED not in self.training.model.state.watched:
            self.journal.event(MADE_LATER, checkpoint=newest.hash, watched=standings(self.training))
        if stopped is not None:
            self.journal.event("stop", reason=stopped)
        return stopped

    def _evaluate_at_end(self) -> None:
        """Evaluate before the last save, which holds the numbers; what was trained is saved if that fails."""
        try:
            metrics = self._evaluate()
            self.line |= metrics
            self.journal.report(metrics)
            self._export_best(metrics)
        except Exception as error:
            self._save_before(error)
            raise

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
        training, control = self.training, Control(self.training, self.requests)
        training.run.log.clock.read()  # what came before is no part of the first step's time
        training.run.log.peaks.note_load()
        first = training.model.state.step
        stragglers = Stragglers(training.run.ranks, training.run.world.device.type)
        while not training.finished:
            training.run.world.failure.at_step(training.model.state.step)
            done = training.model.state.step
            self.checkpoints.mark()
            self.profiler.before(done + 1)
            try:
                result = self.step()
                if result is None:
                    self._report()
                    return None
                self.profiler.after(training.model.state.step)
                self._note(result, first, stragglers)
                self.journal.saved(self.checkpoints.check_first_step(self.requests))
                event = StepEvent(training.model.state.step, training.stream.epoch, self.line)
                decision = control.decide(event, self.checkpoints.session.status)
                stopped = self._follow(decision)
            except StepAbandoned:
                self._report()
                stop_reason = self.requests.pending(training.run.ranks)
                assert stop_reason is not None
                stopped = stop_reason.text
                if training.model.state.step == first and not stop_reason.by_signal:
                    stopped += " before this start had made a step; the next one makes none either unless it is longer"
            except Exception as error:
                self._save_before(error)
                raise
            if stopped is not None:
                self.journal.event("stop", reason=stopped)
                return stopped
        return None

    def _note(self, result: dict[str, float] | StartedUpdate, first: int, stragglers: Stragglers) -> None:
        """Report the step before, and read the numbers of this one if something waits for them."""
        training, log, update = (
            self.training,
            self.training.run.log,
            result if isinstance(result, StartedUpdate) else None,
        )
        line = {**(result.known if isinstance(result, StartedUpdate) else result), "epoch": training.stream.epoch}
        numbers = StepNumbers(training.model.state.step, line, update, list(log.batches))
        log.batches.clear()
        self.pending.append(numbers)
        self._report(keep=1)
        if update is None or self._is_needed(first):
            self._read()
        numbers.line |= measurements(training, numbers.line) | stragglers.look(numbers.step)

    def _is_needed(self, first: int) -> bool:
        """Return whether something waits for the numbers of the step that was made last.

        Args:
            first: Steps that were done when this start began.
        """
        training, config = self.training, self.training.run.config
        state, every = training.model.state, config.checkpoint.export_every
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

    def _read(self) -> None:
        """Read the numbers of the step that was made last; it is not reported if they end the run."""
        numbers = self.pending.pop()
        self.line = numbers.read()
        self.pending.append(numbers)

    def _report(self, *, keep: int = 0) -> None:
        """Read and report the steps that are pending, all but the last `keep`."""
        while len(self.pending) > keep:
            numbers = self.pending.pop(0)
            self.line = numbers.read()
            self.training.run.log.batches[:] = numbers.batches
            self.journal.report(self.line, numbers.step)

    def _follow(self, decision: Decision) -> str | None:
        """Do what was decided after a step; return why the run stops."""
        training, stopped = self.training, decision.stop
        self._tell_forms(decision)
        if decision.collect:
            self.journal.saved(self.checkpoints.collect())
        if self.pending[-1].update is not None:
            if not decision.needs_numbers:
                return None
            self._read()
        numbers = self.line
        if decision.evaluate:
            owe(training, self.line)
            began = time.perf_counter()
            with training.run.log.clock.stopped():  # evaluating is no part of the next step's time
                numbers = self._evaluate()
            numbers["timing/evaluation"] = time.perf_counter() - began
            self.line |= numbers
            stop_reason = self.requests.pending(training.run.ranks)
            if stop_reason is not None and (stop_reason.by_signal or stopped is None):
                stopped = stop_reason.text
        stopped = watch_metric(training, numbers, due=decision.due, stopped=stopped)
        self._report()
        self._export(due_exports(training, self.line))  # before the save, which remembers the best one that stands
        # The last step is saved when its evaluation is done.
        last = training.finished and training.run.config.checkpoint.at_end
        if decision.save and stopped is None and not last:
            self.journal.saved(self.checkpoints.save(self.line))
        return stopped

    def _tell_forms(self, decision: Decision) -> None:
        """Record which optional forms are used; what changed gets an event and a column of the step."""
        record_forms(self.training)
        events, columns = self.form_news.take(decision.lost)
        self.journal.forms(events)
        self.pending[-1].line |= columns

    def _export(self, names: list[str]) -> None:
        for name in names:
            self.journal.event("export", path=export_run(self.training, name, self.line))
            note_exported(self.training, name, self.line)

    def _export_best(self, metrics: dict[str, float]) -> None:
        self._export([name for name in due_exports(self.training, metrics) if name == BEST])

    def _save_before(self, error: Exception) -> None:
        """Save the last whole step before an error that all ranks raise ends the run."""
        if isinstance(error, RankFailed) or self.training.run.world.failure.broken_by_peer(error):
            return
        with suppress(Exception):  # the error that ends the run counts
            self._report()
        if isinstance(error, CheckpointError):
            return
        self.checkpoints.count_again()
        manifest = self.checkpoints.save_before_leaving()
        if manifest is not None:
            print(f"checkpoint of step {manifest.step} is on disk, saved before the error", flush=True)

    def _evaluate(self) -> dict[str, float]:
        self.evaluated_at = self.training.model.state.step
        self.training.stream.settle()  # sets may share sources, a filter and a tokenizer with the rows of training
        ema = self.training.run.config.optim.ema
        with self.training.model.averaged() if ema is not None and ema.evaluate else nullcontext():
            return self.evaluate(interrupted=lambda: self.requests.pending(self.training.run.ranks) is not None)
