"""From accepted rows to the micro-batches of this rank: plan, move sequences once, pack."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast.config.sections.data import DataConfig
from holdfast.data.batches.candidates import Candidates, Known
from holdfast.data.batches.packing import CommonStart, pack
from holdfast.data.batches.planning import Unit, plan_packs, plan_units, saves_work, taken_apart
from holdfast.data.batches.ranks import Ranks
from holdfast.data.batches.weights import Share, shares
from holdfast.types import Batch, Example, MiniBatch


@dataclass(frozen=True)
class Layout:
    """How packs are built; memory and speed only."""

    padded: bool = False
    pad_token: int = 0
    dtype: torch.dtype = torch.float32
    """Dtype of the loss weights."""
    attention_share: float = 1 / 16384
    """Cost of a token pair in attention relative to a token elsewhere."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Values that every token carries, and their dtypes: the batch of an idle rank has them too."""
    shares_heads: bool = False
    """Whether sequences of one draw are laid down with their common head once."""
    angles_of: Callable[[int], Hashable] | None = None
    """What differs between lengths of sequences that a model reads under different rotary angles; such share no head,
    for which there is no single set of keys. None for models whose angles are those of any length."""
    weighs_heads: bool = False
    """Whether they share it only where that is less work by `saves_work`, or where images belong to it."""
    whole_draws: bool = False
    """Whether all sequences of a draw, as many in each, go through one forward pass together."""
    brings_other_answers: bool = False
    """Whether the second sequence of a draw is its prompt with another row's answer, which goes beside the batch."""
    constant_length: int | None = None
    """The constant of that average; default: data.max_length."""
    stand_in: Mapping[str, Any] = field(default_factory=dict)
    """Model inputs for a rank whose sequences have none, in a forward pass in which those of another rank do: all ranks
    then run the same units, or the collectives of a sharded vision tower would not meet."""


def assemble(candidates: Candidates[Example], ranks: Ranks, config: DataConfig, layout: Layout) -> MiniBatch:
    """Build this rank's part of a mini-batch; all ranks plan alike from what they all know."""
    sequences = candidates.sequences
    trained = [sequence.trained for sequence in sequences]
    draws = [sequence.draw for sequence in sequences]
    constant = layout.constant_length or config.max_length
    share = shares(config.average, trained, draws, constant)
    packs = _plan(sequences, draws, ranks.size, config.tokens_per_micro_batch, layout)
    examples = _move(candidates, ranks, packs)
    stand_ins = _stand_ins(packs, sequences, layout)
    micro_batches = tuple(
        _pack(units, examples, share, layout, stand_in)
        for units, stand_in in zip(packs[ranks.rank], stand_ins, strict=True)
    )
    forwarded = sum(unit.tokens for of_rank in packs for units in of_rank for unit in units)
    tokens = sum(sequence.tokens for sequence in sequences)
    capacity = len(packs[0]) * ranks.size * config.tokens_per_micro_batch
    counted = {f"data/{name}": float(number) for name, number in candidates.counts.items()}
    return MiniBatch(
        micro_batches=micro_batches,
        count=sum(part.count for part in share),
        samples=len(sequences),
        tokens=tokens,
        trained_tokens=sum(trained),
        metrics=counted
        | {
            "data/rows": float(candidates.rows),
            "data/tokens": float(tokens),
            "data/mean_length": tokens / max(1, len(sequences)),
            "data/fill": forwarded / capacity,
            "data/micro_batches": float(len(packs[0])),
            "data/order_hash": _order_hash(sequences),
        },
    )


def _plan(
    sequences: Sequence[Known], draws: Sequence[int], ranks: int, budget: int, layout: Layout
) -> list[list[list[Unit]]]:
    """Return the units of every micro-batch of every rank."""
    units = _units(sequences, draws, budget, layout)
    rows = max((len(unit.members) for unit in units), default=1) if layout.padded else 1
    plan = plan_packs(
        [max(sequences[index].tokens for index in unit.members) if layout.padded else unit.tokens for unit in units],
        budget=budget // rows,
        ranks=ranks,
        padded=layout.padded,
        attention_share=layout.attention_share,
    )
    return [[[units[number] for number in numbers] for numbers in of_rank] for of_rank in plan.packs]


