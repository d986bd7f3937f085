"""Make a recorded step again, in one process, from the checkpoint before it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from holdfast.checkpoint.keep.choose import Choice
from holdfast.checkpoint.load.reader import verified_manifest
from holdfast.checkpoint.place.layout import step_name
from holdfast.checkpoint.place.storage import open_storage
from holdfast.config.sections.rollout import ResidencyConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.parallel.mesh import World
from holdfast.recipes.grpo import learn
from holdfast.training.directory import CHECKPOINTS
from holdfast.training.policy.build import build_policy_run
from holdfast.training.policy.recorder import REPLAYED_METRICS, Record, read_record
from holdfast.training.saving.resume import resume

REPLAY_TOLERANCE = 1e-3
"""Largest difference, relative to the gradient norm: the sums of several ranks are rounded in another order."""


def replay_step(config: GRPOConfig, directory: Path, step: int, world: World) -> tuple[list[str], bool]:
    """Return a line for each number that was compared, and whether all of them agree.

    Args:
        config: The run's, for one process.
        directory: The run.
        step: Counted from 1.
        world: One process.

    Raises:
        ConfigError: The step was not kept, or there is no checkpoint right before it.
    """
    record = read_record(directory, step)
    storage, before = open_storage(config.checkpoint.storage or directory / CHECKPOINTS), step_name(step - 1)
    if step > 1 and not storage.exists(before):
        raise ConfigError(
            f"Step {step} is made again from the checkpoint of step {step - 1}, and {storage.root} has none. Keep "
            "checkpoints of the steps you want to replay: checkpoint.every_steps, checkpoint.keep.every."
        )
    with tempfile.TemporaryDirectory(prefix="holdfast-replay-") as place:
        # Nothing is sampled here, so nothing need rest meanwhile.
        changed = {"run": config.run.model_copy(update={"dir": place}), "residency": ResidencyConfig()}
        apart = _as_recorded(config, record).model_copy(update=changed)
        run = build_policy_run(apart, record.base, world, lambda _: [])
        if step > 1:
            manifest = verified_manifest(storage, before, run.setting.ranks)
            resume(
                run.common,
                storage,
                Choice(before, manifest, f"weights of step {step - 1}"),
                run.setting.ranks,
                manifest.run_id,
            )
        metrics = learn(run, record.rollout)
        run.setting.ranks.close()
    scale = max(abs(record.metrics["grad_norm"]), 1e-6)
    pairs = {name: (record.metrics[name], metrics[name]) for name in REPLAYED_METRICS}
    return [f"{name}: recorded {then:.9g}, replayed {now:.9g}" for name, (then, now) in pairs.items()], all(
        abs(then - now) <= REPLAY_TOLERANCE * scale for then, now in pairs.values()
    )


def _as_recorded(config: GRPOConfig, record: Record) -> GRPOConfig:
    """Return a configuration that computes in what the run did: a CPU chooses another precision than a GPU."""
    if record.compute_dtype not in {"float32", "bfloat16"}:
        return config
    return config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"compute_dtype": record.compute_dtype})}
    )
