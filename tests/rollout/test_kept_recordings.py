"""What is recorded serves later rollouts, as long as nothing that it speaks of has moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.names import named_parameters
from holdfast.rollout.engine import Request, Sampled, generate
from holdfast.rollout.local.cache import BlockCache
from holdfast.rollout.local.graphs import DrawToken
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.rollout.sampling import Stops, mixed
from holdfast.training.rollout_memory import TrainingMemory
from tests.rollout.recorders import Steps
from tests.rollout.test_continuous_batches import SEVERAL_ENDS
from tests.rollout.test_graphs import assert_same
from tests.rollout.test_inprocess import EOS, engine_of, origin_of, reference

HOW = SamplingConfig(max_new_tokens=40, temperature=1.3)
ENDS, NEVER = Stops(frozenset({EOS})), Stops(frozenset())


class Fixed(Steps):
    """Replays that stand for operations on fixed memory: they fail where a weight, a block or a slot has moved."""

    def recording_of(self, step: Any) -> DrawToken:
        rows = step.__self__
        weights = [*rows._predictor.replica.model.parameters(), rows._predictor.head.weight]

        def places() -> list[int]:
            joined = [joint.weight for form in rows._forms for joint in form._joints]
            blocks = [tensor for pair in rows.cache.pairs.values() for tensor in pair]
            slots = rows._kept.slots
            return [tensor.data_ptr() for tensor in (*weights, *joined, *blocks, *slots.row_tensors(), slots.tables)]

        before, step_there = places(), super().recording_of(step)

        def replay() -> None:
            assert places() == before, "a recording speaks of memory that has moved"
            step_there()

        return replay


def engine_for(model: Any, stops: Stops = ENDS, *, rows: int = 64) -> tuple[InProcessEngine, Fixed]:
    recorder = Fixed()
    engine = InProcessEngine(origin_of(model), torch.device("cpu"), torch.float64, stops, rows=rows, recorder=recorder)
    engine.update_weights(named_parameters(model).items(), 7)
    return engine, recorder


def asked(rows: int, length: int = 9, seed: int = 1) -> list[Request]:
    prompt = np.random.default_rng(seed).integers(2, 90, length)
    return [Request(0, prompt, tuple(mixed(seed, place) for place in range(rows)))]


def counted(
    engine: InProcessEngine, recorder: Fixed, requests: list[Request], how: SamplingConfig = HOW
) -> tuple[list[Sampled], int]:
    """Return completions, and how many steps were recorded for them."""
    before = len(recorder.buckets)
    return generate(engine, requests, how), len(recorder.buckets) - before


def assert_equal_bits(found: list[Sampled], expected: list[Sampled]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.parametrize(("length", "stops", "times"), [(240, NEVER, 2), (9, SEVERAL_ENDS, 3)], ids=["equal", "spread"])
def test_a_second_rollout_records_nothing_and_draws_the_same_bits(length: int, stops: Stops, times: int) -> None:
    model = reference("qwen3", max_position_embeddings=512)
    engine, recorder = engine_for(model, stops)

    first, recorded = counted(engine, recorder, asked(64, length))
    for pair in engine._kept.cache.pairs.values():
        for tensor in pair:
            tensor[1:] = float("nan")
    again, recorded_again = counted(engine, recorder, asked(64, length))

    assert (recorded, recorded_again) == (times, 0)
    assert_equal_bits(again, first)
    assert engine.step_metrics() == {"rollout/recordings": float(times)}
    assert engine.step_metrics() == {"rollout/recordings": 0.0}


def test_weights_of_another_dtype_are_written_where_those_before_lay() -> None:
    narrow = [reference("qwen3", seed=seed).float() for seed in (0, 1)]
    engine, recorder = engine_for(narrow[0])
    counted(engine, recorder, asked(5))
    engine.update_weights(named_parameters(narrow[1]).items(), 8)

    found, recorded = counted(engine, recorder, asked(5))

    assert recorded == 0
    assert_same(found, generate(engine_of(narrow[1].double()), asked(5), HOW))


def test_weights_of_another_dtype_than_those_before_are_recorded_anew() -> None:
    narrow, wide = reference("qwen3").float(), reference("qwen3", seed=1)
    engine, recorder = engine_for(narrow)
    _, before = counted(engine, recorder, asked(5))
    engine.update_weights(named_parameters(wide).items(), 8)

    found, recorded = counted(engine, recorder, asked(5))

    assert recorded == before > 0
    assert_same(found, generate(engine_of(wide), asked(5), HOW))


def test_rows_that_outgrow_what_was_recorded_are_recorded_anew() -> None:
    model = reference("qwen3", max_position_embeddings=512)
    engine, recorder = engine_for(model)
    counted(engine, recorder, asked(5))

    longer, recorded = counted(engine, recorder, asked(12, 300))

    assert recorded > 0
    assert_same(longer, generate(engine_of(model), asked(12, 300), HOW))
    shorter, recorded = counted(engine, recorder, asked(5))
    assert_same(shorter, generate(engine_of(model), asked(5), HOW))
    _, recorded = counted(engine, recorder, asked(12, 300))
    assert recorded == 0


def test_each_distribution_has_recordings_of_its_own() -> None:
    model = reference("qwen3")
    engine, recorder = engine_for(model)
    several = [HOW.model_copy(update=change) for change in ({}, {"temperature": 0.0}, {"top_k": 5})]

    times = [[counted(engine, recorder, asked(5), how) for how in several] for _ in range(2)]

    assert [[count for _, count in each] for each in times] == [[1, 1, 1], [0, 0, 0]]
    for how, (found, _) in zip(several, times[1], strict=True):
        assert_same(found, generate(engine_of(model), asked(5), how))


def test_an_engine_that_sleeps_gives_everything_back() -> None:
    engine, recorder = engine_for(reference("qwen3"))
    counted(engine, recorder, asked(5))
    assert engine.kept_bytes > 0

    engine.sleep()

    assert (engine.kept_bytes, engine._kept.is_empty) == (0, True)


class _Crowded(BlockCache):
    """A device that has no room for a larger pool beside training, but for that of one rollout."""

    refusals = 1

    def renew(self, capacity: int) -> None:
        if self.capacity and self.refusals:
            self.refusals -= 1
            raise torch.OutOfMemoryError
        super().renew(capacity)


def test_a_pool_that_finds_no_room_is_given_back_after_each_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    model = reference("qwen3", max_position_embeddings=512)
    engine, recorder = engine_for(model)
    counted(engine, recorder, asked(5))
    engine._kept.cache.__class__ = _Crowded

    several = [counted(engine, recorder, asked(12, 300)) for _ in range(2)]

    for found, recorded in several:
        assert recorded > 0
        assert_same(found, generate(engine_of(model), asked(12, 300), HOW))
    assert engine.kept_bytes == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("rollouts: memory of completions is given back after each rollout from here on, since ")


def test_what_decoding_keeps_stays_once_a_step_was_measured_if_it_fits_beside_it() -> None:
    training = TrainingMemory()

    assert not training.note(updates=1, peak=10)  # a trial step, which is taken back
    assert not training.note(updates=0, peak=10)
    assert training.note(updates=1, peak=60)
    assert not training.has_room(kept=26, whole=100)  # 60 and a quarter of it beside 26
    assert training.has_room(kept=25, whole=100)
    assert training.note(updates=2, peak=85)  # 60 and what was kept
    assert training.most == 60
    assert not training.has_room(kept=40, whole=100)
