"""The trial of optional forms of decoding steps: what differs or is slower is not used, and no token changes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from holdfast.parallel.forms import Forms
from holdfast.rollout.engine import generate
from holdfast.rollout.local.block_attention import InPlace, Operands
from holdfast.rollout.local.graphs import DrawToken
from holdfast.rollout.local.inprocess import InProcessEngine
from tests.rollout.recorders import Refusing, Steps
from tests.rollout.test_fused import HOW, Counting, asked, fused_engine, rounds
from tests.rollout.test_graphs import assert_same, engine_of, recorded_engine
from tests.rollout.test_in_place import row_by_row
from tests.rollout.test_inprocess import reference

SLOW = 0.05
"""Seconds, many times what a step of the tiny model takes."""


class SlowSteps(Steps):
    """Replays that wait."""

    def recording_of(self, step: DrawToken) -> DrawToken:
        def replay() -> None:
            time.sleep(SLOW)
            step()

        return replay


class QuickSteps(Steps):
    """Steps that wait where they are not replayed."""

    def recording_of(self, step: Any) -> DrawToken:
        rows, own = step.__self__, step

        def slow() -> None:
            time.sleep(SLOW)
            own()

        rows.step = slow
        return own  # type: ignore[no-any-return]  # a bound method


def slow_kernel(given: Operands) -> None:
    time.sleep(SLOW)
    row_by_row(given)


def wrong_kernel(given: Operands) -> None:
    row_by_row(given)
    given.out.mul_(1.01)


def tried(engine: InProcessEngine, forms: Forms) -> dict[str, int]:
    engine.submit([], HOW)
    engine.longest = 20
    return {standing.name: standing.value for standing in engine.choose_forms(forms)}


@pytest.mark.parametrize(
    ("recorder", "timed", "value"),
    [(Steps(), False, 1), (Refusing(), False, 0), (SlowSteps(), True, 0), (QuickSteps(), True, 1)],
    ids=["agrees", "cannot", "slower", "faster"],
)
def test_steps_are_recorded_where_that_agrees_and_is_faster(recorder: Steps, timed: bool, value: int) -> None:
    model = reference("qwen3")
    engine = recorded_engine(model, recorder, rows=16)

    chosen = tried(engine, Forms(timed=timed))

    assert chosen["steps"] == value
    assert ("projections" in chosen) is bool(value)
    assert engine._recorder is (recorder if value else None)
    assert_same(generate(engine, asked(5), HOW), generate(engine_of(model), asked(5), HOW))


@pytest.mark.parametrize(
    ("kernel", "timed", "value"), [(row_by_row, False, 1), (wrong_kernel, False, 0), (slow_kernel, True, 0)]
)
def test_blocks_are_read_in_place_where_that_agrees_and_is_faster(kernel: Any, timed: bool, value: int) -> None:
    model = reference("qwen3")
    engine = recorded_engine(model, Steps(), rows=16)
    engine.in_place = InPlace(kernel)

    chosen = tried(engine, Forms(timed=timed))

    assert chosen["attention"] == value
    assert engine.in_place.agrees is bool(value)
    assert_same(generate(engine, asked(5), HOW), generate(engine_of(model), asked(5), HOW), 1e-6)


@pytest.mark.parametrize(("compiler", "value"), [(Counting(), 1), (rounds, 0)], ids=["agrees", "differs"])
def test_layers_are_compiled_where_they_agree(compiler: Any, value: int) -> None:
    model = reference("qwen3")
    engine = fused_engine(model, compiler)

    chosen = tried(engine, Forms())

    assert chosen == {"steps": 1, "projections": 1, "layers": value}
    assert_same(generate(engine, asked(5), HOW), generate(engine_of(model), asked(5), HOW))


@pytest.mark.parametrize("recorded", [{"steps": 0}, {"steps": 1, "attention": 0}])
def test_a_resumed_run_decodes_as_it_began(recorded: dict[str, int]) -> None:
    forms, recorder = Forms(timed=True), SlowSteps()
    forms.resume(recorded)
    engine = recorded_engine(reference("qwen3"), recorder, rows=16)
    engine.in_place = InPlace(row_by_row)

    chosen = tried(engine, forms)

    assert {name: chosen[name] for name in recorded} == recorded
    assert bool(recorder.buckets) is bool(recorded["steps"])


def test_a_trial_is_made_once_and_changes_no_token_of_a_rollout() -> None:
    model, recorder = reference("qwen3"), Steps()
    engine, untried = recorded_engine(model, recorder, rows=16), recorded_engine(model, Steps(), rows=16)

    tried(engine, Forms())
    recordings = len(recorder.buckets)
    assert tried(engine, Forms()) == {}

    assert len(recorder.buckets) == recordings > 0
    for one, other in zip(generate(engine, asked(5), HOW), generate(untried, asked(5), HOW), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()
