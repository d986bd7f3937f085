"""What a run directory records of its run reads back as the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig, as_plain
from holdfast.config.yaml12 import parse_text
from holdfast.training.directory import resolved_yaml
from tests.training.cases import run, tree

NAMES = ["1234e56", "7e10", "0o17", "0x1F", "010", "1_0", "12:30", "off", "null", "~", "1."]


@pytest.mark.parametrize("revision", NAMES)
def test_a_recorded_tree_reads_back_whatever_a_revision_is_called(revision: str) -> None:
    data = {"path": "some/rows", "revision": revision}
    config = from_mapping({"steps": 1, "model": {"path": "model"}, "data": data}, SFTConfig)

    values = parse_text(resolved_yaml(config), "config.resolved.yaml").values

    assert values["data"]["revision"] == revision
    assert from_mapping(values, SFTConfig) == config
    assert values == as_plain(config)


@pytest.mark.parametrize("left", ["", "\0" * 64], ids=["nothing", "zeros"])
def test_a_run_whose_run_json_a_power_cut_emptied_goes_on_as_the_run_of_its_checkpoints(
    pools: Any, tmp_path: Path, left: str
) -> None:
    pools(1).run(run, tree(str(tmp_path), steps=2))
    identity = tmp_path / "r" / "run.json"
    before = json.loads(identity.read_text())
    identity.write_text(left)

    outcome = pools(1).run(run, tree(str(tmp_path), steps=4))[0]

    assert outcome.step == 4
    assert json.loads(identity.read_text()) == before
    events = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert {"event": "rewind", "to": 2} in events


def test_a_run_json_that_is_empty_beside_no_checkpoint_is_refused(pools: Any, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").touch()

    errors = pools(1).errors(run, tree(str(tmp_path)))

    assert errors[0][0] == "ConfigError"
    assert f"{tmp_path / 'r' / 'run.json'} is not what Holdfast writes" in errors[0][1]
