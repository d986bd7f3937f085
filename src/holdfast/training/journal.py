"""Output of a running job: metrics and events files on rank 0, the progress display, warnings, samples."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

from holdfast import registry
from holdfast.checkpoint.session import Saved
from holdfast.data.content.lengths import unexpected
from holdfast.errors import HoldfastError
from holdfast.files import append_text, size_words
from holdfast.metrics.health import SPIKES, Health, cut_rows
from holdfast.metrics.progress import End, Lines, LoggedDisplay, ProgressDisplay, open_progress
from holdfast.metrics.sink import (
    METRICS,
    REWIND,
    SAMPLE_FOLDER,
    SAMPLE_IMAGES,
    SAMPLES,
    JsonlSink,
    SampleFiles,
    TrackerProcesses,
    write_sample_images,
)
from holdfast.models.heads.form import FormRecord, described, form_record
from holdfast.optim.randomness import private_randomness
from holdfast.parallel.failure.reports import Failure
from holdfast.parallel.forms import OTHER_SUMS
from holdfast.rewards.base import FAULTS
from holdfast.text.escaping import escaped, escaped_paragraph
from holdfast.training import directory
from holdfast.training.directory import LOGS, MEMORY
from holdfast.training.forms import EVENT
from holdfast.training.run import Training
from holdfast.types import Batch

LOG = "rank-0.log"
"""Log of rank 0 in the folder `logs`, first of the launch directory and then of the run directory."""
SPIKES_FOLDER = "spikes"
"""Folder for the batches of steps whose loss or gradient spiked, one file per rank. A spike is detected from numbers
that all ranks share, so that each writes its file without communication."""
_SHOWN_TOKENS = 200
"""Of a sequence there, as text."""
_NOT_TOLD = ("/std", "/mean", "_std", "/min_length", "/max_length", "_terminated_length")
"""Numbers of an evaluation that stand in metrics.jsonl and are left out on the screen."""
_TOLD_IF_ANY = tuple(f"/reward/{fault}" for fault in FAULTS)
"""Numbers of an evaluation that stand on the screen only where they are not 0."""
_OF_A_STEP = {f"data/{name}" for name in ("rows", "tokens", "mean_length", "fill", "micro_batches", "order_hash")}
"""Numbers about data that are a step's own; the others, and alarms, count events, none of which gets lost."""


