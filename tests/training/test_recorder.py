"""A recorded step that is damaged is told in a paragraph."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.training.policy.recorder import read_record, record_path, what_is_deleted

HEAD = {"step": 1, "base": "/", "metrics": {"loss": 0.5, "grad_norm": 1.0}}
GROUP = {
    "prompt_id": 0,
    "prompt": [5, 6],
    "source": "rows",
    "completions": [
        {"sample_id": 0, "seed": 1, "temperature": 1.0, "tokens": [7], "trained": True, "sampler_logprobs": [-0.5],
         "weights_version": 0, "text": "a"}
    ],
    "facts": {"greedy": None, "completions": [{"reward": 1.0, "parts": {"exact": 1.0}, "finish": "stop"}]},
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = record_path(tmp_path, 1)
    path.parent.mkdir()
    path.write_bytes(gzip.compress((json.dumps(HEAD) + "\n" + json.dumps(GROUP) + "\n").encode(), mtime=0))
    return path


def test_a_bit_that_flips_anywhere_changes_nothing_or_is_named(tmp_path: Path, place: Path) -> None:
    whole = place.read_bytes()
    expected = repr(read_record(tmp_path, 1))

    unnoticed = []
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        place.write_bytes(damaged)
        try:
            found = repr(read_record(tmp_path, 1))
        except ConfigError as error:
            assert "is damaged (" in str(error)
        else:
            unnoticed += [] if found == expected else [bit]

    assert unnoticed == []


@pytest.mark.parametrize("length", [0, 11, 60])
def test_a_torn_one_is_named(tmp_path: Path, place: Path, length: int) -> None:
    place.write_bytes(place.read_bytes()[:length])

    with pytest.raises(ConfigError, match=r"step-00000001.jsonl.gz is damaged \(.*so step 1 cannot be made again"):
        read_record(tmp_path, 1)


@pytest.mark.parametrize(
    ("steps", "checkpoint", "said"),
    [
        (100, {"every_steps": 1, "keep": {"every": 1}}, ""),
        (3, {"every_steps": 1}, ""),
        (100, {}, "saved by the clock alone, and of them the last 3 stay"),
        (100, {"every_steps": 1}, "saved every 1 steps, and of them the last 3 stay"),
        (100, {"every_steps": 5, "keep": {"every": 10}}, "the last 3 and those of every 10 steps stay"),
    ],
)
def test_steps_that_cannot_be_made_again_are_told_at_start(steps: int, checkpoint: dict[str, Any], said: str) -> None:
    tree = {"steps": steps, "model": {"path": "m"}, "data": {"path": "d"}, "reward": "exact", "checkpoint": checkpoint}

    found = what_is_deleted(from_mapping(tree | {"rollout": {"record": True}}, GRPOConfig))

    assert said in found if said else found == ""
    assert what_is_deleted(from_mapping(tree, GRPOConfig)) == ""
