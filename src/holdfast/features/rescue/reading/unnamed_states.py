"""Gives names to numbered optimizer states. The meaning of a number depends on how the model was wrapped.

FSDP2                       one number per parameter, in the order of `named_parameters`; DTensors
FSDP1, use_orig_params      the same; each rank holds a run of a parameter's elements, or nothing
FSDP1, flat parameters      one number per wrapped unit, the root's first; parameters lie one behind another, cut in
                            equal shares, zeros at the end
Trainer, one process        one number per parameter: first those that are decayed, then the others, each in the order
                            of `named_parameters`; a parameter's whole state
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor

from holdfast.features.rescue.reading.parameter_names import decayed_parameters, ordered_parameters
from holdfast.features.rescue.reading.parts import in_rows, joined_tensor
from holdfast.features.rescue.reading.pickles import is_plain
from holdfast.features.rescue.reading.rank_order import misplaced_files, note_untold_order, replicas_of
from holdfast.features.rescue.reading.record import (
    TRAINER,
    DamagedFile,
    ForeignCheckpoint,
    StoredGroup,
    StoredTensor,
    TensorPiece,
)
from holdfast.features.rescue.reading.torch_file import TorchFile

_UNIT = re.compile(r"^(.*?\.\d+)\.")
"""Up to the first number in a name: the layer it belongs to."""


class _Unnamed(DamagedFile):
    """The state does not tell which number is which parameter; the weights may be intact."""


States = dict[str, dict[str, StoredTensor]]


@dataclass(frozen=True)
class NumberedStates:
    """Optimizer states whose parameters are numbered, with the checkpoint and the files that they are of."""

    checkpoint: ForeignCheckpoint
    files: Sequence[TorchFile]
    """The file of each rank."""
    states: Sequence[Mapping[Any, Any]]
    """For each rank: number -> key -> value."""
    groups: Sequence[Mapping[str, Any]]

    @property
    def numbers(self) -> list[Any]:
        """The numbers of the parameters, group by group."""
        return [number for group in self.groups for number in group["params"]]

    @property
    def replicas(self) -> list[list[int]]:
        """The ranks of each copy."""
        return replicas_of(self.checkpoint, len(self.files))


def named_states(numbered: NumberedStates) -> tuple[States, list[StoredGroup]] | None:
    """Return states and groups by parameter name; None where that cannot be, which is noted."""
    try:
        by_number, states = _named(numbered)
    except _Unnamed as error:
        numbered.checkpoint.has_optimizer = False
        numbered.checkpoint.add("loss", f"the optimizer's state {error}: it is not read", there=False)
        return None
    except DamagedFile as error:
        numbered.checkpoint.add("damage", f"the optimizer's state {error}")
        return None
    groups = [
        StoredGroup(
            tuple(name for number in group["params"] for name in by_number[number] if name in states),
            {key: value for key, value in group.items() if key != "params"},
        )
        for group in numbered.groups
    ]
    return states, groups


def _named(numbered: NumberedStates) -> tuple[dict[Any, tuple[str, ...]], States]:
    """Return the parameters of each number, and the states by name.

    Raises:
        DamagedFile: Nobody can know which is which, or the numbers are another model's.
    """
    checkpoint, numbers = numbered.checkpoint, numbered.numbers
    if strange := [key for state in numbered.states for key in state if key not in set(numbers)]:
        raise DamagedFile(f"has parameter {strange[0]}, which none of its groups has")
    names = ordered_parameters(checkpoint)
    if names is None:
        raise _Unnamed("numbers its parameters, and the weights are sorted by name: without a configuration that fits "
                       "them nobody can know which is which")  # fmt: skip
    if len(numbered.groups) > 1:
        names_by_number = _in_two_groups(numbered, names)
        checkpoint.form += "; the optimizer's numbers follow the Trainer's groups, decayed and not"
        return {number: (name,) for number, name in names_by_number.items()}, _of_parameters(numbered, names_by_number)
    units = units_of(names)
    if len(numbers) == len(names):
        checkpoint.form += "; the optimizer's numbers follow the order of the model's parameters"
        names_by_number = dict(zip(numbers, names, strict=True))
        states = _of_parameters(numbered, names_by_number)
        _check_order(numbered, names_by_number, units)
        return {number: (name,) for number, name in names_by_number.items()}, states
    if len(numbers) == len(units):
        checkpoint.form += "; flat parameters, one per layer"
        by_number = {number: tuple(unit) for number, unit in zip(numbers, units, strict=True)}
        note_untold_order(checkpoint, "optimizer", numbered.files, _values(numbered))
        return by_number, _of_units(numbered, by_number)
    raise _Unnamed(
        f"numbers {len(numbers)} parameters, the model has {len(names)} in {len(units)} layers: which is which cannot "
        "be known"
    )


def _in_two_groups(numbered: NumberedStates, names: Sequence[str]) -> dict[Any, str]:
    """Return the parameter of each number, as transformers' Trainer groups them.

    Raises:
        DamagedFile: Another system wrote them, or the groups or the shapes of the states are not those of the model.
    """
    sizes = [len(group["params"]) for group in numbered.groups]
    rules = decayed_parameters(numbered.checkpoint, names) if numbered.checkpoint.system == TRAINER else []
    fitting: list[dict[Any, str]] = []
    for decayed in rules:
        if sizes != [len(decayed), len(names) - len(decayed)]:
            continue
        ordered = sorted(names, key=lambda name: name not in decayed)  # noqa: B023 - it is sorted at once
        names_by_number = dict(zip(numbered.numbers, ordered, strict=True))
        if names_by_number not in fitting and _has_shapes_of_weights(numbered, names_by_number):
            fitting.append(names_by_number)
    if len(fitting) != 1:
        raise _Unnamed(
            f"numbers its parameters in {len(sizes)} groups of {' and '.join(map(str, sizes))}, which by number and "
            "shape are not the decayed and the other parameters of a Trainer: which is which cannot be known"
        )
    return fitting[0]


def _has_shapes_of_weights(numbered: NumberedStates, names: Mapping[Any, str]) -> bool:
    """Return whether every state that goes with each element of a parameter has its shape."""
    return all(
        view.shape in {(), numbered.checkpoint.weights[names[number]].shape}
        for state in numbered.states
        for number, slots in state.items()
        for view in slots.values()
        if is_plain(view)
    )


def _values(numbered: NumberedStates) -> Iterator[Any]:
    return (value for state in numbered.states for slots in state.values() for value in slots.values())


def _check_order(numbered: NumberedStates, names: Mapping[Any, str], units: Sequence[Sequence[str]]) -> None:
    """Compare which runs of parameters each rank's file holds with those that the rank has under FSDP1.

    Raises:
        DamagedFile: Files hold the runs of other ranks.
    """
    numbers = {name: number for number, name in names.items()}
    weights, ranks = numbered.checkpoint.weights, numbered.replicas[0]  # the others have runs of the same lengths
    wrapped = [
        [(math.prod(weights[name].shape), _run_lengths(numbered, ranks, numbers[name])) for name in unit]
        for unit in units
    ]
    misplaced = misplaced_files(wrapped, len(ranks))
    if misplaced:
        files = " and ".join(numbered.files[ranks[index]].path.name for index in misplaced)
        raise DamagedFile(f"is in the files of other ranks: {files} hold the runs that others of them have under FSDP1")
    if misplaced is None:
        note_untold_order(numbered.checkpoint, "optimizer", numbered.files, _values(numbered))


def _run_lengths(numbered: NumberedStates, ranks: Sequence[int], number: Any) -> list[int] | None:
    """Return how many elements of a parameter the ranks hold; None where its state is no run, or none is there."""
    slot = next((slot for slot, value in _slot_values(numbered, number) if getattr(value, "shape", ())), None)
    if slot is None:
        return None
    rank_values = [(numbered.states[rank].get(number) or {}).get(slot) for rank in ranks]
    return [math.prod(value.shape) if is_plain(value) else 0 for value in rank_values]


def _slot_values(numbered: NumberedStates, number: Any) -> Iterator[tuple[Any, Any]]:
    return (pair for state in numbered.states for pair in (state.get(number) or {}).items())


def units_of(names: Sequence[str]) -> list[list[str]]:
    """Return the parameters of each wrapped unit: of no layer, which are the root's, then layer by layer."""
    units: dict[str, list[str]] = {"": []}
    for name in names:
        match = _UNIT.match(name)
        units.setdefault(match[1] if match else "", []).append(name)
    return [unit for unit in units.values() if unit]


