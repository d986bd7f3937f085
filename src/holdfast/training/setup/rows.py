"""Open the rows of the sections `data` and `evaluation`, and build streams of mini-batches from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from holdfast.config.sections.data import RowFormat, SourceConfig
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.data.batches.assembly import Layout
from holdfast.data.batches.candidates import CandidateReader, Ranks, Tokenise, broken_text_named
from holdfast.data.batches.passes import StreamLimits
from holdfast.data.batches.stream import PromptStream, SampleStream
from holdfast.data.rows.reading import DrawOrder, EndOfStream, HeldOut, RowReader
from holdfast.data.rows.rows import Row, Source, from_rows, open_source
from holdfast.data.tasks.synthetic import TaskRows
from holdfast.data.tokens.chat import BLIND, RowTokeniser, S
from holdfast.data.tokens.preferences import LabelTokeniser, PairTokeniser, last_token_alone
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import DataError
from holdfast.training.evaluate import split_at_answer
from holdfast.training.observe import load_function
from holdfast.training.run import ConfiguredRun, EvaluationSet, Run
from holdfast.types import Example, Prompt

_ENDLESS = 2**31 - 1
"""Length limit for `packing: wrapped`, larger than any document, since windows are cut later."""
_NAMED = 3
"""Bad rows that are named when they are skipped."""
_IMAGES_STAY_WHOLE = "data.packing: wrapped cuts sequences anywhere, and an image must stay whole; use best_fit"

Accept = Callable[[Row], bool]
"""A row filter: whether a row is taken."""


@dataclass(frozen=True)
class OpenedData:
    """All rows of a run, before a model exists."""

    training: tuple[Source, ...]
    weights: tuple[float, ...] | None
    formats: dict[str, RowFormat]
    """Row format by the name of a training source."""
    evaluation: dict[str, Source]
    evaluation_formats: dict[str, RowFormat]
    """Row format by the name of an evaluation set, whose source may be called like one of training."""

    @property
    def training_rows(self) -> int | None:
        """Rows of all training sources; None if one is a stream."""
        sizes = [source.size for source in self.training]
        return None if None in sizes else sum(size or 0 for size in sizes)


def open_data(run: ConfiguredRun, rows: Any = None, *, training: bool = True) -> OpenedData:
    """Open every source.

    Args:
        run: Of the run.
        rows: Training rows in memory, instead of the configured ones.
        training: Open training rows; off, an exported model can be evaluated where they are not.

    Raises:
        DataError: A source is missing or empty, or two have the same name.
    """
    config, base = run.config, run.base
    keyed = config.data.sources_by_key() if training else {}
    sections = list(keyed.values())
    task_kind = task_rows(config)
    if rows is None:
        keep_bad = config.data.on_bad_row == "skip"
        sources = [open_source(section, base, task_kind, keep_bad=keep_bad, key=key) for key, section in keyed.items()]
    else:
        sources = [from_rows(rows, "rows", config.data.columns, config.data.max_samples)]
    formats: dict[str, RowFormat] = {
        source.name: section.rows for source, section in zip(sources, sections, strict=False)
    }
    names = [source.name for source in sources]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise DataError(f"Two sources are called {twice!r}; give one of them another data.sources name.")
    evaluation = {
        name: open_source(section, base, task_kind, key=f"evaluation.sets.{name}")
        for name, section in config.evaluation.sets.items()
    }
    evaluation_formats = {name: section.rows for name, section in config.evaluation.sets.items()}
    if config.data.validation_split > 0:
        sources, held_out = _cut_validation(sources, config.data.validation_split)
        evaluation |= held_out
        evaluation_formats |= {name: formats.get(source.name, "auto") for name, source in held_out.items()}
    weights = _weights(sections) if len(sources) > 1 else None
    _check_mixture(sources, weights is not None)
    return OpenedData(tuple(sources), weights, formats, evaluation, evaluation_formats)


def task_rows(config: TrainingConfig) -> TaskRows:
    """Return which kind of rows a generated task gives to this run: answers, pairs or labels."""
    if not isinstance(config, DPOConfig):
        return "answers"
    return "pairs" if config.preference.takes_pairs else "labels"


def _cut_validation(sources: Sequence[Source], share: float) -> tuple[list[Source], dict[str, Source]]:
    held_out: dict[str, Source] = {}
    for source in sources:
        label = "validation" if len(sources) == 1 else f"validation/{source.name}"
        held_out[label] = HeldOut(source, share, keep=True)
    return [HeldOut(source, share, keep=False) for source in sources], held_out


def _weights(sections: Sequence[SourceConfig]) -> tuple[float, ...] | None:
    weights = tuple(section.weight for section in sections if section.weight is not None)
    return weights if len(weights) == len(sections) else None


def _check_mixture(sources: Sequence[Source], weighted: bool) -> None:
    streaming = [source.name for source in sources if source.size is None]
    if streaming and len(sources) > 1 and not weighted:
        raise DataError(
            f"{streaming[0]} is streamed, so nobody knows how many rows it has, and it is mixed with other sources. "
            "Set weight on every source."
        )
    empty = [source.name for source in sources if source.size == 0]
    if empty:
        raise DataError(f"{empty[0]} has no rows. Check the path, the split and data.validation_split.")


def check_batch(config: TrainingConfig, data: OpenedData, ranks: int) -> None:
    """Refuse a batch that no data or not every rank can fill.

    Raises:
        DataError: With the numbers.
    """
    rows = data.training_rows
    batch, later = config.data.batch_size, config.data.batch_size_schedule
    for key, size in {"batch_size": batch, **{f"batch_size_schedule.{step}": later[step] for step in later}}.items():
        if size < ranks:
            raise DataError(
                f"data.{key}={size} is less than the number of ranks, {ranks}: some would never have a sequence. "
                f"Raise data.{key}, or lower launch.ranks."
            )
    if rows is None:
        return
    if rows < ranks:
        raise DataError(f"There are {rows} rows for {ranks} ranks. Add data, or lower launch.ranks.")
    if rows < batch and not config.data.allow_partial and config.data.packing != "wrapped":
        raise DataError(
            f"{', '.join(source.name for source in data.training)} has {rows} rows, less than one batch of {batch}. "
            "Lower data.batch_size, add data, or set data.allow_partial: true."
        )


def row_tokeniser(
    run: ConfiguredRun, tokenizer: Any, formats: dict[str, RowFormat], images: ImageSide | str = BLIND
) -> Tokenise[Example]:
    """Return the function that turns rows into sequences."""
    data = run.config.data
    if data.packing == "wrapped":
        data, images = data.model_copy(update={"max_length": _ENDLESS}), _IMAGES_STAY_WHOLE
    return RowTokeniser(tokenizer, data, run.base, images, formats).examples


def evaluation_tokenisers(
    run: ConfiguredRun, tokenizer: Any, opened: OpenedData, images: ImageSide | str = BLIND
) -> dict[str, Tokenise[Example]]:
    """Return the functions that turn rows of evaluation sets into sequences, by the set's name.

    Windows of `packing: wrapped` begin where the one before ended, in whatever document; a measured document is cut by
    itself, so that its loss does not depend on its neighbours.
    """
    data = run.config.data
    if data.packing == "wrapped":
        run = run.with_sections(data=data.model_copy(update={"packing": "best_fit", "overlong": "split"}))
        images = _IMAGES_STAY_WHOLE
    return {
        name: row_tokeniser(run, tokenizer, {source.name: opened.evaluation_formats[name]}, images)
        for name, source in opened.evaluation.items()
    }


def preference_tokeniser(
    config: DPOConfig, run: ConfiguredRun, tokenizer: Any, images: ImageSide | str = BLIND
) -> Tokenise[Example]:
    """Return the function that turns rows with preferences into sequences."""
    rows = RowTokeniser(tokenizer, config.data, run.base, images)
    tokenise = (PairTokeniser if config.preference.takes_pairs else LabelTokeniser)(rows, config.data)
    return last_token_alone(tokenise) if config.scores else tokenise


def training_stream(run: Run, data: OpenedData, tokenise: Tokenise[Example], layout: Layout) -> SampleStream:
    """Return the endless stream of training batches."""
    reader, config = _training_rows(run, data, tokenise), run.config
    return SampleStream(reader, config.data, layout, _training_limits(config))


def prompt_stream(run: Run, data: OpenedData, tokenise: Tokenise[Prompt]) -> PromptStream:
    """Return the endless stream of prompts."""
    reader, config = _training_rows(run, data, tokenise), run.config
    assert isinstance(config, GRPOConfig)
    return PromptStream(reader, config.data, _training_limits(config))


def _training_rows(run: Run, data: OpenedData, tokenise: Tokenise[S]) -> CandidateReader[S]:
    skipped = _SkippedRows()
    skip = skipped.add if run.config.data.on_bad_row == "skip" else None
    reader = CandidateReader(training_reader(run.config, data), tokenise, run.ranks, row_filter(run), skip)
    reader.notes = skipped.notes
    return reader


@dataclass
class _SkippedRows:
    """Reports the first rows that are skipped as unreadable, each once."""

    notes: list[str] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)

    def add(self, reason: str) -> None:
        """Report one skipped row."""
        if reason in self.reasons or len(self.reasons) > _NAMED:
            return
        self.reasons.add(reason)
        more = len(self.reasons) > _NAMED
        sentence = (
            "further bad rows are skipped; data/bad_rows counts them" if more else f"a bad row is skipped: {reason}"
        )
        self.notes.append(f"warning: {sentence}")


def training_reader(config: TrainingConfig, data: OpenedData) -> RowReader:
    """Return the training rows by draw."""
    order = DrawOrder(
        [source.size for source in data.training],
        data.weights,
        seed=config.seed if config.data.seed is None else config.data.seed,
        shuffle=config.data.shuffle,
        block=config.data.shuffle_buffer,
    )
    return RowReader(data.training, order)


def _training_limits(config: TrainingConfig) -> StreamLimits:
    batches, repeat = config.overfit_batches or config.limit_batches, config.overfit_batches is not None
    resampled = isinstance(config, GRPOConfig) and config.groups.flat == "resample"
    return StreamLimits(config.epochs, batches, repeat, by_rows=resampled)


@dataclass(frozen=True)
class SetReading:
    """How the rows of evaluation sets become sequences."""

    tokenise: Mapping[str, Tokenise[Example]]
    """By the set's name."""
    accept: Accept | None = None
    """The filter of training rows, which those held out from training share."""
    answers: Tokenise[Example] | None = None
    """Gives the sequences that are completed and compared; default: those that are measured."""