class Journal:
    """Opens the run directory and its metrics sinks within a block; does nothing on ranks other than rank 0."""

    def __init__(self, training: Training) -> None:
        self.latest: dict[str, float] = dict(training.run.log.resumed_metrics)
        """The last value of every metric."""
        self._training = training
        self._first_step = training.model.state.step
        self._metrics: JsonlSink | None = None
        self._events: defaultdict[str, float] = defaultdict(float)
        """Of the steps since the last line."""
        self._unwritten: tuple[int, Mapping[str, float]] | None = None
        """The last step, if it has no line."""
        self._trackers: TrackerProcesses | None = None
        first = training.run.world.is_first
        self._samples: JsonlSink | None = None
        self._sample_files: SampleFiles | None = None
        training.run.ranks.on_all_ranks(self._open if first else lambda: None)
        if training.run.world.log is not None and not training.run.config.dry_run:
            training.run.world.log.begin(training.run.directory / LOGS)
        training.run.world.failure.listener = self._heard
        self._health = _health_of(training) if training.run.config.metrics.health else None
        kind = training.run.config.metrics.progress if first else "off"
        with private_randomness():  # rich draws from Python's generator while it is imported
            self._screen = self._logged(
                open_progress(kind, _end_of(training), training.model.state.step, training.run.config.verb)
            )

    def _open(self) -> None:
        training = self._training
        for name in (directory.EVENTS, SAMPLES):
            if (training.run.directory / name).exists():
                # What cannot be appended to is refused before a step is made.
                append_text(training.run.directory / name, "")
        if (folder := training.run.directory / SAMPLE_FOLDER).is_dir():
            self._sample_files = SampleFiles(folder, self._first_step)
        self._metrics = JsonlSink(training.run.directory / METRICS, training.model.state.step)
        run = training.run
        if run.config.metrics.sinks and not run.config.dry_run:  # which leaves nothing anywhere
            trackers: TrackerProcesses = registry.load(registry.TRACKERS)(run.config.metrics, run.directory, run.base)
            if self._metrics.had_lines:
                trackers.write(self._first_step, {REWIND: float(self._first_step)})
            self._trackers = trackers

    def _logged(self, screen: ProgressDisplay) -> ProgressDisplay:
        """Return a display whose steps stand in logs/rank-0.log, also where the screen shows none as lines."""
        run = self._training.run
        launcher = run.world.failure.directory
        if not run.world.is_first or (launcher is not None and isinstance(screen, Lines)):
            return screen  # the launcher copies into the log what rank 0 prints
        log_directory = run.directory / LOGS
        if launcher is None:
            with suppress(OSError):
                log_directory.mkdir(exist_ok=True)

        def write(text: str) -> None:
            # The launcher moves its logs into the run directory as soon as it sees that there is one.
            for folder in (log_directory,) if launcher is None else (launcher / LOGS, log_directory):
                with suppress(OSError):  # a full disk: the run will say so itself
                    append_text(folder / LOG, text + "\n")
                    return

        return LoggedDisplay(screen, _end_of(self._training), write, with_messages=launcher is None)

    def __enter__(self) -> Journal:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the last step, close files and leave the screen as it is."""
        with ExitStack() as leaving:  # each is closed whatever a full disk does to those before it
            leaving.callback(self._screen.close)
            leaving.push(lambda raised, *_: self._close_trackers("failed" if kind or raised else "finished"))
            for lines in filter(None, (self._samples, self._metrics)):
                leaving.callback(lines.close)
            self._write_last()

    def _close_trackers(self, status: str) -> None:
        for text in self._trackers.close(status) if self._trackers is not None else ():
            self.say(text)

    def started(self) -> None:
        """Note a start that has something to do: when, and on how many of which devices."""
        world = self._training.run.world
        head = form_record(self._training.model.module, world.device)
        if world.is_first:
            self._note_chunks(head)
        forms = dict(self._training.model.state.forms or {})
        form: dict[str, Any] = {"forms": forms} | ({} if head is None else {"head": head})
        if self._training.image_rules:
            form["images"] = dict(self._training.image_rules)
        self.event("start", time=time.time(), ranks=world.size, device=world.device.type, **form)

    def _note_chunks(self, head: FormRecord | None) -> None:
        """Say that the head has other chunks than in the start before this one, and so another order of sums."""
        heads = [event["head"] for event in directory.events(self._training.run.directory, "start") if "head" in event]
        if head is not None and heads and heads[-1] != head:
            self.say(
                f"note: the head runs by {described(head)}; until step {self._first_step} it was {described(heads[-1])}"
                f". {OTHER_SUMS}"
            )

    def forms(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Note changes of optional forms."""
        for event in events:
            self.event(EVENT, **event)

    def report(self, line: Mapping[str, float], step: int | None = None) -> None:
        """Take a step's numbers, or an evaluation's; one over no sets has none.

        Args:
            line: The numbers.
            step: Whose they are; default: the step that the run stands at.
        """
        if not line:
            return
        self.latest.update(line)
        step = self._training.model.state.step if step is None else step
        evaluated = {name: value for name, value in line.items() if name.startswith("eval/")}
        alarms = self._health.see(step, line) if "loss" in line and self._health is not None else {}
        if "loss" in line:
            line = {**line, **{f"health/{alarm}": 1.0 for alarm in alarms}}
            self._write_step(step, line, due=bool(evaluated))
            self._screen.update(step, line)
        else:
            self._write_last()
            self._write(step, line)
        self._tell()
        if "loss" in line:
            self._warn(step, line, alarms)
            self._training.run.log.batches.clear()
        if evaluated:
            displayed = {
                name: value
                for name, value in evaluated.items()
                if not name.endswith(_NOT_TOLD) and (value != 0 or not name.endswith(_TOLD_IF_ANY))
            }
            text = "  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in displayed.items())
            self.say(f"evaluation at step {step}: {text}")

    def _write_step(self, step: int, line: Mapping[str, float], *, due: bool) -> None:
        for name, value in line.items():
            if name.startswith(("data/", "health/")) and name not in _OF_A_STEP:
                self._events[name] += value
            elif f"{EVENT}/" in name:
                self._events[name] = value
        self._unwritten = step, line
        if due or step % self._training.run.config.metrics.log_every == 0 or step == self._training.model.total_steps:
            self._write_last()

    def _write_last(self) -> None:
        """Write the step that has no line yet, with what was counted since the line before."""
        if self._unwritten is None:
            return
        (step, line), self._unwritten = self._unwritten, None  # one that fails is not tried again
        self._write(step, {**line, **self._events})
        self._events.clear()

    def _write(self, step: int, line: Mapping[str, float]) -> None:
        if self._metrics is not None:
            self._metrics.write(step, line)
        if self._trackers is not None:
            self._trackers.write(step, line)

    def _warn(self, step: int, line: Mapping[str, float], alarms: Mapping[str, str]) -> None:
        """Print the alarms of a step and append them to events.jsonl."""
        if self._health is None:
            return
        for alarm, sentence in alarms.items():
            batch = self._recorded(step) if alarm in SPIKES else {}
            files_note = "".join(f" The rows of this batch are in {path}." for path in batch.values())
            self.event("health", step=step, alarm=alarm, text=sentence + files_note, **batch)
            self.say(f"warning: {sentence}{files_note}")
        _, sentence = cut_rows([line])
        if step == 1 and sentence and "cut_rows" not in alarms:
            self.say(f"note: {sentence}")
        counts = {name.removeprefix("data/"): number for name, number in line.items() if name.startswith("data/")}
        for sentence in unexpected(counts) if step == 1 else ():
            self.say(f"warning: the first step has {sentence}. Set data.chat_template to a template that does.")

    def _recorded(self, step: int) -> dict[str, str]:
        """Record a step's batch, on every rank; a disk that does not take it ends no run."""
        try:
            return {"batch": _record_batch(self._training, step)}
        except OSError:
            return {}

    def _tell(self) -> None:
        """Print the messages and write the samples that the step left in the log."""
        training = self._training
        peaks = training.run.log.peaks
        if news := peaks.news():
            # Rank 0 alone writes it, so a directory that is gone is told by the next save, on all ranks alike.
            with suppress(OSError, HoldfastError):
                self.event(MEMORY, device=training.run.world.device.type, peaks=news, start=peaks.at_start)
        for text in training.run.log.messages:
            self.say(text)
        if training.run.log.samples and training.run.world.is_first:
            self._write_samples(training.run.log.samples)
        for text in self._trackers.news() if self._trackers else ():
            self.say(text)
        training.run.log.messages.clear()
        training.run.log.samples.clear()
        training.run.log.sample_images.clear()

    def _write_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the completions of a step as the configuration says, and the images of their prompts."""
        run = self._training.run
        if self._trackers is not None:
            self._trackers.completions(samples)
        write_sample_images(run.directory / SAMPLE_IMAGES, run.log.sample_images)
        if self._training.run.config.metrics.samples == "parquet":
            if self._sample_files is None:
                self._sample_files = SampleFiles(self._training.run.directory / SAMPLE_FOLDER, self._first_step)
            self._sample_files.write(samples)
            return
        if self._samples is None:
            self._samples = JsonlSink(self._training.run.directory / SAMPLES, self._first_step)
        for sample in samples:
            self._samples.event(sample)

    def say(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self._training.run.world.is_first:
            self._screen.say(escaped_paragraph(text))

    def saved(self, committed: Sequence[Saved]) -> None:
        """Note checkpoints that were committed."""
        for saved in committed:
            manifest = saved.manifest
            self.event(
                "checkpoint",
                saved=manifest.step,
                bytes=manifest.bytes_,
                seconds=manifest.seconds,
                deleted=list(saved.deleted),
            )
            self.say(f"checkpoint of step {manifest.step} is verified on disk ({size_words(manifest.bytes_)})")

    def failed(self, error: Exception) -> None:
        """Append to events.jsonl that an error ends the run, behind the line of the last step."""
        channel = self._training.run.world.failure
        failure = channel.own(error)
        reason = f"{failure.type}: {error}".strip().partition("\n")[0]
        with suppress(OSError):  # it may be this disk that is full; the error says so
            self._write_last()
            if channel.broken_by_peer(error):
                return  # another rank is the cause, of which `_heard` or the launcher hears
            self.event(
                "failed", reason=reason, time=time.time(), rank=failure.rank, host=failure.host, phase=failure.phase
            )

    def _heard(self, event: str, failure: Failure) -> None:
        """Append what befell another rank, on the rank that was chosen to speak; perhaps in another thread."""
        run, step = self._training.run, self._training.model.state.step
        sentence = failure.sentence() if event == "failed" else failure.message
        reason = sentence.partition("\n")[0]
        origin = {"rank": failure.rank, "host": failure.host, "phase": failure.phase}
        line = {"event": event, "step": step, "reason": reason, "time": time.time(), **origin}
        with suppress(OSError):
            append_text(run.directory / directory.EVENTS, json.dumps(line) + "\n")
        if run.world.log is not None and not run.world.is_first:
            run.world.log.show(escaped_paragraph(sentence))

    def event(self, name: str, **values: object) -> None:
        """Append something that happened, other than a step, to events.jsonl; its step, unless `step` names another."""
        if self._training.run.world.is_first:
            line = json.dumps({"event": name, "step": self._training.model.state.step, **values}) + "\n"
            append_text(self._training.run.directory / directory.EVENTS, line)


def _end_of(training: Training) -> End:
    config = training.run.config
    return End(training.model.total_steps, None if config.dry_run else config.epochs)


def _health_of(training: Training) -> Health:
    scores = training.run.config.scores
    text = training.model.blueprint.skeleton.config.get_text_config()
    return Health(None if scores else getattr(text, "vocab_size", None))


def _record_batch(training: Training, step: int) -> str:
    """Write the sequences that this rank trained in a step; return the file's path in the run.

    Raises:
        OSError: The disk does not take it.
    """
    name = f"{SPIKES_FOLDER}/step-{step:08d}.rank-{training.run.ranks.rank}.jsonl"
    path = training.run.directory / name
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps(line) for line in _sequences(training.run.log.batches, training.model.blueprint.tokenizer)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return name


def _sequences(batches: Sequence[Batch], tokenizer: Any) -> Iterator[dict[str, Any]]:
    written = set()
    for batch in batches:
        for index, sample in enumerate(batch.sample_ids):
            mask = batch.sequence_ids == index
            tokens = batch.tokens[mask].tolist()
            if sample in written or not tokens:
                continue
            written.add(sample)
            text = "" if tokenizer is None else tokenizer.decode(tokens[:_SHOWN_TOKENS])
            yield {
                "sample_id": sample,
                "prompt_id": batch.prompt_ids[index],
                "source": batch.sources[index],
                "tokens": len(tokens),
                "trained_tokens": int(batch.loss_mask[mask].sum()),
                "begins": escaped(text),
            }
