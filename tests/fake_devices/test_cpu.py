"""A plan of a run on the CPU against what torch's own profiler counts in the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.yaml12 import to_yaml
from tests.fake_devices.cases import EXPERTS, tree
from tests.fake_devices.conftest import child
from tests.fake_devices.measure import peaks, resume_peak
from tests.training.cases import run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__), pytest.mark.timeout(900)]

WIDE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
DATA = {"synthetic": {"task": "sort", "rows": 64}, "batch_size": 8, "max_length": 256, "tokens_per_micro_batch": 1024}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": tree(model={"config": WIDE}, data=DATA),
    "tied, recomputed": tree(
        model={"config": WIDE | {"tie_word_embeddings": True}}, data=DATA, parallel={"recompute": "full"}
    ),
    "LoRA": tree(model={"config": WIDE, "lora": {"rank": 8}}, data=DATA),
    "experts": tree(model={"config": EXPERTS | {"hidden_size": 128, "vocab_size": 2048}}, data=DATA),
}


@pytest.mark.cases("all")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_the_peak_of_tensors_is_within_five_per_cent_of_the_plan(
    pools: Any, tmp_path: Path, name: str, ranks: int
) -> None:
    values = SHAPES[name]
    values = values | {
        "run": {"dir": str(tmp_path), "name": "r"},
        "launch": {"device": "cpu", "ranks": ranks},
        "checkpoint": {"rehearsal": False},
        "metrics": {"progress": "off"},
    }
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(values), encoding="utf-8")

    plan = json.loads(child("holdfast.cli.main", "plan", str(file), "--memory", "100GiB", "--json").stdout)
    before, measured = pools(ranks).run(peaks, values)[0]

    assert plan["executed"], plan["notes"]
    planned = max(plan["phases"][phase]["total"] for phase in ("forward", "backward", "optimizer"))
    lying = plan["phases"]["optimizer"]["parts"]
    assert lying["parameters"] + lying["optimizer"] == pytest.approx(before, rel=0.05)
    assert planned == pytest.approx(measured, rel=0.05)


def test_a_resume_that_takes_more_than_any_step_is_planned_as_the_largest_row(pools: Any, tmp_path: Path) -> None:
    # What is read stands beside what is filled: twice the frozen weights, where a step has little besides them.
    wide = WIDE | {"hidden_size": 256, "vocab_size": 8192}
    values = tree(
        steps=1,
        model={"config": wide, "lora": {"rank": 4}},
        data={**DATA, "max_length": 32, "tokens_per_micro_batch": 32},
        run={"dir": str(tmp_path), "name": "r"},
        launch={"device": "cpu", "ranks": 1},
        checkpoint={"rehearsal": False, "export_at_end": False},
        metrics={"progress": "off"},
    )
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(values), encoding="utf-8")
    plan = json.loads(child("holdfast.cli.main", "plan", str(file), "--memory", "100GiB", "--json").stdout)
    pools(1).run(run, values)

    (measured,) = pools(1).run(resume_peak, values)

    rows = {row: phase["total"] for row, phase in plan["phases"].items()}
    assert plan["executed"], plan["notes"]
    assert rows["resume"] == pytest.approx(measured, rel=0.02)
    assert rows["resume"] > 1.2 * max(rows[row] for row in ("forward", "backward", "optimizer"))
