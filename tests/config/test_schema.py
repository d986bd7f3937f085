"""The JSON schema accepts what Holdfast accepts, and a change of the tree shows in a change's diff."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.commands.config import schema
from holdfast.config.load import from_mapping
from holdfast.config.tree import all_keys
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.verbs.training import SFTConfig, as_plain
from holdfast.errors import ConfigError
from tests.config.conftest import WHOLE
from tests.config.json_schema import accepts

SNAPSHOT = Path(__file__).parent / "schema.sft.json"
SCHEMA: dict[str, Any] = SFTConfig.model_json_schema()
LEAST: dict[str, Any] = {"steps": 1, "model": {"path": "m"}, "data": {"path": "d"}}

TAKEN: list[dict[str, Any]] = [
    {},
    {"optim": "sgd"},
    {"optim": {"lr": 1e-5}},
    {"optim": {"kind": "sgd", "momentum": 0.9}},
    {"optim": {"schedule": "constant"}},
    {"optim": {"kind": "adamw", "schedule": {"final_ratio": 0.1}, "clip_norm": None}},
    {"parallel": {"recompute": {"kind": "every_k", "k": 3}, "shard": 4}},
    {"objective": {"kind": "path", "path": "f.py:g", "kwargs": {"any": ["thing"]}}},
    {"objective": "f.py:g"},
    {"optim": "own.py:Lion"},
    {"launch": {"ranks": "auto"}},
    {"data": {"sources": [{"path": "a", "weight": 2}, {"synthetic": {"task": "add"}, "weight": 1.5}]}},
    {"data": {"path": "a", "batch_size_schedule": {"100": 64}, "columns": {"prompt": "question"}}},
    {"evaluation": {"sets": {"a": {"path": "x"}}, "completions": {"samples": 3}}},
]
REFUSED: list[dict[str, Any]] = [
    {"optm": {}},
    {"optim": "adam"},
    {"parallel": {"recompute": "f.py:g"}},
    {"optim": {"momentum": 0.9}},
    {"optim": {"kind": "sgd", "betas": [0.9, 0.9]}},
    {"optim": {"lr": 0}},
    {"optim": {"betas": [0.9]}},
    {"optim": {"schedule": {"kind": "constant", "final_ratio": 0.1}}},
    {"parallel": {"recompute": {"kind": "full", "k": 3}}},
    {"launch": {"ranks": "two"}},
    {"seed": 1.5},
    {"data": {"path": "a", "validation_split": 1}},
    {"evaluation": {"sets": {"a": {"pth": "x"}}}},
    {"objective": {"kind": "path"}},
]


@pytest.mark.parametrize("change", TAKEN)
def test_the_schema_accepts_what_the_tree_accepts(change: dict[str, Any]) -> None:
    from_mapping(LEAST | change, SFTConfig)

    assert accepts(SCHEMA, LEAST | change)


@pytest.mark.parametrize("change", REFUSED)
def test_the_schema_refuses_what_the_tree_refuses(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        from_mapping(LEAST | change, SFTConfig)

    assert not accepts(SCHEMA, LEAST | change)


@pytest.mark.parametrize("change", TAKEN)
def test_the_resolved_tree_fits_the_schema_and_is_the_same_tree(change: dict[str, Any]) -> None:
    config = from_mapping(LEAST | change, SFTConfig)

    plain = json.loads(json.dumps(as_plain(config)))

    assert accepts(SCHEMA, plain)
    assert from_mapping(plain, SFTConfig) == config


def test_the_command_prints_the_schema() -> None:
    assert json.loads(schema("sft")) == SCHEMA
    with pytest.raises(ConfigError, match=r"'stf' .*sft, dpo, reward, grpo, distill"):
        schema("stf")


def test_the_schema_is_the_one_in_the_snapshot() -> None:
    """After a wanted change: `holdfast config schema sft > tests/config/schema.sft.json`."""
    assert json.loads(SNAPSHOT.read_text()) == SCHEMA, "the tree changed: write the snapshot anew, and say why"


def _sections(schema_part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from ((name, section) for name, section in schema_part["$defs"].items())


def test_every_section_says_what_it_is_for() -> None:
    assert [name for name, section in _sections(SCHEMA) if not section.get("description")] == []


def test_keys_that_scripts_rely_on_stand_where_the_design_says() -> None:
    promised = {
        "run.dir", "run.name", "seed", "steps", "launch.ranks", "optim.lr", "model.path", "model.config", "data.path",
    }  # fmt: skip

    assert promised <= set(all_keys(ROOTS["sft"]))


def test_a_run_is_named_after_its_file(read: Callable[..., SFTConfig]) -> None:
    assert read(WHOLE, name="sort-small.v2.yaml").run.name == "sort-small.v2"
    assert read(WHOLE + "run: {dir: elsewhere}\n", name="sort.yaml").run.name == "sort"
    assert read(WHOLE + "run: {name: mine}\n").run.name == "mine"
    assert read(WHOLE, "run.name=other").run.name == "other"
    assert from_mapping(LEAST, SFTConfig).run.name == "run"
