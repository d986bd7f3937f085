"""The transformers configuration of a run: built from values or a file, with overrides, and prepared for training.

transformers accepts a misspelt field silently and stores it as an attribute that nothing reads; here it is refused.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import ModelError
from holdfast.models.names import canonical_name

_MOVED = {"rope_scaling": "rope_parameters", "rope_theta": "rope_parameters.rope_theta"}
"""Fields of older config.json files, and where transformers 5 stores them."""

_PART_OF_THE_MODEL = {("phimoe", "router_jitter_noise")}
"""Fields that are named like training noise and also act in evaluation: PhiMoE excludes experts by it."""

_DRAW_EXPERTS = {"PhimoeTopKRouter"}
"""Routers that send tokens to experts at random in training (SparseMixer, arXiv:2409.12136)."""


@contextmanager
def refusals(subject: str) -> Iterator[None]:
    """Turn what transformers raises at a bad value into one paragraph that begins with `subject`."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, StrictDataclassError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{subject}: {reason:.500}") from error


def config_from_values(values: Mapping[str, Any]) -> Any:
    """Return a transformers configuration from `model.config`.

    Raises:
        ModelError: transformers knows no such model_type or field, or refuses a value.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = str(values["model_type"])
    if kind not in CONFIG_MAPPING:
        raise ModelError(f"transformers knows no model_type {kind!r}.{_nearest(kind, CONFIG_MAPPING.keys())}")
    with refusals(f"model.config does not make a {kind} configuration"):
        # A copy: configuration classes keep and change the nested dictionaries that they are given.
        config = AutoConfig.for_model(**copy.deepcopy(dict(values)))
    _refuse_unknown(config, values, "model.config")
    return config


def _refuse_unknown(config: Any, values: Mapping[str, Any], key: str) -> None:
    """Refuse values that became attributes which the configuration's class does not have."""
    names = {field.name for field in fields(config)} | set(config.attribute_map)
    for name, value in values.items():
        if name in vars(config) and name not in names and name != "model_type":
            raise ModelError(f"{key}: {type(config).__name__} has no field {name}.{_nearest(name, names)}")
        sub_config = getattr(config, name, None)
        if isinstance(value, Mapping) and sub_config in list(sub_configs(config))[1:]:
            _refuse_unknown(sub_config, value, f"{key}.{name}")


def apply_overrides(config: Any, overrides: Mapping[str, Any]) -> None:
    """Set fields of a transformers configuration; dotted names reach into sub-configurations and dictionaries.

    A dictionary is laid over the one that is there, so that `rope_parameters: {rope_type: linear, factor: 4.0}` keeps
    the model's own rope_theta.

    Raises:
        ModelError: A field does not exist, or its value is refused.
    """
    for dotted, value in overrides.items():
        *path, name = _current_name(dotted).split(".")
        target = config
        for component in path:
            target = target.get(component) if isinstance(target, dict) else getattr(target, component, None)
        if target is None or not (isinstance(target, dict) or hasattr(target, name)):
            names = () if target is None else [field.name for field in fields(target)]
            raise ModelError(
                f"model.config_override: {type(config).__name__} has no field {dotted}.{_nearest(name, names)} "
                "Its fields stand in the model's config.json."
            )
        with refusals(f"model.config_override.{dotted}"):
            if isinstance(target, dict):
                target[name] = value
            else:
                old = getattr(target, name)
                setattr(target, name, old | value if isinstance(old, dict) and isinstance(value, dict) else value)


def follow_tokenizer(config: Any, tokenizer: Any, user_values: Mapping[str, Any]) -> None:
    """Give a model that starts at random the first and last tokens of its tokenizer, where nobody named others.

    A configuration's own defaults are those of the family's first model: with another vocabulary they end completions
    at any token, and an export would not end them where the run did.

    Args:
        config: transformers' configuration.
        tokenizer: The run's.
        user_values: Values that a user wrote.
    """
    for name in ("bos_token_id", "eos_token_id"):
        if not any(name in section for section in (user_values, user_values.get("text_config", {}))):
            for section in {id(section): section for section in (config, config.get_text_config())}.values():
                setattr(section, name, getattr(tokenizer, name, None))


def _current_name(dotted: str) -> str:
    prefix, dot, name = dotted.rpartition(".")
    return dotted if "rope_parameters" in prefix else prefix + dot + _MOVED.get(name, name)


def _nearest(name: str, names: Any) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def sub_configs(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it."""
    from transformers import PreTrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from sub_configs(value)


def make_trainable(config: Any, *, keep_dropout: bool) -> None:
    """Turn off the key/value cache and, unless they are kept, dropout, dropped layers and router noise.

    Only what acts in training alone is changed: in evaluation the model stays the one that its files describe.
    """
    for sub_config in sub_configs(config):
        sub_config.use_cache = False
        if keep_dropout:
            continue
        # A list, since `setattr` on a configuration of transformers may add attributes while they are iterated.
        for name, value in list(vars(sub_config).items()):
            noise = ("drop" in name or "jitter" in name) and isinstance(value, float)
            if noise and (sub_config.model_type, name) not in _PART_OF_THE_MODEL:
                setattr(sub_config, name, 0.0)


def keep_routers_still(model: Any) -> None:
    """Leave routers that draw experts at random in training in evaluation for good: they have no rate to turn off."""
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in _DRAW_EXPERTS:
            # Of the same printed name, by which transformers finds what a class can record.
            attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            module.__class__ = type(kind.__name__, (kind,), {**attributes, "train": _stay_in_evaluation})
            module.eval()


def _stay_in_evaluation(module: Any, mode: bool = True) -> Any:  # noqa: FBT001, FBT002, ARG001 - torch's form
    return nn.Module.train(module, False)  # noqa: FBT003 - same


Make = Callable[[Any], Any]
"""A function from a transformers configuration to a model with random weights."""


def maker(config: Any, trust_remote_code: bool, scorer: bool, live: Any = None) -> Make:
    """Return what makes models of a configuration: that score texts if `scorer`, else that predict tokens.

    A model in memory, `live`, has a class already.

    Raises:
        ModelError: transformers has no such model, or the one in memory scores no texts.
    """
    if live is not None:
        if scorer and not hasattr(live, "score"):
            raise ModelError(
                f"A {type(live).__name__} has no layer `score`. Give a model for sequence classification with "
                "num_labels=1, or name a language model's directory in model.path."
            )
        return type(live)._from_config  # type: ignore[no-any-return]  # noqa: SLF001 - what from_config calls
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    if trust_remote_code and not scorer and hasattr(config, "auto_map"):
        return partial(AutoModelForCausalLM.from_config, trust_remote_code=True)
    for auto in [AutoModelForSequenceClassification] if scorer else [AutoModelForImageTextToText, AutoModelForCausalLM]:
        if type(config) in auto._model_mapping:  # noqa: SLF001 - the registry has no public lookup
            return auto.from_config  # type: ignore[no-any-return]
    description = "model for sequence classification of" if scorer else "language model for"
    raise ModelError(f"transformers has no {description} model_type {config.model_type!r}.")


def on_meta(make: Make, config: Any) -> Any:
    """Return a model whose parameters and buffers have shapes alone."""
    with torch.device("meta"):
        return _made(make, config)


def _made(make: Make, config: Any) -> Any:
    config = copy.deepcopy(config)
    config.dtype = torch.float32  # only for the skeleton; `set_storage` chooses the dtypes that are stored
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

    # A patch of the class, undone at the end of the block: `torch.device("meta")` as a context would move buffers too,
    # and these must be computed.
    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