def opened_sets(run: Run, data: OpenedData, reading: SetReading, layout: Layout) -> tuple[EvaluationSet, ...]:
    """Return the evaluation sets; they are read in order, and small ones are welcome.

    The first batch of each is read now, since an evaluation may come after hours of training.

    Raises:
        DataError: It holds a row that cannot be read; the same on all ranks.
    """
    config, ranks = run.config, run.ranks
    limit = config.evaluation.limit_samples

    def stream_of(name: str, source: Source) -> Callable[[], SampleStream]:
        def open_stream() -> SampleStream:
            accept = filter_of(source, reading.accept)
            rows = CandidateReader(RowReader([source], in_order(source)), reading.tokenise[name], ranks, accept)
            return one_pass(config, rows, ranks, layout, limit)

        return open_stream

    def prompts_of(name: str, source: Source) -> Callable[[int], Sequence[Example]]:
        tokenise, accept = reading.answers or reading.tokenise[name], filter_of(source, reading.accept)
        return lambda count: first_sequences(source, tokenise, count, ranks, accept)

    sets = tuple(
        EvaluationSet(name, stream_of(name, source), prompts_of(name, source))
        for name, source in data.evaluation.items()
    )
    for held_out in sets:
        held_out.open_stream().next(0)
    return sets


def filter_of(source: Source, accept: Accept | None) -> Accept | None:
    """Return the filter for a source of evaluation rows: that of training for rows held out from it, else none."""
    return accept if isinstance(source, HeldOut) else None


