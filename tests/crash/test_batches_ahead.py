"""A batch that is read ahead is no part of a checkpoint: its cursor is that of a run that reads none ahead."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.ahead import BatchesAhead, StreamAhead
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.recipes.sft import sft_step
from holdfast.training.evaluate import evaluate
from holdfast.training.fit import fit
from holdfast.training.setup.begin import build_run
from tests.crash.runs import log_of, state_differences, values_of
from tests.training.cases import run

STEPS = 6


def run_without(world: World, values: dict[str, Any]) -> Any:
    """Run SFT on batches that are read when they are needed."""
    built = build_run(from_mapping(values, SFTConfig), Path(), world)
    assert isinstance(built.stream, BatchesAhead)
    stream, options = built.stream._stream, built.stream._options
    built.stream.close()
    built = replace(built, stream=StreamAhead(stream, replace(options, own_ranks=RankGroup(1.0))))
    return fit(built, partial(sft_step, built), partial(evaluate, built.evaluation))


def cursors(place: Path) -> dict[int, Any]:
    """Return what the checkpoint of each step says of its place in the data."""
    states = [json.loads(file.read_text()) for file in place.glob("r/checkpoints/step-*/trainer.json")]
    return {state["state"]["step"]: state["stream"] for state in states}


@pytest.mark.cases(1)
@pytest.mark.parametrize("packing", ["best_fit", "wrapped"])
def test_cursors_of_all_checkpoints_are_those_of_a_run_that_reads_no_batch_ahead(
    pools: Any, tmp_path: Path, packing: str
) -> None:
    places = [tmp_path / "ahead", tmp_path / "without"]
    ahead, without = (
        values_of(
            place,
            steps=STEPS,
            checkpoint={"every_steps": 1},
            data={"synthetic": {"task": "sort", "rows": 40}, "packing": packing},
        )
        for place in places
    )

    pools(2).run(run, ahead)
    pools(2).run(run_without, without)

    assert sorted(cursors(places[0])) == list(range(1, STEPS + 1))
    assert cursors(places[0]) == cursors(places[1])
    assert log_of(places[0]) == log_of(places[1])
    assert state_differences(*places) == []