def _slots(states: Sequence[Mapping[Any, Any]], number: Any) -> list[str]:
    return list(dict.fromkeys(slot for state in states for slot in state.get(number) or {}))


def refuse_gaps(files: Sequence[TorchFile], held: Set[int]) -> None:
    """Refuse a state that a rank lacks and others have.

    Args:
        files: The file of each rank.
        held: The ranks that have it, or need none.

    Raises:
        DamagedFile: There are others.
    """
    if missing := sorted(set(range(len(files))) - held):
        raise DamagedFile(f"is not in {files[missing[0]].path.name}, and in the files of other ranks it is")


def _holders(numbered: NumberedStates, number: Any, slot: str) -> dict[int, tuple[TorchFile, Any]]:
    """Return what each rank has of a slot; a rank without it is left out."""
    pairs = enumerate(zip(numbered.files, numbered.states, strict=True))
    return {rank: (file, state[number][slot]) for rank, (file, state) in pairs if slot in (state.get(number) or {})}


def _is_run(value: Any) -> bool:
    return is_plain(value) and len(value.shape) == 1


def _of_parameters(numbered: NumberedStates, names: Mapping[Any, str]) -> States:
    states: States = {}
    for number, name in names.items():
        in_runs = any(_is_run(value) for _, value in _slot_values(numbered, number))
        stateless = frozenset(rank for rank, state in enumerate(numbered.states) if not state.get(number))
        unneeded = stateless if in_runs else numbered.checkpoint.empty_ranks.get(name, frozenset())
        for slot in _slots(numbered.states, number):
            holders = _holders(numbered, number, slot)
            if not any(isinstance(value, Tensor) for _, value in holders.values()):
                continue  # a number that some optimizers keep, of which nothing here can go on
            label, ranks = f"{slot} of {name}", list(holders.values())
            try:
                refuse_gaps(numbered.files, holders.keys() | unneeded)
            except DamagedFile as error:
                raise DamagedFile(f"lacks a part: {label} {error}") from None
            if not _is_run(ranks[0][1]):
                tensor = joined_tensor(ranks)
            else:
                tensor = _of_runs(numbered, numbered.checkpoint.weights[name].shape, holders, label)
            if tensor.shape and tensor.shape != numbered.checkpoint.weights[name].shape:
                raise DamagedFile(f"is another model's: {label} is {list(tensor.shape)}, the weight is "
                                  f"{list(numbered.checkpoint.weights[name].shape)}")  # fmt: skip
            states.setdefault(name, {})[str(slot)] = tensor
    return states


