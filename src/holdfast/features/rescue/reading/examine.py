"""Find what is wrong with another system's checkpoint, and what a resume would lose, there and here."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.errors import ModelError
from holdfast.features.rescue.reading.alignment import unwrap
from holdfast.features.rescue.reading.parameter_names import note_ties, skeleton_of
from holdfast.features.rescue.reading.record import (
    MALFORMED,
    DamagedFile,
    ForeignCheckpoint,
    StoredTensor,
    TensorPiece,
    counted,
    have_same_bytes,
    never_written,
)
from holdfast.files import read_json
from holdfast.models.names import canonical_name, named_parameters, tied_names

ForeignLevel = Literal["headers", "tensors"]
_LAYER = re.compile(r"^(.*\.\d+)\.")
"""Up to the last number in a name: its layer, or its expert."""
_OF_EVERY_PARAMETER = {"step", "exp_avg", "exp_avg_sq", "momentum_buffer", "compensation"}
"""States that an optimizer has of each parameter; others, such as those of quantised moments, of large ones alone."""
_FEW, _SMALL = 8, 1 << 20
"""Tensors with copies that are compared without reading all of them, and their most bytes."""
_DIVERGED = "are of two steps, or of copies that diverged"


def examine(checkpoint: ForeignCheckpoint, level: ForeignLevel = "tensors") -> None:
    """Add to a checkpoint's findings what its headers, and its tensors, show.

    Args:
        checkpoint: As it was opened.
        level: headers, or tensors: then every number is read, one tensor in memory at a time.
    """
    try:
        _examine(checkpoint, level)
    except MALFORMED as error:
        checkpoint.add("damage", never_written(checkpoint.path.name, error))


def _examine(checkpoint: ForeignCheckpoint, level: ForeignLevel) -> None:
    _compare_with_configuration(checkpoint)
    _check_schedule(checkpoint)
    for name, tensor in _named_tensors(checkpoint):
        gap = tensor.gap()
        if gap is not None:
            checkpoint.add("damage", f"{name}: {gap}")
    _compare_states(checkpoint)
    _compare_steps(checkpoint)
    if level == "tensors":
        for name, tensor in _named_tensors(checkpoint):
            _read(checkpoint, name, tensor)
        _compare_ties(checkpoint)
        _compare_rest(checkpoint)
        _note_without_checksums(checkpoint)
    else:
        copied = (named for named in _named_tensors(checkpoint) if named[1].copies and named[1].nbytes <= _SMALL)
        for name, tensor in islice(copied, _FEW):
            _read(checkpoint, name, tensor)
        checkpoint.add("unverified", "numbers were not read, headers alone were")
    _add_losses(checkpoint)


def _compare_rest(checkpoint: ForeignCheckpoint) -> None:
    for path, compare in checkpoint.compare_rest.items():
        try:
            compare()
        except (DamagedFile, OSError) as error:
            if not any(path.name in finding.text for finding in checkpoint.of_kind("damage")):
                checkpoint.add("damage", f"{path.name} {error}")


def _note_without_checksums(checkpoint: ForeignCheckpoint) -> None:
    files = sorted(checkpoint.without_checksums)
    if files:
        more = f" and {len(files) - 1} more files have" if len(files) > 1 else " has"
        checkpoint.add(
            "unverified", f"{files[0]}{more} no checksums: nothing but NaN and infinity would show in what was read"
        )


def _check_schedule(checkpoint: ForeignCheckpoint) -> None:
    try:
        last = (checkpoint.schedule or {}).get("last_epoch")
        if last is not None:
            counted(last, "the step of the schedule")
    except DamagedFile as error:
        checkpoint.schedule = None
        checkpoint.add("damage", f"{checkpoint.path.name} {error}")


def _named_tensors(checkpoint: ForeignCheckpoint) -> Iterator[tuple[str, StoredTensor]]:
    yield from checkpoint.weights.items()
    for name, slots in checkpoint.states.items():
        yield from ((f"{slot} of {name}", tensor) for slot, tensor in slots.items())


def _read(checkpoint: ForeignCheckpoint, name: str, tensor: StoredTensor) -> None:
    """Look at every number of a tensor, piece by piece, and compare it with its copies on other ranks."""
    from holdfast.checkpoint.format.unsupported_tensors import is_finite  # imports what headers do without

    for piece in tensor.pieces:
        values = _read_piece(checkpoint, name, piece)
        if values is None:
            continue
        if values.is_floating_point() and not is_finite(values):
            count = int((~torch.isfinite(values.float())).sum())
            checkpoint.add("damage", f"{name} holds {count:,} numbers that are NaN or infinite ({piece.file})")
        for copy in tensor.copies_of(piece):
            copied_values = _read_piece(checkpoint, name, copy)
            if copied_values is not None and not have_same_bytes(values, copied_values):
                _note_difference(checkpoint, name, (piece, copy), (values, copied_values))


def _note_difference(
    checkpoint: ForeignCheckpoint, name: str, pieces: tuple[TensorPiece, TensorPiece], values: tuple[Tensor, Tensor]
) -> None:
    """Note the first difference between what two ranks should hold alike: where they diverged, all may differ."""
    if any(_DIVERGED in finding.text for finding in checkpoint.of_kind("damage")):
        return
    numbers = f" ({values[0].item():g} and {values[1].item():g})" if values[0].numel() == 1 else ""
    checkpoint.add("damage", f"{pieces[0].file} and {pieces[1].file} {_DIVERGED}: {name} differs{numbers}")


def _read_piece(checkpoint: ForeignCheckpoint, name: str, piece: TensorPiece) -> Tensor | None:
    try:
        return piece.read()
    except (DamagedFile, OSError) as error:
        checkpoint.add("damage", f"{piece.file} {error} ({name})")
    return None


def _compare_with_configuration(checkpoint: ForeignCheckpoint) -> None:
    """Compare names and shapes with the model that the configuration beside a checkpoint describes."""
    folder = checkpoint.model_files
    if folder is None or not checkpoint.weights:
        return
    try:
        read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        checkpoint.add("damage", f"config.json cannot be read: {type(error).__name__}")
        return
    try:
        skeleton = skeleton_of(folder)
    except (ModelError, OSError, RuntimeError, ValueError) as error:
        checkpoint.add("note", f"the configuration beside it builds no model here: {error}")
        return
    unwrap(checkpoint, named_parameters(skeleton))
    note_ties(checkpoint, tied_names(skeleton))
    if not (folder / "generation_config.json").is_file():
        checkpoint.add("repair", "it lacks a generation configuration; an export has the one that its model implies")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        checkpoint.add("note", "it lacks a tokenizer: an export needs one from --model, an import has the run's")
    _compare_parameters(checkpoint, named_parameters(skeleton))
    buffers = {canonical_name(name): value for name, value in skeleton.named_buffers()}
    for name, buffer in buffers.items():
        repair_buffer(checkpoint, name, tuple(buffer.shape))


def _compare_parameters(checkpoint: ForeignCheckpoint, parameters: Mapping[str, Any]) -> None:
    weights = checkpoint.weights
    if checkpoint.system == "Hugging Face" and not parameters.keys() & weights.keys():
        return  # the files of many models have other names than the modules; an export or a run converts them
    lacking = [name for name in parameters if name not in weights]
    is_complete = checkpoint.system != "Hugging Face" or weights.keys() <= parameters.keys()
    if lacking and is_complete:  # else a weight has another name in the files, and is converted
        checkpoint.add("damage", f"it lacks {len(lacking)} weights of its configuration's model, such as {lacking[0]}")
    mismatched = [
        name for name in parameters if name in weights and tuple(parameters[name].shape) != weights[name].shape
    ]
    if mismatched:
        name = mismatched[0]
        checkpoint.add(
            "damage",
            f"the configuration beside it is another model's: {name} is {list(parameters[name].shape)} by it and "
            f"{list(weights[name].shape)} here",
        )


def repair_buffer(checkpoint: ForeignCheckpoint, name: str, shape: tuple[int, ...]) -> None:
    """Take one copy of a buffer that a merger put one behind another, once for each rank."""
    stored = checkpoint.weights.get(name)
    if stored is None or not shape or stored.shape == shape or stored.shape[1:] != shape[1:]:
        return
    copies, remainder = divmod(stored.shape[0], shape[0]) if shape[0] else (0, 1)
    if remainder or copies < 2 or math.prod(stored.shape) > 2**24:
        return
    chunks = torch.split(stored.read(), shape[0])
    if not all(torch.equal(chunk, chunks[0]) for chunk in chunks[1:]):
        checkpoint.add(
            "damage", f"buffer {name} is {list(stored.shape)} and should be {list(shape)}, and its parts differ"
        )
        return

    def fill(target: Tensor) -> None:
        target.copy_(stored.read()[: shape[0]])

    piece = TensorPiece((0,) * len(shape), shape, stored.dtype, fill, stored.pieces[0].file)
    checkpoint.weights[name] = StoredTensor(shape, stored.dtype, (piece,))
    message = f"buffer {name} is there {copies} times, one copy behind another, as mergers write it"
    checkpoint.add("repair", f"{message}; one of them is taken")


def _compare_states(checkpoint: ForeignCheckpoint) -> None:
    """Look at shapes and dtypes of optimizer states beside those of their parameters."""
    dtypes: Counter[tuple[str, str, str]] = Counter()
    for name, slots in checkpoint.states.items():
        weight = checkpoint.weights.get(name)
        if weight is None:
            checkpoint.add("damage", f"the optimizer has a state of {name}, of which there is no weight")
            continue
        for slot, state in slots.items():
            if state.shape and state.shape != weight.shape:
                message = f"{slot} of {name} is {list(state.shape)}, the weight {list(weight.shape)}"
                checkpoint.add("damage", f"{message}: they are of two models or two steps")
            elif state.shape and state.dtype != weight.dtype:
                dtypes[slot, _dtype_name(state.dtype), _dtype_name(weight.dtype)] += 1
    _compare_slots(checkpoint)
    for (slot, dtype, weight_dtype), count in dtypes.items():
        checkpoint.add(
            "note",
            f"{slot} of {count} parameters is {dtype}, the weights {weight_dtype}: torch's own loading of a state "
            f"makes it {weight_dtype}; here it stays what it is where the optimizer can go on with that",
        )


def _compare_slots(checkpoint: ForeignCheckpoint) -> None:
    """Look for parameters that lack what another one of the same kind of optimizer has."""
    kinds = {frozenset(slots) for slots in checkpoint.states.values()}
    for name, slots in checkpoint.states.items():
        lacking = {slot for kind in kinds if kind > slots.keys() for slot in kind - slots.keys()} & _OF_EVERY_PARAMETER
        if lacking:
            checkpoint.add("damage", f"the optimizer lacks {', '.join(sorted(lacking))} of {name}, which others have")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare_ties(checkpoint: ForeignCheckpoint) -> None:
    for name, first in checkpoint.tied_away.items():
        first_weight, tied_weight = checkpoint.weights.get(first), checkpoint.weights.get(name)
        if first_weight is None or tied_weight is None:
            continue
        try:
            if not torch.equal(first_weight.read(), tied_weight.read()):
                checkpoint.add("damage", f"{name} and {first} are tied, and hold different numbers")
        except (DamagedFile, OSError):
            continue  # it was named when it was read


def _compare_steps(checkpoint: ForeignCheckpoint) -> None:
    """Add what the step counters show: each is a scalar of its parameter, and all of one save agree.

    A layer, an expert or a kind of module that was trained later has fewer, as a whole; that is a note.
    """
    steps: dict[str, int] = {}
    for name, slots in checkpoint.states.items():
        stored = slots.get("step")
        if stored is None or stored.shape not in {(), (1,)}:
            continue
        try:
            steps[name] = counted(stored.read().item(), f"the optimizer's step of {name}")
        except DamagedFile as error:
            checkpoint.add("damage", f"{stored.pieces[0].file} {error}")
            return
        except OSError:
            return  # it is named when tensors are read
    if not steps:
        return
    fewest, most = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
    if checkpoint.step_is_updates and checkpoint.step not in {None, steps[most]}:
        message = f"the optimizer made {steps[most]} updates, the checkpoint is of step {checkpoint.step}"
        checkpoint.add("damage", f"{message}: they are of two saves")
    if steps[fewest] == steps[most]:
        return
    message = f"the optimizer made {steps[fewest]} updates of {fewest} and {steps[most]} of {most}"
    if _agrees_within(_layer, steps) or _agrees_within(_module_kind, steps):
        checkpoint.add("note", f"{message}: what was trained later has fewer")
    else:
        checkpoint.add("damage", f"{message}, and no layer or kind of module has one number: they are of two saves")


def _agrees_within(key: Callable[[str], str], steps: Mapping[str, int]) -> bool:
    """Return whether all parameters with one key have one number of steps."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name, step in steps.items():
        numbers[key(name)].add(step)
    return all(len(step_counts) == 1 for step_counts in numbers.values())


