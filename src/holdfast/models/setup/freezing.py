"""Which parameters are trained: patterns and words of the configuration, as canonical names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from holdfast.errors import ModelError
from holdfast.models.files.vision import FREEZE_PRESETS
from holdfast.models.names import named_parameters


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Turn off gradients of parameters whose canonical name matches, or which one of the words means.

    Raises:
        ModelError: A pattern matches nothing, or nothing is left to train.
    """
    parameters = named_parameters(model)
    frozen: set[str] = set()
    for pattern in patterns:
        frozen.update(_names_of(model, pattern, parameters))
    if patterns and not any(value.requires_grad for name, value in parameters.items() if name not in frozen):
        raise ModelError(f"model.freeze {[*patterns]} leaves no parameter to train.")
    for name in frozen:
        parameters[name].requires_grad_(False)  # noqa: FBT003 - torch's own form


def _names_of(model: Any, pattern: str, parameters: Mapping[str, nn.Parameter]) -> list[str]:
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
            f"model.freeze: {pattern!r} matches no parameter. Names look like {', '.join(near)}; print all of them "
            "with `holdfast model parameters RUN.yaml 'model.freeze=[]'`. Words of their own: "
            f"{', '.join((*FREEZE_PRESETS, 'embeddings'))}."
        )
    return matched
