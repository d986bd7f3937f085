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
from holdfast.training.run import Run, StepAbandoned
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


def fit(run: Run, step: Step, evaluate: EvaluateRun, *, reads_late: bool | None = None) -> Outcome:
    """Run steps until the end, from the newest verified checkpoint on, and leave the results in the run directory.

    Args:
        run: The run.
        step: Makes a step.
        evaluate: Measures the run.
        reads_late: Whether the numbers of an update are read when the next one is on its way, so that the device does
            not wait for the host. Default: on CUDA devices.
    """
    dry, first = run.setting.config.dry_run, run.trained.state.step
    signals = StopRequests(speaks_first=run.setting.world.failure.directory is None)
    try:
        with Checkpoints(run) as checkpoints, Journal(run) as journal, signals as requests:
            checkpoints.rehearse(requests)
            requests.start_clock(run)
            try:
                stopped = _Loop(run, step, evaluate, checkpoints, journal, requests, reads_late).run_to_end()
            except Exception as error:
                journal.failed(error)
                raise
            exports_at_end = run.setting.config.checkpoint.export_at_end or dry
            export_path = export_run(run, FINAL, journal.latest) if exports_at_end and is_end(stopped) else None
            if stopped is None and run.trained.state.step > first:
                journal.event("done")
    finally:
        run.stream.close()
        if dry and run.setting.world.is_first:
            directory.remove(run.setting.directory)
    run.setting.ranks.close()
    command = None if dry else checkpoints.export_command
    return Outcome(
        run.trained.state.step,
        journal.latest,
        stopped,
        str(run.setting.directory),
        None if dry else export_path,
        command,
    )


