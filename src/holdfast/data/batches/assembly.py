"""Assemble the micro-batches of this rank from sequences: share out weights, plan packs, exchange sequences once, pack.

Weights are set before packs are planned, so no loss depends on how tokens are split over ranks, micro-batches or packs.
The plan is a pure function of lengths and affects memory and speed only. It has the same number of micro-batches on
every rank, since a rank with fewer would leave the others waiting in FSDP's collectives.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from holdfast.config.sections.data import Average, DataConfig, PairAverage
from holdfast.data.batches.candidates import Candidates, Ranks, SequenceInfo
from holdfast.data.batches.packing import CommonStart, Share, pack, split_row
from holdfast.types import Example, MiniBatch

Packs = tuple[tuple[tuple[int, ...], ...], ...]
"""packs[rank][micro_batch] is a tuple of indices of units, shortest first."""


def shares(
    average: Average | PairAverage, trained_tokens: Sequence[int], prompt_ids: Sequence[int], max_length: int
) -> list[Share]:
    """Return the share of every sequence of an update; 0 and 0 for a sequence without a trained token.

    - token_mean: the mean over trained tokens (DAPO, arXiv:2503.14476, eq. 8).
    - sequence_mean: the mean over sequences of their token means (GRPO, arXiv:2402.03300, eq. 3).
    - constant_length: the mean over sequences of their token sums divided by `max_length`, one constant for the whole
      run (Dr. GRPO, arXiv:2503.20783, section 3.2).
    - prompt_mean: the mean over prompts of the token mean over all sequences of a prompt.
    - pair_mean: the mean over prompts of the token sum over all sequences of a prompt. For losses that sum to one
      number per prompt, which is what losses of pairs do.

    Args:
        average: Which of them.
        trained_tokens: Trained tokens of each sequence of the whole update, over all ranks.
        prompt_ids: Prompt of each sequence.
        max_length: The constant of `constant_length`.
    """
    trained = np.asarray(trained_tokens, dtype=np.int64)
    _, prompt, members = np.unique(np.asarray(prompt_ids), return_inverse=True, return_counts=True)
    match average:
        case "token_mean":
            pairs = [(1.0, float(tokens)) for tokens in trained]
        case "sequence_mean":
            pairs = [(1.0 / max(tokens, 1), 1.0) for tokens in trained]
        case "constant_length":
            pairs = [(1.0 / max_length, 1.0) for _ in trained]
        case "prompt_mean":
            totals = np.maximum(np.bincount(prompt, weights=trained), 1.0)[prompt]
            pairs = [(float(1.0 / total), float(tokens / total)) for tokens, total in zip(trained, totals, strict=True)]
        case "pair_mean":
            pairs = [(1.0, float(1.0 / of_prompt)) for of_prompt in members[prompt]]
    return [
        Share(weight, count) if tokens > 0 else Share(0.0, 0.0)
        for (weight, count), tokens in zip(pairs, trained, strict=True)
    ]


class Unit(NamedTuple):
    """Sequences that are packed together because they share their first tokens, or a single sequence."""

    members: tuple[int, ...]
    """Indices of the sequences in the mini-batch."""
    head: int
    """Number of shared first tokens; 0 for a single sequence."""
    tokens: int
    """Number of tokens of the unit, with the head counted once."""


def plan_units(
    lengths: Sequence[int], heads: Sequence[int], draws: Sequence[int], budget: int, *, whole_draws: bool = False
) -> list[Unit]:
    """Put neighbours of one draw into units of at most `budget` tokens, each head counted once per unit.

    Args:
        lengths: Tokens of each sequence.
        heads: Tokens it shares with the others of its draw; 0 where nothing is shared.
        draws: Its draw; sequences of one draw follow each other.
        budget: Most tokens of a unit; no sequence is longer.
        whole_draws: Keep all sequences of a draw in one unit, which is no longer than the budget, whatever they share.
    """
    units: list[Unit] = []
    last: int | None = None
    for index, (length, head, draw) in enumerate(zip(lengths, heads, draws, strict=True)):
        open_unit = units[-1] if units and draw == last and (head or whole_draws) else None
        if open_unit is not None and (whole_draws or open_unit.tokens + length - head <= budget):
            units[-1] = Unit((*open_unit.members, index), head, open_unit.tokens + length - head)
        else:
            units.append(Unit((index,), head, length))
        last = draw
    return units


def saves_work(unit: Unit, lengths: Sequence[int], attention_share: float) -> bool:
    """Return whether sharing a head is less work, where what follows it is computed side by side.

    Each member's own tokens then attend to the head and to as many of their own as the longest member has, masked,
    where a sequence alone has half of its pairs. A pair costs twice `attention_share`, which stands for half of them.

    Args:
        unit: Its head is forwarded once.
        lengths: Tokens of each sequence.
        attention_share: As in `plan_packs`.
    """
    count, sizes = len(unit.members), [lengths[index] for index in unit.members]
    longest = max(sizes) - unit.head
    alone = sum(length * length for length in sizes) / 2
    shared = unit.head * unit.head / 2 + count * longest * (unit.head + longest)
    return (count - 1) * unit.head + 2 * attention_share * (alone - shared) > 0


def taken_apart(unit: Unit, lengths: Sequence[int]) -> list[Unit]:
    """Return a unit's members as units of their own."""
    return [Unit((index,), 0, lengths[index]) for index in unit.members]


