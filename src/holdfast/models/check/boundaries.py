"""Sequence lengths at which a model's computation changes (windows, chunks, rotary scaling), and how to test them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast.models.check.shrink import count_of, layers_in, one_of_each
from holdfast.models.layers.attention import upstream_attention
from holdfast.models.layers.family import blocks_of
from holdfast.models.layers.rotary import rotary_boundaries
from holdfast.models.names import POLICY_PREFIX, canonical_name

_WINDOW = re.compile(r"(sliding_|attention_|local_)?window(_size)?|sliding_window_size|attention_chunk_size")
_LONGEST = 16_384
"""Longest document that the check computes, in tokens."""
_PRODUCTS = {"cpu": 2e11, "cuda": 2e13}
"""Largest number of multiplications with weights in one pass: about ten seconds of one core or one device."""
_WRITTEN_OUT_BYTES = 2**31
"""Largest size of an attention matrix, in models whose attention materialises it."""


class LengthBoundaries(NamedTuple):
    """Boundary lengths of a model: texts of exactly this length and of one token more are computed differently."""

    checked: tuple[int, ...]
    """Boundaries that the check computes."""
    too_long: tuple[int, ...]
    """Boundaries that would take too much time or memory."""
    layers: int
    """Number of first layers that the check computes."""


def boundaries_of(config: Any) -> tuple[int, ...]:
    """Return every length at which windows, chunks or rotary angles begin to matter, ascending."""
    text = config.get_text_config()
    windows = {name: value for name, value in text.to_dict().items() if _WINDOW.fullmatch(name)}
    if getattr(text, "use_sliding_window", True) is False:  # Qwen's files name a window and leave it unused
        windows.pop("sliding_window", None)
    sizes = {value for value in windows.values() if isinstance(value, int) and value > 0}
    return tuple(sorted({*sizes, *rotary_boundaries(config)}))


def _first_layers(model: Any) -> Sequence[int]:
    """Return how many of the first layers hold one of each kind, best first; all where the configuration counts none.

    Layers that take keys and values of earlier ones are the last; they are left out where there is no time for all.
    """
    text = model.config.get_text_config().to_dict()
    if count_of(text) is None:
        return [len(blocks_of(model))]
    unshared = one_of_each({**text, "num_kv_shared_layers": 0})
    return sorted({one_of_each(text)[-1] + 1, unshared[-1] + 1}, reverse=True)


def lengths_to_see(model: Any, device: torch.device) -> LengthBoundaries:
    """Return which boundaries of a model there is time and memory to look at.

    Args:
        model: Of transformers.
        device: Where it computes.
    """
    choices = [_lengths_for(model, device, layers) for layers in _first_layers(model)]
    return next((lengths for lengths in choices if not lengths.too_long), choices[-1])


def _lengths_for(model: Any, device: torch.device, layers: int) -> LengthBoundaries:
    inside = tuple(f"{canonical_name(path)}." for path in blocks_of(model)[:layers])
    weights = sum(
        value.numel()
        for path, value in model.named_parameters()
        if canonical_name(path).removeprefix(POLICY_PREFIX).startswith(inside)
    )
    written_out = upstream_attention(model) == "eager"
    lengths, work, every = [], 0.0, boundaries_of(model.config)
    for length in every:
        work += 2.0 * weights * length
        weights_bytes = 4 * length**2 * model.config.get_text_config().num_attention_heads if written_out else 0
        if length > _LONGEST or work > _PRODUCTS[device.type] or weights_bytes > _WRITTEN_OUT_BYTES:
            break
        lengths.append(length)
    return LengthBoundaries(tuple(lengths), every[len(lengths) :], layers)


@contextmanager
def shortened(count: int, *models: nn.Module) -> Iterator[None]:
    """Let models run only their first `count` layers within the block.

    Blocks are removed from the module lists, and the configuration is not changed, since Gemma 4 splits its embeddings
    by the number of layers in it.
    """
    before: list[tuple[nn.ModuleList, dict[str, Any]]] = []
    try:
        for model in models:
            layer_count = layers_in(model)
            for path in dict.fromkeys(path.rpartition(".")[0] for path in blocks_of(model)):
                blocks = model.get_submodule(path)
                if isinstance(blocks, nn.ModuleList) and len(blocks) == layer_count:  # a tower's are others
                    inside = blocks._modules  # noqa: SLF001 - what a list of modules holds
                    before.append((blocks, dict(inside)))
                    for number in range(count, layer_count):
                        del inside[str(number)]
        yield
    finally:
        for blocks, inside in before:
            blocks._modules.update(inside)  # noqa: SLF001 - same
