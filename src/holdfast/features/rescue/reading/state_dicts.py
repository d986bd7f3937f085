"""Adds state dicts to a checkpoint: those that every rank's file holds a part of, or that one file holds whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from holdfast.features.rescue.reading.parts import joined_tensor
from holdfast.features.rescue.reading.pickles import Sharded, is_plain, place_in_file
from holdfast.features.rescue.reading.rank_order import is_one_optimizer, note_copies, note_shares, note_untold_order
from holdfast.features.rescue.reading.record import DamagedFile, ForeignCheckpoint, StoredGroup, StoredTensor
from holdfast.features.rescue.reading.torch_file import TorchFile
from holdfast.features.rescue.reading.unnamed_states import NumberedStates, named_states, refuse_gaps
from holdfast.models.names import canonical_name

Rank = tuple[TorchFile, Any]
"""One rank's file, and what it holds."""


def add_weights(checkpoint: ForeignCheckpoint, ranks: Sequence[Rank]) -> None:
    """Add the weights of a model's state dict; of names with one storage, the first counts.

    Raises:
        DamagedFile: It is none, or ranks hold other weights.
    """
    for file, state in ranks:
        if not isinstance(state, dict) or not any(isinstance(value, Tensor) for value in state.values()):
            raise DamagedFile(f"{file.path.name} holds no state of a model")
    names = list(ranks[0][1])
    for rank, (_, state) in enumerate(ranks):
        if odd := sorted(set(map(str, names)) ^ set(map(str, state))):
            raise DamagedFile(f"rank {rank} holds other weights than rank 0: {', '.join(odd[:3])}")
    files = [file for file, _ in ranks]
    note_untold_order(checkpoint, "weights", files, chain.from_iterable(state.values() for _, state in ranks))
    parts = [[state[key] for key in names] for _, state in ranks]
    note_shares(checkpoint, [canonical_name(str(key)) for key in names], parts)
    first_names: dict[Any, str] = {}
    for key in names:
        name, first_value = canonical_name(str(key)), ranks[0][1][key]
        if not isinstance(first_value, Tensor):
            checkpoint.add("note", f"{key} is no tensor and is left out")
            continue
        local = getattr(first_value, "local", first_value)
        with checkpoint.naming(str(key)):
            if is_plain(local) and 0 not in local.shape:
                first = first_names.setdefault(place_in_file(local), name)
                if first != name:
                    checkpoint.tied_away[name] = first
            checkpoint.weights[name] = _joined([(file, state[key]) for file, state in ranks])


def add_optimizer(checkpoint: ForeignCheckpoint, ranks: Sequence[Rank]) -> None:
    """Add the states of an optimizer, by the names of parameters or by their numbers.

    Raises:
        DamagedFile: A file holds no state of an optimizer.
    """
    files, contents, states = [file for file, _ in ranks], [content for _, content in ranks], []
    for file, content in ranks:
        match content:
            case {"state": dict() as state, "param_groups": list()}:
                states.append(state)
            case _:
                raise DamagedFile(f"{file.path.name} holds no state of an optimizer")
    if not is_one_optimizer(checkpoint, files, contents):
        return
    groups = contents[0]["param_groups"]
    keys = list(dict.fromkeys(key for state in states for key in state))
    empty = {key for key in keys if all(not state.get(key) for state in states)}
    if empty:
        checkpoint.add(
            "repair",
            f"{len(empty)} empty entries in the optimizer's state, left by code that indexed it, are dropped (report "
            "000): their parameters have no state",
        )
    note_copies(checkpoint, files)
    if all(isinstance(key, str) for key in chain(keys, *(group["params"] for group in groups))):
        _add_named(checkpoint, files, states, [key for key in keys if key not in empty])
        checkpoint.groups = [_group(group) for group in groups]
    elif (numbered := named_states(NumberedStates(checkpoint, files, states, groups))) is not None:
        checkpoint.states, checkpoint.groups = numbered
    if dtypes := sorted({key for group in groups for key, value in group.items() if isinstance(value, torch.dtype)}):
        checkpoint.add(
            "repair",
            f"the param groups hold a torch.dtype ({', '.join(dtypes)}), of which torch's own gathering of a state "
            "fails (report 001); it is read as it is",
        )


def _add_named(
    checkpoint: ForeignCheckpoint, files: Sequence[TorchFile], states: Sequence[Mapping[Any, Any]], keys: Sequence[str]
) -> None:
    slots_of_ranks = chain.from_iterable(state.values() for state in states)
    note_untold_order(checkpoint, "optimizer", files, chain.from_iterable(slots.values() for slots in slots_of_ranks))
    for key in keys:
        for slot in dict.fromkeys(slot for state in states for slot in state.get(key, {})):
            shards = [
                (file, state[key][slot])
                for file, state in zip(files, states, strict=True)
                if slot in state.get(key, {})
            ]
            if not any(isinstance(value, Tensor) for _, value in shards):
                continue  # a number that some optimizers keep, of which nothing here can go on
            with checkpoint.naming(f"{slot} of {key}"):
                if not any(isinstance(value, Sharded) and value.offsets is not None for _, value in shards):
                    held = {rank for rank, state in enumerate(states) if slot in state.get(key, {})}
                    refuse_gaps(files, held | checkpoint.empty_ranks.get(canonical_name(key), frozenset()))
                checkpoint.states.setdefault(canonical_name(key), {})[str(slot)] = _joined(shards)


def _joined(shards: Sequence[Rank]) -> StoredTensor:
    try:
        return joined_tensor(shards)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"is no tensor that such a file holds ({type(error).__name__}: {error})") from None


def _group(group: Mapping[str, Any]) -> StoredGroup:
    settings = {key: value for key, value in group.items() if key != "params"}
    return StoredGroup(tuple(canonical_name(name) for name in group["params"]), settings)
