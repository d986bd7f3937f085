"""Which blocks of the cache rows have, and how many rows read each of them.

A block has room for the keys and values of a few tokens, in all layers. A row has as many blocks as its tokens fill, so
memory follows tokens, and rows of one prompt read the same blocks of it. A full block may be remembered by all tokens
up to its end: without readers it stays as it is until no other block is free, and a later text that begins with the
same tokens reads it. Nothing here touches the device.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

PADDING, SCRATCH = 0, 1
"""The block behind a row's end, which is never written, and the block that rows write which nobody reads."""
RESERVED = 2
"""Number of blocks that no row has."""


def keys_of(tokens: NDArray[np.int64], block_size: int) -> list[bytes]:
    """Return a key of each full block of a text; equal keys mean equal tokens up to the blocks' ends."""
    keys, key = [], b""
    for end in range(block_size, len(tokens) + 1, block_size):
        block = np.ascontiguousarray(tokens[end - block_size : end], dtype=np.int64)
        key = hashlib.blake2b(key + block.tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


class Blocks:
    """Gives blocks out and takes them back.

    Args:
        block_size: Tokens in a block.
        limit: Largest number of blocks that rows have at one time; None for no limit. One row always has room.
    """

    def __init__(self, block_size: int, limit: int | None = None) -> None:
        self.block_size, self.limit = block_size, limit
        self.end = RESERVED
        """One more than the largest block that was ever given out."""
        self._free: list[int] = []
        self._readers: Counter[int] = Counter()
        self._remembered: dict[bytes, int] = {}
        """Key -> block."""
        self._keys: dict[int, bytes] = {}
        """Block -> key."""
        self._idle: dict[int, None] = {}
        """Remembered blocks without readers; the one that was read longest ago is first."""

    @property
    def used(self) -> int:
        """Number of blocks that rows have."""
        return len(self._readers)

    def needed(self, tokens: int) -> int:
        """Return how many blocks so many tokens fill."""
        return -(-tokens // self.block_size)

    def most(self, prompts: Iterable[tuple[int, int]], new_tokens: int, rows: int) -> int:
        """Return the most blocks that can be used at one time, if completions are as long as they may be.

        Args:
            prompts: (tokens, completions) of each.
            new_tokens: Most tokens of a completion, and those by which steps run ahead.
            rows: Largest number of completions that are decoded together.
        """
        # The last block of a prompt is copied for each completion, unless it is full.
        costs = [
            (self.needed(length), self.needed(length % self.block_size + new_tokens), count)
            for length, count in prompts
        ]
        total = 0
        for prompt, completion, count in sorted(costs, reverse=True):
            begun = min(rows, count)
            if not begun:
                break
            total, rows = total + prompt + begun * completion, rows - begun
        return total

    def fit(self, row: int) -> None:
        """Raise the limit where it has no room for one row that needs so many blocks."""
        if self.limit is not None:
            self.limit = max(self.limit, row)

    def has(self, count: int) -> bool:
        """Whether so many blocks can be given out."""
        return self.limit is None or self.used + count <= self.limit

    def take(self, count: int) -> list[int]:
        """Give out blocks, each with one reader; remembered ones only where no other is left within the limit."""
        assert self.has(count), "whoever takes blocks asks first"
        blocks = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = count - len(blocks)
        if self.limit is not None:
            fresh = min(fresh, max(0, RESERVED + self.limit - self.end))
        blocks += range(self.end, self.end + fresh)
        self.end += fresh
        for block in list(self._idle)[: count - len(blocks)]:
            del self._idle[block], self._remembered[self._keys.pop(block)]
            blocks.append(block)
        self._readers.update(blocks)
        return blocks

    def remember(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Remember full blocks of a text, which have readers, by the keys of `keys_of`."""
        for key, block in zip(keys, blocks, strict=False):
            if key not in self._remembered and block not in self._keys:
                self._remembered[key], self._keys[block] = block, key

    def known(self, keys: Sequence[bytes]) -> list[int]:
        """Return the remembered blocks of the longest beginning of a text."""
        blocks: list[int] = []
        for key in keys:
            if key not in self._remembered:
                break
            blocks.append(self._remembered[key])
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more reader of each."""
        for block in blocks:
            self._idle.pop(block, None)
            self._readers[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Count one reader of each less; blocks without a reader can be given out again, the last of a text first."""
        for block in reversed(list(blocks)):
            self._readers[block] -= 1
            if self._readers[block]:
                continue
            del self._readers[block]
            if block in self._keys:
                self._idle[block] = None
            else:
                self._free.append(block)
