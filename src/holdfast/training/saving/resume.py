"""Restore a run from a checkpoint, and report what continues bit for bit and what was declared to differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, TypeAdapter, ValidationError

from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointUnreadable
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.settings import settings_of
from holdfast.checkpoint.format.snapshot import set_random_state
from holdfast.checkpoint.format.verification import verified_bytes
from holdfast.checkpoint.keep.choose import ResumeChoice, newest_verified
from holdfast.checkpoint.loading.matching import Declared
from holdfast.checkpoint.loading.reader import LoadedState, load_state
from holdfast.checkpoint.place.layout import ASSETS
from holdfast.checkpoint.place.storage import Storage
from holdfast.config.base import SavedCount, leaves
from holdfast.config.load import EXPORTED_CONFIG
from holdfast.config.public import WHOLE, public_configuration
from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.config.verbs.training import as_plain
from holdfast.data.batches.passes import StreamState
from holdfast.optim.state import hyperparameter_words
from holdfast.parallel.collectives import RankGroup
from holdfast.text.shortening import shortened
from holdfast.training.randomness import seed_rank
from holdfast.training.run import Training, TrainState, say
from holdfast.training.saving.differences import changed_fingerprints, has_default, is_gone
from holdfast.types import EpisodeSummary

MOVES_NUMBERS = (
    "steps", "epochs", "seed", "optim.", "data.", "model.", "objective.", "preference.", "parallel.",
    "rollout.", "environment", "reward", "advantage.", "groups.", "kl.", "entropy.", "correction.", "off_policy_mask.",
    "reference.", "updates.", "critic", "teacher", "distill.", "neftune_alpha",
)  # fmt: skip


def go_on(training: Training, storage: Storage, ranks: RankGroup, run_id: str) -> Continuation | None:
    """Continue from the newest whole checkpoint of this run; None if there never was one.

    What another run saved is refused before anything is renamed, also where it is damaged.

    Raises:
        NoCheckpoint, CheckpointMismatch: None is whole, or the newest does not fit this run.
    """
    restored: list[Continuation] = []
    choice = newest_verified(
        storage,
        ranks,
        not_finite=training.run.config.checkpoint.resume.not_finite,
        check=lambda name, manifest: _refuse_other_run(training, storage, name, manifest, run_id),
        use=lambda name, manifest: restored.append(restore_run(training, storage, name, manifest, ranks, run_id)),
    )
    if choice is None:
        return None
    say(training, choice.message, *restored[0].lines)
    return restored[0]


def resume(training: Training, storage: Storage, choice: ResumeChoice, ranks: RankGroup, run_id: str) -> None:
    """Continue from a checkpoint; what was declared to differ is printed.

    Args:
        training: As it was built.
        storage, choice: The checkpoint.
        ranks: A group of its own.
        run_id: Of this run.

    Raises:
        CheckpointMismatch: It does not fit this run, and the difference was not declared; nothing was changed.
    """
    restored = restore_run(training, storage, choice.name, choice.manifest, ranks, run_id)
    say(training, choice.message, *restored.lines)


@dataclass(frozen=True)
class Continuation:
    """The checkpoint that a run continues from, and what to report about it."""

    manifest: Manifest
    deviations: tuple[str, ...]
    """What was declared to differ, at this resume."""
    lines: tuple[str, ...]
    """What the user reads of it."""


def restore_run(  # noqa: PLR0913 - what is continued, and from what
    training: Training, storage: Storage, name: str, manifest: Manifest, ranks: RankGroup, run_id: str
) -> Continuation:
    """Put a run where a checkpoint left it, whose bytes are verified while they are read.

    Raises:
        CheckpointMismatch: It does not fit this run, and the difference was not declared; nothing was changed.
    """
    config = training.run.config.checkpoint
    accepted: list[str] = []
    saved_settings: dict[str, Any] = {}
    with training.run.ranks.together():
        saved_settings |= saved_settings_of(storage, name, manifest)
        changes = changed_fingerprints(manifest.fingerprints, training.identity, training.run.config)
        changes = {**changes, **_other_run(training, manifest, run_id, saved_settings)}
        accepted += _checkdeclared(training, f"{storage.root}/{name}", changes)
    loaded = load_state(
        storage,
        name,
        training.model.module,
        training.model.optimizer,
        ranks,
        declared=declared(config),
        hyperparameters="live" if config.resume.hyperparameters == "config" else "checkpoint",
        manifest=manifest,
        averages=training.model.averages.tensors if training.model.averages is not None else {},
        companions=training.saved_companions,
        check=lambda shared, _: check_saved_state(training, shared, manifest.step),
    )
    _take_state(training, loaded.shared["state"])
    training.stream.load_state(loaded.shared["stream"])
    if training.ahead is not None:
        training.ahead.restore(loaded.shared.get("ahead", []))
    if loaded.rank_state is not None:
        set_random_state(loaded.rank_state["random"])
    else:
        seed_rank(
            training.run.config.seed,
            training.run.world.rank,
            deterministic=training.run.config.determinism,
            step=training.model.state.step,
        )
    _damage(training)
    training.run.log.resumed_metrics |= {name: value for name, value in manifest.metrics.items() if value is not None}
    lines = (
        _of_another_system(loaded) or _exactness(training, loaded, int(saved_settings.get("parallel.context", 1))),
        _hyperparameters(training),
        *accepted,
        *loaded.notes,
        *_changed(training, saved_settings),
    )
    return Continuation(manifest, (*accepted, *loaded.deviations), lines)


def _take_state(training: Training, saved: Mapping[str, Any]) -> None:
    """Restore the training state of the run and of its companions."""
    training.model.state = TrainState(**{name: value for name, value in saved.items() if name != "companions"})
    for name, companion in training.companions.items():
        companion.state = training.model.state.companions[name] = TrainState(
            **saved.get("companions", {}).get(name, {})
        )


def _hyperparameters(training: Training) -> str:
    """Say where the optimizer's settings come from; notes follow on what the other place says otherwise."""
    source = training.run.config.checkpoint.resume.hyperparameters
    side = {"config": "the configuration", "checkpoint": "the checkpoint"}[source]
    return (
        "optimizer: the learning rate follows the schedule of the configuration; "
        f"{hyperparameter_words(training.model.updater)} come from {side} (checkpoint.resume.hyperparameters: {source})"
    )


