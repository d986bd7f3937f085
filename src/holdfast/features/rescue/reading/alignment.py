"""Maps the tensor names of a checkpoint to those of a model: removes wrapper prefixes, tied names, extra buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.features.rescue.reading.record import ForeignCheckpoint, StoredGroup
from holdfast.models.names import canonical_name

_WRAPPINGS = ("base_model.model.", "model.", "module.", "_forward_module.")
"""What stands before all names: peft's, a Lightning module's attribute, DDP's, a strategy's."""


def align(checkpoint: ForeignCheckpoint, expected: Collection[str], ties: Mapping[str, tuple[str, ...]]) -> None:
    """Rename a checkpoint's weights and states to a model's names; of tied weights one is kept.

    Args:
        checkpoint: Is changed.
        expected: Names of the model's parameters and stored buffers; of tied ones the first.
        ties: Of these, with their other names.

    Raises:
        CheckpointMismatch: Weights that are tied in the model hold different numbers.
    """
    unwrap(checkpoint, expected)
    for first, aliases in ties.items():
        _merge_tied(checkpoint, first, aliases)
    computed = ("rotary_emb.inv_freq", "masked_bias", "position_ids")
    extra = [name for name in checkpoint.weights if name not in expected and name.endswith(computed)]
    for name in extra:
        del checkpoint.weights[name]
    if extra:
        checkpoint.add(
            "repair", f"{len(extra)} buffers that every model computes anew are left out, such as {extra[0]}"
        )


def unwrap(checkpoint: ForeignCheckpoint, expected: Collection[str]) -> None:
    """Take off what stands before all names of a checkpoint and not before those of the model."""
    prefix = _prefix(checkpoint, expected)
    if prefix:
        rename(checkpoint, lambda name: canonical_name(name.removeprefix(prefix)))


def _prefix(checkpoint: ForeignCheckpoint, expected: Collection[str]) -> str:
    """Return what stands before all names of a checkpoint and not before those of the model."""
    names = list(checkpoint.weights)
    if not names or any(name in expected for name in names):
        return ""
    first = names[0].partition(".")[0] + "."
    for prefix in (*_WRAPPINGS, first, f"{first}model."):
        stripped = [canonical_name(name.removeprefix(prefix)) for name in names if name.startswith(prefix)]
        if len(stripped) == len(names) and any(name in expected for name in stripped):
            return prefix
    return ""


def rename(checkpoint: ForeignCheckpoint, plain: Callable[[str], str]) -> None:
    """Give every weight and state another name."""
    checkpoint.weights = {plain(name): value for name, value in checkpoint.weights.items()}
    checkpoint.states = {plain(name): value for name, value in checkpoint.states.items()}
    checkpoint.tied_away = {plain(name): plain(first) for name, first in checkpoint.tied_away.items()}
    checkpoint.groups = [StoredGroup(tuple(map(plain, group.names)), group.settings) for group in checkpoint.groups]


def _merge_tied(checkpoint: ForeignCheckpoint, first: str, aliases: tuple[str, ...]) -> None:
    """Keep one of the weights that a model ties, under its first name."""
    present = [name for name in (first, *aliases) if name in checkpoint.weights]
    if not present:
        return
    values = [checkpoint.weights.pop(name) for name in present]
    checkpoint.weights[first] = values[0]
    if len(present) > 1:
        reference = values[0].read()
        if not all(value.shape == values[0].shape and torch.equal(reference, value.read()) for value in values[1:]):
            raise CheckpointMismatch(
                f"{checkpoint.path} does not fit: {' and '.join(present)} are one tensor in this model "
                "(tie_word_embeddings) and hold different numbers there. Set tie_word_embeddings to false, or mend the "
                "checkpoint."
            )
        checkpoint.add("repair", f"{' and '.join(present)} are tied and were saved twice; one of them is written")
    states = [checkpoint.states.pop(name) for name in (first, *aliases) if name in checkpoint.states]
    if states:
        checkpoint.states[first] = states[0]
    members = dict.fromkeys(aliases, first)
    checkpoint.groups = [
        StoredGroup(tuple(dict.fromkeys(members.get(name, name) for name in group.names)), group.settings)
        for group in checkpoint.groups
    ]
