"""What a manifest says of optimizers: their class, groups, plain values, and how quantised state is cut."""

from __future__ import annotations

from typing import Any

from holdfast.checkpoint.format.snapshot import OPTIM, Snapshot
from holdfast.checkpoint.load.companions import COMPANIONS
from holdfast.optim.state import OptimizerState


def described_optimizers(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return a manifest's `optimizer`: of the model's, and of those of companions."""
    if snapshot.optimizer is None:
        return None
    beside = {name: _described(state) for name, state in snapshot.companions.items()}
    return _described(snapshot.optimizer) | ({COMPANIONS: beside} if beside else {})


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
    own = {} if snapshot.optimizer is None else {OPTIM: snapshot.optimizer}
    states = own | {f"{name}.{OPTIM}": state for name, state in snapshot.companions.items()}
    return {where + name: keys for where, state in states.items() for name, keys in _records(state).items()}


def _records(optimizer: OptimizerState) -> dict[str, Any]:
    return {name: {key: record.as_plain() for key, record in keys.items()} for name, keys in optimizer.wrapped.items()}
