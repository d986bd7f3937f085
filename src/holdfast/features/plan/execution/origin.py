"""Replaces the model files in a run's configuration by the shapes of the models, which is all that a plan needs."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from holdfast.config.sections.model import ModelConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import ModelError
from holdfast.features.plan.formulas import SHAPE_FOLDER, ModelSize, shape_file
from holdfast.models.check.shrink import layers_in
from holdfast.models.files.configuration import config_from_values
from holdfast.models.files.origin import load_tokenizer
from holdfast.models.setup.model import Blueprint, configured, storage_of
from holdfast.parallel.plan import ShardPlan
from holdfast.training.run import ConfiguredRun
from holdfast.training.setup.frozen import settled_for_plan

_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
_BUILT_IN = "builtin:characters"


def without_files(config: TrainingConfig, base: Path, device: str) -> tuple[TrainingConfig, list[str]]:
    """Return the configuration with the shapes of its models in the place of their files, and what to know of it.

    Args:
        config: The user's own.
        base: The directory of its YAML.
        device: The type of device that is planned for, "cuda" or "cpu".

    Raises:
        ModelError: A model's configuration is neither here nor among those that are known.
    """
    config, settled = settled_for_plan(ConfiguredRun(config=config, base=base), device)
    model, notes = shape_of(config.model, base)
    notes += settled
    changed: dict[str, Any] = {"model": model}
    if model.lora is not None and model.lora.path is not None:
        changed["model"] = model.model_copy(update={"lora": model.lora.model_copy(update={"path": None})})
    if isinstance(config, GRPOConfig):
        rollout = config.rollout.model_copy(update={"record": False, "show": 0, "stop": []})
        changed |= {"rollout": rollout}
        if config.critic is not None and config.critic.path is not None:
            changed["critic"] = config.critic.model_copy(update={"path": None})
            notes.append("critic: planned with the shape of the policy")
    return config.model_copy(update=changed), notes


def shape_of(model: ModelConfig, base: Path) -> tuple[ModelConfig, list[str]]:
    """Return a model section that names no files, and what a user should know of it."""
    notes: list[str] = []
    if model.path is None:
        raw = config_from_values(model.config or {})
    else:
        raw, is_shipped = _raw(model, base)
        notes += [f"model: the configuration of {model.path} as the package knows it"] if is_shipped else []
    try:
        load_tokenizer(model, base)
        tokenizer = model.tokenizer or model.path
    except ModelError:
        tokenizer = _BUILT_IN
        notes.append("tokenizer: it is not here, and the vocabulary is taken as the configuration has it")
    changed: dict[str, Any] = {"path": None, "config": _values(raw), "tokenizer": tokenizer, "config_override": {}}
    return model.model_copy(update=changed), notes


def _values(config: Any) -> dict[str, Any]:
    """Return the values from which the same configuration can be built."""
    values: dict[str, Any] = {"model_type": config.model_type}
    for name in (field.name for field in fields(config) if not field.name.startswith("_")):
        value = getattr(config, name, None)
        if hasattr(value, "attribute_map"):
            values[name] = _values(value)
        elif isinstance(value, _PLAIN):
            values[name] = copy.deepcopy(value)
    return values


def _raw(model: ModelConfig, base: Path) -> tuple[Any, bool]:
    """Return the transformers configuration of a named model, and whether it is one that the package knows."""
    name = str(model.path)
    known = shape_file(name)
    if known.is_file() and not (base / name).is_dir() and not Path(name).is_dir():
        values = json.loads(known.read_text(encoding="utf-8"))
        return config_from_values(values), True
    try:
        return configured(model, base)[0], False
    except ModelError as error:
        shapes = sorted(path.stem.replace("--", "/") for path in SHAPE_FOLDER.glob("*.json"))
        raise ModelError(
            f"{error} A plan needs no weights, but it needs the configuration: put config.json of {name} into a "
            f"directory and name that in model.path. Known without files are {', '.join(shapes)}."
        ) from error


def size_of_plan(config: TrainingConfig, plan: ShardPlan, origin: Blueprint) -> ModelSize:
    """Return the size of a model that is built."""
    text: Any = origin.skeleton.config.get_text_config()
    stored = storage_of(config.model)[0].itemsize
    units = sorted((unit.bytes_ // stored for unit in plan.units), reverse=True)
    widths = layers_in(origin.skeleton), int(text.hidden_size), int(text.vocab_size)
    return ModelSize(plan.parameters, plan.trainable, tuple(units), *widths)