def plan_packs(
    lengths: Sequence[int], *, budget: int, ranks: int, padded: bool = False, attention_share: float = 1 / 16384
) -> Packs:
    """Assign units to packs of at most `budget` tokens, balanced over ranks.

    Args:
        lengths: Tokens of each unit; none is above `budget`.
        budget: Most tokens of a pack; with `padded`, rows times the longest row.
        ranks: Ranks that share the mini-batch.
        padded: One unit per row, padded to the longest of its pack.
        attention_share: Cost of a token pair in attention, relative to a token elsewhere; balances long against short.

    Raises:
        ValueError: A unit is longer than the budget.
    """
    if lengths and max(lengths) > budget:
        raise ValueError(f"a unit of {max(lengths)} tokens does not fit a pack of {budget}")
    everything = len(lengths) * max(lengths, default=0) if padded else sum(lengths)
    budget = min(budget, max(1, everything))  # more room changes nothing, and costs memory
    costs = [length * (1.0 + attention_share * length) for length in lengths]
    bins = _rows_of_equal_width(lengths, budget) if padded else best_fit_decreasing(lengths, budget)
    count = max(1, -(-len(bins) // ranks)) * ranks
    if padded:
        bins = _narrowest(lengths, budget, count)
        work = [len(units) * max(costs[unit] for unit in units) for units in bins]
    else:
        bins = _spread(lengths, costs, budget, count) or bins
        work = [sum(costs[unit] for unit in units) for units in bins]
    idle = count - len(bins)
    packs = [tuple(sorted(units, key=lambda unit: (lengths[unit], unit))) for units in bins] + [()] * idle
    return _deal(packs, work + [0.0] * idle, ranks)


def best_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack each item, longest first, into the fullest bin it fits (Johnson 1973: at most 11/9 of the optimum + 4).

    The set of free capacities is one integer used as a bit set, so finding the fullest bin that fits takes a shift
    and a lowest-set-bit: packing 100,000 items stays linear in practice and needs no tree.
    """
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    free = 0
    for item in order:
        length = lengths[item]
        fitting = free >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            stack = with_room[room]
            target = stack.pop()
            if not stack:
                free &= ~(1 << room)
            bins[target].append(item)
        else:
            target, room = len(bins), budget
            bins.append([item])
        remaining = room - length
        with_room.setdefault(remaining, []).append(target)
        free |= 1 << remaining
    return bins


def _spread(lengths: Sequence[int], costs: Sequence[float], budget: int, count: int) -> list[list[int]] | None:
    """Spread units over exactly `count` packs, always filling the cheapest that has room; None if one finds none."""
    heap: list[tuple[float, int, int]] = [(0.0, index, 0) for index in range(count)]
    packs: list[list[int]] = [[] for _ in range(count)]
    for item in sorted(range(len(lengths)), key=lambda unit: (-costs[unit], unit)):
        skipped = []
        while heap and heap[0][2] + lengths[item] > budget:
            skipped.append(heapq.heappop(heap))
            if len(skipped) > 32:
                return None
        if not heap:
            return None
        cost, index, tokens = heapq.heappop(heap)
        packs[index].append(item)
        heapq.heappush(heap, (cost + costs[item], index, tokens + lengths[item]))
        for entry in skipped:
            heapq.heappush(heap, entry)
    return packs


def _rows_of_equal_width(lengths: Sequence[int], budget: int) -> list[list[int]]:
    packs: list[list[int]] = []
    width = 0
    for item in sorted(range(len(lengths)), key=lambda unit: (-lengths[unit], unit)):
        if packs and (len(packs[-1]) + 1) * width <= budget:
            packs[-1].append(item)
        else:
            packs.append([item])
            width = lengths[item]
    return packs


def _narrowest(lengths: Sequence[int], budget: int, count: int) -> list[list[int]]:
    """Lay rows of equal width into at most `count` packs of the smallest budget that does it: nobody idles."""
    low, high = max(lengths, default=1), budget
    best = _rows_of_equal_width(lengths, budget)
    while low < high:
        middle = (low + high) // 2
        packs = _rows_of_equal_width(lengths, middle)
        if len(packs) <= count:
            best, high = packs, middle
        else:
            low = middle + 1
    return best


def _deal(packs: Sequence[tuple[int, ...]], work: Sequence[float], ranks: int) -> Packs:
    """Give packs of like work to the ranks of one micro-batch, so that nobody waits, and even out the totals."""
    ordered = sorted(range(len(packs)), key=lambda pack: (-work[pack], packs[pack]))
    load = [0.0] * ranks
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    for start in range(0, len(ordered), ranks):
        idlest_first = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for rank, number in zip(idlest_first, ordered[start : start + ranks], strict=True):
            load[rank] += work[number]
            dealt[rank].append(packs[number])
    return tuple(tuple(rank_packs) for rank_packs in dealt)


@dataclass(frozen=True)
class Layout:
    """Options of packing, which affect memory and speed only."""

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
    weighs_heads: bool = False
    """Whether they share it only where that is less work by `saves_work`, or where images belong to it."""
    whole_draws: bool = False
    """Whether all sequences of a draw, as many in each, go through one forward pass together."""
    context: int = 1
    """Neighbouring ranks that share every row; see `packing.split_row`."""
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
    micro_batches = []
    for number, units in enumerate(packs[ranks.rank]):
        members = [index for unit in units for index in unit.members]
        in_this_pass = (index for of_rank in packs for unit in of_rank[number] for index in unit.members)
        batch = pack(
            [examples[index] for index in members],
            [share[index] for index in members],
            padded=layout.padded,
            pad_token=layout.pad_token,
            dtype=layout.dtype,
            columns=layout.columns,
            heads=[head for unit in units for head in _heads(unit)],
            stand_in=layout.stand_in if any(sequences[index].has_inputs for index in in_this_pass) else {},
            multiple_of=layout.context,
        )
        micro_batches.append(split_row(batch, ranks.rank % layout.context, layout.context))
    forwarded = sum(unit.tokens for of_rank in packs for units in of_rank for unit in units) / layout.context
    tokens = sum(sequence.tokens for sequence in sequences)
    capacity = len(packs[0]) * ranks.size * config.tokens_per_micro_batch
    counted = {f"data/{name}": float(number) for name, number in candidates.counts.items()}
    return MiniBatch(
        micro_batches=tuple(micro_batches),
        count=sum(sequence_share.count for sequence_share in share),
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
    sequences: Sequence[SequenceInfo], draws: Sequence[int], ranks: int, budget: int, layout: Layout
) -> list[list[list[Unit]]]:
    """Return the units of every micro-batch of every rank; the ranks of a context group have the same."""
    budget *= layout.context
    units = _units(sequences, draws, budget, layout)
    rows = max((len(unit.members) for unit in units), default=1) if layout.padded else 1
    packs = plan_packs(
        [max(sequences[index].tokens for index in unit.members) if layout.padded else unit.tokens for unit in units],
        budget=budget // rows,
        ranks=ranks // layout.context,
        padded=layout.padded,
        attention_share=layout.attention_share,
    )
    groups = [[[units[number] for number in numbers] for numbers in of_group] for of_group in packs]
    return [of_group for of_group in groups for _ in range(layout.context)]


def _units(sequences: Sequence[SequenceInfo], draws: Sequence[int], budget: int, layout: Layout) -> list[Unit]:
    lengths = [sequence.tokens for sequence in sequences]
    heads = [sequence.head if layout.shares_heads else 0 for sequence in sequences]
    units = plan_units(lengths, heads, draws, budget, whole_draws=layout.whole_draws)
    if not layout.weighs_heads:
        return units
    weighed: list[Unit] = []
    for unit in units:
        # A tower that runs once for all members always pays.
        pays = sequences[unit.members[0]].has_inputs or saves_work(unit, lengths, layout.attention_share)
        weighed += [unit] if pays else taken_apart(unit, lengths)
    return weighed


def _heads(unit: Unit) -> list[CommonStart]:
    """Return one head for all members, or for each of those that only go together none."""
    return [CommonStart(len(unit.members), unit.head)] if unit.head else [CommonStart(1, 0)] * len(unit.members)


def _order_hash(sequences: Sequence[SequenceInfo]) -> float:
    """Return a number below 2**52 that two updates share only if they hold the same sequences in the same order."""
    indices = np.array([(sequence.draw, sequence.index_in_row) for sequence in sequences], dtype=np.int64)
    return float(xxhash.xxh3_64_intdigest(indices.tobytes()) >> 12)


def _move(
    candidates: Candidates[Example], ranks: Ranks, packs: Sequence[Sequence[Sequence[Unit]]]
) -> dict[int, Example]:
    """Send every sequence to the rank that trains it; return this rank's, by index."""
    own, sequences = candidates.own_sequences, candidates.sequences
    outgoing = [
        {
            index: own[sequences[index].draw, sequences[index].index_in_row]
            for index in sorted(index for units in of_rank for unit in units for index in unit.members)
            if sequences[index].owner == ranks.rank
        }
        for of_rank in packs
    ]
    examples: dict[int, Example] = {}
    for received in ranks.swap(outgoing):
        examples |= received
    return examples
