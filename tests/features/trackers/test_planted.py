"""Secrets planted in every free place of the whole configuration tree, of every verb."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.checkpoint.export.about import Exported
from holdfast.checkpoint.export.card import card_of
from holdfast.config.base import LEFT_OUT
from holdfast.config.public import hashed, portable_configuration, public_configuration
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.yaml12 import parse_text, to_yaml
from holdfast.features.report.settings import flat_public

PLANTED = re.compile("planted[0-9a-f]{16}")


class Planter:
    """Fills a JSON schema: addresses with passwords where text may stand, keys and tokens where objects are free."""

    def __init__(self, schema: dict[str, Any], seed: int) -> None:
        self._definitions = schema.get("$defs", {})
        self._random = random.Random(seed)
        self.secrets: list[str] = []

    def secret(self) -> str:
        self.secrets.append(f"planted{self._random.getrandbits(64):016x}")
        return self.secrets[-1]

    def address(self) -> str:
        scheme = self._random.choice(["https", "http", "s3", "postgres", "git+ssh"])
        return f"{scheme}://me:{self.secret()}@host.example:8000/v1?token={self.secret()}#{self.secret()}"

    def value(self, schema: dict[str, Any], key: str, depth: int = 0) -> Any:
        if "$ref" in schema:
            return self.value(self._definitions[schema["$ref"].rpartition("/")[2]], key, depth)
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return self.value(self._random.choice(choices), key, depth) if depth < 12 else None
        match schema.get("type"):
            case "object" if schema.get("properties"):
                return {name: self.value(each, name, depth + 1) for name, each in schema["properties"].items()}
            case "object":
                free = {"api_key": self.secret(), "hub_token": self.secret(), "password": self.secret()}
                free |= {"server": self.address(), "nested": {"list": [self.address(), {"secret": self.secret()}]}}
                return free | ({"anything": self.secret()} if key == "kwargs" else {})
            case "array":
                return [self.value(schema.get("items", {"type": "string"}), key, depth + 1) for _ in range(2)]
            case "string" if "enum" not in schema:
                return self.address()
        return schema.get("const", schema.get("default"))


def planted(verb: str, seed: int) -> Iterator[tuple[dict[str, Any], list[str]]]:
    planter = Planter(ROOTS[verb].model_json_schema(), seed)
    tree = planter.value(planter._definitions.get("", ROOTS[verb].model_json_schema()), "")
    yield tree, planter.secrets


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("verb", sorted(ROOTS))
def test_no_secret_of_any_key_is_in_what_leaves_a_run(verb: str, seed: int) -> None:
    ((tree, secrets),) = planted(verb, seed)
    about = Exported("1" * 32, "tiny", 40)

    leaving = {
        "trackers and pushes": to_yaml(public_configuration(tree)),
        "report": repr(flat_public(tree)),
        "card": card_of(tree, verb, about, {}, {}),
        "exports and checkpoints": to_yaml(portable_configuration(tree)),
    }

    assert len(secrets) > 30
    assert set(PLANTED.findall(json.dumps(tree))) == set(secrets)
    assert {name: PLANTED.findall(text) for name, text in leaving.items()} == dict.fromkeys(leaving, [])


@pytest.mark.parametrize("seed", range(3))
def test_settings_that_a_resume_compares_hold_hashes(seed: int) -> None:
    ((tree, secrets),) = planted("grpo", seed)
    text = json.dumps(tree)

    mark = hashed(text)

    assert secrets
    assert PLANTED.findall(mark) == []
    assert hashed(mark) == mark
    kwargs = [f'{{"kwargs": {{"key": "{value}"}}}}' for value in ("a", "a", "b")]
    assert len({hashed(each) for each in kwargs}) == 2
    assert hashed('{"lr": 0.1}') == '{"lr": 0.1}'
    assert hashed("no JSON") == "no JSON"


def test_what_an_export_needs_stays_in_its_configuration() -> None:
    tree = {
        "data": {"path": "../rows/held_out.jsonl"},
        "reward": [
            {"kind": "path", "path": "/home/me/my.py:f", "kwargs": {"a": 1}},
            {"kind": "path", "path": "b.py:g", "kwargs": {}},
            {"kind": "judge", "url": "https://me:word@host:8000/v1?t=1", "api_key_variable": "JUDGE_KEY",
             "prompt": "Rate it.\nOf 10?"},
        ],
    }  # fmt: skip

    portable = portable_configuration(tree)

    assert portable["data"] == tree["data"]
    assert portable["reward"] == [
        {"kind": "path", "path": "/home/me/my.py:f", "kwargs": LEFT_OUT},
        {"kind": "path", "path": "b.py:g", "kwargs": {}},
        {"kind": "judge", "url": "https://host:8000/v1", "api_key_variable": "JUDGE_KEY", "prompt": "Rate it.\nOf 10?"},
    ]
    assert portable_configuration(portable) == portable
    assert parse_text(to_yaml(portable), "x").values == portable