def refuse_completions_with_images(
    config: TrainingConfig, sets: Sequence[EvaluationSet], images: ImageSide | str
) -> None:
    """Refuse to complete prompts whose answers hold images, which no policy writes.

    Raises:
        DataError: A row that would be completed has an image behind the first token of its last answer.
    """
    options = config.evaluation.completions
    if options is None or isinstance(images, str):
        return
    for held_out in sets:
        for example in held_out.read_prompts(options.samples):
            prompt, _ = split_at_answer(example)
            if images.video_id is not None and images.video_id in example.tokens:
                raise DataError(
                    f"evaluation.completions would complete row {example.sample_id} of {held_out.name}, which has a "
                    "video; completions are sampled from prompts of text and images. Remove the row, or remove "
                    "evaluation.completions: the loss and mean_token_accuracy of the set stay."
                )
            if images.image_id in example.tokens[len(prompt) :]:
                raise DataError(
                    f"evaluation.completions would complete row {example.sample_id} of {held_out.name}, whose answer "
                    "holds an image; a policy writes text alone. Remove the row, or remove evaluation.completions: the "
                    "loss and mean_token_accuracy of the set stay."
                )


def one_pass(
    config: TrainingConfig, rows: CandidateReader[Example], ranks: Ranks, layout: Layout, limit: int | None = None
) -> SampleStream:
    """Return a stream over the first rows, or all; small numbers of them are welcome."""
    batch = max(config.data.batch_size, ranks.size)
    size = batch if limit is None else max(min(limit, batch), 1)
    packing = "best_fit" if config.data.packing == "wrapped" else config.data.packing
    section = config.data.model_copy(
        update={"allow_partial": True, "batch_size": size, "batch_size_schedule": {}, "packing": packing}
    )
    return SampleStream(rows, section, layout, StreamLimits(passes=1, draws=limit))