def _units(sequences: Sequence[Known], draws: Sequence[int], budget: int, layout: Layout) -> list[Unit]:
    lengths = [sequence.tokens for sequence in sequences]
    apart = _drawn_apart(lengths, draws, layout)
    heads = [
        0 if draw in apart or not layout.shares_heads else sequence.head
        for sequence, draw in zip(sequences, draws, strict=True)
    ]
    units = plan_units(lengths, heads, draws, budget, whole=layout.whole_draws)
    if not layout.weighs_heads:
        return units
    return [part for unit in units for part in _weighed(unit, lengths, sequences, layout.attention_share)]


def _drawn_apart(lengths: Sequence[int], draws: Sequence[int], layout: Layout) -> set[int]:
    """Return the draws whose sequences have several sets of rotary angles between them."""
    if layout.angles_of is None:
        return set()
    angles: dict[int, set[Hashable]] = {}
    for length, draw in zip(lengths, draws, strict=True):
        angles.setdefault(draw, set()).add(layout.angles_of(length))
    return {draw for draw, several in angles.items() if len(several) > 1}


def _weighed(unit: Unit, lengths: Sequence[int], sequences: Sequence[Known], attention_share: float) -> list[Unit]:
    """Return a unit, or its members alone where that is less work; a tower that runs once for all always pays."""
    if sequences[unit.members[0]].has_inputs or saves_work(unit, lengths, attention_share):
        return [unit]
    return taken_apart(unit, lengths)


def _stand_ins(
    packs: Sequence[Sequence[Sequence[Unit]]], sequences: Sequence[Known], layout: Layout
) -> list[Mapping[str, Any]]:
    """Return, for each forward pass, what a rank without model inputs takes instead: nothing where no rank has any."""
    of_pass = list(zip(*packs, strict=True))
    seen = [
        any(sequences[index].has_inputs for units in of_ranks for unit in units for index in unit.members)
        for of_ranks in of_pass
    ]
    return [layout.stand_in if some else {} for some in seen]


def _pack(
    units: Sequence[Unit],
    examples: Mapping[int, Example],
    share: Sequence[Share],
    layout: Layout,
    stand_in: Mapping[str, Any],
) -> Batch:
    members = [index for unit in units for index in unit.members]
    return pack(
        [examples[index] for index in members],
        [share[index] for index in members],
        padded=layout.padded,
        pad_token=layout.pad_token,
        dtype=layout.dtype,
        columns=layout.columns,
        heads=[head for unit in units for head in _heads(unit)],
        stand_in=stand_in,
    )


def _heads(unit: Unit) -> list[CommonStart]:
    """Return one head for all members, or for each of those that only go together none."""
    return [CommonStart(len(unit.members), unit.head)] if unit.head else [CommonStart(1, 0)] * len(unit.members)


def _order_hash(sequences: Sequence[Known]) -> float:
    """Return a number below 2**52 that two updates share only if they hold the same sequences in the same order."""
    places = np.array([(sequence.draw, sequence.part) for sequence in sequences], dtype=np.int64)
    return float(xxhash.xxh3_64_intdigest(places.tobytes()) >> 12)


def _move(
    candidates: Candidates[Example], ranks: Ranks, packs: Sequence[Sequence[Sequence[Unit]]]
) -> dict[int, Example]:
    """Send every sequence to the rank that trains it; return this rank's, by index."""
    outgoing = []
    for of_rank in packs:
        indices = sorted(index for units in of_rank for unit in units for index in unit.members)
        local = [index for index in indices if candidates.sequences[index].owner == ranks.rank]
        outgoing.append(
            {
                index: candidates.own_sequences[(candidates.sequences[index].draw, candidates.sequences[index].part)]
                for index in local
            }
        )
    examples: dict[int, Example] = {}
    for received in ranks.swap(outgoing):
        examples |= received
    return examples
