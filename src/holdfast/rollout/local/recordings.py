"""What stays between rollouts where steps are recorded: blocks, slots, and the recordings that speak of both.

A recording repeats operations on the memory that it met. Whatever moves that memory forgets all recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext

import torch

from holdfast.models.chunks.logits import HeadWeights
from holdfast.rollout.local.block_attention import InPlace
from holdfast.rollout.local.blocks import PADDING, SCRATCH
from holdfast.rollout.local.cache import BlockCache
from holdfast.rollout.local.graphs import DrawToken, Recorder
from holdfast.rollout.local.slots import Slots

_ROOM = 1.25
"""Factor by which blocks are more than a later rollout needs, so that few rollouts move them."""


class Recordings:
    """Recorded steps, and the device memory that they read and write.

    Args:
        in_place: Whether decoding steps read blocks in place.
        recorder: What records steps; None where each operation is called for every token.
        measured: Measures the block in which a step is recorded.
    """

    def __init__(
        self,
        in_place: InPlace | None = None,
        recorder: Recorder | None = None,
        measured: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.cache = BlockCache(in_place)
        self.recorder = recorder
        self.slots: Slots | None = None
        self.head: HeadWeights | None = None
        """The output layer in another dtype than the model's."""
        self._measured = measured
        self._replays: dict[Hashable, DrawToken] = {}
        self._made = 0
        self._has_room = True

    @property
    def stays(self) -> bool:
        """Whether memory and recordings are kept when a rollout ends."""
        return self.recorder is not None and self._has_room

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        if self.recorder is None:
            return 0
        tensors = [tensor for pair in self.cache.pairs.values() for tensor in pair] + list(self.head or ())
        slots = 0 if self.slots is None else self.slots.nbytes
        return slots + self.recorder.nbytes + sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is recorded."""
        return not self._replays

    def begin(self) -> None:
        """Let a rollout find memory as if it were fresh: rows that only fill a bucket read what nobody writes anew."""
        if self.slots is not None:
            self.slots.reset()
        self.cache.clear([PADDING, SCRATCH])

    def replay(self, key: Hashable) -> DrawToken | None:
        """Return the recording that serves a purpose, None where there is none."""
        return self._replays.get(key)

    def record(self, key: Callable[[], Hashable], record: Callable[[], DrawToken]) -> DrawToken:
        """Record a step, and keep it for a purpose, which is asked for behind it."""
        with self._measured():
            replay = record()
        self._made += 1
        return self._replays.setdefault(key(), replay)

    def made(self) -> int:
        """Return how many recordings were made since the last call."""
        count, self._made = self._made, 0
        return count

    def renew(self, blocks: int, most: int | None) -> None:
        """Have memory for so many blocks, none of which is used; if there is room, for more that later rollouts need.

        Args:
            blocks: Those that this rollout needs.
            most: Those that no rollout exceeds; None where that is not known.
        """
        self.forget()
        roomy = max(blocks, int(self.cache.capacity * _ROOM))
        try:
            self.cache.renew(roomy if most is None else max(blocks, min(roomy, most)))
        except torch.OutOfMemoryError:
            self.free()
            self.give_up("more of them have no room beside what is in memory")
            self.cache.renew(blocks)

    def give_up(self, reason: str) -> None:
        """Keep nothing from one rollout to the next from here on."""
        if self.stays:
            print(f"rollouts: memory of completions is given back after each rollout from here on, since {reason}")
        self._has_room = False

    def wide_head(self, head: HeadWeights) -> HeadWeights:
        """Return an output layer in float32, in memory that stays."""
        if self.head is None:
            self.head = HeadWeights(head.weight.float(), None if head.bias is None else head.bias.float())
            return self.head
        for wide, narrow in zip(self.head, head, strict=True):
            if wide is not None and narrow is not None:
                wide.copy_(narrow)
        return self.head

    def forget(self) -> None:
        """Forget what was recorded: the memory that it speaks of moves."""
        self._replays.clear()
        if self.recorder is not None:
            self.recorder.forget()

    def free(self) -> None:
        """Give all memory back."""
        self.forget()
        self.slots = self.head = None
        self.cache.free()
