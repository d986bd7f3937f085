"""Put a run where a checkpoint left it, and say what continues bit for bit and what does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import yaml

from holdfast.checkpoint.choose import Choice
from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.checkpoint.export import EXPORTED_CONFIG
from holdfast.checkpoint.layout import ASSETS
from holdfast.checkpoint.matching import Declared
from holdfast.checkpoint.reader import Loaded, load
from holdfast.checkpoint.snapshot import set_random_state
from holdfast.checkpoint.storage import Storage, open_storage
from holdfast.config.base import leaves
from holdfast.config.checkpoint import CheckpointConfig
from holdfast.config.runs import as_plain
from holdfast.optim.state import hyperparameter_words
from holdfast.parallel.collectives import ProcessExchange
from holdfast.parallel.materialise import sharded_parameters
from holdfast.training.identity import differences
from holdfast.training.randomness import seed_rank
from holdfast.training.run import Run
from holdfast.training.saved_state import check_saved_state
from holdfast.training.state import TrainState
from holdfast.training.unfreezing import unfreeze
from holdfast.training.weights_marks import with_marks_of_now

MOVES_NUMBERS = (
    "steps", "epochs", "seed", "optim.", "data.", "model.", "objective.", "preference.", "parallel.",
    "rollout.", "reward", "advantage.", "groups.", "kl.", "entropy.", "correction.", "off_policy_mask.", "reference.",
    "updates.", "critic", "teacher.", "distill.",
)  # fmt: skip


def resume(run: Run, storage: Storage, choice: Choice, ranks: ProcessExchange, run_id: str) -> Loaded:
    """Continue from a verified checkpoint; what was declared to differ is printed, and is among the deviations.

    Args:
        run: As it was built.
        storage, choice: The checkpoint.
        ranks: A group of its own.
        run_id: Of this run.

    Raises:
        CheckpointMismatch: It does not fit this run, and the difference was not declared; nothing was changed.
    """
    config = run.config.checkpoint
    accepted: list[str] = []
    with run.exchange.together():
        accepted += _check_identity(run, storage, choice, run_id)
    unfreeze(run, choice.manifest.step)
    loaded = load(
        storage,
        choice.name,
        run.policy,
        run.optimizer,
        ranks,
        declared=_declared(config),
        hyperparameters="live" if config.resume.hyperparameters == "config" else "checkpoint",
        verified=choice.manifest,
        averages=run.averages.tensors if run.averages is not None else {},
        companions=run.beside,
        check=lambda shared, _: check_saved_state(run, shared, choice.manifest.step),
    )
    _take_state(run, loaded.shared["state"])
    run.stream.load_state(loaded.shared["stream"])
    if loaded.rank_state is not None:
        set_random_state(loaded.rank_state["random"])
    else:
        seed_rank(run.config.seed, run.world.rank, deterministic=run.config.determinism, step=run.state.step)
    _damage(run)
    run.resumed_metrics |= {name: value for name, value in choice.manifest.metrics.items() if value is not None}
    changed = _changed(run, storage, choice) if run.world.is_first else []
    say(run, choice.words, _exactness(run, loaded), _hyperparameters(run), *accepted, *loaded.notes, *changed)
    return replace(loaded, deviations=(*accepted, *loaded.deviations))


def _take_state(run: Run, saved: Mapping[str, Any]) -> None:
    """Put back what a run, and those beside it, must remember between steps."""
    run.state = TrainState(**{name: value for name, value in saved.items() if name != "companions"})
    for name, each in run.companions.items():
        each.state = run.state.companions[name] = TrainState(**saved.get("companions", {}).get(name, {}))


def _hyperparameters(run: Run) -> str:
    """Say where the optimizer's settings come from; notes follow on what the other place says otherwise."""
    source = run.config.checkpoint.resume.hyperparameters
    place = {"config": "the configuration", "checkpoint": "the checkpoint"}[source]
    return (
        "optimizer: the learning rate follows the schedule of the configuration; "
        f"{hyperparameter_words(run.optimizer)} come from {place} (checkpoint.resume.hyperparameters: {source})"
    )


