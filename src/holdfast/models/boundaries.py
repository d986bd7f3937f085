"""Lengths at which a model begins to compute otherwise, and the part of it that shows what it does there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast.models.attention import upstream_attention
from holdfast.models.family import blocks_of
from holdfast.models.names import POLICY_PREFIX, canonical_name
from holdfast.models.rotary import rotary_boundaries

_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size")
_LONGEST = 16_384
"""Tokens of a document that is still looked at."""
_PRODUCTS = {"cpu": 2e11, "cuda": 2e13}
"""Numbers multiplied with a weight in one pass: some ten seconds of one core, or of a device."""
_WRITTEN_OUT_BYTES = 2**31
"""Of attention weights, where they are written out."""


class Lengths(NamedTuple):
    """Boundaries of a model; texts of so many tokens and of one more are computed differently."""

    seen: tuple[int, ...]
    """Those that can be looked at before a run."""
    too_long: tuple[int, ...]


def boundaries_of(config: Any) -> tuple[int, ...]:
    """Return every length at which windows, chunks or rotary angles begin to matter, ascending."""
    text = config.get_text_config()
    windows = [getattr(text, name, None) for name in _WINDOWS]
    if getattr(text, "use_sliding_window", True) is False:  # Qwen's files name a window and leave it unused
        windows[0] = None
    return tuple(sorted({*(int(each) for each in windows if each), *rotary_boundaries(config)}))


def first_layers(config: Any) -> int:
    """Return how many of the first layers hold one of each type."""
    text = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ())
    count = int(text.num_hidden_layers)
    return min(count, max(map(kinds.index, set(kinds))) + 1) if kinds else min(count, 2)


def lengths_to_see(model: Any, device: torch.device) -> Lengths:
    """Return which boundaries of a model there is time and memory to look at.

    Args:
        model: Of transformers.
        device: Where it computes.
    """
    text = model.config.get_text_config()
    blocks = blocks_of(model)[: first_layers(model.config)]
    inside = tuple(f"{canonical_name(path)}." for path in blocks)
    weights = sum(
        value.numel()
        for path, value in model.named_parameters()
        if canonical_name(path).removeprefix(POLICY_PREFIX).startswith(inside)
    )
    written_out = upstream_attention(model) == "eager"
    seen, work, every = [], 0.0, boundaries_of(model.config)
    for length in every:
        work += 2.0 * weights * length
        weights_bytes = 4 * length**2 * text.num_attention_heads if written_out else 0
        if length > _LONGEST or work > _PRODUCTS[device.type] or weights_bytes > _WRITTEN_OUT_BYTES:
            break
        seen.append(length)
    return Lengths(tuple(seen), every[len(seen) :])


@contextmanager
def shortened(*models: nn.Module) -> Iterator[None]:
    """Let models run their first layers alone within the block, one of each type.

    The lists of blocks are cut, not the number in the configuration: Gemma 4 lays out its embeddings by that.
    """
    before: list[tuple[nn.ModuleList, dict[str, Any]]] = []
    try:
        for model in models:
            config: Any = model.config
            count, whole = first_layers(config), int(config.get_text_config().num_hidden_layers)
            for path in dict.fromkeys(path.rpartition(".")[0] for path in blocks_of(model)):
                blocks = model.get_submodule(path)
                if isinstance(blocks, nn.ModuleList) and len(blocks) == whole:  # a tower's are others
                    inside = blocks._modules  # noqa: SLF001 - what a list of modules holds
                    before.append((blocks, dict(inside)))
                    for number in range(count, whole):
                        del inside[str(number)]
        yield
    finally:
        for blocks, inside in before:
            blocks._modules.update(inside)  # noqa: SLF001 - same
