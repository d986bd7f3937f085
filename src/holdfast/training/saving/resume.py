"""Restore a run from a checkpoint, and report what continues bit for bit and what was declared to differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

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
from holdfast.checkpoint.place.storage import Storage, open_storage
from holdfast.config.base import SavedCount, leaves
from holdfast.config.load import EXPORTED_CONFIG
from holdfast.config.public import WHOLE, public_configuration
from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.config.verbs.training import as_plain
from holdfast.data.batches.passes import StreamState
from holdfast.optim.state import hyperparameter_words
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.shards import sharded_parameters
from holdfast.text.shortening import shortened
from holdfast.training.randomness import seed_rank
from holdfast.training.run import Run, TrainState, say
from holdfast.training.saving.differences import changed_fingerprints, has_default, is_gone
from holdfast.training.saving.parents import recordable

MOVES_NUMBERS = (
    "steps", "epochs", "seed", "optim.", "data.", "model.", "objective.", "preference.", "parallel.",
    "rollout.", "environment", "reward", "advantage.", "groups.", "kl.", "entropy.", "correction.", "off_policy_mask.",
    "reference.", "updates.", "critic", "teacher.", "distill.", "neftune_alpha",
)  # fmt: skip


def go_on(run: Run, storage: Storage, ranks: RankGroup, run_id: str) -> Continuation | None:
    """Continue from the newest whole checkpoint of this run; None if there never was one.

    What another run saved is refused before anything is renamed, also where it is damaged.

    Raises:
        NoCheckpoint, CheckpointMismatch: None is whole, or the newest does not fit this run.
    """
    restored: list[Continuation] = []
    choice = newest_verified(
        storage,
        ranks,
        not_finite=run.setting.config.checkpoint.resume.not_finite,
        check=lambda name, manifest: _refuse_other_run(run, storage, name, manifest, run_id),
        use=lambda name, manifest: restored.append(restore_run(run, storage, name, manifest, ranks, run_id)),
    )
    if choice is None:
        return None
    say(run, choice.message, *restored[0].lines)
    return restored[0]


def resume(run: Run, storage: Storage, choice: ResumeChoice, ranks: RankGroup, run_id: str) -> None:
    """Continue from a checkpoint; what was declared to differ is printed.

    Args:
        run: As it was built.
        storage, choice: The checkpoint.
        ranks: A group of its own.
        run_id: Of this run.

    Raises:
        CheckpointMismatch: It does not fit this run, and the difference was not declared; nothing was changed.
    """
    restored = restore_run(run, storage, choice.name, choice.manifest, ranks, run_id)
    say(run, choice.message, *restored.lines)


@dataclass(frozen=True)
class Continuation:
    """The checkpoint that a run continues from, and what to report about it."""

    manifest: Manifest
    deviations: tuple[str, ...]
    """What was declared to differ, at this resume."""
    lines: tuple[str, ...]
    """What the user reads of it."""


def restore_run(  # noqa: PLR0913 - what is continued, and from what
    run: Run, storage: Storage, name: str, manifest: Manifest, ranks: RankGroup, run_id: str
) -> Continuation:
    """Put a run where a checkpoint left it, whose bytes are verified while they are read.

    Raises:
        CheckpointMismatch: It does not fit this run, and the difference was not declared; nothing was changed.
    """
    config = run.setting.config.checkpoint
    accepted: list[str] = []
    saved_settings: dict[str, Any] = {}
    with run.setting.ranks.together():
        saved_settings |= saved_settings_of(storage, name, manifest)
        accepted += _check_identity(run, f"{storage.root}/{name}", manifest, run_id, saved_settings)
    loaded = load_state(
        storage,
        name,
        run.trained.model,
        run.trained.optimizer,
        ranks,
        declared=_declared(config),
        hyperparameters="live" if config.resume.hyperparameters == "config" else "checkpoint",
        manifest=manifest,
        averages=run.trained.averages.tensors if run.trained.averages is not None else {},
        companions=run.saved_companions,
        check=lambda shared, _: check_saved_state(run, shared, manifest.step),
    )
    _take_state(run, loaded.shared["state"])
    run.stream.load_state(loaded.shared["stream"])
    if run.ahead is not None:
        run.ahead.restore(loaded.shared.get("ahead", []))
    if loaded.rank_state is not None:
        set_random_state(loaded.rank_state["random"])
    else:
        seed_rank(
            run.setting.config.seed,
            run.setting.world.rank,
            deterministic=run.setting.config.determinism,
            step=run.trained.state.step,
        )
    _damage(run)
    run.setting.log.resumed_metrics |= {name: value for name, value in manifest.metrics.items() if value is not None}
    lines = (
        _of_another_system(loaded) or _exactness(run, loaded, int(saved_settings.get("parallel.context", 1))),
        _hyperparameters(run),
        *accepted,
        *loaded.notes,
        *_changed(run, saved_settings),
    )
    return Continuation(manifest, (*accepted, *loaded.deviations), lines)


def _take_state(run: Run, saved: Mapping[str, Any]) -> None:
    """Restore the training state of the run and of its companions."""
    run.trained.state = TrainState(**{name: value for name, value in saved.items() if name != "companions"})
    for name, companion in run.companions.items():
        companion.state = run.trained.state.companions[name] = TrainState(**saved.get("companions", {}).get(name, {}))


def _hyperparameters(run: Run) -> str:
    """Say where the optimizer's settings come from; notes follow on what the other place says otherwise."""
    source = run.setting.config.checkpoint.resume.hyperparameters
    side = {"config": "the configuration", "checkpoint": "the checkpoint"}[source]
    return (
        "optimizer: the learning rate follows the schedule of the configuration; "
        f"{hyperparameter_words(run.trained.optimizer)} come from {side} (checkpoint.resume.hyperparameters: {source})"
    )


