"""Finds out which rank wrote which file, and whether the optimizer files of all ranks belong together.

torch.save calls the archive in a file after the path that it was given, and a file that is renamed keeps that. DTensors
and ShardedTensors say where their part lies. The optimizer of FSDP1 says nothing: with flat parameters every rank holds
as many numbers as any other; with original parameters a rank holds a run of each wrapped unit, and how long the runs
are follows from the shapes, so that swapped files can be told wherever two ranks hold runs of different lengths.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from holdfast.errors import ConfigError
from holdfast.features.rescue.reading.pickles import Sharded, is_plain
from holdfast.features.rescue.reading.record import DamagedFile, ForeignCheckpoint, StateKind, plain_settings
from holdfast.features.rescue.reading.torch_file import TorchFile

_ALIGNMENTS = (4, 8, 2, 1)
"""Elements that FSDP1 begins a parameter at a multiple of: 16 bytes of float32, bfloat16, float64, or no alignment."""


def note_untold_order(
    checkpoint: ForeignCheckpoint, contents: StateKind, files: Sequence[TorchFile], values: Iterable[Any]
) -> None:
    """Note files of which nothing says whose they are.

    Args:
        checkpoint: Is added to.
        contents: What the files hold.
        files: Of one kind, by rank.
        values: All that they hold.
    """
    if len(files) < 2 or all(file.written_as == file.path.stem for file in files):
        return
    if not any(_is_unplaced(value, contents) for value in values):
        return
    checkpoint.untold_order.add(contents)
    checkpoint.add(
        "unverified",
        f"nothing in {files[0].path.name} to {files[-1].path.name} says which rank wrote them: two that were swapped "
        "look like these, and parts are put together in the order of the names",
    )


def note_copies(checkpoint: ForeignCheckpoint, files: Sequence[TorchFile]) -> None:
    """Note a rank's file that is another rank's, byte by byte, unless both ranks hold the same share."""
    first: dict[Any, int] = {}
    shares = checkpoint.shares if len(checkpoint.shares) == len(files) else range(len(files))
    for rank, file in enumerate(files):
        mark = file.fingerprint()
        original = first.setdefault(mark, rank) if mark is not None else rank
        if shares[original] != shares[rank]:
            name = files[original].path.name
            checkpoint.add("damage", f"{file.path.name} is {name} once more: a rank's file lies over another's")


def note_shares(checkpoint: ForeignCheckpoint, names: Sequence[str], ranks: Sequence[Sequence[Any]]) -> None:
    """Note which ranks hold copies of each other's shards, and which hold nothing of a weight.

    Args:
        checkpoint: Is added to.
        names: Of the weights.
        ranks: For each rank, its part of every weight.
    """
    places = []
    for parts in ranks:
        cut = [(part.cut_axis, part.coordinate) for part in parts if isinstance(part, Sharded)]
        places.append({(axis, at[axis]) for axis, at in cut if axis is not None and axis < len(at)})
    if all(len(place) == 1 for place in places):
        found = [next(iter(place)) for place in places]
        if len({axis for axis, _ in found}) == 1:
            checkpoint.shares = tuple(share for _, share in found)
    for name, *parts in zip(names, *ranks, strict=True):
        checkpoint.empty_ranks[name] = frozenset(rank for rank, part in enumerate(parts) if _is_empty(part))


def _is_empty(part: Any) -> bool:
    return isinstance(part, Sharded) and (part.local is None or 0 in part.local.shape)


def replicas_of(checkpoint: ForeignCheckpoint, world: int) -> list[list[int]]:
    """Return the ranks that hold a whole together, in their order: one list for each copy of it.

    Raises:
        DamagedFile: Ranks are missing from a copy.
    """
    if len(checkpoint.shares) != world:
        return [list(range(world))]
    counts = Counter(checkpoint.shares)
    if sorted(counts) != list(range(len(counts))) or len(set(counts.values())) > 1:
        raise DamagedFile(f"lacks a part: the weights are those of ranks {sorted(checkpoint.shares)} of the mesh")
    copies: list[list[int]] = [[] for _ in range(counts[0])]
    earlier: Counter[int] = Counter()
    for rank, share in enumerate(checkpoint.shares):
        copies[earlier[share]].append(rank)
        earlier[share] += 1
    return copies


def refuse_untold_order(checkpoint: ForeignCheckpoint, *contents: StateKind) -> None:
    """Refuse to read what nobody can say the ranks of.

    Raises:
        ConfigError: Nothing says which rank wrote the files of one of the parts.
    """
    untold = sorted(checkpoint.untold_order & set(contents))
    if untold:
        raise ConfigError(
            f"{checkpoint.path} does not say which rank wrote which file of its {' and '.join(untold)}. If files were "
            "swapped or renamed since, many tensors would be wrong, and no check could tell. Where you know that they "
            "were not, give --trust-rank-order. Nothing was written."
        )


def _is_unplaced(value: Any, contents: StateKind) -> bool:
    if is_plain(value):  # a weight that every rank has whole is compared with that of the others
        return contents == "optimizer" and math.prod(value.shape) > 1
    is_told = not isinstance(value, Sharded) or value.offsets is not None or value.coordinate
    return not is_told and value.cut_dim is not None


WrappedUnit = Sequence[tuple[int, Sequence[int] | None]]
"""A wrapped unit: of each parameter its number of elements, and how many each file has; None without a state."""


def misplaced_files(units: Sequence[WrappedUnit], world: int) -> list[int] | None:
    """Return which files hold runs of another rank, with original parameters under FSDP1.

    Args:
        units: As the model is wrapped: each layer, and the root.
        world: The number of ranks.

    Returns:
        The numbers of such files; an empty list where every file can only be its own rank's; None where the runs do not
        tell, since two ranks hold runs of the same lengths or the model was wrapped in another way.
    """
    stored_runs = _by_rank([run_lengths for unit in units for _, run_lengths in unit if run_lengths is not None], world)
    for alignment in _ALIGNMENTS:
        runs = [_runs([count for count, _ in unit], world, alignment) for unit in units]
        pairs = zip(chain.from_iterable(units), chain.from_iterable(runs), strict=True)
        expected_runs = _by_rank([run for (_, run_lengths), run in pairs if run_lengths is not None], world)
        if sorted(expected_runs) != sorted(stored_runs):
            continue
        misplaced = [rank for rank in range(world) if expected_runs[rank] != stored_runs[rank]]
        return misplaced if misplaced or len(set(expected_runs)) == world else None
    return None


def _by_rank(counts: Sequence[Sequence[int]], world: int) -> list[tuple[int, ...]]:
    return [tuple(run_lengths[rank] for run_lengths in counts) for rank in range(world)]


def _runs(counts: Sequence[int], world: int, alignment: int) -> list[list[int]]:
    """Return how many elements of each parameter of a unit every rank holds."""
    starts, end = [], 0
    for count in counts:
        starts.append(math.ceil(end / alignment) * alignment)
        end = starts[-1] + count
    share = math.ceil(end / world)
    return [
        [max(0, min(start + count, (rank + 1) * share) - max(start, rank * share)) for rank in range(world)]
        for start, count in zip(starts, counts, strict=True)
    ]


def is_one_optimizer(checkpoint: ForeignCheckpoint, files: Sequence[TorchFile], contents: Sequence[Any]) -> bool:
    """Return whether every rank's optimizer has the parameters and settings of the first's; else note both ranks."""
    first, first_groups = files[0].path.name, contents[0]["param_groups"]
    members = [list(group["params"]) for group in first_groups]
    for file, content in zip(files[1:], contents[1:], strict=True):
        groups = content["param_groups"]
        if (parameters := [list(group["params"]) for group in groups]) != members:
            counts = sum(map(len, members)), sum(map(len, parameters))
            message = f"{first} has {counts[0]} parameters, {file.path.name} {counts[1]}"
            if counts[0] == counts[1]:
                message = f"{first} and {file.path.name} have {counts[0]} parameters each, and not the same ones"
            checkpoint.add("damage", f"{message}: the ranks' optimizers are of two saves or two models")
            return False
        if [plain_settings(group) for group in groups] != [plain_settings(group) for group in first_groups]:
            key = next(
                key
                for first_group, rank_group in zip(first_groups, groups, strict=True)
                for key in {**first_group, **rank_group}
                if plain_settings({key: first_group.get(key, "")}) != plain_settings({key: rank_group.get(key, "")})
            )
            checkpoint.add(
                "damage", f"{first} and {file.path.name} are of two saves: {key} of their optimizers differs"
            )
            return False
    return True
