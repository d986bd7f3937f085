"""Two checkpoints side by side: what differs, told from manifests and small files where chunks are the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.hashing import combined, hash_bytes, hash_tensor
from holdfast.checkpoint.layout import RANK, TRAINER
from holdfast.checkpoint.manifest import Manifest, TensorEntry
from holdfast.checkpoint.snapshot import OPTIM
from holdfast.checkpoint.tensors import StoredCheckpoint
from holdfast.checkpoint.wrapped_state import records
from holdfast.optim.wrapped import BETWEEN


def differences(first: StoredCheckpoint, second: StoredCheckpoint) -> Iterator[str]:
    """Yield one sentence per tensor or state that differs, in order of names.

    Tensors are compared by the hashes of their chunks. Where the numbers of ranks differ, chunks do too, and tensors
    are read and compared whole.

    Raises:
        CheckpointCorrupt: Something that had to be read is damaged.
    """
    one, two = first.manifest.tensors, second.manifest.tensors
    for key in sorted({*one, *two}):
        if key in one and key in two:
            told = _tensor_difference(first, second, key, one[key], two[key])
        else:
            told = f"{key} is only in the {'first' if key in one else 'second'}"
        if told is not None:
            yield told
    for file in sorted(_states(first.manifest) | _states(second.manifest)):
        told = _state_difference(first, second, file)
        if told is not None:
            yield told


def _tensor_difference(
    first: StoredCheckpoint, second: StoredCheckpoint, key: str, one: TensorEntry, two: TensorEntry
) -> str | None:
    if one.shape[:1] != two.shape[:1] and _same_table(first, second, key):
        return None
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return f"{key} is {one.dtype} {list(one.shape)} and {two.dtype} {list(two.shape)}"
    if one.chunks == two.chunks:
        return None
    if [(chunk.offsets, chunk.sizes) for chunk in one.chunks] == [(chunk.offsets, chunk.sizes) for chunk in two.chunks]:
        return f"{key} has other numbers"
    same = hash_of(first, key) == hash_of(second, key)
    return None if same else f"{key} has other numbers"


def _same_table(first: StoredCheckpoint, second: StoredCheckpoint, key: str) -> bool:
    """Return whether a tensor is a table that every shard has alike, in both, however many shards they are."""
    if not (_per_shard(first, key) and _per_shard(second, key)):
        return False
    return len({hash_tensor(row) for row in (*first.read(key), *second.read(key))}) == 1


def _per_shard(checkpoint: StoredCheckpoint, key: str) -> bool:
    """Return whether each row of a tensor is what one shard had of a class of its own."""
    name, _, slot = key.removeprefix(OPTIM).rpartition(".")
    whole, _, part = slot.rpartition(BETWEEN)
    record = records(checkpoint.manifest).get(name, {}).get(whole)
    return key.startswith(OPTIM) and record is not None and record["parts"][part][0] == 0


def hash_of(checkpoint: StoredCheckpoint, key: str) -> str:
    """Return the hash of a whole tensor, whatever its chunks were."""
    return hash_tensor(checkpoint.read(key))


def _state_difference(first: StoredCheckpoint, second: StoredCheckpoint, file: str) -> str | None:
    if file not in first.manifest.files or file not in second.manifest.files:
        return f"{file} is only in the {'first' if file in first.manifest.files else 'second'}"
    key = _first_key(json.loads(_read(first, file)), json.loads(_read(second, file)))
    return None if key is None else f"{file}: {key} differs"


def _read(checkpoint: StoredCheckpoint, file: str) -> bytes:
    data = checkpoint.storage.read(f"{checkpoint.name}/{file}")
    if hash_bytes(data) != checkpoint.manifest.files[file].hash:
        raise CheckpointCorrupt(f"{checkpoint.path}/{file} is damaged: its hash is not the manifest's.")
    return data


def first_difference(first: StoredCheckpoint, second: StoredCheckpoint) -> str | None:
    """Return the first of `differences`, None if there is none."""
    return next(differences(first, second), None)


def state_hash(checkpoint: StoredCheckpoint) -> str:
    """Return one hash of all tensors and all states besides them."""
    tensors = checkpoint.manifest.tensors
    chunks = [f"{key}:{chunk.hash}" for key in sorted(tensors) for chunk in tensors[key].chunks]
    files = sorted(_states(checkpoint.manifest))
    return combined([*chunks, *(hash_bytes(_read(checkpoint, file)) for file in files)])


def _states(manifest: Manifest) -> set[str]:
    return {file for file in manifest.files if file == TRAINER or file.startswith(f"{RANK}/")}


def _first_key(one: Any, two: Any, path: str = "") -> str | None:
    """Return the path of the first value that differs between two trees."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        for key in sorted({*one, *two}):
            found = _first_key(one.get(key), two.get(key), f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
        return None
    return None if one == two else path or "everything"