def _layer(name: str) -> str:
    match = _LAYER.match(name)
    return match[1] if match else name


def _module_kind(name: str) -> str:
    return re.sub(r"\d+", "#", name.rpartition(".")[0])


def _add_losses(checkpoint: ForeignCheckpoint) -> None:
    """Say what a resume here would lose, besides what the system itself does not save."""
    if not checkpoint.has_optimizer and not any("optimizer" in finding.text or "weights" in finding.text
                                                for finding in checkpoint.of_kind("loss")):  # fmt: skip
        checkpoint.add("loss", "it holds no optimizer state: training begins with moments of zero")
    if checkpoint.random_state:
        ranks = f"its {checkpoint.world_size} ranks" if checkpoint.world_size else "its ranks"
        checkpoint.add("loss", f"the random state of {ranks}: dropout and sampling draw new numbers", there=False)
    if checkpoint.position is None:
        checkpoint.add(
            "loss", "the position in the data is not stated: --data-from-start begins the rows anew", there=False
        )
    else:
        checkpoint.add(
            "loss",
            "the order of rows is drawn anew: after the rows that were done, other ones come than there",
            there=False,
        )
    critic = checkpoint.path.parent / "critic"
    if checkpoint.path.name == "actor" and critic.is_dir():
        checkpoint.add("loss", f"the critic in {critic} is a checkpoint of its own, which is not imported", there=False)
