"""Rows being decoded, in memory that stays where it is, so that one recorded step can serve every token.

Rows lie side by side in slots. Where steps are recorded, a step is for a bucket: a number of rows and of blocks, both
rounded up, so that few different steps are recorded; rows that only fill the bucket are decoded too, and nobody reads
them. Elsewhere a step is for the rows and blocks that there are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.parallel.forms import Forms
from holdfast.rollout.local.blocks import PADDING, RESERVED, SCRATCH, Blocks
from holdfast.rollout.local.cache import BLOCK_SIZE, View
from holdfast.rollout.local.fused import LoseForm, StepForm, step_graph
from holdfast.rollout.local.graphs import CHECKED_STEPS, DrawToken, NotReplayable
from holdfast.rollout.local.predictor import Predictor, RowState
from holdfast.rollout.local.recordings import Recordings
from holdfast.rollout.local.slots import Bucket, Slots, bucket_of, power_of_two
from holdfast.types import host_value

_COMPARED_ROWS = 8
"""Rows for which two forms of attention are compared: gathered blocks of all rows may have no room."""


class Drawn(NamedTuple):
    """What rows have drawn since the last look, on the host."""

    tokens: list[list[int]]
    """Of each row."""
    logprobs: list[list[float]]


class DeviceRows:
    """Rows in slots; the host knows how long they are, and which blocks they have.

    Args:
        predictor: What steps.
        kept: Their memory, and what was recorded.
        blocks: Which blocks are whose.
        forms: Of what recorded steps compute; those that do not go on without the later ones come first.
        most_blocks: Blocks that no row will exceed, where that is known.
        look_every: Most steps between two looks.
        lose: Is told of optional forms that are given up; default: they are printed.
    """

    def __init__(  # noqa: PLR0913 - what a step is made of
        self,
        predictor: Predictor,
        kept: Recordings,
        blocks: Blocks,
        *,
        forms: Sequence[StepForm] = (),
        most_blocks: int | None = None,
        look_every: int = 1,
        lose: LoseForm | None = None,
    ) -> None:
        self._lose = lose or Forms().lose
        self._predictor, self._kept, self.cache, self._blocks = predictor, kept, kept.cache, blocks
        self._forms, self._most_blocks, self._look_every = forms, most_blocks, look_every
        self._bucket = Bucket(0, 0)
        self._part: Slots | None = None
        """The part of the memory that the bucket has."""
        self.lengths = np.zeros(0, np.int64)
        """[rows] tokens of each row whose keys and values are in blocks; every step adds one to all"""
        self.tables: list[list[int]] = []
        """The blocks of each row."""
        self._tables_changed = False
        self._expected = RESERVED
        """Number of blocks that are known to be enough."""
        self._unseen = 0
        """Steps since the last look."""

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def records(self) -> bool:
        """Whether steps are recorded."""
        return self._kept.recorder is not None

    def add(self, state: RowState, lengths: Sequence[int], tables: Sequence[list[int]]) -> None:
        """Append rows; nothing is drawn and not yet looked at."""
        assert self._unseen == 0
        start, end = len(self), len(self) + len(lengths)
        memory = self._memory_for(state, end, max(map(len, tables)))
        for tensor, new in zip(memory.state.tensors(), state.tensors(), strict=True):
            tensor[start:end] = new
        memory.lengths[start:end] = torch.tensor(lengths).to(memory.lengths.device)
        self.lengths = np.concatenate([self.lengths, np.asarray(lengths, np.int64)])
        self.tables += tables
        self._tables_changed = True

    def remove(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Drop rows and give their blocks back; the last rows take their slots.

        Returns:
            (from, to) of the rows that moved, in the order in which they did.
        """
        memory = self._kept.slots
        assert self._unseen == 0 and memory is not None
        gone, left = set(numbers), len(self) - len(numbers)
        movers = [number for number in range(left, len(self)) if number not in gone]
        holes = sorted(number for number in gone if number < left)
        for number in numbers:
            self._blocks.give_back(self.tables[number])
        for source, target in zip(movers, holes, strict=True):
            self.tables[target], self.lengths[target] = self.tables[source], self.lengths[source]
        if movers:
            sources, targets = (
                torch.tensor(some).to(memory.lengths.device, non_blocking=True) for some in (movers, holes)
            )
            for tensor in memory.row_tensors():
                tensor[targets] = tensor[sources]
        del self.tables[left:]
        self.lengths = self.lengths[:left].copy()
        self._tables_changed = True
        return list(zip(movers, holes, strict=True))

    def stretch(self, length: int) -> None:
        """Let every row have so many tokens, whatever they are."""
        assert self._kept.slots is not None
        self.lengths[:] = length
        self._kept.slots.lengths[: len(self)] = length

    def missing_blocks(self, count: int) -> list[int]:
        """Return how many blocks each row lacks for so many tokens more."""
        ends = self.lengths + (max(count, CHECKED_STEPS) if self.records else count)
        return [
            max(0, self._blocks.needed(int(end)) - len(table)) for end, table in zip(ends, self.tables, strict=True)
        ]

    def reserve(self, missing: Sequence[int]) -> None:
        """Give each row so many blocks more."""
        if not any(missing):
            return
        fresh = self._blocks.take(sum(missing))
        self.fit_memory()
        self.cache.clear(fresh)
        for table, count in zip(self.tables, missing, strict=True):
            table += [fresh.pop() for _ in range(count)]
        self._tables_changed = True

    def expect(self, count: int) -> None:
        """Know how many blocks will be used at most: where moving memory would cost recordings, have it at once."""
        self._expected = RESERVED + (count if self._blocks.limit is None else min(count, self._blocks.limit))
        if self.records and self._expected > self.cache.capacity:
            if self._blocks.end > RESERVED:  # blocks that are remembered have no reader
                self._move_memory(self._expected)
            else:
                self._kept.renew(self._expected, None if self._blocks.limit is None else RESERVED + self._blocks.limit)

    def fit_memory(self) -> None:
        """Have memory for all blocks that were given out, with some room that saves further moves."""
        if self._blocks.end > self.cache.capacity:
            self._move_memory(max(self._blocks.end, min(self.cache.capacity * 3 // 2, self._expected)))

    def _move_memory(self, capacity: int) -> None:
        self.cache.grow(capacity)
        self._kept.forget()

    def run(self, count: int) -> None:
        """Draw that many tokens in every row, at most `look_every`, for which blocks are reserved."""
        assert count <= self._look_every
        self.settle(count)
        in_place = self.cache.in_place
        if in_place is not None and in_place.agrees is None:
            self.compare_attention()
            if in_place.reason and not in_place.planned:
                self._lose("attention", in_place.reason)
        try:
            draw_token = self._drawing()
        except NotReplayable as reason:
            self._kept.forget()
            self._kept.recorder = None
            self._lose("steps", str(reason))
            self.settle(count)
            draw_token = self.step
        for _ in range(count):
            draw_token()
            self.lengths += 1
            self._unseen += 1

    def _drawing(self) -> DrawToken:
        """Return what draws a token in every row: the step, or its recording."""
        recorder = self._kept.recorder
        if recorder is None:
            return self.step
        replay = self._kept.replay(self._purpose())
        return replay or self._kept.record(
            self._purpose,
            lambda: step_graph(recorder, self, self._predictor, self._forms, self._lose),
        )

    def _purpose(self) -> Hashable:
        """Return what one recording is for: a bucket, a distribution, and the forms of what is computed."""
        forms = self.cache.in_place and self.cache.in_place.agrees, tuple(form.are_sound for form in self._forms)
        return self._bucket, self._predictor.distribution, forms

    def compare_attention(self) -> None:
        """Find out whether blocks can be read in place, by a step of some rows, which draws nothing.

        Nothing of it is used, so that what rows draw does not follow from what this process has compared.
        """
        in_place = self.cache.in_place
        assert in_place is not None
        whole, lengths = self._now, self.lengths
        self._part, self.lengths = whole.first(_COMPARED_ROWS, whole.tables.shape[1]), lengths[:_COMPARED_ROWS]
        before = [tensor.clone() for tensor in self.changed()]
        with in_place.comparing():
            self.step()
        for tensor, value in zip(self.changed(), before, strict=True):
            tensor.copy_(value)
        self._part, self.lengths = whole, lengths

    def look(self) -> Drawn:
        """Bring what was drawn to the host."""
        tokens, logprobs = (host_value(part, "drawn tokens").tolist() for part in self.written(self._unseen))
        self._unseen = 0
        self._now.cursor.zero_()
        return Drawn(tokens, logprobs)

    def step(self) -> None:
        """Draw one token in every row: a function of fixed memory alone, which it changes in place."""
        now = self._now
        longest = self._bucket.blocks * BLOCK_SIZE
        if self.records:
            # Rows that only fill a bucket grow beyond it, and write their last place again.
            view = View.of(now.tables, now.lengths.clamp(max=longest - 1)[:, None], longest, decodes=True)
        else:
            longest = int(self.lengths.max()) + 1
            even = bool((self.lengths + 1 == longest).all())
            view = View.of(now.tables, now.lengths.clone()[:, None], longest, even=even, decodes=True)
        self.cache.view = view
        tokens, logprobs = self._predictor.step(now.state, self.cache, has_fillers=self.records)
        now.lengths.add_(1)
        now.tokens.index_copy_(1, now.cursor, tokens[:, None])
        now.logprobs.index_copy_(1, now.cursor, logprobs[:, None])
        now.cursor.add_(1)

    def changed(self) -> list[Tensor]:
        """Return what a step reads and then changes; not of rows that only fill a bucket.

        Those write one place together, and on CUDA it is left to chance which of them is the last.
        """
        return [*(tensor[: len(self)] for tensor in self._now.row_tensors()), self._now.cursor]

    def written(self, count: int) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probabilities of the first steps since the last look, [rows, count] each."""
        rows = len(self)
        return self._now.tokens[:rows, :count], self._now.logprobs[:rows, :count]

    @property
    def _now(self) -> Slots:
        assert self._part is not None
        return self._part

    def settle(self, count: int) -> None:
        """Choose the bucket of the next steps, and bring the rows' blocks to the device."""
        held = self._kept.slots
        assert self._unseen == 0 and held is not None
        rows, blocks = len(self), self._blocks.needed(int(self.lengths.max()) + count)
        bucket = bucket_of(rows, blocks, self._most_blocks) if self.records else Bucket(rows, blocks)
        if bucket == self._bucket and not self._tables_changed:
            return
        memory = self._memory_for(held.state, bucket.rows, bucket.blocks)
        self._bucket, self._part = bucket, memory.first(bucket.rows, bucket.blocks)
        tables = np.full((bucket.rows, bucket.blocks), SCRATCH, np.int64)
        for number, table in enumerate(self.tables):
            tables[number, : len(table)] = table[: bucket.blocks]
            tables[number, len(table) :] = PADDING
        self._part.tables.copy_(torch.from_numpy(tables).to(self._part.tables.device, non_blocking=True))
        self._part.lengths[rows:] = 0
        self._tables_changed = False

    def _memory_for(self, state: RowState, rows: int, blocks: int) -> Slots:
        """Return memory for so many slots; if there was too little, what was recorded speaks of memory that goes."""
        memory, kept = self._kept.slots, self._kept
        if self.records:
            rows = bucket_of(rows, blocks, None).rows
        if memory is not None and not memory.holds(state):
            assert not len(self), "rows of a rollout are of one kind"
            memory = None
        if memory is not None and rows <= len(memory.lengths) and blocks <= memory.tables.shape[1]:
            return memory
        kept.forget()
        wide = torch.float64 if self._predictor.head.weight.dtype == torch.float64 else torch.float32
        held = (0, 0) if memory is None else memory.tables.shape
        columns = max(self._look_every, CHECKED_STEPS)
        sizes = power_of_two(max(rows, held[0])), power_of_two(max(blocks, held[1], self._most_blocks or 0))
        kept.slots = Slots.like(state, *sizes, columns, wide)
        if memory is not None:
            for new, old in zip(kept.slots.row_tensors(), memory.row_tensors(), strict=True):
                new[: len(old)] = old
        self._tables_changed, self._bucket = True, Bucket(0, 0)
        return kept.slots