def start_from(run: Run, checkpoint: str, ranks: RankGroup) -> tuple[str, ...]:
    """Take the weights of another run's checkpoint; everything else starts anew.

    Returns:
        What later manifests say of it: the checkpoint, and what was declared.

    Raises:
        NoCheckpoint, CheckpointCorrupt, CheckpointMismatch: Nothing was changed.
    """
    path, _, name = checkpoint.rstrip("/").rpartition("/")
    loaded = load_state(
        open_storage(path or "."),
        name,
        run.trained.model,
        None,
        ranks,
        declared=_declared(run.setting.config.checkpoint),
    )
    if run.trained.averages is not None:
        run.trained.averages.begin(sharded_parameters(run.trained.model))
    source = recordable(checkpoint)
    say(run, f"weights from {source} (step {loaded.manifest.step}); a new run starts at step 0", *loaded.notes)
    return (f"weights from {source} ({loaded.manifest.hash})", *loaded.deviations)


def _check_identity(
    run: Run, checkpoint: str, manifest: Manifest, run_id: str, saved_settings: Mapping[str, Any]
) -> list[str]:
    """Return a line for each difference that the configuration declares."""
    changes = changed_fingerprints(manifest.fingerprints, run.identity, run.setting.config)
    return _check_declared(run, checkpoint, {**changes, **_other_run(run, manifest, run_id, saved_settings)})


