"""Decide which sequences share a forward pass, and on which rank: pure functions of lengths.

The plan has the same number of micro-batches on every rank, since a rank that stops early leaves the others waiting in
FSDP's collectives. It affects memory and speed only, never the result.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class PackPlan:
    """Units (indices into the mini-batch) of every micro-batch of every rank."""

    packs: tuple[tuple[tuple[int, ...], ...], ...]
    """[rank][micro-batch] -> indices, shortest unit first"""

    @property
    def micro_batches(self) -> int:
        """Forward passes per rank."""
        return len(self.packs[0])


class Unit(NamedTuple):
    """Sequences that are packed together because they share their first tokens; mostly one alone."""

    members: tuple[int, ...]
    """Indices into the mini-batch."""
    head: int
    """Tokens they share; 0 for one alone."""
    tokens: int
    """Tokens they take together."""


def plan_units(
    lengths: Sequence[int], heads: Sequence[int], draws: Sequence[int], budget: int, *, whole: bool = False
) -> list[Unit]:
    """Put neighbours of one draw into units of at most `budget` tokens, each head counted once per unit.

    Args:
        lengths: Tokens of each sequence.
        heads: Tokens it shares with the others of its draw; 0 where nothing is shared.
        draws: Its draw; sequences of one draw follow each other.
        budget: Most tokens of a unit; no sequence is longer.
        whole: Keep all sequences of a draw together, whatever they share; together they are no longer than the budget.
    """
    units: list[Unit] = []
    last: int | None = None
    for index, (length, head, draw) in enumerate(zip(lengths, heads, draws, strict=True)):
        open_unit = units[-1] if units and draw == last and (head or whole) else None
        if open_unit is not None and (whole or open_unit.tokens + length - head <= budget):
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
    count, whole = len(unit.members), [lengths[index] for index in unit.members]
    longest = max(whole) - unit.head
    alone = sum(length * length for length in whole) / 2
    shared = unit.head * unit.head / 2 + count * longest * (unit.head + longest)
    return (count - 1) * unit.head + 2 * attention_share * (alone - shared) > 0


def taken_apart(unit: Unit, lengths: Sequence[int]) -> list[Unit]:
    """Return a unit's members as units of their own."""
    return [Unit((index,), 0, lengths[index]) for index in unit.members]


def plan_packs(
    lengths: Sequence[int], *, budget: int, ranks: int, padded: bool = False, attention_share: float = 1 / 16384
) -> PackPlan:
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
    budget = min(budget, _room_for_all(lengths, padded))  # more room changes nothing, and costs memory
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
    return PackPlan(_deal(packs, work + [0.0] * idle, ranks))


def _room_for_all(lengths: Sequence[int], padded: bool) -> int:
    return max(1, len(lengths) * max(lengths, default=0) if padded else sum(lengths))


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
        left = room - length
        with_room.setdefault(left, []).append(target)
        free |= 1 << left
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


def _deal(
    packs: Sequence[tuple[int, ...]], work: Sequence[float], ranks: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Give packs of like work to the ranks of one micro-batch, so that nobody waits, and even out the totals."""
    ordered = sorted(range(len(packs)), key=lambda pack: (-work[pack], packs[pack]))
    load = [0.0] * ranks
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    for start in range(0, len(ordered), ranks):
        idlest_first = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for rank, pack in zip(idlest_first, ordered[start : start + ranks], strict=True):
            load[rank] += work[pack]
            dealt[rank].append(packs[pack])
    return tuple(tuple(rank_packs) for rank_packs in dealt)