def _of_runs(
    numbered: NumberedStates, shape: tuple[int, ...], holders: Mapping[int, tuple[TorchFile, Any]], label: str
) -> StoredTensor:
    """Return the tensor that ranks hold runs of, in the order of ranks."""
    copies = []
    for ranks in numbered.replicas:
        pairs = [holders[rank] for rank in ranks if rank in holders]
        copies.append([_run(file, view, 0, math.prod(view.shape)) for file, view in pairs])
    pieces, other_pieces = in_rows(copies)
    count = sum(piece.sizes[0] for piece in pieces)
    if count != math.prod(shape):
        raise DamagedFile(f"has {count:,} numbers for {label}, which has {math.prod(shape):,}")
    return StoredTensor(shape, next(iter(holders.values()))[1].dtype, pieces, other_pieces, flat=True)


def _run(file: TorchFile, view: Tensor, start: int, count: int) -> TensorPiece:
    """Return so many elements of a flat tensor in a file."""
    if math.prod(view.shape) > 1 and view.stride() != (1,):
        raise DamagedFile("holds a run of a parameter whose numbers do not lie one behind another")
    run = view.as_strided((count,), (1,), view.storage_offset() + start)
    file.check(view)
    return TensorPiece((0,), (count,), view.dtype, partial(file.fill, run), file.path.name)


def _of_units(numbered: NumberedStates, units: Mapping[Any, Sequence[str]]) -> States:
    states: States = {}
    for number, unit in units.items():
        for slot in _slots(numbered.states, number):
            holders = _holders(numbered, number, slot)
            try:
                refuse_gaps(numbered.files, holders.keys())
            except DamagedFile as error:
                raise DamagedFile(f"lacks a part: {slot} of a layer {error}") from None
            for name, tensor in _cut(numbered, unit, list(holders.values()), slot):
                states.setdefault(name, {})[str(slot)] = tensor
    return states


def _cut(
    numbered: NumberedStates, unit: Sequence[str], holders: Sequence[tuple[TorchFile, Any]], slot: str
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield what a flat tensor holds of each parameter."""
    first = holders[0][1]
    shapes = {name: numbered.checkpoint.weights[name].shape for name in unit}
    if not first.shape:
        tensor = joined_tensor(holders)
        yield from ((name, tensor) for name in unit)
        return
    replicas = [[holders[rank] for rank in ranks] for ranks in numbered.replicas]
    needed = sum(math.prod(shape) for shape in shapes.values())
    for copy in replicas:
        count = sum(math.prod(view.shape) for _, view in copy)
        if not 0 <= count - needed < max(2, len(copy)):
            raise DamagedFile(f"has {count:,} numbers for {slot} of a layer that has {needed:,}")
    begin = 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape)
        pieces, copies = in_rows([_between(copy, begin, end) for copy in replicas])
        yield name, StoredTensor(shape, first.dtype, pieces, copies, flat=True)
        begin = end


def _between(holders: Sequence[tuple[TorchFile, Any]], begin: int, end: int) -> list[TensorPiece]:
    """Return the runs from one to another element of the flat tensor that files hold parts of."""
    sizes = [math.prod(view.shape) for _, view in holders]
    return [
        _run(file, view, max(begin, start) - start, min(end, start + size) - max(begin, start))
        for (file, view), start, size in zip(holders, accumulate(sizes, initial=0), sizes, strict=False)
        if max(begin, start) < min(end, start + size)
    ]
