"""Build a distillation: what can fail before step 1 fails here, on all ranks alike, with nothing written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.config.verbs.distill import DistillConfig, JSDConfig
from holdfast.data.batches.candidates import Tokenise
from holdfast.data.batches.prompts import prompt_tokeniser
from holdfast.data.rows.rows import Row
from holdfast.data.tokens.chat import RowTokeniser, Tokenised
from holdfast.errors import DataError
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.heads.student import Taught
from holdfast.objectives.supervised import (
    BothLikelihoods,
    Comparison,
    Distillation,
    NegativeLogLikelihood,
    SampledReverseKL,
)
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.training.build.begin import Live, begin, build_model, layout_of, parts_of_run
from holdfast.training.build.rows import (
    OpenedData,
    SetReading,
    evaluation_sets,
    evaluation_tokenisers,
    open_data,
    row_filter,
    row_tokeniser,
    training_stream,
)
from holdfast.training.distillation.run import (
    DistillEvaluation,
    DistillRun,
    SampledDistillRun,
    prompt_alone,
)
from holdfast.training.engines import open_engine, pad_token
from holdfast.training.evaluate import split_at_answer
from holdfast.training.fingerprints import Identity
from holdfast.training.run import Evaluation
from holdfast.training.scorers.server import ScoringServer
from holdfast.training.scorers.teacher import Teacher, build_teacher
from holdfast.types import Example

_BLIND = "A distillation reads text alone"
_SAMPLED_BY = {
    "share", "group_size", "seed", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "stop",
}  # fmt: skip


def build_distillation_run(config: DistillConfig, base: Path, world: World, live: Live | None = None) -> DistillRun:
    """Return a run that is ready for its first step; nothing has been written.

    Raises:
        UserError: Anything that can be known now; the same error on all ranks.
    """
    live = live or Live()
    started = begin(config, base, world, live)
    ranks, data = started.ranks, started.data
    student = _student(config, base, world, ranks, live, data)
    layout = layout_of(student, _BLIND)
    tokenise = ranks.on_all_ranks(lambda: _tokeniser(config, base, student, data))
    stream = ranks.on_all_ranks(lambda: training_stream(config, data, tokenise, ranks, layout, base))
    parts = vars(student) | parts_of_run(config, base, student, started, stream)
    parts["identity"] = _with_teacher(parts["identity"], student)
    if config.rollout is None:
        return DistillRun(**parts)
    engine = open_engine(student, config.rollout)
    of_samples = _of_samples(config, student.teacher)
    return SampledDistillRun(**parts, engine=engine, rollout=config.rollout, layout=layout, of_samples=of_samples)


def build_distillation_evaluation(config: DistillConfig, base: Path, world: World) -> DistillEvaluation:
    """Return a student, its teacher and its evaluation sets.

    Raises:
        UserError: As `build_distillation_run`.
    """
    ranks = RankGroup(config.launch.timeout_minutes)
    needs_training_rows = config.data.validation_split > 0
    data = ranks.first_rank_first(lambda: open_data(config, base, training=needs_training_rows))
    return _student(config, base, world, ranks, Live(), data)


def _student(  # noqa: PLR0913 - the borders of a run
    config: DistillConfig, base: Path, world: World, ranks: RankGroup, live: Live, data: OpenedData
) -> DistillEvaluation:
    # The objective compares with the teacher, who is built when the student is.
    measured = build_model(config, base, world, ranks, live, NegativeLogLikelihood())
    teacher = build_teacher(measured, base)
    tokenizer = measured.origin.tokenizer
    reading = ranks.on_all_ranks(
        lambda: SetReading(evaluation_tokenisers(tokenizer, config.data, base, data, _BLIND), row_filter(config, base)),
    )
    sets = evaluation_sets(config, data, reading, ranks, layout_of(measured, _BLIND))
    of_rows = _of_rows(config, teacher)
    parts: dict[str, Any] = vars(measured) | {
        "config": config,
        "objective": of_rows,
        "evaluation_sets": sets,
        "temperature": config.distill.temperature,
    }
    return DistillEvaluation(**parts, teacher=teacher, of_rows=of_rows)


def _of_rows(config: DistillConfig, teacher: Teacher) -> Comparison:
    """Return the comparison on the answers of rows."""
    match teacher.model:
        case ScoringServer():
            return BothLikelihoods()
        case model:
            return Taught(_divergence(config), model)


def _of_samples(config: DistillConfig, teacher: Teacher) -> Comparison:
    """Return the comparison on what the student wrote."""
    if config.distill.loss.kind == "sampled_reverse_kl":
        return SampledReverseKL()
    assert isinstance(teacher.model, PolicyModel), "the configuration refuses a server that would tell distributions"
    return Taught(replace(_divergence(config), sft_weight=0.0), teacher.model)


def _divergence(config: DistillConfig) -> Distillation:
    return Distillation(_beta(config), config.distill.temperature, config.distill.sft_weight)


def _beta(config: DistillConfig) -> float:
    """Return which of the divergences over whole distributions is meant."""
    match config.distill.loss:
        case JSDConfig() as section:
            return section.beta
        case section:
            return 0.0 if section.kind == "forward_kl" else 1.0


def _tokeniser(config: DistillConfig, base: Path, student: Evaluation, data: OpenedData) -> Tokenise[Example]:
    """Return the function that makes sequences of rows: with answers, or where those are never read, of prompts."""
    tokenizer, rollout = student.origin.tokenizer, config.rollout
    rows = row_tokeniser(tokenizer, config.data, base, data.formats, _BLIND)
    if rollout is None:
        return rows
    longest = config.data.max_length - rollout.max_new_tokens
    if rollout.share < 1:
        return _with_room(rows, config, longest)
    prompts = prompt_tokeniser(
        RowTokeniser(tokenizer, config.data, base, _BLIND), tokenizer.decode, config.data, longest
    )
    filler = pad_token(tokenizer)

    def tokenise(row: Row, sample_id: int, source: str, name: str) -> Tokenised[Example]:
        tokenised = prompts(row, sample_id, source, name)
        return Tokenised(tuple(prompt_alone(prompt, filler) for prompt in tokenised.examples), tokenised.counts)

    return tokenise


def _with_room(rows: Tokenise[Example], config: DistillConfig, longest: int) -> Tokenise[Example]:
    """Return a function that leaves out sequences whose prompts are too long to be completed."""

    def tokenise(row: Row, sample_id: int, source: str, name: str) -> Tokenised[Example]:
        tokenised = rows(row, sample_id, source, name)
        sizes = [len(split_at_answer(example)[0]) for example in tokenised.examples]
        if max(sizes, default=0) <= longest:
            return tokenised
        if config.data.overlong == "refuse":
            raise DataError(
                f"{name}: its prompt has {max(sizes)} tokens, and data.max_length={config.data.max_length} less "
                f"rollout.max_new_tokens leaves room for {longest}. Raise data.max_length, or set data.overlong: drop."
            )
        fitting = tuple(example for example, size in zip(tokenised.examples, sizes, strict=True) if size <= longest)
        dropped = tokenised.counts.get("overlong_dropped", 0) + len(sizes) - len(fitting)
        return Tokenised(fitting, {**tokenised.counts, "overlong_dropped": dropped})

    return tokenise


def _with_teacher(identity: Identity, student: DistillEvaluation) -> Identity:
    """Add what a resumed run must find unchanged of the teacher and the comparison."""
    config = student.config
    rollout = None if config.rollout is None else config.rollout.model_dump(mode="json", include=_SAMPLED_BY)
    loss = {"distill": config.distill.model_dump_json(), "rollout": json.dumps(rollout, sort_keys=True)}
    return {
        **identity,
        "model": {**identity["model"], "teacher": student.teacher.mark},
        "objective": {**identity["objective"], **loss},
    }
