"""`determinism`: what a run does again is the same to the bit, and an operation that cannot promise it raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.parallel.mesh import World
from tests.crash.runs import log_of, state_differences, values_of
from tests.training.cases import run

LOSS = """
import torch
from holdfast.objectives.supervised import NegativeLogLikelihood

class Loss(NegativeLogLikelihood):
    def token_terms(self, logprobs, entropy, part):
        kept = torch.zeros(1)
        kept.put_(torch.zeros(2, dtype=torch.int64), torch.ones(2))  # which of two writes stays is not defined
        return super().token_terms(logprobs, entropy, part)
"""


def run_once(world: World, values: dict[str, Any], base: str) -> tuple[Any, bool]:
    """Run; return the outcome and whether torch was told, and leave the process as it was."""
    try:
        outcome = run(world, values, base)
        return outcome, torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)  # noqa: FBT003 - torch's own form


def test_two_runs_are_equal_to_the_bit(pools: Any, tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("one", "two")]

    found = [pools(2).run(run_once, values_of(place, steps=4, determinism=True), ".") for place in places]

    assert all(told for outcomes in found for _, told in outcomes)
    assert log_of(places[0]) == log_of(places[1])
    assert len(log_of(places[0])) == 4
    assert state_differences(*places) == []


@pytest.mark.parametrize("determinism", [True, False])
def test_an_operation_without_a_deterministic_form_raises(pools: Any, tmp_path: Path, determinism: bool) -> None:
    (tmp_path / "loss.py").write_text(LOSS)
    objective = {"kind": "path", "path": "loss.py:Loss"}
    values = values_of(tmp_path, steps=1, determinism=determinism, objective=objective)

    if determinism:
        errors = pools(2).errors(run_once, values, str(tmp_path))
        assert all(
            kind == "RuntimeError" and text.startswith("put_ does not have a deterministic") for kind, text in errors
        )
    else:
        assert pools(2).run(run_once, values, str(tmp_path))[0][0].step == 1
