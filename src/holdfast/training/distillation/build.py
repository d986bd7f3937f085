"""Build a distillation run. Everything that can fail before step 1 fails here, on all ranks, before any file is
written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from holdfast.config.verbs.distill import DistillConfig, JSDConfig
from holdfast.data.batches.assembly import Layout
from holdfast.data.batches.candidates import Tokenise, prompt_tokeniser
from holdfast.data.rows.rows import Row
from holdfast.data.tokens.chat import RowTokeniser, Tokenised
from holdfast.errors import DataError
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.heads.student import TeacherComparison, WeightedTeacher
from holdfast.models.setup.model import Blueprint
from holdfast.objectives.supervised import BothLikelihoods, Comparison, Distillation, SampledReverseKL
from holdfast.parallel.mesh import World
from holdfast.training.distillation.run import (
    DistillEvaluation,
    DistillTraining,
    StudentSampling,
    prompt_alone,
)
from holdfast.training.engines import layout_of, open_engine, pad_token
from holdfast.training.evaluate import split_at_answer
from holdfast.training.other_models.teacher import Teacher, build_teachers, marks
from holdfast.training.policy.run import Sampler
from holdfast.training.rollout_memory import deal_memory
from holdfast.training.run import Identity, Run
from holdfast.training.setup.begin import (
    Live,
    RunSetup,
    begin,
    begin_evaluation,
    build_model,
    evaluation_sets,
    training_of,
)
from holdfast.training.setup.first_rows import check_first_rows
from holdfast.training.setup.rows import (
    OpenedData,
    evaluation_tokenisers,
    row_tokeniser,
    training_stream,
)
from holdfast.types import Example

_BLIND = "A distillation reads text alone"
_SAMPLED_BY = {
    "share", "group_size", "seed", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "stop",
}  # fmt: skip


def build_distillation_run(
    config: DistillConfig, base: Path, world: World, live: Live | None = None
) -> DistillTraining:
    """Return a run that is ready for its first step; nothing has been written.

    Raises:
        UserError: Anything that can be known now; the same error on all ranks.
    """
    run = Run.of(config, base, world)
    setup = begin(run, live or Live())
    evaluation = _evaluation(config, setup)
    layout = layout_of(evaluation.model, _BLIND)
    with run.ranks.together():
        tokenise = _tokeniser(config, run, evaluation.model.blueprint, setup.data)
        stream = training_stream(run, setup.data, tokenise, layout)
    training = DistillTraining(**vars(training_of(setup, evaluation, stream)))
    training.identity = _with_teachers(config, evaluation.teachers, training.identity)
    if config.rollout is not None:
        training.writing = _writing(config, evaluation, layout)
    return training


def _with_teachers(config: DistillConfig, teachers: Sequence[Teacher], identity: Identity) -> Identity:
    """Return fingerprints with those of the teachers, and of the loss."""
    rollout = None if config.rollout is None else config.rollout.model_dump(mode="json", include=_SAMPLED_BY)
    loss = {"distill": config.distill.model_dump_json(), "rollout": json.dumps(rollout, sort_keys=True)}
    return {
        **identity,
        "model": {**identity["model"], "teacher": marks(teachers)},
        "objective": {**identity["objective"], **loss},
    }


def _writing(config: DistillConfig, evaluation: DistillEvaluation, layout: Layout) -> StudentSampling:
    """Open the engine that samples from the student."""
    section, student = config.rollout, evaluation.model
    assert section is not None
    sampler = Sampler(open_engine(student, section))
    deal_memory(sampler.engine, student, section, config.data.max_length - section.max_new_tokens)
    seed = config.seed if section.seed is None else section.seed
    return StudentSampling(sampler, section, seed, layout, objective_of_samples(config, evaluation.teachers))


def build_distillation_evaluation(config: DistillConfig, base: Path, world: World) -> DistillEvaluation:
    """Return a student, its teachers and its evaluation sets.

    Raises:
        UserError: As `build_distillation_run`.
    """
    return _evaluation(config, begin_evaluation(Run.of(config, base, world)))


def _evaluation(config: DistillConfig, setup: RunSetup) -> DistillEvaluation:
    student = build_model(setup.run, setup.live, partial(_look_at_rows, config, setup))
    teachers = build_teachers(student)
    sets = evaluation_sets(setup, student, _BLIND)
    student.temperature = config.distill.temperature
    return DistillEvaluation(model=student, objective=objective_of_rows(config, teachers), sets=sets, teachers=teachers)


def objective_of_rows(config: DistillConfig, teachers: Sequence[Teacher]) -> Comparison:
    """Return the comparison on the answers of rows."""
    if config.has_server:
        return BothLikelihoods()
    return TeacherComparison(_divergence(config), _weighted(teachers))


def objective_of_samples(config: DistillConfig, teachers: Sequence[Teacher]) -> Comparison:
    """Return the comparison on what the student wrote."""
    if config.distill.loss.kind == "sampled_reverse_kl":
        return SampledReverseKL()
    return TeacherComparison(replace(_divergence(config), sft_weight=0.0), _weighted(teachers))


def _weighted(teachers: Sequence[Teacher]) -> list[WeightedTeacher]:
    """Return teachers of whole distributions; the configuration refuses a server here."""
    return [WeightedTeacher(each.model, each.weight) for each in teachers if isinstance(each.model, PolicyModel)]


def _divergence(config: DistillConfig) -> Distillation:
    match config.distill.loss:
        case JSDConfig() as section:
            beta = section.beta
        case section:
            beta = 0.0 if section.kind == "forward_kl" else 1.0
    return Distillation(beta, config.distill.temperature, config.distill.sft_weight)


def _look_at_rows(config: DistillConfig, setup: RunSetup, origin: Blueprint) -> None:
    run, data = setup.run, setup.data
    with run.ranks.together():
        tokenise = _tokeniser(config, run, origin, data)
        of_sets = evaluation_tokenisers(run, origin.tokenizer, data, _BLIND)
    check_first_rows(run, data, tokenise, of_sets)


def _tokeniser(config: DistillConfig, run: Run, origin: Blueprint, data: OpenedData) -> Tokenise[Example]:
    """Return the function that makes sequences of rows: with answers, or where those are never read, of prompts."""
    tokenizer, rollout = origin.tokenizer, config.rollout
    rows = row_tokeniser(run, tokenizer, data.formats, _BLIND)
    if rollout is None:
        return rows
    longest = config.data.max_length - rollout.max_new_tokens
    if rollout.share < 1:
        return _with_room(rows, config, longest)
    prompts = prompt_tokeniser(
        RowTokeniser(tokenizer, config.data, run.base, _BLIND), tokenizer.decode, config.data, longest
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