def _other_run(run: Run, manifest: Manifest, run_id: str, saved_settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return words if a run of another name saved a checkpoint, by the kind that declares it.

    A run whose directory was on a disk that is gone has a new identity and the old name.
    """
    name = saved_settings.get("run.name")
    same = manifest.run_id == run_id or name in {None, run.setting.config.run.name}
    return {} if same else {"run": [f"run.name is {name} there"]}


def _check_declared(run: Run, checkpoint: str, changes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each difference, all of which must be declared.

    Raises:
        CheckpointMismatch: Some of it was not declared.
    """
    refused = {
        kind: differences
        for kind, differences in changes.items()
        if kind not in run.setting.config.checkpoint.resume.changed
    }
    if refused:
        listing = "; ".join(f"{kind}: {', '.join(differences[:4])}" for kind, differences in refused.items())
        raise CheckpointMismatch(
            f"{checkpoint} was made with other things than this run has ({listing}). Nothing was changed. Put them "
            f"back, choose another run.name, or declare it: checkpoint.resume.changed: [{', '.join(refused)}]."
        )
    return [f"{kind}: {', '.join(differences)} (changed)" for kind, differences in changes.items()]


def _refuse_other_run(run: Run, storage: Storage, name: str, manifest: Manifest, run_id: str) -> None:
    """Refuse a damaged checkpoint of another run, as far as it still says whose it is."""
    with suppress(CheckpointCorrupt, CheckpointUnreadable):
        saved_settings = saved_settings_of(storage, name, manifest)
        _check_declared(run, f"{storage.root}/{name}", _other_run(run, manifest, run_id, saved_settings))


def saved_settings_of(storage: Storage, name: str, manifest: Manifest) -> dict[str, Any]:
    """Return the configuration that a checkpoint was made with, by dotted name; empty if it holds none."""
    file = f"{ASSETS}/{EXPORTED_CONFIG}"
    if file not in manifest.files:
        return {}
    tree = settings_of(verified_bytes(storage, name, manifest, file), f"{storage.root}/{name}/{file}")
    return dict(leaves(public_configuration(tree, WHOLE), into_lists=True))


def _changed(run: Run, saved_settings: Mapping[str, Any]) -> list[str]:
    """Return what the configuration says otherwise than when the checkpoint was made, as far as it moves numbers."""
    if not saved_settings:
        return []
    config = run.setting.config
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


def _exactness(run: Run, loaded: LoadedState, saved_context: int) -> str:
    mesh = {"replicate": run.trained.plan.replicate, "shard": run.trained.plan.shard}
    context = run.setting.config.parallel.context
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


def _declared(config: CheckpointConfig) -> Declared:
    resume = config.resume
    return Declared(resume.add, resume.drop, resume.cast, resume.freeze, resume.unfreeze)


def _damage(run: Run) -> None:
    """Corrupt the restored state if a proof asks for it, to show that the proof can fail."""
    match run.setting.world.break_resume:
        case "rng":
            torch.manual_seed(torch.initial_seed() + 1)
        case "cursor":
            state = run.stream.state()
            run.stream.load_state(state | {"cursor": state["cursor"] | {"draw": state["cursor"]["draw"] + 1}})
        case "optimizer":
            tensors = (value for state in run.trained.optimizer.state.values() for value in state.values())
            next(tensor for tensor in tensors if tensor.ndim).mul_(1.5)


@dataclass(frozen=True)
class _SavedCompletion:
    mark: str
    request_id: SavedCount
    place: SavedCount
    tokens: str
    logprobs: str
    finish: Literal["stop", "length"]
    weights_version: Annotated[int, Field(strict=True, ge=-1)]
    segments: list[tuple[SavedCount, SavedCount]]
    prompt: str = ""


@dataclass(frozen=True)
class _SavedRunState:
    state: TrainState
    stream: StreamState
    ahead: list[_SavedCompletion] = field(default_factory=list)


_SAVED = TypeAdapter(_SavedRunState)


def check_saved_state(run: Run, shared: Mapping[str, Any], step: int) -> None:
    """Look at what trainer.json says; a run's later versions may remember more, which then begins as in a new run.

    Args:
        run: Built, and not changed by this.
        shared: The file's content.
        step: Of the manifest.

    Raises:
        ValueError: The first thing that is wrong, by its place in the file.
    """
    try:
        saved = _SAVED.validate_python(shared)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"]))
        problem = "missing" if first["type"] == "missing" else f"{shortened(repr(first['input']), 43)}: {first['msg']}"
        raise ValueError(f"{location} is {problem}") from error
    if saved.state.step != step:
        raise ValueError(f"state.step is {saved.state.step}, and the checkpoint is of step {step}")
    needed = max((index for index, size in enumerate(run.stream.state()["sizes"]) if size is None), default=-1)
    if len(saved.stream.sizes) <= needed:
        raise ValueError(f"stream.sizes has {len(saved.stream.sizes)} entries, for {needed + 1} sources or more")
    if run.ahead is not None:
        run.ahead.check(shared.get("ahead", []))