def start_from(run: Run, place: str, ranks: ProcessExchange) -> tuple[str, ...]:
    """Take the weights of another run's checkpoint; everything else starts anew.

    Returns:
        What later manifests say of it: the checkpoint, and what was declared.

    Raises:
        NoCheckpoint, CheckpointCorrupt, CheckpointMismatch: Nothing was changed.
    """
    path, _, name = place.rstrip("/").rpartition("/")
    found = load(open_storage(path or "."), name, run.policy, None, ranks, declared=_declared(run.config.checkpoint))
    if run.averages is not None:
        run.averages.begin(sharded_parameters(run.policy))
    say(run, f"weights from {place} (step {found.manifest.step}); a new run starts at step 0", *found.notes)
    return (f"weights from {place} ({found.manifest.hash})", *found.deviations)


def say(run: Run, *lines: str) -> None:
    """Print on rank 0."""
    if run.world.is_first:
        for line in lines:
            print(line, flush=True)


def _check_identity(run: Run, storage: Storage, choice: Choice, run_id: str) -> list[str]:
    """Return what differs and was declared, in words."""
    allowed = run.config.checkpoint.resume.changed
    found = differences(with_marks_of_now(choice.manifest.fingerprints, run.identity), run.identity)
    # A run whose directory was on a disk that is gone has a new identity and the old name.
    name = _settings_then(storage, choice).get("run.name")
    if choice.manifest.run_id != run_id and name not in {None, run.config.run.name}:
        found = {**found, "run": [f"run.name is {name} there"]}
    refused = {kind: what for kind, what in found.items() if kind not in allowed}
    if refused:
        words = "; ".join(f"{kind}: {', '.join(what[:4])}" for kind, what in refused.items())
        raise CheckpointMismatch(
            f"{storage.root}/{choice.name} was made with other things than this run has ({words}). Nothing was "
            "changed. Put them back, choose another run.name, or declare it: checkpoint.resume.changed: "
            f"[{', '.join(refused)}]."
        )
    return [f"{kind}: {', '.join(what)} (changed)" for kind, what in found.items()]


def _settings_then(storage: Storage, choice: Choice) -> dict[str, Any]:
    """Return the configuration that a checkpoint was made with, by dotted name; empty if it holds none."""
    file = f"{ASSETS}/{EXPORTED_CONFIG}"
    if file not in choice.manifest.files:
        return {}
    return dict(leaves(yaml.safe_load(storage.read(f"{choice.name}/{file}"))))


def _changed(run: Run, storage: Storage, choice: Choice) -> list[str]:
    """Return what the configuration says otherwise than when the checkpoint was made, as far as it moves numbers."""
    then = _settings_then(storage, choice)
    if not then:
        return []
    now = dict(leaves(as_plain(run.config)))
    told = [
        f"{key} {then.get(key)} -> {now.get(key)}"
        for key in sorted({*then, *now})
        if key.startswith(MOVES_NUMBERS) and then.get(key) != now.get(key)
    ]
    return [f"changed since the checkpoint: {', '.join(told)}; the new values hold from here on"] if told else []


def _exactness(run: Run, loaded: Loaded) -> str:
    mesh = {"replicate": run.plan.replicate, "shard": run.plan.shard}
    if loaded.rank_state is not None:
        return "weights, optimizer, random state and order of rows continue bit for bit"
    then = " x ".join(f"{axis}={size}" for axis, size in sorted(loaded.manifest.mesh.items()))
    now = " x ".join(f"{axis}={size}" for axis, size in sorted(mesh.items()))
    return (
        f"the checkpoint was written by {then}, this run is {now}: weights, optimizer and order of rows continue "
        "exactly; sums over ranks are added in another order, and dropout draws new numbers"
    )


def _declared(config: CheckpointConfig) -> Declared:
    resume = config.resume
    return Declared(resume.add, resume.drop, resume.cast, resume.freeze, resume.unfreeze)


def _damage(run: Run) -> None:
    """Spoil what was restored, where a proof asks for it: a proof that cannot fail proves nothing."""
    match run.world.break_resume:
        case "rng":
            torch.manual_seed(torch.initial_seed() + 1)
        case "cursor":
            run.stream.cursor = replace(run.stream.cursor, draw=run.stream.cursor.draw + 1)
        case "optimizer":
            tensors = (value for state in run.optimizer.state.values() for value in state.values())
            next(tensor for tensor in tensors if tensor.ndim).mul_(1.5)