@dataclass
class _Loop:
    run: Run
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
        self.profiler = StepProfiler(self.run.setting)
        self.form_news = FormNews(self.run)
        if self.reads_late is None:
            self.reads_late = self.run.setting.world.device.type == "cuda"

    def run_to_end(self) -> str | None:
        """Return why the run stopped early; None if it did not."""
        run, state, dry = self.run, self.run.trained.state, self.run.setting.config.dry_run
        evaluation = run.setting.config.evaluation
        if self._has_ended():
            return reason_to_end(run)
        for line in resume_forms(run):
            self.journal.say(line)
        self.journal.started()
        stopped = self._begin() or self._train()
        if is_end(stopped) and (evaluation.at_end or dry) and self.evaluated_at != state.step:
            self._evaluate_at_end()
        if stopped is not None or run.setting.config.checkpoint.at_end:
            self.journal.saved(self.checkpoints.save_last(self.line))
            self.checkpoints.check_grace(self.requests)
        self.journal.saved(self.checkpoints.collect("The run ends without it"))
        return stopped

    def _has_ended(self) -> bool:
        """Return whether the run has already ended, and print why."""
        if self._owes_evaluation():
            return False
        run_directory, step, reason = self.run.setting.directory, self.run.trained.state.step, reason_to_end(self.run)
        if self.run.finished:
            self.journal.say(
                f"nothing to do: step {step} is the last one of {run_directory}. Raise steps to "
                "go on, or give another run.name to begin a new run"
            )
        elif reason is not None:
            self.journal.say(
                f"nothing to do: {run_directory} has ended at step {step}. {reason}. Raise stop_when.patience or leave "
                "stop_when out to go on, or give another run.name to begin a new run"
            )
        return self.run.finished or reason is not None

    def _owes_evaluation(self) -> bool:
        """Say whether an evaluation of the step the run stands at is left to make; one that was made later counts.

        Its checkpoint cannot say so: it was on disk before.
        """
        run, newest = self.run, self.checkpoints.session.newest
        if not run.trained.state.watched.get(OWED):
            return False
        if newest is not None:
            run_directory = run.setting.directory
            records = run.setting.ranks.on_first_rank(
                lambda: [
                    line["watched"]
                    for line in directory.events(run_directory, MADE_LATER)
                    if line["checkpoint"] == newest.hash
                ]
            )
            if records:
                set_standings(run, records[-1])
        return bool(run.trained.state.watched.get(OWED))

    def _begin(self) -> str | None:
        """Make the evaluations that come before the first step of a start; return why the run ends with them."""
        config, step = self.run.setting.config, self.run.trained.state.step
        for message in rename_final_export(self.run):
            self.journal.say(message)
        if (config.evaluation.at_start and step == 0) or config.dry_run:
            self.journal.report(self._evaluate())
        return self._evaluate_later() if self.run.trained.state.watched.get(OWED) else None

    def _evaluate_later(self) -> str | None:
        """Make the evaluation that an earlier start left; return why the run ends with it."""
        metrics = self._evaluate()
        stop_reason = self.requests.pending(self.run.setting.ranks)
        stopped = watch_metric(self.run, metrics, due=True, stopped=None if stop_reason is None else stop_reason.text)
        self.line |= metrics
        self.journal.report(metrics)
        self._export_best(metrics)
        newest = self.checkpoints.session.newest
        if newest is not None and OWED not in self.run.trained.state.watched:
            self.journal.event(MADE_LATER, checkpoint=newest.hash, watched=standings(self.run))
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
        if skipped := self.run.stream.bad_rows:
            self.journal.say(f"{skipped} bad rows were skipped since this start (data/bad_rows)")
        return stopped

    def _steps(self) -> str | None:
        run, control = self.run, Control(self.run, self.requests)
        run.setting.log.clock.read()  # what came before is no part of the first step's time
        run.setting.log.peaks.note_load()
        first = run.trained.state.step
        stragglers = Stragglers(run.setting.ranks, run.setting.world.device.type)
        while not run.finished:
            run.setting.world.failure.at_step(run.trained.state.step)
            done = run.trained.state.step
            self.checkpoints.mark()
            self.profiler.before(done + 1)
            try:
                result = self.step()
                if result is None:
                    self._report()
                    return None
                self.profiler.after(run.trained.state.step)
                self._note(result, first, stragglers)
                self.journal.saved(self.checkpoints.check_first_step(self.requests))
                event = StepEvent(run.trained.state.step, run.stream.epoch, self.line)
                decision = control.decide(event, self.checkpoints.session.status)
                stopped = self._follow(decision)
            except StepAbandoned:
                self._report()
                stop_reason = self.requests.pending(run.setting.ranks)
                assert stop_reason is not None
                stopped = stop_reason.text
                if run.trained.state.step == first and not stop_reason.by_signal:
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
        run, log, update = self.run, self.run.setting.log, result if isinstance(result, StartedUpdate) else None
        line = {**(result.known if isinstance(result, StartedUpdate) else result), "epoch": run.stream.epoch}
        numbers = StepNumbers(run.trained.state.step, line, update, list(log.batches))
        log.batches.clear()
        self.pending.append(numbers)
        self._report(keep=1)
        if update is None or self._is_needed(first):
            self._read()
        numbers.line |= measurements(run, numbers.line) | stragglers.look(numbers.step)

    def _is_needed(self, first: int) -> bool:
        """Return whether something waits for the numbers of the step that was made last.

        Args:
            first: Steps that were done when this start began.
        """
        run, config = self.run, self.run.setting.config
        state, every = run.trained.state, config.checkpoint.export_every
        return (
            not self.reads_late
            or run.finished
            or state.step == first + 1
            or bool(run.observers)
            or follows_steps(run)
            or reason_to_end(run) is not None
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
            self.run.setting.log.batches[:] = numbers.batches
            self.journal.report(self.line, numbers.step)

    def _follow(self, decision: Decision) -> str | None:
        """Do what was decided after a step; return why the run stops."""
        run, stopped = self.run, decision.stop
        self._tell_forms(decision)
        if decision.collect:
            self.journal.saved(self.checkpoints.collect())
        if self.pending[-1].update is not None:
            if not decision.needs_numbers:
                return None
            self._read()
        numbers = self.line
        if decision.evaluate:
            owe(run, self.line)
            began = time.perf_counter()
            with run.setting.log.clock.stopped():  # evaluating is no part of the next step's time
                numbers = self._evaluate()
            numbers["timing/evaluation"] = time.perf_counter() - began
            self.line |= numbers
            stop_reason = self.requests.pending(run.setting.ranks)
            if stop_reason is not None and (stop_reason.by_signal or stopped is None):
                stopped = stop_reason.text
        stopped = watch_metric(run, numbers, due=decision.due, stopped=stopped)
        self._report()
        self._export(due_exports(run, self.line))  # before the save, which remembers the best one that stands
        # The last step is saved when its evaluation is done.
        last = run.finished and run.setting.config.checkpoint.at_end
        if decision.save and stopped is None and not last:
            self.journal.saved(self.checkpoints.save(self.line))
        return stopped

    def _tell_forms(self, decision: Decision) -> None:
        """Record which optional forms are used; what changed gets an event and a column of the step."""
        record_forms(self.run)
        events, columns = self.form_news.take(decision.lost)
        self.journal.forms(events)
        self.pending[-1].line |= columns

    def _export(self, names: list[str]) -> None:
        for name in names:
            self.journal.event("export", path=export_run(self.run, name, self.line))
            note_exported(self.run, name, self.line)

    def _export_best(self, metrics: dict[str, float]) -> None:
        self._export([name for name in due_exports(self.run, metrics) if name == BEST])

    def _save_before(self, error: Exception) -> None:
        """Save the last whole step before an error that all ranks raise ends the run."""
        if isinstance(error, RankFailed) or self.run.setting.world.failure.broken_by_peer(error):
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
        self.evaluated_at = self.run.trained.state.step
        self.run.stream.settle()  # sets may share sources, a filter and a tokenizer with the rows of training
        ema = self.run.setting.config.optim.ema
        with self.run.trained.averaged() if ema is not None and ema.evaluate else nullcontext():
            return self.evaluate(interrupted=lambda: self.requests.pending(self.run.setting.ranks) is not None)
