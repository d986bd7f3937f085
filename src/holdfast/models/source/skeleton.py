"""Models without weights: which class a configuration makes, built on the meta device, and the buffers it has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import ModelError
from holdfast.models.names import canonical_name

Make = Callable[[Any], Any]
"""A transformers configuration -> a model of random weights."""


def _made_like(live: Any, scorer: bool) -> Make:
    """Return what makes models of the class of one in memory.

    Raises:
        ModelError: A reward model is wanted, and it is none.
    """
    if scorer and not hasattr(live, "score"):
        raise ModelError(
            f"A {type(live).__name__} has no layer `score`. Give a model for sequence classification with "
            "num_labels=1, or name a language model's directory in model.path."
        )
    return type(live)._from_config  # type: ignore[no-any-return]  # noqa: SLF001 - what from_config calls


def maker(config: Any, trust_remote_code: bool, scorer: bool, live: Any = None) -> Make:
    """Return what makes models of a configuration: that score texts if `scorer`, else that predict tokens.

    A model in memory, `live`, has a class already.

    Raises:
        ModelError: transformers has no such model.
    """
    if live is not None:
        return _made_like(live, scorer)
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    if scorer:
        return _scorer_maker(config, AutoModelForSequenceClassification)
    if trust_remote_code and hasattr(config, "auto_map"):
        return partial(AutoModelForCausalLM.from_config, trust_remote_code=True)
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if type(config) in auto._model_mapping:  # noqa: SLF001 - the registry has no public lookup
            return auto.from_config  # type: ignore[no-any-return]
    raise ModelError(f"transformers has no language model for model_type {config.model_type!r}.")


def _scorer_maker(config: Any, auto: Any) -> Make:
    if type(config) not in auto._model_mapping:  # noqa: SLF001 - the registry has no public lookup
        raise ModelError(f"transformers has no model for sequence classification of model_type {config.model_type!r}.")
    return auto.from_config  # type: ignore[no-any-return]


def on_meta(make: Make, config: Any) -> Any:
    """Return a model whose parameters and buffers have shapes alone."""
    with torch.device("meta"):
        return _made(make, config)


def _made(make: Make, config: Any) -> Any:
    config = copy.deepcopy(config)
    config.dtype = torch.float32  # of the skeleton; storage is decided when tensors are placed
    return make(config)


def reference_buffers(make: Make, config: Any) -> dict[str, Tensor]:
    """Build the model's buffers on the CPU, without allocating its parameters."""
    model = with_buffers(make, config)
    return {canonical_name(name): buffer.detach().clone() for name, buffer in model.named_buffers()}


def with_buffers(make: Make, config: Any) -> Any:
    """Return a model whose parameters have shapes alone, and whose buffers are computed on the CPU."""
    from transformers.initialization import no_init_weights

    with no_init_weights(), _parameters_on_meta():
        return _made(make, config)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Send each parameter to the meta device the moment a module registers it."""
    original = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        original(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
