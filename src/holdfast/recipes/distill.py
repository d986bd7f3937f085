"""Distillation of a teacher into a student.

Bring the student's prediction of every trained token near the teacher's: on the answers of rows (Hinton et al.,
arXiv:1503.02531), on texts that the student writes itself, or on both by turns (GKD, Agarwal et al., arXiv:2306.13649,
algorithm 1). Which divergence is the configuration's business (`distill.loss`), who writes the text is `rollout`'s.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from holdfast.config.verbs.distill import DistillConfig
from holdfast.parallel.mesh import World
from holdfast.training.distillation.build import build_distillation_run
from holdfast.training.distillation.run import (
    DistillTraining,
    compared_with_teacher,
    completed,
    evaluate_distilled,
)
from holdfast.training.fit import Outcome, fit
from holdfast.training.run import StepAbandoned
from holdfast.training.setup.begin import Live
from holdfast.training.step import train_step


def distill(config: DistillConfig, base: Path, world: World, live: Live | None = None) -> Outcome:
    """Train, evaluate and export as the configuration says."""
    training = build_distillation_run(config, base, world, live)
    return fit(training, partial(distill_step, training), partial(evaluate_distilled, training.evaluation))


def distill_step(training: DistillTraining) -> dict[str, float] | None:
    """Let the student write, or take the rows' answers, and make one update; None when the data has ended."""
    student, stream, writing = training.model, training.stream, training.writing
    before = stream.state()
    with student.run.phase("data"):
        mini_batch = stream.next(student.state.step)
    if mini_batch is None:
        return None
    objective = training.evaluation.objective
    if writing is not None and writing.is_due(student.state.step):
        objective = writing.objective
        try:
            mini_batch = completed(training, writing, mini_batch)
        except StepAbandoned:
            stream.load_state(before)  # its rows are read again after a resume
            raise
    mini_batch = compared_with_teacher(student, training.evaluation.asked.model, objective, mini_batch)
    return train_step(student, mini_batch, objective, source_names=training.source_names).read().metrics
