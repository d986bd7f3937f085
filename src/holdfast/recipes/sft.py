"""Supervised fine-tuning.

A step takes a batch of sequences and makes one update that raises the likelihood of their trained tokens. The data
room has marked these in each row (`loss_mask`), and `data.average` says what the loss is averaged over.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.mesh import World
from holdfast.training.evaluate import evaluate
from holdfast.training.fit import Outcome, fit
from holdfast.training.run import Training
from holdfast.training.setup.begin import Live, build_run
from holdfast.training.step import Update, train_step


def sft(config: SFTConfig, base: Path, world: World, live: Live | None = None) -> Outcome:
    """Train, evaluate and export as the configuration says."""
    training = build_run(config, base, world, live)
    return fit(training, partial(sft_step, training), partial(evaluate, training.evaluation))


def sft_step(training: Training) -> Update | None:
    """Make one update, whose numbers the device may still compute; None when the data has ended."""
    model, config = training.model, training.run.config
    assert isinstance(config, SFTConfig)
    with training.run.phase("data"):
        mini_batch = training.stream.next(model.state.step)
    if mini_batch is None:
        return None
    noise: AbstractContextManager[None] = nullcontext()
    if config.neftune_alpha is not None:
        noise = model.module.noisy(config.neftune_alpha, seed=config.seed, step=model.state.step)
    with noise:
        return train_step(model, mini_batch, training.evaluation.objective, source_names=training.source_names)