def _other_run(
    training: Training, manifest: Manifest, run_id: str, saved_settings: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return words if a run of another name saved a checkpoint, by the kind that declares it.

    A run whose directory was on a disk that is gone has a new identity and the old name.
    """
    name = saved_settings.get("run.name")
    same = manifest.run_id == run_id or name in {None, training.run.config.run.name}
    return {} if same else {"run": [f"run.name is {name} there"]}


def _checkdeclared(training: Training, checkpoint: str, changes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each difference, all of which must be declared.

    Raises:
        CheckpointMismatch: Some of it was not declared.
    """
    refused = {
        kind: differences
        for kind, differences in changes.items()
        if kind not in training.run.config.checkpoint.resume.changed
    }
    if refused:
        listing = "; ".join(f"{kind}: {', '.join(differences[:4])}" for kind, differences in refused.items())
        raise CheckpointMismatch(
            f"{checkpoint} was made with other things than this run has ({listing}). Nothing was changed. Put them "
            f"back, choose another run.name, or declare it: checkpoint.resume.changed: [{', '.join(refused)}]."
        )
    return [f"{kind}: {', '.join(differences)} (changed)" for kind, differences in changes.items()]


def _refuse_other_run(training: Training, storage: Storage, name: str, manifest: Manifest, run_id: str) -> None:
    """Refuse a damaged checkpoint of another run, as far as it still says whose it is."""
    with suppress(CheckpointCorrupt, CheckpointUnreadable):
        saved_settings = saved_settings_of(storage, name, manifest)
        _checkdeclared(training, f"{storage.root}/{name}", _other_run(training, manifest, run_id, saved_settings))


def saved_settings_of(storage: Storage, name: str, manifest: Manifest) -> dict[str, Any]:
    """Return the configuration that a checkpoint was made with, by dotted name; empty if it holds none."""
    file = f"{ASSETS}/{EXPORTED_CONFIG}"
    if file not in manifest.files:
        return {}
    tree = settings_of(verified_bytes(storage, name, manifest, file), f"{storage.root}/{name}/{file}")
    return dict(leaves(public_configuration(tree, WHOLE), into_lists=True))


def _changed(training: Training, saved_settings: Mapping[str, Any]) -> list[str]:
    """Return what the configuration says otherwise than when the checkpoint was made, as far as it moves numbers."""
    if not saved_settings:
        return []
    config = training.run.config
    settings = dict(leaves(public_configuration(as_plain(config), WHOLE), into_lists=True))
    sections = type(config).model_fields
    gone = sorted(key for key in saved_settings if is_gone(config, key) or key.partition(".")[0] not in sections)
    changes = [
        f"{key} {saved_settings.get(key)} -> {settings.get(key)}"
        for key in sorted({*saved_settings, *settings} - {*gone})
        if key.startswith(MOVES_NUMBERS)
        and saved_settings.get(key) != settings.get(key)
        and (key in saved_settings or not has_default(config, key, settings[key]))
    ]
    lines = [f"changed since the checkpoint: {', '.join(changes)}; the new values hold from here on"] if changes else []
    return lines + ([f"keys of the checkpoint that are gone, and ignored: {', '.join(gone)}"] if gone else [])


IMPORTED = "imported"
"""Key of trainer.json in a checkpoint that was another system's: whose it was, and what was lost on the way."""


def _of_another_system(loaded: LoadedState) -> str:
    """Return what a checkpoint says that was imported from another system; "" of any other."""
    source = loaded.shared.get(IMPORTED)
    if not isinstance(source, dict):
        return ""
    return (
        f"imported from {source.get('system')}, step {source.get('step')}: weights and optimizer continue as they were "
        "there; the order of rows and random numbers are this run's own"
    )


def _exactness(training: Training, loaded: LoadedState, saved_context: int) -> str:
    mesh = {"replicate": training.model.plan.replicate, "shard": training.model.plan.shard}
    context = training.run.config.parallel.context
    if loaded.rank_state is not None and saved_context == context:
        return "weights, optimizer, random state and order of rows are those of the checkpoint, bit for bit"
    if loaded.rank_state is not None:
        return (
            f"the checkpoint was written with parallel.context={saved_context}, this run has {context}: weights, "
            "optimizer, random state and order of rows continue exactly; sums over ranks are added in another order"
        )
    saved_mesh = " x ".join(f"{axis}={size}" for axis, size in sorted(loaded.manifest.mesh.items()))
    current_mesh = " x ".join(f"{axis}={size}" for axis, size in sorted(mesh.items()))
    return (
        f"the checkpoint was written by {saved_mesh}, this run is {current_mesh}: weights, optimizer and order of rows "
        "continue exactly; sums over ranks are added in another order, and dropout draws new numbers"
    )


def declared(config: CheckpointConfig) -> Declared:
    """Return the deviations that a configuration allows."""
    resume = config.resume
    return Declared(resume.add, resume.drop, resume.cast, resume.freeze, resume.unfreeze)


def _damage(training: Training) -> None:
    """Corrupt the restored state if a proof asks for it, to show that the proof can fail."""
    match training.run.world.break_resume:
        case "rng":
            torch.manual_seed(torch.initial_seed() + 1)
        case "cursor":
            state = training.stream.state()
            training.stream.load_state(state | {"cursor": state["cursor"] | {"draw": state["cursor"]["draw"] + 1}})
        case "optimizer":
            tensors = (value for state in training.model.updater.state.values() for value in state.values())
            next(tensor for tensor in tensors if tensor.ndim).mul_(1.5)


_SavedVersion = Annotated[int, Field(strict=True, ge=-1)]


@dataclass(frozen=True)
class _SavedCompletion:
    mark: str
    request_id: SavedCount
    place: SavedCount
    tokens: str
    logprobs: str
    finish: Literal["stop", "length", "error"]
    weights_version: _SavedVersion
    segments: list[tuple[SavedCount, _SavedVersion]]
    prompt: str = ""
    episode: EpisodeSummary | None = None
    last_text: str = ""


@dataclass(frozen=True)
class _SavedRunState:
    state: TrainState
    stream: StreamState
    ahead: list[_SavedCompletion] = field(default_factory=list)


_SAVED = TypeAdapter(_SavedRunState)
Saved = TypeVar("Saved")


def validated(adapter: TypeAdapter[Saved], shared: Mapping[str, Any]) -> Saved:
    """Return the content of trainer.json, or raise ValueError with its first fault and the place of it."""
    try:
        return adapter.validate_python(shared)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"]))
        problem = "missing" if first["type"] == "missing" else f"{shortened(repr(first['input']), 43)}: {first['msg']}"
        raise ValueError(f"{location} is {problem}") from error


def check_step(state: TrainState, step: int) -> None:
    """Raise ValueError unless the counters are of a step."""
    if state.step != step:
        raise ValueError(f"state.step is {state.step}, and the checkpoint is of step {step}")


def check_saved_state(training: Training, shared: Mapping[str, Any], step: int) -> None:
    """Look at what trainer.json says; a run's later versions may remember more, which then begins as in a new run.

    Args:
        training: Built, and not changed by this.
        shared: The file's content.
        step: Of the manifest.

    Raises:
        ValueError: The first thing that is wrong, by its place in the file.
    """
    saved = validated(_SAVED, shared)
    check_step(saved.state, step)
    needed = max((index for index, size in enumerate(training.stream.state()["sizes"]) if size is None), default=-1)
    if len(saved.stream.sizes) <= needed:
        raise ValueError(f"stream.sizes has {len(saved.stream.sizes)} entries, for {needed + 1} sources or more")
    if training.ahead is not None:
        training.ahead.check(shared.get("ahead", []))
