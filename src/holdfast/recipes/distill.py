"""Distillation of a teacher into a student.

Bring the student's prediction of every trained token near the teacher's: on the answers of rows (Hinton et al.,
arXiv:1503.02531), on texts that the student writes itself, or on both by turns (GKD, Agarwal et al., arXiv:2306.13649,
algorithm 1). Which divergence is the configuration's business (`distill.loss`), who writes the text is `rollout`'s.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.config.verbs.distill import DistillConfig
from holdfast.parallel.mesh import World
from holdfast.training.build.begin import Live
from holdfast.training.distillation.build import build_distillation_run
from holdfast.training.distillation.run import (
    DistillRun,
    SampledDistillRun,
    compared_with_teacher,
    completed,
    evaluate_distilled,
)
from holdfast.training.fit import Outcome, fit
from holdfast.training.run import StepAbandoned
from holdfast.training.step import train_step


def distill(config: DistillConfig, base: Path, world: World, live: Live | None = None) -> Outcome:
    """Train, evaluate and export as the configuration says."""
    run = build_distillation_run(config, base, world, live)
    outcome = fit(run, distill_step, evaluate_distilled)
    run.ranks.close()
    return outcome


def distill_step(run: DistillRun) -> dict[str, float] | None:
    """Let the student write, or take the rows' answers, and make one update; None when the data has ended."""
    if isinstance(run, SampledDistillRun) and run.samples_now:
        return sampled_step(run)
    run.objective = run.of_rows
    with run.phase("data"):
        mini_batch = run.stream.next(run.state.step)
    return None if mini_batch is None else train_step(run, compared_with_teacher(run, mini_batch))


def sampled_step(run: SampledDistillRun) -> dict[str, float] | None:
    """Let the student complete the rows' prompts, and make one update on what it wrote."""
    run.objective = run.of_samples
    before = run.stream.state()
    with run.phase("data"):
        mini_batch = run.stream.next(run.state.step)
    if mini_batch is None:
        return None
    try:
        mini_batch = completed(run, mini_batch)
    except StepAbandoned:
        run.stream.load_state(before)  # its rows are read again after a resume
        raise
    return train_step(run, compared_with_teacher(run, mini_batch))
