"""Which parameters are trained, and from which step on: patterns and words of the configuration, as canonical names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast.config.sections.model import UnfreezeConfig
from holdfast.errors import ModelError
from holdfast.models.files.vision import FREEZE_PRESETS
from holdfast.models.names import named_parameters


@dataclass(frozen=True)
class Stage:
    """Parameters that are frozen until so many steps are done."""

    at_step: int
    patterns: tuple[str, ...]
    """Patterns as the configuration writes them."""
    names: tuple[str, ...]
    """Canonical."""


def freeze(model: nn.Module, patterns: Sequence[str], later: Sequence[UnfreezeConfig] = ()) -> tuple[Stage, ...]:
    """Turn off gradients of parameters whose canonical name matches, or which one of the words means.

    Those that are trained later keep theirs for now: whoever builds the run stores and shards them as what they will
    be, and then freezes them until their step.

    Returns:
        What is trained later, in that order.

    Raises:
        ModelError: A pattern matches nothing, or nothing that is frozen, or nothing is left to train.
    """
    parameters = named_parameters(model)
    frozen: set[str] = set()
    for pattern in patterns:
        frozen.update(_names_of(model, pattern, parameters, "model.freeze"))
    if patterns and not any(value.requires_grad for name, value in parameters.items() if name not in frozen):
        raise ModelError(f"model.freeze {[*patterns]} leaves no parameter to train.")
    stages = []
    for section in sorted(later, key=lambda section: section.at_step):
        thawed: set[str] = set()
        for pattern in section.patterns:
            names = _names_of(model, pattern, parameters, "model.unfreeze")
            if not frozen.intersection(names):
                raise ModelError(
                    f"model.unfreeze: {pattern!r} at step {section.at_step} matches only parameters that are trained "
                    f"by then ({', '.join(names[:2])}). Name them in model.freeze, or remove the pattern."
                )
            thawed.update(names)
        stages.append(
            Stage(
                section.at_step,
                tuple(section.patterns),
                tuple(name for name in parameters if name in thawed and name in frozen),
            )
        )
        frozen -= thawed
    for name in frozen:
        parameters[name].requires_grad_(False)  # noqa: FBT003 - torch's own form
    return tuple(stages)


def timetable(stages: Sequence[Stage], model: nn.Module) -> list[str]:
    """Return a line for each stage, for the start of a run."""
    parameters = named_parameters(model)
    return [
        f"frozen until step {stage.at_step} is done, and trained from then on: {len(stage.names)} tensors of "
        f"{sum(parameters[name].numel() for name in stage.names):,} parameters ({', '.join(stage.patterns)})"
        for stage in stages
    ]


def _names_of(model: Any, pattern: str, parameters: Mapping[str, nn.Parameter], key: str) -> list[str]:
    """Return the names of the parameters that a pattern or word means.

    Raises:
        ModelError: It means none.
    """
    if pattern == "embeddings":
        embedding_ids = {id(value) for value in model.get_input_embeddings().parameters()}
        matched = [name for name, value in parameters.items() if id(value) in embedding_ids]
    else:
        matched = [name for name in parameters if re.search(FREEZE_PRESETS.get(pattern, pattern), name)]
    if not matched:
        near = difflib.get_close_matches(pattern, parameters, n=2, cutoff=0.3) or list(parameters)[:2]
        raise ModelError(
            f"{key}: {pattern!r} matches no parameter. Names look like {', '.join(near)}; print all of them "
            "with `holdfast model parameters RUN.yaml 'model.freeze=[]'`. Words of their own: "
            f"{', '.join((*FREEZE_PRESETS, 'embeddings'))}."
        )
    return matched
