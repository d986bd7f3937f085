"""Repeats a recorded step in one process from the checkpoint before it, or explains its mismatch with the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from holdfast.checkpoint.format.verification import named_manifest
from holdfast.checkpoint.keep.choose import ResumeChoice
from holdfast.checkpoint.place.layout import step_name
from holdfast.checkpoint.place.storage import Storage
from holdfast.config.sections.engine import LocalEngineConfig
from holdfast.config.sections.rollout import ResidencyConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.features.forensics.mismatch import (
    CAUSES,
    WHY_NOT,
    Fit,
    best_of_each,
    causes,
    completions_of,
    fits,
    fits_without,
    verdict,
)
from holdfast.features.forensics.other_engines import fits_elsewhere, plain_copy
from holdfast.features.forensics.record_files import is_kept
from holdfast.features.forensics.recorder import REPLAYED_METRICS, Record
from holdfast.models.support import Support
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.recipes.grpo import learn
from holdfast.training.forms import resume_forms
from holdfast.training.policy.build import build_policy_run
from holdfast.training.policy.episodes import open_environments
from holdfast.training.policy.run import PolicyTraining
from holdfast.training.saving.resume import resume

REPLAY_TOLERANCE = 1e-3
"""Largest difference, relative to the gradient norm: the sums of several ranks are rounded in another order."""


def replay_step(config: GRPOConfig, storage: Storage, record: Record, world: World) -> tuple[list[str], bool]:
    """Return a line for each number that was compared, and whether all of them agree.

    Args:
        config: The run's, for one process.
        storage: Its checkpoints, of which there is one right before the step.
        record: The step.
        world: One process.
    """
    with _rebuilt(config, storage, record, world) as rebuilt:
        rebuilt.go_to(record.step - 1)
        _, metrics = learn(rebuilt.training, record.rollout)
    scale = max(abs(record.metrics["grad_norm"]), 1e-6)
    pairs = {name: (record.metrics[name], metrics[name]) for name in REPLAYED_METRICS}
    return [
        f"{name}: recorded {recorded:.9g}, replayed {replayed:.9g}" for name, (recorded, replayed) in pairs.items()
    ], all(abs(recorded - replayed) <= REPLAY_TOLERANCE * scale for recorded, replayed in pairs.values())


class Explanation(NamedTuple):
    """The result of `holdfast explain-mismatch` for one recorded step."""

    sentence: str
    """The sentence that a user reads first."""
    fits: list[Fit]
    """That nothing is wrong, and then the nearest of each cause, the nearest first."""
    not_tried: dict[str, str]
    """Causes that do not apply to the step, and why."""


def explain_mismatch(config: GRPOConfig, storage: Storage, record: Record, world: World) -> Explanation:
    """Return why the engine's log-probabilities of a recorded step differ from the trainer's, and what was tried.

    Args:
        config, storage, record, world: As of `replay_step`.

    Raises:
        ConfigError: The step has no log-probability of an engine.
    """
    groups, rollout, step = record.rollout.groups, config.rollout, record.step
    if not any(np.isfinite(engine_logprobs).any() for _, _, engine_logprobs in completions_of(groups)):
        raise ConfigError(
            f"The record of step {step} has no completion whose log-probabilities the engine told, so there is "
            "nothing to compare the trainer's with: no group of the step was trained on, or the engine told none. Look "
            "at groups and rollout/ in metrics.jsonl, or choose another --step."
        )
    support = Support(rollout.top_k, rollout.top_p, rollout.min_p)
    tried = causes(groups[0].trajectories[0].temperature or 1.0, support, renormalised=rollout.renormalise)
    as_it_was = dict([next(iter(tried.items()))])
    logprobs_of = next(iter(tried.values()))
    with _rebuilt(config, storage, record, world) as rebuilt:
        model = rebuilt.training.model
        further_fits: list[Fit] = []
        earlier, before = None, f"step {step - 2}"
        if step > 1 and is_kept(storage, step - 2):
            rebuilt.go_to(step - 2)
            stale = f"stale weights: those of {before}"
            if rollout.max_staleness:
                stale += f", as rollout.max_staleness: {rollout.max_staleness} asks for"
            further_fits.append(replace(fits(model, groups, as_it_was)[0], cause=stale))
            earlier = plain_copy(model), before
        rebuilt.go_to(step - 1)
        nothing, *ranked = fits(model, groups, tried)
        further_fits += fits_without(model, groups, logprobs_of)
        further_fits += fits_elsewhere(model, groups, logprobs_of, earlier)
        with torch.no_grad():
            for value in sharded_parameters(model.module).values():
                local_part(value).copy_(local_part(value).bfloat16())
        further_fits.append(replace(fits(model, groups, as_it_was)[0], cause="dtype: weights in bfloat16"))
        dtype = model.plan.compute_dtype
    best = best_of_each([*ranked, *further_fits])
    no_earlier = f"there is no checkpoint of {before}" if step > 1 else "step 1 has no step before it"
    reasons = dict.fromkeys(("stale weights", "prefix cache"), no_earlier) | WHY_NOT
    tried_causes = {fit.cause.partition(":")[0] for fit in best}
    return Explanation(
        verdict(best, nothing, dtype),
        [nothing, *best],
        {cause: reasons[cause] for cause in CAUSES if cause not in tried_causes},
    )


@dataclass(frozen=True)
class _Rebuilt:
    """A run rebuilt in one process, with the state that a checkpoint holds."""

    training: PolicyTraining
    storage: Storage

    def go_to(self, step: int) -> None:
        """Take over the state of a step that there is a checkpoint of."""
        if step == 0:
            return  # as it was built; nothing goes back there from another step
        name, ranks = step_name(step), self.training.run.ranks
        manifest = named_manifest(self.storage, name, ranks)
        choice = ResumeChoice(name, manifest, f"weights of step {step}")
        resume(self.training, self.storage, choice, ranks, manifest.run_id)
        resume_forms(self.training)


@contextmanager
def _rebuilt(config: GRPOConfig, storage: Storage, record: Record, world: World) -> Iterator[_Rebuilt]:
    with tempfile.TemporaryDirectory(prefix="holdfast-replay-") as folder:
        # Nothing is sampled here, so nothing need rest meanwhile, no server need live, and no step comes early.
        changed = {
            "run": config.run.model_copy(update={"dir": folder}),
            "residency": ResidencyConfig(),
            "rollout": config.rollout.model_copy(update={"engine": LocalEngineConfig(), "max_staleness": 0}),
        }
        apart = _as_recorded(config, record).model_copy(update=changed)
        with open_environments(apart, record.base, world) as environments:  # their tools are part of prompts
            training = build_policy_run(apart, record.base, world, lambda _: [], environments=environments)
            yield _Rebuilt(training, storage)
            training.run.ranks.close()


def _as_recorded(config: GRPOConfig, record: Record) -> GRPOConfig:
    """Return a configuration that computes in what the run did: a CPU chooses another precision than a GPU."""
    if record.compute_dtype not in {"float32", "bfloat16"}:
        return config
    return config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"compute_dtype": record.compute_dtype})}
    )
