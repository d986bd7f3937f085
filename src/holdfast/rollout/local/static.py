"""Rows in memory that stays where it is, so that one recorded step serves every token.

Rows lie in a bucket: a number of rows and a room of tokens, both rounded up, so that few different steps are recorded.
A step looks at the whole room and hides what lies behind each row's end by lengths that are on the device; rows that
only fill the bucket are decoded too, and nobody reads them. When rows become too long, end or arrive, all of them move
to the bucket that fits, between two looks of the host. All buckets lie in the same memory, as large as the largest so
far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.rollout.local.cache import HeldCache, KeysAndValues, RowCache, View
from holdfast.rollout.local.graphs import CHECKED_STEPS, DrawToken, Recorder, recorded_graph
from holdfast.rollout.local.predictor import Drawn, EagerRows, Predictor, RowState
from holdfast.types import host_value

_LEAST_ROOM = 256
_ROOM_OF_DOUBLING = 2048
"""Tokens up to which the room doubles; beyond, it grows by quarters: keys and values of long rows fill the memory."""
_ROOM_UNIT = 64


class Bucket(NamedTuple):
    """What one recorded step is for."""

    rows: int
    room: int
    """Tokens of each row."""


def bucket_of(rows: int, tokens: int, most: int) -> Bucket:
    """Return the bucket of some rows.

    Args:
        rows: How many.
        tokens: Tokens that the longest of them must have room for.
        most: Tokens that none will ever exceed; more room would never be used.
    """
    room = max(_LEAST_ROOM, _power_of_two(tokens))
    if room > _ROOM_OF_DOUBLING:
        room = _up_to(tokens, room // 8)
    return Bucket(_power_of_two(rows), min(room, _up_to(max(most, tokens), _ROOM_UNIT)))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _up_to(number: int, unit: int) -> int:
    return -(-number // unit) * unit


class StaticCache(HeldCache):
    """Keys and values of a bucket; the rows' lengths are on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = torch.empty(0, dtype=torch.int64)
        """[rows] int64 on the device"""
        self._memory: dict[int, KeysAndValues] = {}
        """Layer -> flat keys and values, of which `held` is the beginning"""
        self._room = 0

    def begin_step(self) -> None:
        """Count the step's token in every row; rows that have ended may be full, and write their last place again."""
        self._view = View(self._room, None, self.lengths.clamp(max=self._room - 1))
        self.lengths.add_(1)

    def lay(self, bucket: Bucket, own: Tensor, tokens: int, more: RowCache | None) -> None:
        """Lay rows into a bucket.

        Args:
            bucket: The bucket.
            own: [n] int64, rows that are held and stay.
            tokens: How many of each of these are of use.
            more: Rows that come behind them.
        """
        self._room = bucket.room
        for layer in more.pairs if more is not None else self.pairs:
            parts = [] if more is None else [more.pairs[layer]]
            if len(own):
                keys, values = (tensor[:, :, :tokens].index_select(0, own) for tensor in self.pairs[layer])
                parts.insert(0, (keys, values))
            memory = self._memory.get(layer, (None, None))
            # One layer after the other, so that no two copies of everything are alive.
            (keys, values), self._memory[layer] = zip(
                *(_laid(memory[which], [part[which] for part in parts], bucket) for which in (0, 1)), strict=True
            )
            self.pairs[layer] = (keys, values)


def _laid(memory: Tensor | None, parts: Sequence[Tensor], bucket: Bucket) -> tuple[Tensor, Tensor]:
    """Lay parts [n, heads, T, size] below each other; return them as [rows, heads, room, size], and their memory."""
    _, heads, _, size = parts[0].shape
    elements = bucket.rows * heads * bucket.room * size
    if memory is None or memory.numel() < elements:
        memory = parts[0].new_empty(elements)
    laid = memory[:elements].view(bucket.rows, heads, bucket.room, size)
    laid.zero_()  # what lies behind a row's end gets no weight, but no weight times infinity is not nothing
    start = 0
    for part in parts:
        laid[start : start + len(part), :, : part.shape[2]] = part[:, :, : bucket.room]
        start += len(part)
    return laid, memory


class _Buffers(NamedTuple):
    """All that a step changes beside keys and values."""

    state: RowState
    lengths: Tensor
    """[rows] int64, tokens in each row"""
    tokens: Tensor
    """[rows, columns] int64, what was drawn since the last look"""
    logprobs: Tensor
    """[rows, columns]"""
    cursor: Tensor
    """[1] int64, the column that comes next"""

    @classmethod
    def like(cls, state: RowState, rows: int, columns: int, dtype: torch.dtype) -> _Buffers:
        """Return buffers for so many rows of this kind."""
        whole = state.last.new_zeros
        logprobs = whole(rows, columns, dtype=dtype)
        return cls(state.empty(rows), whole(rows), whole(rows, columns), logprobs, whole(1))

    def first(self, rows: int) -> _Buffers:
        """Return the same memory's first rows."""
        some = slice(rows)
        return _Buffers(self.state.of(some), self.lengths[some], self.tokens[some], self.logprobs[some], self.cursor)

    def fill(self, state: RowState, lengths: Sequence[int]) -> None:
        """Begin with these rows; the others are empty ones."""
        rows = len(lengths)
        for buffer, new in zip(self.state.tensors(), state.tensors(), strict=True):
            buffer.zero_()[:rows] = new
        self.lengths.zero_()[:rows] = torch.tensor(lengths).to(self.lengths.device)
        self.cursor.zero_()


