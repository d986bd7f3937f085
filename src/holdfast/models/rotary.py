"""Rotary angles that depend on how long a text is."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

_LONGROPE = "longrope"
_DYNAMIC = "dynamic"
_FACTORS = ("factor", "mscale")
"""What LongRoPE has twice, for short and for long texts: factors of wavelengths, and Phi-3.5-MoE's of amplitudes."""


def rotary_boundaries(config: Any) -> tuple[int, ...]:
    """Return lengths L such that a text of L tokens and one of L + 1 follow different rotary angles, ascending.

    LongRoPE (arXiv:2402.13753) has two sets of factors and one such length. Dynamic NTK scaling has angles of their own
    for every length from there on. Both are decided as transformers decides, by the length of the whole text.

    Args:
        config: transformers' configuration of a model; that of its language model counts.
    """
    text = copy.deepcopy(config.get_text_config())
    return tuple(sorted({length for part in _rope_parameters(text) for length in _boundary(text, part)}))


def _rope_parameters(text: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of a language model's angles: one set, or one for each type of its layers."""
    if not getattr(text, "rope_parameters", None):
        return
    text.standardize_rope_params()  # brings fields of older files to where transformers reads them
    settings: Mapping[str, Any] = text.rope_parameters
    by_layer_type = [part for part in settings.values() if isinstance(part, Mapping)]
    yield from by_layer_type or [settings]


def _boundary(text: Any, settings: Mapping[str, Any]) -> list[int]:
    """Return where the angles of one set of settings change; nothing if they never do."""
    kind = str(settings.get("rope_type", "default"))
    # Hunyuan's files say dynamic and name a factor `alpha`, which fixes the angles for every length.
    if _DYNAMIC in kind and not settings.get("alpha"):
        return [int(text.max_position_embeddings)]
    if kind == _LONGROPE and any(settings.get(f"short_{name}") != settings.get(f"long_{name}") for name in _FACTORS):
        return [int(settings["original_max_position_embeddings"])]
    return []
