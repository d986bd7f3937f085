"""Supervised fine-tuning.

A batch of sequences, the negative log-likelihood of their trained tokens, one optimizer update. What is averaged over
is the batch's business (`data.average`), what counts as a trained token the row's (`loss_mask`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.mesh import World
from holdfast.training.evaluate import evaluate
from holdfast.training.fit import Outcome, fit
from holdfast.training.run import Run
from holdfast.training.setup.begin import Live, build_run
from holdfast.training.step import StartedUpdate, start_step


def sft(config: SFTConfig, base: Path, world: World, live: Live | None = None) -> Outcome:
    """Train, evaluate and export as the configuration says."""
    run = build_run(config, base, world, live)
    return fit(run, partial(start_sft_step, run), partial(evaluate, run.evaluation))


def sft_step(run: Run) -> dict[str, float] | None:
    """Make one update and return its metrics; None when the data has ended."""
    started = start_sft_step(run)
    return None if started is None else started.read().metrics


def start_sft_step(run: Run) -> StartedUpdate | None:
    """Make one update, without waiting for its numbers; None when the data has ended."""
    trained, config = run.trained, run.setting.config
    assert isinstance(config, SFTConfig)
    with run.setting.phase("data"):
        mini_batch = run.stream.next(trained.state.step)
    if mini_batch is None:
        return None
    noise: AbstractContextManager[None] = nullcontext()
    if config.neftune_alpha is not None:
        noise = trained.model.noisy(config.neftune_alpha, seed=config.seed, step=trained.state.step)
    with noise:
        return start_step(trained, mini_batch, run.evaluation.objective, source_names=run.source_names)
