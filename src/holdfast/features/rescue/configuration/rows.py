"""Conversion rules for data sets, columns and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.features.rescue.configuration.facts import Facts, ForeignKey, KeyOutcome, NotConverted, Rule, weights_of

_SOURCE_KEYS = {"path": "path", "name": "config_name", "split": "split", "revision": "revision", "type": "rows"}
_ROW_SHAPES = {"alpaca": "alpaca", "sharegpt": "sharegpt", "chat_template": "messages", "completion": "text"}


def _with_split(path: Any, split: Any) -> str:
    return f"{path}@{split}" if split else str(path)


def hub_rows(foreign: ForeignKey) -> KeyOutcome:
    """Join the name of a data set and the split that is trained on."""
    if foreign.facts.get("dataset_name") is None:
        return KeyOutcome({}, "there is no dataset_name")
    return KeyOutcome(
        {"data.path": _with_split(foreign.facts.get("dataset_name"), foreign.facts.get("dataset_train_split"))}
    )


def hub_test_rows(foreign: ForeignKey) -> KeyOutcome:
    """Make an evaluation set called `test` of the split that is evaluated."""
    if foreign.facts.get("dataset_name") is None:
        return KeyOutcome({}, "there is no dataset_name")
    return KeyOutcome({"evaluation.sets.test.path": _with_split(foreign.facts.get("dataset_name"), foreign.value)})


def _sources(value: Any) -> list[dict[str, Any]]:
    """Return a list of sources there as one of ours; what else an item says has to be decided by hand."""
    items = value if isinstance(value, list) else [value]
    sources = []
    for item in items:
        if isinstance(item, str):
            sources.append({"path": item})
            continue
        if not isinstance(item, Mapping) or "path" not in item:
            raise NotConverted("a source without a path")
        sources.append(_source(item))
    return sources


def _source(item: Mapping[str, Any]) -> dict[str, Any]:
    source = {"path": _with_split(item["path"], item.get("split"))}
    if item.get("name"):
        source["config_name"] = item["name"]
    if item.get("revision"):
        source["revision"] = item["revision"]
    shape = _ROW_SHAPES.get(str(item.get("type", "")).partition(".")[0].partition(":")[0])
    if shape in {"alpaca", "sharegpt"}:
        source["rows"] = shape
    renamed = {ours: item[theirs] for theirs, ours in (("field_messages", "messages"),) if theirs in item}
    renamed = {ours: theirs for ours, theirs in renamed.items() if ours != theirs}
    return {**source, "columns": renamed} if renamed else source


def _other_options(value: Any) -> str:
    """Return what sources say beyond what was converted."""
    items = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Mapping)]
    unconverted = sorted({key for item in items for key in item} - {*_SOURCE_KEYS, "field_messages"})
    return f"not converted: {', '.join(unconverted)}" if unconverted else ""


def rows_list(foreign: ForeignKey) -> KeyOutcome:
    """Write one source into data, several into data.sources."""
    sources = _sources(foreign.value)
    if foreign.facts.verb != "sft":
        sources = [{key: option for key, option in source.items() if key != "rows"} for source in sources]
    if len(sources) == 1:
        return KeyOutcome({f"data.{key}": option for key, option in sources[0].items()}, _other_options(foreign.value))
    return KeyOutcome({"data.sources": sources}, _other_options(foreign.value))


def test_rows_list(foreign: ForeignKey) -> KeyOutcome:
    """Name evaluation sets test, test2 and so on."""
    sources = _sources(foreign.value)
    sets = {f"test{index or ''}" if index < 1 else f"test{index + 1}": source for index, source in enumerate(sources)}
    return KeyOutcome({"evaluation.sets": sets}, _other_options(foreign.value))


def rows_paths(foreign: ForeignKey) -> KeyOutcome:
    """Write one file as a path, several as sources."""
    paths = foreign.value if isinstance(foreign.value, list) else [foreign.value]
    if len(paths) == 1:
        return KeyOutcome({foreign.target: str(paths[0])})
    if foreign.target != "data.path":
        return KeyOutcome({"evaluation.sets": {f"val{index}": {"path": path} for index, path in enumerate(paths, 1)}})
    return KeyOutcome({"data.sources": [{"path": str(path)} for path in paths]})


def text_column(foreign: ForeignKey) -> KeyOutcome:
    """Rename the column of texts."""
    return KeyOutcome({} if foreign.value == "text" else {"data.columns": {"text": foreign.value}})


def renamed_column(foreign: ForeignKey) -> KeyOutcome:
    """Map our name of a column to the file's, where they differ."""
    name = foreign.target.rpartition(".")[2]
    return KeyOutcome({} if foreign.value == name else {foreign.target: foreign.value})


