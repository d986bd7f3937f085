"""Keys and values in blocks, and attention over them.

`blocks.Blocks` says which blocks a row has; `BlockCache` has their memory. While prompts are computed, or a piece of a
long one, their keys and values are written to the blocks as they come. A decoding step writes one token to each row,
and looks at the row's blocks through a table: in place by a kernel (`block_attention`), or in a contiguous copy, which
serves CPUs, several queries of a row, and models that make keys and values of what the cache keeps. Nothing here waits
for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own short name
from torch import Tensor, nn
from transformers import Cache

from holdfast.models.layers.attention import packed_attention
from holdfast.rollout.local.block_attention import InPlace, Operands

CACHED = "holdfast_cached"
"""Name under which transformers finds attention over this cache."""

BLOCK_SIZE = 16
"""Tokens in a block."""

KeysAndValues = tuple[Tensor, Tensor]
"""Keys and values of a layer, [blocks, block size, key heads, head size]."""


def register_cache() -> None:
    """Make attention over the cache known to transformers; doing it again changes nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(CACHED, cached_attention)


class StateKey(NamedTuple):
    """Names one state of a recurrent layer, as transformers does."""

    layer: int
    number: int
    kind: str


class View:
    """Which places of the cache one pass writes, and which it sees.

    Args:
        tables: [rows, blocks] int64, the blocks of each row in the order of its tokens; None where whole prompts are
            computed, which see what is computed with them and nothing else.
        positions: [rows, queries] int64, the places in each row that are written.
        longest: Places that are looked at in every row.
        written: [rows x queries] int64, block x block size + offset of what is written.
        even: All rows see all places that are looked at.
        decodes: It is a decoding step, which may read blocks in place. A piece of a text gathers them, also one of a
            single token, so that its bits do not depend on whether two forms have been compared yet.
    """

    def __init__(  # noqa: PLR0913 - what a pass is known by
        self,
        tables: Tensor | None,
        positions: Tensor,
        longest: int,
        written: Tensor,
        *,
        even: bool = False,
        decodes: bool = False,
    ) -> None:
        self.tables, self.positions, self.longest, self.written = tables, positions, longest, written
        self.decodes = decodes
        self._even = even
        self._masks: dict[tuple[int | None, torch.dtype], Tensor | None] = {}

    @classmethod
    def of(cls, tables: Tensor, positions: Tensor, longest: int, *, even: bool = False, decodes: bool = False) -> View:
        """Return the view of rows that write these positions; see `View`."""
        size = BLOCK_SIZE
        written = tables.gather(1, positions // size) * size + positions % size
        return cls(tables, positions, longest, written.flatten(), even=even, decodes=decodes)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to scores: 0 where a query sees a place, else minus infinity.

        Args:
            window: Tokens that a query sees, its own included; None for all.
            dtype: Of the scores.

        Returns:
            [rows, 1, queries, longest]; None if every query sees all.
        """
        if window is not None and window >= self.longest:
            window = None
        if (window, dtype) not in self._masks:
            mask = None
            if window is not None or not self._even:
                places, own = torch.arange(self.longest, device=self.positions.device), self.positions[:, :, None]
                hidden = places > own
                if window is not None:
                    hidden |= places <= own - window
                mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
                mask = mask.masked_fill_(hidden, float("-inf"))[:, None]
            self._masks[window, dtype] = mask
        return self._masks[window, dtype]


class BlockCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Memory of blocks, layer by layer.

    Args:
        in_place: Whether decoding steps read blocks in place; None for never.
    """

    def __init__(self, in_place: InPlace | None = None) -> None:
        super().__init__(layers=[])
        self.in_place = in_place
        self.pairs: dict[int, KeysAndValues] = {}
        """Layer -> keys and values"""
        self.capacity = 0
        """Number of blocks that there is memory for."""
        self._view: View | None = None
        self.states: dict[StateKey, Tensor] = {}
        """States of recurrent layers, [rows, ...]: what a pass goes on from, and changes in place; or, where it begins
        a text, what it leaves."""
        self._given: dict[int, tuple[ReferenceType[Tensor], ReferenceType[Tensor]]] = {}
        """Layer -> keys and values that a step gave the model, by which attention knows the layer"""

    @property
    def reads_in_place(self) -> bool:
        """Whether this pass reads blocks in place."""
        return self.view.decodes and self.in_place is not None and bool(self.in_place.agrees)

    def layer_of(self, key: Tensor, value: Tensor) -> int | None:
        """Return the layer for which `update` gave these very tensors in this step; None if it gave others."""
        latest_first = reversed(self._given.items())  # some layers attend to what an earlier one was given
        return next((layer for layer, pair in latest_first if pair[0]() is key and pair[1]() is value), None)

    def operands(  # noqa: PLR0913, PLR0917 - the operands of a formula
        self,
        layer: int,
        query: Tensor,
        sinks: Tensor | None,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Operands:
        """Return what the kernel reads for a layer, and memory for what it writes; see `Operands`."""
        view, pair = self.view, self.pairs[layer]
        assert view.tables is not None
        return Operands.of(
            query, pair, view.tables, view.positions[:, 0], view.longest,
            sinks=sinks, scale=scale, window=window, softcap=softcap,
        )  # fmt: skip

    @property
    def view(self) -> View:
        """Return what the pass sees."""
        assert self._view is not None
        return self._view

    @view.setter
    def view(self, view: View) -> None:
        self._view = view
        self._given.clear()

    def grow(self, capacity: int) -> None:
        """Have memory for so many blocks; memory that there was is given up, layer by layer."""
        assert capacity > self.capacity
        self.capacity = capacity
        for layer in self.pairs:  # one by one: both sizes of all layers have no room
            keys, values = self.pairs[layer]
            self.pairs[layer] = (self._grown(keys), self._grown(values))

    def renew(self, capacity: int) -> None:
        """Have memory for so many blocks and nothing in them; memory that there was is given up first."""
        pairs = {layer: [tensor[:0].clone() for tensor in pair] for layer, pair in self.pairs.items()}
        self.free()
        self.capacity = capacity
        for layer, (keys, values) in pairs.items():
            self.pairs[layer] = (self._grown(keys), self._grown(values))

    def free(self) -> None:
        """Give all memory back."""
        self.pairs, self.states, self.capacity, self._view = {}, {}, 0, None
        self._given.clear()

    def _grown(self, tensor: Tensor) -> Tensor:
        grown = tensor.new_zeros(self.capacity, *tensor.shape[1:])
        grown[: len(tensor)] = tensor
        return grown

    def clear(self, blocks: Sequence[int]) -> None:
        """Set blocks to 0: what lies behind a row's end gets no weight, but no weight times infinity is not nothing."""
        if not blocks or not self.pairs:
            return
        index = self._index(blocks)
        for pair in self.pairs.values():
            for tensor in pair:
                tensor.index_fill_(0, index, 0)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks to others."""
        if not sources or not self.pairs:
            return
        source, target = self._index(sources), self._index(targets)
        for pair in self.pairs.values():
            for tensor in pair:
                tensor.index_copy_(0, target, tensor.index_select(0, source))

    def _index(self, blocks: Sequence[int]) -> Tensor:
        device = next(iter(self.pairs.values()))[0].device
        return torch.tensor(blocks, dtype=torch.int64).to(device, non_blocking=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values, [rows, key heads, queries, head size].

        Returns:
            Those that attention sees: whole prompts' own, else [rows, key heads, longest, head size] of the rows. Some
            models (DeepSeek's) keep less than keys and values, and make these of what they get back. Where blocks are
            read in place, the step's own, by which attention knows the layer.
        """
        view = self.view
        if layer_idx not in self.pairs:
            self.pairs[layer_idx] = (self.memory_like(key_states), self.memory_like(value_states))
        pair = self.pairs[layer_idx]
        for stored, new in zip(pair, (key_states, value_states), strict=True):
            # [rows, key heads, queries, size] -> [rows x queries, key heads, size]
            stored.flatten(0, 1).index_copy_(0, view.written, new.transpose(1, 2).flatten(0, 1))
        if view.tables is None:
            return key_states, value_states
        seen = key_states, value_states
        if not self.reads_in_place:
            seen = _gathered(pair[0], view), _gathered(pair[1], view)
        if self.in_place is not None and self.in_place.is_comparing:
            self.in_place.note_written(layer_idx)
        if self.in_place is not None and (self.in_place.is_comparing or self.reads_in_place):
            self._given[layer_idx] = ref(seen[0]), ref(seen[1])
        return seen

    def memory_like(self, states: Tensor) -> Tensor:
        """Return memory of all blocks for what is like these keys or values, [rows, key heads, queries, head size]."""
        return states.new_zeros(self.capacity, BLOCK_SIZE, states.shape[1], states.shape[3])

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a convolution's last inputs, [rows, channels, kernel size]; None where a text begins."""
        return self.states.get(StateKey(layer_idx, state_idx, "conv"))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Take inputs of a convolution, [rows, channels, queries]; return them behind those that it needs of before."""
        key = StateKey(layer_idx, state_idx, "conv")
        stored, width = self.states.get(key), conv_kernel_size or conv_states.shape[-1]
        if stored is None:
            inputs = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
            self.states[key] = inputs[..., -width:].clone()
        else:
            inputs = torch.cat([stored, conv_states], -1)
            stored.copy_(inputs[..., -stored.shape[-1] :])
        return inputs

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent layer's state, [rows, ...]; None where a text begins."""
        return self.states.get(StateKey(layer_idx, state_idx, "recurrent"))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Take a recurrent layer's state, [rows, ...], and return it."""
        key = StateKey(layer_idx, state_idx, "recurrent")
        stored = self.states.get(key)
        if stored is None:
            stored = self.states[key] = recurrent_states.clone()
        else:
            stored.copy_(recurrent_states)
        return stored

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:  # noqa: ARG002 - transformers'
        """Whether a layer goes on from a state, or all of them do."""
        return any(layer_idx in {None, key.layer} for key in self.states)

    def is_recording_past(self, layer_idx: int | None = None) -> bool:  # noqa: ARG002 - transformers'
        """Return that states of before are not kept, which speculative decoding asks for."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers'
        """Return 0 for prompts, else the places that are looked at less those written, which are not 0."""
        view = self.view
        return 0 if view.tables is None else view.longest - view.positions.shape[1]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def cached_attention(  # noqa: PLR0913 - the operands of a formula
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend from new tokens to all of their row; or within documents, when whole prompts are computed.

    Args:
        module: The attention layer.
        query: [rows, heads, queries, head size]
        key: What `BlockCache.update` returned.
        value: As key.
        attention_mask: Not used.
        scaling: Factor of the products; default 1 / sqrt(head size).
        dropout: Not used.
        options: `documents` (while whole prompts are computed) or `rows` (the cache), and the layer's own:
            `sliding_window`, `softcap`, `s_aux` (sinks).

    Returns:
        [rows, queries, heads, head size], and None in place of attention weights.
    """
    if "documents" in options:
        attended: Tensor
        attended, _ = packed_attention(module, query, key, value, attention_mask, scaling, dropout, **options)
        return attended, None
    cache: BlockCache = options["rows"]
    in_place = cache.in_place
    if in_place is None or not (cache.reads_in_place or in_place.is_comparing):
        return _over_gathered(cache.view, query, key, value, scaling, options), None
    layer, how = cache.layer_of(key, value), (scaling, options.get("sliding_window"), options.get("softcap"))
    given = None if layer is None else cache.operands(layer, query[:, :, 0], options.get("s_aux"), *how)
    if cache.reads_in_place:
        assert given is not None, "attention got other keys than those that the cache has given"
        return in_place.attend(given)[:, None], None
    out = _over_gathered(cache.view, query, key, value, scaling, options)
    in_place.compare(layer, given, out[:, 0])
    return out, None


def _over_gathered(  # noqa: PLR0913, PLR0917 - the operands of a formula
    view: View, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, options: Mapping[str, Any]
) -> Tensor:
    """Attend to gathered blocks; operands and result are those of `cached_attention`."""
    mask = view.mask(options.get("sliding_window"), query.dtype)
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    rows, heads, queries, size = query.shape
    key_heads = key.shape[1]
    # The queries that share a key head become the query positions of that head: no key is copied.
    grouped = query.reshape(rows, key_heads, heads // key_heads * queries, size)
    if mask is not None and queries > 1:
        mask = mask.repeat(1, 1, heads // key_heads, 1)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(grouped, key, value, mask, scale=scaling)
    else:
        out = _explicit(grouped, key, value, mask, scaling, softcap, sinks)
    return out.reshape(rows, heads, queries, -1).transpose(1, 2)


def _gathered(stored: Tensor, view: View) -> Tensor:
    """Return what rows look at, [rows, key heads, longest, size], of all blocks."""
    assert view.tables is not None
    blocks, size = -(-view.longest // BLOCK_SIZE), stored.shape[1:]
    gathered = stored.index_select(0, view.tables[:, :blocks].flatten())
    return gathered.view(len(view.tables), blocks * size[0], *size[1:])[:, : view.longest].transpose(1, 2)


def _explicit(  # noqa: PLR0913 - the operands of a formula
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with the weights written out; see `models.attention` for soft caps and sinks.

    Args:
        query: [rows, key heads, queries of the head, size]; of each of its heads, all queries.
        key, value: [rows, key heads, places, size]
        mask: What is added to scores.
        scaling, softcap: As the layer has them.
        sinks: [heads]
    """
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        heads = sinks.to(scores.dtype).view(1, key.shape[1], -1)
        column = heads.repeat_interleave(scores.shape[2] // heads.shape[2], 2)[..., None]
        scores = torch.cat([scores, column.expand(scores.shape[0], -1, -1, 1)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return weights[..., : key.shape[2]] @ value
