"""Memory of a run of gigabytes against its plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.yaml12 import to_yaml
from holdfast.features.plan.checks.measured import measured_peaks
from tests.fake_devices.cases import tree
from tests.fake_devices.conftest import child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


WIDE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""235 million parameters, of sixteen bytes each; large matrices, since glibc keeps the memory of small ones."""


def test_resident_memory_above_the_start_is_within_fifteen_per_cent_of_the_plan(tmp_path: Path) -> None:
    values = tree(
        steps=3,
        model={"config": WIDE},
        data={"batch_size": 2, "max_length": 64, "tokens_per_micro_batch": 128},
        run={"dir": str(tmp_path), "name": "r"},
        launch={"device": "cpu", "ranks": 1},
        checkpoint={"at_end": False, "export_at_end": False, "rehearsal": False},
    )
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(values), encoding="utf-8")

    plan = json.loads(child("holdfast.cli.main", "plan", str(file), "--memory", "100GiB", "--json").stdout)
    done = child("holdfast.cli.main", "sft", str(file))

    assert done.returncode == 0, done.stderr[-2000:]
    device, measured = measured_peaks(tmp_path / "r")
    assert device == "cpu"
    planned = plan["clock_phases"]
    assert planned["optimizer"] > 3 * 2**30
    for phase in ("forward_backward", "optimizer"):
        assert measured[phase] == pytest.approx(planned[phase], rel=0.15), phase
