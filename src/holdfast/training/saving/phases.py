"""Start a new run from another run's checkpoint: its weights, its moments, its place in the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.checkpoint.format.verification import named_manifest
from holdfast.checkpoint.loading.matching import optimizer_difference
from holdfast.checkpoint.loading.reader import load_state
from holdfast.checkpoint.place.storage import open_storage
from holdfast.config.sections.checkpoint import InitConfig
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.shards import sharded_parameters
from holdfast.training.run import PLATEAU_FACTOR, Training, TrainState, say
from holdfast.training.saving.parents import recordable
from holdfast.training.saving.resume import check_step, declared, validated


@dataclass(frozen=True)
class _SavedCounters:
    state: TrainState


_SAVED_COUNTERS = TypeAdapter(_SavedCounters)


def start_from(training: Training, source: InitConfig, ranks: RankGroup) -> tuple[str, ...]:
    """Take the weights of another run's checkpoint, and the moments and the place in the schedule if asked to.

    The place in the data is never taken.

    Returns:
        What later manifests say of it: the checkpoint, and what was declared.

    Raises:
        NoCheckpoint, CheckpointCorrupt, CheckpointMismatch: Nothing was changed.
    """
    path, _, name = source.path.rstrip("/").rpartition("/")
    storage = open_storage(path or ".")
    manifest = named_manifest(storage, name, ranks)
    if source.moments and (difference := optimizer_difference(training.model.updater, manifest)) is not None:
        raise CheckpointMismatch(
            f"{recordable(source.path)} has no moments for checkpoint.init_from.take={source.take}: {difference}. Set "
            "take: weights, or optim as that run had it. Nothing was changed."
        )
    loaded = load_state(
        storage,
        name,
        training.model.module,
        training.model.optimizer if source.moments else None,
        ranks,
        declared=declared(training.run.config.checkpoint),
        manifest=manifest,
        check=(lambda shared, _: _check_schedule(shared, manifest.step)) if source.schedule else lambda *_: None,
    )
    if training.model.averages is not None:
        training.model.averages.begin(sharded_parameters(training.model.module))
    if source.schedule:
        _take_schedule(training, loaded.shared["state"])
    shown = recordable(source.path)
    words = source.take.replace("+", ", ")
    start = training.model.state.schedule_start
    rate = f"the schedule goes on at its step {start}" if source.schedule else "the schedule starts anew"
    say(
        training,
        f"{words} from {shown} (step {loaded.manifest.step}); a new run starts at step 0; {rate}",
        *loaded.notes,
    )
    return (f"{words} from {shown} ({loaded.manifest.hash})", *loaded.deviations)


def _check_schedule(shared: Mapping[str, Any], step: int) -> None:
    """Raise ValueError unless trainer.json has the counters of that step."""
    check_step(validated(_SAVED_COUNTERS, shared).state, step)


def _take_schedule(training: Training, saved: Mapping[str, Any]) -> None:
    """Let the learning rate go on: by the updates that were made, and by what plateaus took off it."""
    state = training.model.state
    state.schedule_start = saved["step"] + saved.get("schedule_start", 0)
    if PLATEAU_FACTOR in saved.get("watched", {}):
        state.watched[PLATEAU_FACTOR] = saved["watched"][PLATEAU_FACTOR]
