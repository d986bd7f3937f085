"""Conversion rules for data sets, columns and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.features.rescue.configuration.facts import (
    Converted,
    ForeignKey,
    NotConverted,
    Provisional,
    Rule,
    text,
    weights_of,
)

_SOURCE_KEYS = {"path", "name", "split", "revision", "type", "field_messages"}
_ROW_SHAPES = ("alpaca", "sharegpt")
_SOURCE_TYPES = (None, "chat_template", *_ROW_SHAPES)
_FILE_KEYS = (
    "reward_funcs",
    "worker.reward.reward_function",
    "worker.reward.score_function",
    "reward.custom_reward_function.path",
    "custom_reward_function.path",
)


def _with_split(path: Any, split: Any) -> str:
    return text(path) if split is None else f"{text(path)}@{text(split)}"


def hub_rows(foreign: ForeignKey) -> dict[str, Any]:
    """Join the name of a data set and the split that is trained on."""
    name = foreign.get("dataset_name")
    return {} if name is None else {"data.path": _with_split(name, foreign.get("dataset_train_split"))}


def hub_test_rows(foreign: ForeignKey) -> dict[str, Any]:
    """Make an evaluation set of the split that is evaluated."""
    name = foreign.get("dataset_name")
    return {} if name is None else {foreign.target: _with_split(name, foreign.value)}


def _sources(value: Any) -> tuple[list[dict[str, Any]], str]:
    """Return a list of sources there as one of ours, and what else decides there what a row is."""
    items = [
        {"path": item} if isinstance(item, str) else item for item in (value if isinstance(value, list) else [value])
    ]
    if not all(isinstance(item, Mapping) and "path" in item for item in items):
        raise NotConverted("a source without a path")
    others = {str(key) for item in items for key in item if key not in _SOURCE_KEYS and item[key] is not None}
    others |= {f"type {item['type']}" for item in items if item.get("type") not in _SOURCE_TYPES}
    return [_source(item) for item in items], f"not converted: {', '.join(sorted(others))}" if others else ""


def _unless(others: str, settings: dict[str, Any]) -> Converted:
    """Return settings that are a person's decision where their sources say anything else."""
    return Provisional(settings, others) if others else settings


def _source(item: Mapping[str, Any]) -> dict[str, Any]:
    shape = str(item.get("type", "")).partition(".")[0].partition(":")[0]
    name, revision, messages = (
        None if item.get(key) is None else text(item[key]) for key in ("name", "revision", "field_messages")
    )
    source = {
        "path": _with_split(item["path"], item.get("split")),
        "config_name": name,
        "revision": revision,
        "rows": shape if shape in _ROW_SHAPES else None,
        "columns": {"messages": messages} if messages not in (None, "messages") else None,
    }
    return {key: value for key, value in source.items() if value}


def rows_list(foreign: ForeignKey) -> Converted:
    """Write one source into data, several into data.sources."""
    sources, others = _sources(foreign.value)
    if foreign.verb != "sft":
        sources = [{key: option for key, option in source.items() if key != "rows"} for source in sources]
    if len(sources) == 1:
        return _unless(others, {f"data.{key}": option for key, option in sources[0].items()})
    return _unless(others, {"data.sources": sources})


def test_rows_list(foreign: ForeignKey) -> Converted:
    """Name evaluation sets test, test2 and so on."""
    sources, others = _sources(foreign.value)
    sets = {f"test{place if place > 1 else ''}": one for place, one in enumerate(sources, 1)}
    return _unless(others, {foreign.target: sets})


def rows_paths(foreign: ForeignKey) -> dict[str, Any]:
    """Write one file as a path, several as sources."""
    paths = foreign.value if isinstance(foreign.value, list) else [foreign.value]
    if len(paths) == 1:
        return {foreign.target: text(paths[0])}
    if foreign.target != "data.path":
        return {"evaluation.sets": {f"val{place}": {"path": text(path)} for place, path in enumerate(paths, 1)}}
    return {"data.sources": [{"path": text(path)} for path in paths]}


def text_column(foreign: ForeignKey) -> dict[str, Any]:
    """Rename the column of texts."""
    return {} if foreign.value == "text" else {"data.columns": {"text": foreign.value}}


def renamed_column(foreign: ForeignKey) -> dict[str, Any]:
    """Map our name of a column to the file's, where they differ."""
    return {} if foreign.value == foreign.target.rpartition(".")[2] else {foreign.target: foreign.value}


def jinja_file(foreign: ForeignKey) -> dict[str, Any]:
    """Accept a jinja file; the name of another tokenizer is not converted."""
    if not str(foreign.value).endswith((".jinja", ".jinja2")):
        raise NotConverted(f"{foreign.value} is no jinja file")
    return {foreign.target: foreign.value}


def reward_functions(foreign: ForeignKey) -> dict[str, Any]:
    """Write functions in files as rewards, with their weights and options."""
    paths = foreign.get(*_FILE_KEYS)
    paths = paths if isinstance(paths, list) else [paths]
    functions = [_function(str(path), foreign) for path in paths if path is not None]
    weights = weights_of(foreign.get("reward_weights"), len(functions))
    rewards: list[dict[str, Any]] = [
        {"kind": "path", "path": function} | ({"weight": weight} if weight != 1 else {})
        for function, weight in zip(functions, weights, strict=True)
    ]
    options = foreign.get("worker.reward.reward_function_kwargs")
    if options is not None and not isinstance(options, Mapping):
        raise NotConverted(f"{options} is no mapping")
    if options and rewards:
        rewards[0]["kwargs"] = dict(options)
    return {"reward": rewards if len(rewards) > 1 else rewards[0]} if rewards else {}


def _function(path: str, foreign: ForeignKey) -> str:
    file, colon, name = path.rpartition(":")
    if colon and file.endswith(".py"):
        return f"{file}:{name}"
    module, dot, function = path.rpartition(".")
    if dot and function != "py" and all(identifier.isidentifier() for identifier in path.split(".")):
        return f"{module}:{function}"
    if not path.endswith(".py"):
        raise NotConverted(f"{path} is no function in a file; write file.py:function")
    name = foreign.get("reward.custom_reward_function.name", "custom_reward_function.name")
    return f"{path}:{'main' if name is None else name}"


def reward_model(foreign: ForeignKey) -> dict[str, Any]:
    """Write a reward model as a reward of kind `model`."""
    if foreign.get("reward_funcs") is not None:
        raise NotConverted("several rewards are a list; add one of kind model")
    return {"reward": {"kind": "model", "path": foreign.value}}


ROW_RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        hub_rows, hub_test_rows, rows_list, test_rows_list, rows_paths, text_column, renamed_column, jinja_file,
        reward_functions, reward_model,
    )
}  # fmt: skip
