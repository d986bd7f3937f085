"""Finds the order of a model's parameters, which gives numbered optimizer states their names, and the tied names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.nn import LayerNorm

from holdfast.errors import ModelError
from holdfast.features.rescue.reading.record import ForeignCheckpoint
from holdfast.models.names import canonical_name, named_parameters, tied_names

_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def skeleton_of(folder: Path) -> Any:
    """Return the model that a directory's config.json describes, on the meta device; its own code is never run.

    Raises:
        ModelError: transformers cannot build it.
    """
    # Here, since what builds models takes long to import and many a checkpoint has no configuration.
    from holdfast.config.sections.model import ModelConfig
    from holdfast.models.files.configuration import maker, on_meta
    from holdfast.models.setup.model import configured

    raw_config, _ = configured(ModelConfig(path=str(folder)), folder)
    return on_meta(maker(raw_config, trust_remote_code=False, scorer=False), raw_config)


def ordered_parameters(checkpoint: ForeignCheckpoint) -> list[str] | None:
    """Return the names of a checkpoint's parameters in the order of `named_parameters`; of tied ones the first.

    The configuration beside it knows; without one, the order of the weights is the same but for buffers, unless the
    weights are sorted by name: then nobody knows, and None is returned.
    """
    names = _by_configuration(checkpoint)
    if names is None and checkpoint.is_in_model_order:
        return [name for name in checkpoint.weights if name not in checkpoint.tied_away]
    return names


def _by_configuration(checkpoint: ForeignCheckpoint) -> list[str] | None:
    """Return the names in the order of the configuration's model; None where it builds none that fits."""
    stored = checkpoint.weights
    names = [name for name in stored if name not in checkpoint.tied_away]
    if checkpoint.model_files is None or _has_adapters(names):
        return None  # a configuration says nothing of adapters, which stand among the parameters
    try:
        skeleton = skeleton_of(checkpoint.model_files)
    except (ModelError, OSError, ValueError, RuntimeError) as error:
        checkpoint.add(
            "note", f"the configuration beside it builds no model ({error}); names follow the weights' order"
        )
        return None
    shapes = {name: tuple(value.shape) for name, value in named_parameters(skeleton).items()}
    missing = [name for name in shapes if name not in stored]
    differing = [name for name in shapes if name in stored and stored[name].shape != shapes[name]]
    if missing or differing:
        first = (missing or differing)[0]
        checkpoint.add("note", f"the configuration beside it is of another model: {first} differs; names follow the "
                               "weights' order")  # fmt: skip
        return None
    note_ties(checkpoint, tied_names(skeleton))
    return list(shapes)


def _has_adapters(names: Iterable[str]) -> bool:
    return any(".lora_A." in name for name in names)


def note_ties(checkpoint: ForeignCheckpoint, ties: dict[str, tuple[str, ...]]) -> None:
    """Note which names of a checkpoint are of one tensor."""
    for first, aliases in ties.items():
        for alias in aliases:
            if alias in checkpoint.weights and first in checkpoint.weights:
                checkpoint.tied_away[alias] = first


def decayed_parameters(checkpoint: ForeignCheckpoint, names: Sequence[str]) -> list[frozenset[str]]:
    """Return which parameters transformers' Trainer decays: by the rule of today, and by that of before 2025.

    Today no parameter with `bias` or `norm` in its name; before, none of `nn.LayerNorm` and none with `bias`. No set is
    returned where the configuration builds no model.
    """
    if checkpoint.model_files is None:
        return []
    try:
        modules = skeleton_of(checkpoint.model_files).named_modules()
    except (ModelError, OSError, ValueError, RuntimeError):
        return []
    norms = tuple(f"{canonical_name(name)}." for name, module in modules if isinstance(module, LayerNorm))
    plain = [name for name in names if not name.startswith(norms)] if norms else list(names)
    return [
        frozenset(name for name in plain if not _UNDECAYED.search(name.lower())),
        frozenset(name for name in plain if "bias" not in name),
    ]
