"""`holdfast data check`: every row of a run, read as the run will read it, before any weight is."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import typer

from holdfast.cli.commands.data.preview import images_of, longest_prompt, tokeniser_of
from holdfast.config.sections.reward import MathConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import load_run
from holdfast.config.verbs.training import TrainingConfig
from holdfast.data.batches.candidates import Tokenise, broken_text_named
from holdfast.data.rows.reading import EndOfStream, RowReader
from holdfast.data.rows.rows import Row, Source, open_source
from holdfast.data.survey import Survey, report_lines
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import DataError
from holdfast.models.files.origin import load_tokenizer
from holdfast.text.numbers import number_as_text
from holdfast.training.policy.rewards import RewardScorer
from holdfast.training.run import ConfiguredRun
from holdfast.training.setup.rows import (
    Accept,
    filter_of,
    in_order,
    open_data,
    row_filter,
    task_rows,
)

_AT_ONCE = 1000
"""Right answers that are tried together."""
_SHOWN = 3


def check_data(path: Path, overrides: Sequence[str], *, as_json: bool) -> int:
    """Print what all rows come to; return 1 where a run would stop at one of them, or could not score it.

    Raises:
        UserError: There is nothing to read, or no row could be: a file, a template or the tokenizer is wrong.
    """
    loaded = load_run(path, overrides)
    with ExitStack() as processes:
        reports = list(_reports(loaded.config, loaded.base, processes))
    if as_json:
        typer.echo(json.dumps({"sets": [report.as_plain() for report in reports]}, indent=2))
    else:
        for report in reports:
            for line in report.lines():
                typer.echo(line)
    return int(any(report.is_wrong for report in reports))


@dataclass
class Report:
    """The counts and problems of one set of rows."""

    name: str
    """`training`, or the name of an evaluation set."""
    survey: Survey
    room_for: int | None
    """Tokens that a policy writes after each of its prompts; None where rows are not prompts."""
    limits_prompts: bool = False
    """Whether prompts have a limit of their own."""
    unreadable: dict[str, list[str]] = field(default_factory=dict)
    """Name of a reward -> right answers that it cannot read."""

    @property
    def is_wrong(self) -> bool:
        """Whether a run stops at one of the rows, or cannot score what completes it."""
        stops = self.survey.mistaken_rows > 0 and not self.survey.skips
        return stops or any(self.unreadable.values())

    def as_plain(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        unreadable = {label: len(answers) for label, answers in self.unreadable.items()}
        return {"set": self.name, **self.survey.as_plain(), "unreadable_answers": unreadable}

    def lines(self) -> Iterator[str]:
        """Yield what is printed."""
        room_for = 0 if self.limits_prompts else self.room_for or 0
        key = "data.max_prompt_length" if self.limits_prompts else "data.max_length"
        lines = report_lines(self.survey, prompts=self.room_for is not None, room_for=room_for, limit=key)
        yield f"{self.name}, {next(lines)}"
        yield from lines
        for label, answers in self.unreadable.items():
            if answers:
                examples = ", ".join(f"{answer!r:.60}" for answer in answers[:_SHOWN])
                yield f"  {len(answers):,} right answers that reward {label} cannot read, such as {examples}"


def survey_of(config: TrainingConfig, base: Path, rows: int) -> Survey:
    """Return what the first rows of the first training source come to, before any is cut.

    Raises:
        UserError: One of them cannot be read.
    """
    section = config.data.all_sources()[0]
    source = open_source(section, base, task_rows(config))
    tokenizer = load_tokenizer(config.model, base)
    images = images_of(config, tokenizer, base)
    tokenise = _tokenise(config, tokenizer, base, images, {source.name: section.rows})
    survey = Survey(source.name, config.data.max_length)
    for number, row in enumerate(islice(source.scan(0), rows)):
        survey.add(tokenise(row, number, source.name, f"{source.name} row {number}"))
    return survey


def _reports(config: TrainingConfig, base: Path, processes: ExitStack) -> Iterator[Report]:
    data = open_data(ConfiguredRun(config=config, base=base))
    tokenizer = load_tokenizer(config.model, base)
    images = images_of(config, tokenizer, base)
    accept = row_filter(ConfiguredRun(config=config, base=base))
    answers = _AnswerChecks.of(config, base, processes)
    every: list[tuple[str, Source, Mapping[str, Any], Accept | None]] = [
        *(("training", source, data.formats, accept) for source in data.training),
        *(
            (f"evaluation {name}", source, {source.name: data.evaluation_formats[name]}, filter_of(source, accept))
            for name, source in data.evaluation.items()
        ),
    ]
    for name, source, formats, taken in every:
        training = name == "training"
        report = _report_of(name, source, config, longest_prompt(config, training=training))
        report.survey.skips = training and config.data.on_bad_row == "skip"
        if isinstance(images, ImageSide):
            images.on_image, images.on_video = report.survey.images.add, report.survey.videos.add
        tokenise = _tokenise(config, tokenizer, base, images, dict(formats), training=training)
        for label, row in _rows(source, report.survey):
            if taken is not None and not taken(row):
                report.survey.leave_out()
            elif _count(report.survey, tokenise, row, label, refused=config.data.overlong == "refuse"):
                answers.add(row, report.unreadable)
        answers.finish(report.unreadable)
        yield report


def _report_of(name: str, source: Source, config: TrainingConfig, longest: int | None) -> Report:
    """Return an empty report of rows, which are prompts of at most `longest` tokens unless that is None."""
    written = None if longest is None else config.data.max_length - longest
    report = Report(name, Survey(source.name, longest or config.data.max_length), written)
    report.limits_prompts = isinstance(config, GRPOConfig) and config.data.max_prompt_length is not None
    return report


def _rows(source: Source, survey: Survey) -> Iterator[tuple[str, Row]]:
    """Yield all rows that can be read, each with its name for messages; the others are counted."""
    reader = RowReader([source], in_order(source))
    for draw in count() if source.size is None else range(source.size):
        try:
            _, name, row = reader.read(draw)
        except EndOfStream:
            return
        except DataError as error:
            if source.size is None and not survey.skips:
                raise
            survey.add_mistake(str(error))
            continue
        yield name, row


def _count(survey: Survey, tokenise: Tokenise[Any], row: Row, name: str, *, refused: bool) -> bool:
    """Add a row to the survey; return whether a run can use it."""
    try:
        with broken_text_named(row, name):
            tokenised = tokenise(row, survey.rows, survey.source, name)
    except DataError as error:
        survey.add_mistake(str(error))
        return False
    longest = max(tokenised.lengths, default=0)
    survey.add(tokenised, mistake="" if not refused or longest <= survey.max_length else (
        f"{name} has {longest} tokens, more than {survey.max_length}, and data.overlong is refuse."
    ))  # fmt: skip
    return True


def _tokenise(
    config: TrainingConfig, tokenizer: Any, base: Path, images: Any, formats: dict[str, Any], *, training: bool = True
) -> Tokenise[Any]:
    """Return what turns rows into what a run of this verb reads; rows that would be refused for length are measured."""
    if config.data.overlong == "refuse":
        config = config.model_copy(update={"data": config.data.model_copy(update={"overlong": "drop"})})
    return tokeniser_of(config, tokenizer, base, images, formats, training=training)


@dataclass
class _AnswerChecks:
    """Right answers, tried on the rewards that have to read them, in processes that can be killed."""

    columns: Mapping[str, str]
    """Name of a reward -> the column that it reads."""
    scorer: RewardScorer | None
    waiting: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: TrainingConfig, base: Path, processes: ExitStack) -> _AnswerChecks:
        """Start the processes, if there is a reward to try.

        Raises:
            ConfigError: A reward cannot work here.
        """
        if not isinstance(config, GRPOConfig):
            return cls({}, None)
        rewards = [reward for reward in config.reward if isinstance(reward, MathConfig)]
        if not rewards:
            return cls({}, None)
        logs = Path(processes.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-answers-")))
        section = config.rewards.model_copy(update={"workers": 1})
        run_file = ConfiguredRun(config=config.model_copy(update={"reward": rewards}), base=base)
        scorer = RewardScorer(run_file, section, {}, logs)
        processes.callback(scorer.close)
        scorer.start()
        return cls({reward.label: reward.column for reward in rewards}, scorer)

    def add(self, row: Row, unreadable: dict[str, list[str]]) -> None:
        """Take a row's answers; try them once there are enough."""
        for label, column in self.columns.items():
            waiting = self.waiting.setdefault(label, [])
            waiting.append(str(number_as_text(row[column])) if row.get(column) is not None else "")
            if len(waiting) >= _AT_ONCE:
                self.finish(unreadable)

    def finish(self, unreadable: dict[str, list[str]]) -> None:
        """Try what waits."""
        for label, answers in self.waiting.items():
            assert self.scorer is not None
            bad = set(self.scorer.unreadable(label, list(dict.fromkeys(answers))))
            unreadable.setdefault(label, []).extend(answer for answer in answers if answer in bad)
        self.waiting.clear()
