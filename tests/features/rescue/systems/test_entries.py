"""Every entry of every table makes a configuration: its key with a value, in a file that its system reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.yaml12 import Document
from holdfast.errors import ConfigError
from holdfast.features.rescue.configuration.convert import ConvertedConfig, ConvertedLine, convert
from holdfast.features.rescue.systems.table import READABLE, KeyEntry, load_key_table

TRL = {"model_name_or_path": "m", "dataset_name": "rows", "test_split_size": 0.1}
FILES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "trl": [
        ("sft", TRL),
        ("dpo", TRL),
        ("reward", TRL),
        ("grpo", {**TRL, "reward_funcs": "a.py:f"}),
    ],
    "easyr1": [
        ("grpo", {
            "data.train_files": "rows", "data.val_files": "others", "worker.actor.model.model_path": "m",
            "worker.reward.reward_function": "a.py:f", "worker.rollout.n": 4,
        }),
    ],
    "verl": [
        ("grpo", {
            "data.train_files": "rows", "data.val_files": "others", "actor_rollout_ref.model.path": "m",
            "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4, "custom_reward_function.path": "a.py",
        }),
    ],
    "axolotl": [
        (verb, {"base_model": "m", "datasets": [{"path": "rows"}], "val_set_size": 0.1, "learning_rate": 1e-5, **more})
        for verb, more in (("sft", {}), ("dpo", {"rl": "dpo"}), ("reward", {"reward_model": True}),
                           ("grpo", {"rl": "grpo"}))
    ],
    "llamafactory": [
        (verb, {"model_name_or_path": "m", "val_size": 0.1, "stage": stage})
        for verb, stage in (("sft", "sft"), ("dpo", "dpo"), ("dpo", "kto"), ("reward", "rm"))
    ],
}  # fmt: skip
"""Least files of each system, with dotted keys, and the commands that they are for."""
NEEDED = {
    "warmup_ratio": {"max_steps": 1000},
    "quantization_type": {"quantization_type": "nf4"},
    "trainer.critic_warmup": {"critic.model.path": "m"},
    "lora_target_parameters": {"lora_dropout": 0.0},
    "max_new_tokens": {"vllm_max_model_length": 4096},
    "reward_model_name_or_path": {"reward_funcs": None},
    "use_bias_correction_kl": {"beta": 0.1},
    "algorithm.use_kl_loss": {"algorithm.kl_penalty": "low_var_kl"},
    "actor_rollout_ref.actor.clip_ratio": dict.fromkeys(
        f"actor_rollout_ref.actor.clip_ratio_{side}" for side in ("low", "high")
    ),
    "lr_scheduler_type": {"warmup_steps": 10},
    "lr_scheduler": {"warmup_steps": 10},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "polynomial"},
    **{
        f"vllm_importance_sampling_{name}": {"vllm_importance_sampling_mode": "token_mask"}
        for name in ("correction", "clip_min", "clip_max", "cap")
    },
}
SAMPLES: list[Any] = [
    8, 0.5, True, 64, 1, 3600, "x", "out/run", "a.py:f", "a.py", "nf4", "t.jinja", "tokenizer_default", "overall",
    "fixed", "token_mask", "server", [0.9, 0.99], ["wandb"], ["x"], [2.0], {"a": 1}, {"temperature": 0.5},
    {"power": 2.0}, [{"path": "rows"}], "sigmoid", "dapo", "sequence", "grpo", 4096, "127.0.0.1",
    "http://127.0.0.1:8000", 0,
]  # fmt: skip
"""Values one of which a key takes."""


def tree(values: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for dotted, value in values.items():
        *above, last = dotted.split(".")
        place = nested
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    return nested


def read(text: str) -> Any:
    return {"true": True, "false": False, "": None}.get(text, int(text) if text.lstrip("-").isdecimal() else text)


def conditions(entry: KeyEntry) -> dict[str, Any]:
    """Return what else a file says where its system reads the key."""
    parts = [part.partition("=") for part in entry.condition.text.split(" & ") if part]
    return {key.removesuffix("!"): 8 if key.endswith("!") else read(values.split("|")[0]) for key, _, values in parts}


def converted(system: str, entry: KeyEntry, value: Any) -> Iterator[tuple[ConvertedLine, ConvertedConfig]]:
    """Yield the conversion of a file with the key, for each command that has a file."""
    for verb, values in FILES[system]:
        asked = conditions(entry)
        if asked.get("verb", verb) != verb:
            continue
        file = {**values, **asked, **NEEDED.get(entry.key, {}), entry.key: value}
        file.pop("verb", None)
        conversion = convert(Document("theirs.yaml", tree(file)), system, verb, 8)
        yield next(line for line in conversion.lines if line.key == entry.key), conversion


def builds(conversion: ConvertedConfig) -> bool:
    """Return whether our tree takes the file, with rows and rewards where that system names none in it."""
    values = conversion.values()
    if not {"path", "sources"} & set(values.setdefault("data", {})):
        values["data"]["path"] = "rows"
    if conversion.verb == "grpo":
        values.setdefault("reward", "a.py:f")
    try:
        from_mapping(values, ROOTS[conversion.verb])
    except ConfigError:
        return False
    return True


def entries(system: str) -> list[KeyEntry]:
    table = load_key_table(system)
    return [entry for key in table.entries for entry in table.entries[key] if not entry.word]


@pytest.mark.parametrize("system", READABLE)
def test_every_value_of_every_entry_makes_a_configuration(system: str) -> None:
    failed = []
    for entry in entries(system):
        for text, ours in (entry.values or {}).items():
            outcomes = list(converted(system, entry, read(text)))
            if ours is None:
                good = any(not line.settings and not line.undecided and builds(each) for line, each in outcomes)
            else:
                good = any(line.settings and builds(each) for line, each in outcomes)
            if not good:
                failed.append((entry.key, text))

    assert failed == []


@pytest.mark.parametrize("system", READABLE)
def test_every_entry_without_a_list_of_values_makes_a_configuration_of_some_value(system: str) -> None:
    assert [
        entry.key
        for entry in entries(system)
        if entry.targets and (entry.rule or entry.values is None)
        if not any(
            line.settings and not line.undecided and builds(each)
            for value in SAMPLES
            for line, each in converted(system, entry, value)
        )
    ] == []


@pytest.mark.parametrize("system", READABLE)
def test_a_value_without_counterpart_is_left_to_a_person(system: str) -> None:
    closed = [entry for entry in entries(system) if not entry.rule and entry.values is not None]

    assert [
        entry.key
        for entry in closed
        if not entry.targets or any(ours is not None for ours in entry.values or {})
        if not any(line.undecided and not line.settings for line, _ in converted(system, entry, "made up"))
        if not all(text.lstrip("-").isdecimal() and ours is None for text, ours in (entry.values or {}).items())
    ] == []