def in_order(source: Source) -> DrawOrder:
    """Return the order of a source's own."""
    return DrawOrder([source.size], shuffle=False)


def first_sequences(
    source: Source, tokenise: Tokenise[S], count: int | None, ranks: Ranks, accept: Accept | None = None
) -> list[S]:
    """Return this rank's share of the first rows, one sequence of each that is taken."""
    reader = RowReader([source], in_order(source))
    sequences: list[S] = []
    for draw in islice(itertools.count(ranks.rank, ranks.size), None if count is None else -(-count // ranks.size)):
        if draw >= min(size for size in (count, source.size, math.inf) if size is not None):
            break
        try:
            _, name, row = reader.read(draw)
        except EndOfStream:
            break
        if accept is None or accept(row):
            with broken_text_named(row, name):
                sequences.extend(tokenise(row, draw, source.name, name).examples[-1:])
    return sequences


def row_filter(run: ConfiguredRun) -> Accept | None:
    """Return the function that says which training rows are taken; None takes all."""
    path = run.config.data.filter
    if path is None:
        return None
    function = load_function(path, run.base, "data.filter")

    def accept(row: Row) -> bool:
        try:
            return bool(function(row))
        except (Exception, SystemExit) as error:  # an exit would leave the other ranks waiting
            raise DataError(
                f"data.filter {path} raised {type(error).__name__}: {error} on the row {dict(row)!r:.200}"
            ) from error

    return accept