def jinja_file(foreign: ForeignKey) -> KeyOutcome:
    """Accept a jinja file; the name of another tokenizer is not converted."""
    if not str(foreign.value).endswith((".jinja", ".jinja2")):
        raise NotConverted(f"{foreign.value} is no jinja file")
    return KeyOutcome({foreign.target: foreign.value})


def chat_template(foreign: ForeignKey) -> KeyOutcome:
    """Leave the tokenizer's own template alone; another one by name has to be written to a file."""
    if str(foreign.value) in {"tokenizer_default", "jinja"}:
        return KeyOutcome({})
    raise NotConverted(
        f"{foreign.value} is a template of that system; write it to a jinja file, or take the tokenizer's own"
    )


def reward_functions(foreign: ForeignKey) -> KeyOutcome:
    """Write functions in files as rewards, with their weights and options."""
    paths = foreign.facts.get(
        "reward_funcs",
        "worker.reward.reward_function",
        "worker.reward.score_function",
        "reward.custom_reward_function.path",
        "custom_reward_function.path",
    )
    paths = paths if isinstance(paths, list) else [paths]
    functions = [_function(str(path), foreign.facts) for path in paths if path is not None]
    weights = weights_of(foreign.facts.get("reward_weights"), len(functions))
    options = foreign.facts.get("worker.reward.reward_function_kwargs")
    rewards: list[dict[str, Any]] = []
    for function, weight in zip(functions, weights, strict=True):
        reward: dict[str, Any] = {"kind": "path", "path": function}
        rewards.append({**reward, "weight": weight} if weight != 1 else reward)
    if options and rewards:
        rewards[0]["kwargs"] = dict(options)
    if not rewards:
        return KeyOutcome({})
    return KeyOutcome({"reward": rewards if len(rewards) > 1 else rewards[0]})


def _function(path: str, facts: Facts) -> str:
    file, colon, name = path.rpartition(":")
    if colon and file.endswith(".py"):
        return f"{file}:{name}"
    module, dot, function = path.rpartition(".")
    if dot and function != "py" and all(identifier.isidentifier() for identifier in path.split(".")):
        return f"{module}:{function}"
    if not path.endswith(".py"):
        raise NotConverted(f"{path} is no function in a file; write file.py:function")
    default = facts.get("reward.custom_reward_function.name", "custom_reward_function.name") or "main"
    return f"{path}:{default}"


def reward_options(foreign: ForeignKey) -> KeyOutcome:
    """Accept options together with the function that they belong to."""
    return reward_functions(foreign) if foreign.value else KeyOutcome({})


def named_with(_: ForeignKey) -> KeyOutcome:
    """Convert a name together with the entry of its file."""
    return KeyOutcome({}, "written with the file")


def reward_model(foreign: ForeignKey) -> KeyOutcome:
    """Write a reward model as a reward of kind `model`."""
    if foreign.facts.get("reward_funcs") is not None:
        raise NotConverted("several rewards are a list; add one of kind model")
    return KeyOutcome({"reward": {"kind": "model", "path": foreign.value}})


ROW_RULES: dict[str, Rule] = {
    function.__name__: function
    for function in (
        hub_rows,
        hub_test_rows,
        rows_list,
        test_rows_list,
        rows_paths,
        text_column,
        renamed_column,
        jinja_file,
        chat_template,
        reward_functions,
        reward_options,
        named_with,
        reward_model,
    )
}
