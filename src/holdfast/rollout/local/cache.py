"""Keys and values of the rows being decoded, and attention over them.

A row holds one completion: its prompt's keys and values, computed once for all rows of the prompt, then one more for
every token. Rows differ in length, so each step writes at a place of its own in every row and hides what lies behind.
`RowCache` knows lengths on the host and grows with them; `static.StaticCache` has them on the device and stays in
place. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own short name
from torch import Tensor, nn
from transformers import Cache

from holdfast.models.layers.attention import packed_attention

CACHED = "holdfast_cached"
"""Name under which transformers finds attention over this cache."""

ROOM = 64
"""Tokens of room that are added at least when rows grow."""

KeysAndValues = tuple[Tensor, Tensor]
"""Keys and values of a layer."""


def register_cache() -> None:
    """Make attention over the cache known to transformers; doing it again changes nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(CACHED, cached_attention)


class PromptCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Keeps what each layer computes for prompts that lie side by side in one row."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.pairs: dict[int, KeysAndValues] = {}
        """Layer -> keys and values, [1, key heads, T, head size]"""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep them, and give them back."""
        self.pairs[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers'
        """Return 0: nothing came before."""
        return 0


class HeldCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of rows, to which each step adds one place per row."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.pairs: dict[int, KeysAndValues] = {}
        """Layer -> keys and values, [rows, key heads, room, head size]"""
        self._view: View | None = None

    def begin_step(self) -> None:
        """Set what the step sees, and count its token in every row."""
        raise NotImplementedError

    @property
    def view(self) -> View:
        """Return what the step sees."""
        assert self._view is not None
        return self._view

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values, [rows, key heads, 1, head size]; return all that the step looks at."""
        view, (keys, values) = self.view, self.pairs[layer_idx]
        for stored, new in ((keys, key_states), (values, value_states)):
            if view.place is not None:
                stored[:, :, view.place] = new[:, :, 0]
            else:
                stored[view.rows, :, view.places] = new[:, :, 0]
        return keys[:, :, : view.longest], values[:, :, : view.longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers'
        """Return the places that a step looks at, less its own: not 0, so it is not a prompt that is computed."""
        return self.view.longest - 1


class RowCache(HeldCache):
    """Keys and values of rows whose lengths are known on the host; a step looks no further than the longest.

    Args:
        held: Layer -> keys and values, [rows, key heads, room, head size].
        lengths: Tokens in each row.
    """

    def __init__(self, pairs: dict[int, KeysAndValues], lengths: Sequence[int]) -> None:
        super().__init__()
        self.pairs, self.lengths = pairs, list(lengths)
        self._room = next(iter(pairs.values()))[0].shape[2]

    @classmethod
    def of(cls, prompts: PromptCache, spans: Sequence[tuple[int, int]]) -> RowCache:
        """Return the rows that begin with prompts.

        Args:
            prompts: What a forward pass over prompts kept.
            spans: Where each row's prompt begins and ends there; rows of one prompt share its span.
        """
        lengths = [end - start for start, end in spans]
        places, room = _places(spans, next(iter(prompts.pairs.values()))[0].device), max(lengths) + ROOM
        pairs = {
            layer: (_rows_of(pair[0], places, room), _rows_of(pair[1], places, room))
            for layer, pair in prompts.pairs.items()
        }
        return cls(pairs, lengths)

    def begin_step(self) -> None:
        """Make room for one token more in every row."""
        longest = max(self.lengths) + 1
        if longest > self._room:
            more = max(ROOM, self._room // 2)
            for layer, (keys, values) in self.pairs.items():  # one by one: both sizes of all layers have no room
                self.pairs[layer] = (_grown(keys, more), _grown(values, more))
            self._room += more
        self._view = View.of(self.lengths, next(iter(self.pairs.values()))[0].device)
        self.lengths = [length + 1 for length in self.lengths]

    def keep(self, rows: Tensor, lengths: Sequence[int]) -> None:
        """Drop all rows but these.

        Args:
            rows: [kept] int64
            lengths: Theirs.
        """
        self.lengths = list(lengths)
        self._room = max(self.lengths) + ROOM
        self.pairs = {
            layer: (_fit(keys.index_select(0, rows), self._room), _fit(values.index_select(0, rows), self._room))
            for layer, (keys, values) in self.pairs.items()
        }

    def add(self, other: RowCache) -> None:
        """Append the rows of another cache."""
        self._room = max(self._room, other._room)
        self.lengths += other.lengths
        for layer, pair in self.pairs.items():
            more = other.pairs[layer]
            self.pairs[layer] = (
                torch.cat([_fit(pair[0], self._room), _fit(more[0], self._room)]),
                torch.cat([_fit(pair[1], self._room), _fit(more[1], self._room)]),
            )


class View:
    """Which places of the cache one step writes and sees.

    Args:
        longest: Places that it looks at, in every row.
        place: The place all rows write at, if it is one.
        places: [rows] int64 on the device, the place each row writes at.
    """

    def __init__(self, longest: int, place: int | None, places: Tensor) -> None:
        self.longest, self.place, self.places = longest, place, places
        self.rows = torch.arange(len(places), device=places.device)
        self._masks: dict[int | None, Tensor | None] = {}

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> View:
        """Return the view of rows of these lengths."""
        place = lengths[0] if len(set(lengths)) == 1 else None
        return cls(max(lengths) + 1, place, torch.tensor(lengths).to(device, non_blocking=True))

    def mask(self, window: int | None) -> Tensor | None:
        """Return [rows, 1, 1, longest], True where the new token sees a place; None if it sees all."""
        if window is not None and window >= self.longest:
            window = None
        if window not in self._masks:
            places = torch.arange(self.longest, device=self.places.device)[None]
            seen = places <= self.places[:, None]
            if window is not None:
                seen &= places > self.places[:, None] - window
            whole = window is None and self.place is not None
            self._masks[window] = None if whole else seen[:, None, None]
        return self._masks[window]


def _rows_of(tensor: Tensor, places: Tensor, room: int) -> Tensor:
    """[1, heads, T, size] -> [rows, heads, room, size], by the places [rows, longest] each row takes from T"""
    rows = tensor.new_zeros(places.shape[0], tensor.shape[1], room, tensor.shape[3])
    rows[:, :, : places.shape[1]] = tensor[0][:, places].transpose(0, 1)
    return rows


def _places(spans: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return [rows, longest] places; behind a row's end, its last place again, which no query sees there."""
    bounds = torch.tensor(spans).to(device)
    steps = torch.arange(max(end - start for start, end in spans), device=device)
    return torch.minimum(bounds[:, :1] + steps, bounds[:, 1:] - 1)


def _grown(tensor: Tensor, more: int) -> Tensor:
    return F.pad(tensor, (0, 0, 0, more))


def _fit(tensor: Tensor, room: int) -> Tensor:
    """Bring a tensor to `room` places; what is cut off lies behind every row's end."""
    return tensor[:, :, :room] if tensor.shape[2] >= room else _grown(tensor, room - tensor.shape[2])


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
    """Attend from one new token per row to all of the row; or within documents, when prompts are computed.

    Args:
        module: The attention layer.
        query: [rows, heads, 1, head size]
        key: [rows, key heads, T, head size], from `HeldCache.update`.
        value: As key.
        attention_mask: Not used.
        scaling: Factor of the products; default 1 / sqrt(head size).
        dropout: Not used.
        options: `documents` (while prompts are computed) or `rows` (the cache), and the layer's own: `sliding_window`,
            `softcap`, `s_aux` (sinks).

    Returns:
        [rows, 1, heads, head size], and None in place of attention weights.
    """
    if "documents" in options:
        attended: Tensor
        attended, _ = packed_attention(module, query, key, value, attention_mask, scaling, dropout, **options)
        return attended, None
    mask = options["rows"].view.mask(options.get("sliding_window"))
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    rows, heads, _, size = query.shape
    # The queries that share a key head become the query positions of that head: no key is copied.
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(grouped, key, value, mask, scale=scaling)
    else:
        out = _explicit(grouped, key, value, mask, scaling, softcap, sinks)
    attended = out.reshape(rows, 1, heads, value.shape[-1])
    return attended, None


def _explicit(  # noqa: PLR0913 - the operands of a formula
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with the weights written out; see `models.attention` for soft caps and sinks."""
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, key.shape[1], -1, 1).expand(scores.shape[0], -1, -1, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return weights[..., : key.shape[2]] @ value
