"""What a run directory records of its run reads back as the same run."""

from __future__ import annotations

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.runs import SFTConfig, as_plain
from holdfast.config.yaml12 import parse_text
from holdfast.training.directory import resolved_yaml

NAMES = ["1234e56", "7e10", "0o17", "0x1F", "010", "1_0", "12:30", "off", "null", "~", "1."]


@pytest.mark.parametrize("revision", NAMES)
def test_a_recorded_tree_reads_back_whatever_a_revision_is_called(revision: str) -> None:
    data = {"path": "some/rows", "revision": revision}
    config = from_mapping({"steps": 1, "model": {"path": "model"}, "data": data}, SFTConfig)

    values = parse_text(resolved_yaml(config), "config.resolved.yaml").values

    assert values["data"]["revision"] == revision
    assert from_mapping(values, SFTConfig) == config
    assert values == as_plain(config)
