"""Rotary angles that depend on how long a text is.

transformers reads that length from the largest position of a whole forward pass, and dynamic scaling from earlier
passes too. Models with such angles are not packed (`layers/family.py`): every row of a batch is one text, and its
angles are those that transformers' own rotary module, as it was built, computes for this row alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_LONGROPE = "longrope"
_DYNAMIC = "dynamic"
_FACTORS = ("factor", "mscale")
"""What LongRoPE has twice, for short and for long texts: factors of wavelengths, and Phi-3.5-MoE's of amplitudes."""


class AngleChange(NamedTuple):
    """Where a model's angles begin to depend on the length of a text."""

    length: int
    """Tokens of the longest text that has the angles of a short one."""
    by_length: bool
    """Whether beyond it every length has angles of its own; else all longer texts share theirs."""


def rotary_boundaries(config: Any) -> tuple[int, ...]:
    """Return lengths L such that a text of L tokens and one of L + 1 follow different rotary angles, ascending.

    Args:
        config: transformers' configuration of a model; that of its language model counts.
    """
    return tuple(sorted({change.length for change in angle_changes(config)}))


def angle_changes(config: Any) -> tuple[AngleChange, ...]:
    """Return where the angles of a model change; nothing if they never do.

    LongRoPE (arXiv:2402.13753) has two sets of factors. Dynamic NTK scaling has angles of their own for every length
    beyond `max_position_embeddings`.

    Args:
        config: As in `rotary_boundaries`.
    """
    text = copy.deepcopy(config.get_text_config())
    if not getattr(text, "rope_parameters", None):
        return ()
    text.standardize_rope_params()  # brings fields of older files to where transformers reads them
    by_layer_type = [parameters for parameters in text.rope_parameters.values() if isinstance(parameters, Mapping)]
    changes = set()
    for settings in by_layer_type or [text.rope_parameters]:
        kind = str(settings.get("rope_type", "default"))
        # Hunyuan's files say dynamic and name a factor `alpha`, which fixes the angles for every length.
        if not settings.get("alpha") and (change := _change(kind, settings, text)) is not None:
            changes.add(change)
    return tuple(sorted(changes))


def _change(kind: str, settings: Mapping[str, Any], config: Any) -> AngleChange | None:
    if _DYNAMIC in kind:
        return AngleChange(int(config.max_position_embeddings), by_length=True)
    if kind == _LONGROPE and any(settings.get(f"short_{name}") != settings.get(f"long_{name}") for name in _FACTORS):
        return AngleChange(int(settings["original_max_position_embeddings"]), by_length=False)
    return None


def _by_length(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the modules whose angles depend on length, each with its kinds of angles."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        names = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(name == _LONGROPE or _DYNAMIC in name for name in map(str, names)):
            yield module, kinds


def keep_short_angles(model: nn.Module) -> None:
    """Give all texts the angles of short ones, in a model that reads no longer text."""
    for module, kinds in _by_length(model):
        # transformers' modules choose their frequencies anew for other types alone.
        module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"


def read_rows_alone(model: nn.Module) -> None:
    """Let rotary modules whose angles depend on length compute each row of a batch as the only one they ever see."""
    for module, _ in _by_length(model):
        module.forward = partial(_angles, module)


@torch.no_grad()
def _angles(module: nn.Module, x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
    """Return what a rotary module returns, row by row.

    Args:
        module: The module; what its own `forward` changes, it changes in a copy.
        x: Says dtype and device.
        position_ids: [B, T] or [A, B, T]; padding has no position beyond those of its row.
        args, options: Its further arguments.
    """
    rows = [type(module).forward(_copy(module), x, row, *args, **options) for row in torch.split(position_ids, 1, -2)]
    if isinstance(rows[0], Tensor):
        return torch.cat(rows, -3)
    return tuple(torch.cat(parts, -3) for parts in zip(*rows, strict=True))


def _copy(module: nn.Module) -> nn.Module:
    """Return a module whose changes are its own: transformers' functions write to the one they are called with."""
    module_copy = copy.copy(module)
    module_copy._buffers = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
    return module_copy