class StaticRows:
    """Rows in fixed memory, where every step is a replay.

    Args:
        predictor: What steps.
        recorder: What records steps.
        most: Tokens that no row will exceed.
        look_every: Most steps between two looks.
    """

    def __init__(self, predictor: Predictor, recorder: Recorder, most: int, look_every: int) -> None:
        self._predictor, self._recorder = predictor, recorder
        self._most, self._look_every = most, look_every
        self._replays: dict[Bucket, DrawToken] = {}
        self._bucket = Bucket(0, 0)
        self._cache = StaticCache()
        self._memory: _Buffers | None = None
        self._memory_places = 0
        """Rows times room that there is memory for."""
        self._held: _Buffers | None = None
        """The part of the memory that the bucket has."""
        self._lengths: list[int] = []
        """Tokens in each row; every step adds one to all, so the device need not be asked."""
        self._unseen = 0
        """Steps since the last look."""

    @property
    def _now(self) -> _Buffers:
        assert self._held is not None
        return self._held

    def load(self, rows: EagerRows) -> None:
        """Take rows in, and forget all others."""
        self._settle([], rows)

    def add(self, other: EagerRows) -> None:
        """Append rows; nothing is drawn and not yet looked at."""
        self._settle(range(len(self._lengths)), other)

    def keep(self, left: Sequence[int]) -> None:
        """Drop all rows but these; nothing is drawn and not yet looked at."""
        self._settle(left)

    def run(self, count: int) -> None:
        """Draw that many tokens in every row, at most `look_every` before the next look.

        Raises:
            NotReplayable: Nothing was drawn, and nothing can be here.
        """
        assert self._unseen + count <= self._look_every
        if self._room_for(count, self._lengths) > self._bucket.room:
            self._settle(range(len(self._lengths)))
        replay = self._replays.get(self._bucket)
        if replay is None:
            dtype = self._predictor.replica.model.dtype
            replay = self._replays[self._bucket] = recorded_graph(self._recorder, self, dtype)
        for _ in range(count):
            replay()
        self._lengths = [length + count for length in self._lengths]
        self._unseen += count

    def look(self) -> Drawn:
        """Bring what was drawn to the host."""
        tokens, logprobs = self.written(self._unseen)
        on_host = [host_value(part, "drawn tokens").tolist() for part in (tokens, logprobs)]
        drawn = Drawn(on_host[0], on_host[1], None)
        self._unseen = 0
        self._now.cursor.zero_()
        return drawn

    def step(self) -> None:
        """Draw one token in every row: a function of fixed memory alone, which it changes in place."""
        now = self._now
        tokens, logprobs, _ = self._predictor.step(now.state, self._cache)
        now.tokens.index_copy_(1, now.cursor, tokens[:, None])
        now.logprobs.index_copy_(1, now.cursor, logprobs[:, None])
        now.cursor.add_(1)

    def changed(self) -> list[Tensor]:
        """Return what a step reads and then changes."""
        return [*self._now.state.tensors(), self._now.lengths, self._now.cursor]

    def written(self, count: int) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probabilities of the first steps since the last look, [rows, count] each."""
        rows = len(self._lengths)
        return self._now.tokens[:rows, :count], self._now.logprobs[:rows, :count]

    def plain(self) -> EagerRows:
        """Return the rows, to be decoded without recordings; what is here is theirs from now on."""
        rows, room = slice(len(self._lengths)), self._bucket.room
        pairs = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self._cache.pairs.items()}
        lengths = [min(length, room) for length in self._lengths]
        return EagerRows(self._predictor, self._now.state.of(rows), RowCache(pairs, lengths))

    def close(self) -> None:
        """Forget what was recorded."""
        self._replays.clear()
        self._recorder.forget()

    def _room_for(self, count: int, lengths: Sequence[int]) -> int:
        """Return the room that so many steps need; only rows that have ended go on beyond what any row may have."""
        return min(max(lengths) + count, self._most)

    def _settle(self, own: Sequence[int], more: EagerRows | None = None) -> None:
        """Lay some of the rows, and further ones behind them, into the bucket that fits until the next look."""
        assert self._unseen == 0
        own_lengths = [self._lengths[number] for number in own]
        lengths = own_lengths + ([] if more is None else more.cache.lengths)
        bucket = bucket_of(len(lengths), self._room_for(self._look_every, lengths), self._most)
        index = torch.tensor(list(own), dtype=torch.int64).to(self._predictor.device)
        states = [self._now.state.of(index)] if own_lengths else []
        states += [] if more is None else [more.state]
        state = states[0] if len(states) == 1 else states[0].joined(states[1])
        memory = self._memory_for(bucket, state)
        self._cache.lay(bucket, index, max(own_lengths, default=0), None if more is None else more.cache)
        self._lengths, self._bucket, self._held = lengths, bucket, memory.first(bucket.rows)
        self._now.fill(state, lengths)
        self._cache.lengths = self._now.lengths

    def _memory_for(self, bucket: Bucket, state: RowState) -> _Buffers:
        """Return memory for a bucket; if there was too little, what was recorded speaks of memory that goes."""
        places, memory = bucket.rows * bucket.room, self._memory
        if memory is not None and bucket.rows <= len(memory.lengths) and places <= self._memory_places:
            return memory
        self.close()
        self._memory_places = max(self._memory_places, places)
        if memory is None or bucket.rows > len(memory.lengths):
            wide = torch.float64 if self._predictor.head.weight.dtype == torch.float64 else torch.float32
            columns = max(self._look_every, CHECKED_STEPS)
            memory = self._memory = _Buffers.like(state, bucket.rows, columns, wide)
        return memory
