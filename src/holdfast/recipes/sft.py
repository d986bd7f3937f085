"""Supervised fine-tuning.

A batch of sequences, the negative log-likelihood of their trained tokens, one optimizer update. What is averaged over
is the batch's business (`data.average`), what counts as a trained token the row's (`loss_mask`).
"""

from __future__ import annotations

from pathlib import Path

from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.mesh import World
from holdfast.training.build.begin import Live, build_run
from holdfast.training.fit import Outcome, fit
from holdfast.training.run import Run
from holdfast.training.step import train_step


def sft(config: SFTConfig, base: Path, world: World, live: Live | None = None) -> Outcome:
    """Train, evaluate and export as the configuration says."""
    run = build_run(config, base, world, live)
    outcome = fit(run, sft_step)
    run.ranks.close()
    return outcome


def sft_step(run: Run) -> dict[str, float] | None:
    """Make one update; None when the data has ended."""
    config = run.config
    assert isinstance(config, SFTConfig)
    with run.phase("data"):
        mini_batch = run.stream.next(run.state.step)
    if mini_batch is None:
        return None
    if config.neftune_alpha is None:
        return train_step(run, mini_batch)
    with run.policy.noisy(config.neftune_alpha, seed=config.seed, step=run.state.step):
        return train_step(run, mini_batch)
