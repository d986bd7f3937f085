"""What a resume was allowed to change stands in every later checkpoint of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.checkpoint import find
from tests.crash.runs import values_of
from tests.training.cases import run


def test_an_unfrozen_parameter_is_recorded_in_the_next_manifest(pools: Any, tmp_path: Path) -> None:
    frozen = {"model": {"freeze": [r"layers\.0\."]}}
    declared = {"resume": {"unfreeze": [r"layers\.0\."]}}
    pools(2).run(run, values_of(tmp_path, steps=2, **frozen))
    assert find.one(str(tmp_path / "r")).manifest.deviations == ()

    pools(2).run(run, values_of(tmp_path, steps=4, checkpoint=declared))

    manifest = find.one(str(tmp_path / "r")).manifest
    assert manifest.step == 4
    recorded = str(manifest.deviations)
    assert "unfreeze" in recorded
    assert "layers.0.self_attn.q_proj.weight" in recorded
    assert "layers.1" not in recorded
