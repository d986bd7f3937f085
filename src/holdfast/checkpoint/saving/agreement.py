"""Agreement of ranks during a save: they compare what they are about to save, and raise the same error if one fails.

It also describes optimizers, for this comparison and for the manifest: class, param groups, values that are not
tensors, and the layout of quantised state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.dict_diff import first_difference
from holdfast.checkpoint.format.manifest import About
from holdfast.checkpoint.format.snapshot import OPTIM, Outline, Snapshot, outline
from holdfast.checkpoint.loading.parts import COMPANIONS
from holdfast.checkpoint.place.layout import place_file, rank_file
from holdfast.errors import HoldfastError
from holdfast.optim.state import OptimizerState
from holdfast.optim.wrapped import BETWEEN
from holdfast.parallel.collectives import RankGroup


@contextmanager
def together_in_phase(ranks: RankGroup, phase: str) -> Iterator[None]:
    """Turn any exception in a phase of a save, on any rank, into the same `SaveFailed` on all ranks."""
    with ranks.together():
        try:
            yield
        except HoldfastError:
            raise
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            raise SaveFailed(f"rank {ranks.rank} could not save in phase {phase!r}: {reason_of(error)}.") from error


def reason_of(error: BaseException) -> str:
    """Describe an error; for an OSError, by the system's message and the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f" ({error.filename})" if error.filename else "")
    return f"{type(error).__name__}: {error}"


class _SaveOutline(NamedTuple):
    """Names, shapes and plain values of what one rank is about to save; ranks compare it. Texts are JSON."""

    outline: Outline
    wrapped: str
    """Records of quantised optimizer state."""
    optimizers: str
    shared: str
    contents: tuple[str, ...]
    step: int


def agree_on_save(snapshot: Snapshot, about: About, ranks: RankGroup) -> str:
    """Compare what ranks are about to save, before one waits in a collective for a tensor that another does not have.

    Returns:
        Name of the file for this rank's own state.

    Raises:
        SaveFailed: Ranks would save different things; the message has the first difference. On all ranks.
    """
    first, *later_ranks = ranks.gather(
        _SaveOutline(
            outline(snapshot),
            json.dumps(wrapped_records(snapshot), sort_keys=True),
            json.dumps(described_optimizers(snapshot), sort_keys=True),
            json.dumps(snapshot.shared, sort_keys=True, default=repr),
            snapshot.contents,
            about.step,
        )
    )
    for rank, theirs in enumerate(later_ranks, start=1):
        if theirs.outline != first.outline:
            raise SaveFailed(_first_difference(first.outline, theirs.outline, rank))
        if theirs.wrapped != first.wrapped:
            raise SaveFailed(_first_difference(json.loads(first.wrapped), json.loads(theirs.wrapped), rank))
        if theirs.optimizers != first.optimizers:
            raise SaveFailed(_disagreement(json.loads(first.optimizers), json.loads(theirs.optimizers), rank))
        if theirs.step != first.step:
            raise SaveFailed(f"rank 0 saves step {first.step}, and rank {rank} step {theirs.step}.")
        if theirs != first:
            raise SaveFailed(
                f"ranks 0 and {rank} give different shared state. What differs between ranks belongs into rank_state."
            )
    state_files = ranks.gather(place_file(about.mesh, snapshot.coordinate))
    state_file = state_files[ranks.rank]
    # The file has the name of the coordinate on the mesh, or of the rank where coordinates do not tell ranks apart.
    return state_file if state_file is not None and len(set(state_files)) == ranks.size else rank_file(ranks.rank)


def _disagreement(first: Any, second: Any, rank: int) -> str:
    """Describe the first value in which ranks' optimizers differ; only one of the values would be saved."""
    path, first_value, second_value = first_difference(first, second) or ("", first, second)
    return (
        f"ranks 0 and {rank} disagree on the optimizer's {path}: {first_value!r} and {second_value!r}. Only one "
        "would be saved. Every rank must give its param groups the same hyper-parameters and keep the same values "
        "besides tensors; what is a rank's own belongs into rank_state."
    )


def _first_difference(first: Mapping[str, Any], second: Mapping[str, Any], rank: int) -> str:
    differing = [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]
    component = next((name for name in differing if name.startswith(OPTIM) and BETWEEN in name), None)
    name = component or differing[0]
    message = f"ranks 0 and {rank} disagree on {name}: {first.get(name, 'absent')} and {second.get(name, 'absent')}"
    if component is not None:
        return (
            f"{message}. It is a part of quantised optimizer state: the optimizer decides by the size of a "
            "rank's shard whether it quantises, and these differ. Use optim.kind: adamw_8bit, which decides for all "
            "ranks alike, or another number of ranks."
        )
    return f"{message} (shape, dtype, trained). Every rank must build the same model and optimizer."


def described_optimizers(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return the field `optimizer` of a manifest, which describes the model's optimizer and those of companions."""
    if snapshot.optimizer is None:
        return None
    companions = {name: _described(state) for name, state in snapshot.companions.items()}
    return _described(snapshot.optimizer) | ({COMPANIONS: companions} if companions else {})


def _described(optimizer: OptimizerState) -> dict[str, Any]:
    return {
        "kind": optimizer.kind,
        "groups": [
            {"parameters": list(group.parameters), "hyperparameters": dict(group.hyperparameters)}
            for group in optimizer.groups
        ],
        "values": {name: dict(keys) for name, keys in optimizer.values.items()},
    } | ({"wrapped": _records(optimizer)} if optimizer.wrapped else {})


def wrapped_records(snapshot: Snapshot) -> dict[str, Any]:
    """Return the records of quantised state, of every optimizer that is saved."""
    main = {} if snapshot.optimizer is None else {OPTIM: snapshot.optimizer}
    states = main | {f"{name}.{OPTIM}": state for name, state in snapshot.companions.items()}
    return {prefix + name: keys for prefix, state in states.items() for name, keys in _records(state).items()}


def _records(optimizer: OptimizerState) -> dict[str, Any]:
    return {name: {key: record.as_plain() for key, record in keys.items()} for name, keys in optimizer.wrapped.items()}
