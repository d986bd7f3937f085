"""Compare two checkpoints by the hashes in their manifests, reading tensors only where chunks differ in shape."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.checkpoint.format.dict_diff import first_difference as first_difference_of
from holdfast.checkpoint.format.manifest import Manifest, TensorEntry
from holdfast.checkpoint.format.snapshot import OPTIM
from holdfast.checkpoint.format.verification import verified_bytes
from holdfast.checkpoint.inspect.tensors import StoredCheckpoint
from holdfast.checkpoint.loading.parts import COMPANIONS
from holdfast.checkpoint.loading.wrapped_state import records
from holdfast.checkpoint.place.hashing import combined, hash_bytes, hash_tensor
from holdfast.checkpoint.place.layout import RANK, TRAINER
from holdfast.files import parse_json
from holdfast.optim.wrapped import BETWEEN


def differences(first: StoredCheckpoint, second: StoredCheckpoint, *, same_sampling: bool = True) -> Iterator[str]:
    """Yield one sentence per tensor that differs, then about optimizers' plain values, then one per state.

    Tensors are compared by the hashes of their chunks. Where the numbers of ranks differ, chunks do too, and tensors
    are read and compared whole.

    Args:
        first: A checkpoint.
        second: Another.
        same_sampling: Both runs sampled alike. If not, the room that engines had for keys and values is not compared.

    Raises:
        CheckpointCorrupt: Something that had to be read is damaged.
    """
    first_tensors, second_tensors = first.manifest.tensors, second.manifest.tensors
    for key in sorted({*first_tensors, *second_tensors}):
        if key in first_tensors and key in second_tensors:
            sentence = _tensor_difference(first, second, key, first_tensors[key], second_tensors[key])
        else:
            sentence = f"{key} is only in the {'first' if key in first_tensors else 'second'}"
        if sentence is not None:
            yield sentence
    sentence = _optimizer_difference(first, second)
    if sentence is not None:
        yield sentence
    for file in sorted(_states(first.manifest) | _states(second.manifest)):
        sentence = _state_difference(first, second, file, same_sampling=same_sampling)
        if sentence is not None:
            yield sentence


def _tensor_difference(
    first: StoredCheckpoint, second: StoredCheckpoint, key: str, first_entry: TensorEntry, second_entry: TensorEntry
) -> str | None:
    if first_entry.shape[:1] != second_entry.shape[:1] and _same_table(first, second, key):
        return None
    if (first_entry.shape, first_entry.dtype) != (second_entry.shape, second_entry.dtype):
        kinds = [f"{entry.dtype} {list(entry.shape)}" for entry in (first_entry, second_entry)]
        return f"{key} is {' and '.join(kinds)}"
    first_hashes, second_hashes = (
        {(chunk.offsets, chunk.sizes): chunk.hash for chunk in entry.chunks} for entry in (first_entry, second_entry)
    )
    if first_hashes == second_hashes:
        return None
    if first_hashes.keys() == second_hashes.keys():
        return f"{key} has other numbers"
    same = hash_of(first, key) == hash_of(second, key)
    return None if same else f"{key} has other numbers"


def _same_table(first: StoredCheckpoint, second: StoredCheckpoint, key: str) -> bool:
    """Return whether a tensor is a table that every shard has alike, in both, however many shards they are."""
    if not (_per_shard(first, key) and _per_shard(second, key)):
        return False
    return len({hash_tensor(row) for row in (*first.read(key), *second.read(key))}) == 1


def _per_shard(checkpoint: StoredCheckpoint, key: str) -> bool:
    """Return whether each row of a tensor is what one shard had of a quantised tensor."""
    name, _, slot = key.removeprefix(OPTIM).rpartition(".")
    state_slot, _, component = slot.rpartition(BETWEEN)
    record = records(checkpoint.manifest).get(name, {}).get(state_slot)
    return key.startswith(OPTIM) and record is not None and record["parts"][component][0] == 0


def hash_of(checkpoint: StoredCheckpoint, key: str) -> str:
    """Return the hash of a whole tensor, whatever its chunks were."""
    return hash_tensor(checkpoint.read(key))


def _state_difference(
    first: StoredCheckpoint, second: StoredCheckpoint, file: str, *, same_sampling: bool
) -> str | None:
    if file not in first.manifest.files or file not in second.manifest.files:
        return f"{file} is only in the {'first' if file in first.manifest.files else 'second'}"
    states = [parse_json(_read(checkpoint, file)) for checkpoint in (first, second)]
    if file == TRAINER and not same_sampling:
        for state in states:
            state["state"].pop("cache_blocks", None)
    difference = first_difference_of(*states)
    return None if difference is None else f"{file}: {difference[0] or 'everything'} differs"


def _optimizer_difference(first: StoredCheckpoint, second: StoredCheckpoint) -> str | None:
    """Return what differs of optimizers besides tensors; how state is cut into parts follows from the ranks."""
    first_state, second_state = (
        _without_records(checkpoint.manifest.optimizer or {}) for checkpoint in (first, second)
    )
    difference = first_difference_of(first_state, second_state)
    return None if difference is None else f"optimizer: {difference[0]} is {difference[1]!r} and {difference[2]!r}"


def _without_records(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    companions = {name: _without_records(state) for name, state in optimizer.get(COMPANIONS, {}).items()}
    plain = {key: value for key, value in optimizer.items() if key not in {"wrapped", COMPANIONS}}
    return plain | ({COMPANIONS: companions} if companions else {})


def _read(checkpoint: StoredCheckpoint, file: str) -> bytes:
    return verified_bytes(checkpoint.storage, checkpoint.name, checkpoint.manifest, file)


def first_different_value(
    first: StoredCheckpoint, second: StoredCheckpoint, *, same_sampling: bool = True
) -> str | None:
    """Return the first of `differences`, None if there is none."""
    return next(differences(first, second, same_sampling=same_sampling), None)


def state_hash(checkpoint: StoredCheckpoint) -> str:
    """Return one hash of all tensors, of optimizers' plain values and of all states besides them."""
    tensors = checkpoint.manifest.tensors
    optimizer = json.dumps(_without_records(checkpoint.manifest.optimizer or {}), sort_keys=True)
    chunks = [f"{key}:{chunk.hash}" for key in sorted(tensors) for chunk in tensors[key].chunks]
    files = sorted(_states(checkpoint.manifest))
    return combined([*chunks, optimizer, *(hash_bytes(_read(checkpoint, file)) for file in files)])


def _states(manifest: Manifest) -> set[str]:
    return {file for file in manifest.files if file == TRAINER or file.startswith(f"{RANK}/")}
