"""Decoding by recorded steps gives what decoding operation by operation gives, or is found out and given up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.names import named_parameters
from holdfast.rollout.engine import Request, Sampled, generate
from holdfast.rollout.local.graphs import CudaRecorder, NotReplayable, Recorder
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.rollout.local.rows import DeviceRows
from holdfast.rollout.local.slots import bucket_of
from holdfast.rollout.sampling import Stops, mixed
from tests.models.architectures import SETTINGS
from tests.rollout.recorders import Program, Refusing, Steps, Wrong
from tests.rollout.test_inprocess import EOS, engine_of, origin_of, reference, requests

SAMPLINGS: dict[str, dict[str, float]] = {
    "free": {},
    "greedy": {"temperature": 0},
    "warm": {"temperature": 1.3},
    "top k": {"top_k": 5},
    "top p": {"top_p": 0.6, "temperature": 0.8},
    "min p": {"min_p": 0.17},  # no token comes within 7e-6 of its limit; at 0.1 one is at 1e-6, a tie in float32
    "penalty": {"repetition_penalty": 1.7, "top_k": 20},
}
FEW = SamplingConfig(max_new_tokens=17, temperature=1.3)
"""One look, so one bucket: tracing takes longest here."""
ASKS_THE_HOST = ("_local_scalar_dense", "nonzero", "lift_fresh", "unique", "is_nonzero", "masked_select")
"""Operations that wait for the device, or that bring in a value of the host."""


def recorded_engine(
    model: Any, recorder: Recorder, *, rows: int = 8, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> InProcessEngine:
    stops = Stops(frozenset({EOS}))
    engine = InProcessEngine(origin_of(model), torch.device(device), dtype, stops, rows=rows, recorder=recorder)
    engine.update_weights(named_parameters(model).items(), 7)
    return engine


def by_recordings(
    model: Any, recorder: Recorder, asked: list[Request], how: SamplingConfig, **options: Any
) -> list[Sampled]:
    """Complete requests, all of them by what was recorded."""
    engine = recorded_engine(model, recorder, **options)
    found = generate(engine, asked, how)
    assert engine._recorder is recorder, "recordings were given up"
    return found


ROUNDED = float(np.finfo(np.float32).eps)
"""Log-probabilities are computed in float64 and kept in float32: two that agree to 1e-15 may round to neighbours."""


def assert_same(found: list[Sampled], expected: list[Sampled], tolerance: float = ROUNDED) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.request_id, one.place, one.finish) == (other.request_id, other.place, other.finish)
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", sorted(SETTINGS))
@pytest.mark.cases(3)
def test_rows_in_fixed_memory_draw_what_rows_as_they_are_draw(kind: str) -> None:
    model, asked, recorder = reference(kind), requests(5), Steps()
    sampling = SamplingConfig(max_new_tokens=20, temperature=1.3)

    found = by_recordings(model, recorder, asked, sampling)

    assert_same(found, generate(engine_of(model), asked, sampling))
    assert recorder.buckets, "nothing was recorded"


_PROGRAMS = ["qwen3", "qwen2", "gemma2", "gemma3_text", "cohere2", "phi3", "granite", "smollm3"]


@pytest.mark.parametrize("kind", _PROGRAMS)
@pytest.mark.cases(2)
def test_a_step_is_a_program_of_its_memory_alone(kind: str) -> None:
    model, asked, recorder = reference(kind), requests(3), Program()

    found = by_recordings(model, recorder, asked, FEW, rows=512)

    assert_same(found, generate(engine_of(model), asked, FEW))
    assert recorder.calls == len(recorder.buckets) > 0, "the step's own code may run while it is recorded, once"
    assert not [name for name in recorder.operations if any(word in name for word in ASKS_THE_HOST)]


@pytest.mark.parametrize("options", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.cases(3)
def test_every_way_to_draw_can_be_recorded(options: dict[str, float]) -> None:
    model, asked, recorder = reference("qwen3"), requests(3), Program()
    sampling = SamplingConfig(max_new_tokens=17, **options)

    found = by_recordings(model, recorder, asked, sampling, rows=512)

    assert_same(found, generate(engine_of(model), asked, sampling))
    assert recorder.calls == len(recorder.buckets) > 0
    assert not [name for name in recorder.operations if any(word in name for word in ASKS_THE_HOST)]


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_single_precision_draws_the_same_tokens(kind: str) -> None:
    model, asked, recorder = reference(kind).float(), requests(3), Program()

    found = by_recordings(model, recorder, asked, FEW, rows=512, dtype=torch.float32)

    assert_same(found, generate(engine_of(model, dtype=torch.float32), asked, FEW), 1e-5)
    assert recorder.calls == len(recorder.buckets) > 0
    assert not [name for name in recorder.operations if any(word in name for word in ASKS_THE_HOST)]


@pytest.mark.slow
def test_rows_move_to_another_bucket_as_they_end_and_arrive() -> None:
    model, asked, recorder = reference("qwen3"), requests(12, shortest=1), Program()
    sampling = SamplingConfig(max_new_tokens=90)

    found = by_recordings(model, recorder, asked, sampling, rows=32)

    assert_same(found, generate(engine_of(model, rows=32), asked, sampling))
    assert len({rows for rows, _ in recorder.buckets}) >= 3
    assert len({len(sampled.tokens) for sampled in found}) > 10, "rows are to end at many places"


def test_rows_move_to_more_room_as_they_grow() -> None:
    model, recorder = reference("qwen2", max_position_embeddings=1024), Program()
    asked = [
        Request(number, np.random.default_rng(number).integers(2, 90, length), (mixed(3, number), mixed(4, number)))
        for number, length in enumerate((232, 3, 505))
    ]
    sampling = SamplingConfig(max_new_tokens=40, repetition_penalty=1.2)

    found = by_recordings(model, recorder, asked, sampling, rows=4)

    assert_same(found, generate(engine_of(model, rows=4), asked, sampling))
    assert len({blocks for _, blocks in recorder.buckets}) >= 2


def test_completions_that_end_with_their_first_token_are_never_recorded() -> None:
    model, asked, recorder = reference("qwen3"), requests(5), Steps()
    sampling = SamplingConfig(max_new_tokens=1)

    found = by_recordings(model, recorder, asked, sampling)

    assert_same(found, generate(engine_of(model), asked, sampling))
    assert [len(sampled.tokens) for sampled in found] == [1] * 20
    assert not recorder.buckets


def test_prompts_that_come_when_all_others_have_ended_use_what_was_recorded() -> None:
    model, asked, recorder = reference("qwen3"), requests(5), Program()
    sampling = SamplingConfig(max_new_tokens=4)

    found = by_recordings(model, recorder, asked, sampling, rows=4)

    assert_same(found, generate(engine_of(model, rows=4), asked, sampling))
    assert recorder.buckets == [(8, 2)]


def test_a_bucket_that_comes_back_is_not_recorded_again() -> None:
    model, recorder = reference("qwen2", max_position_embeddings=1024), Program()
    asked = [
        Request(number, np.random.default_rng(number).integers(2, 90, length), (mixed(3, number), mixed(4, number)))
        for number, length in enumerate((5, 300, 9))
    ]
    sampling = SamplingConfig(max_new_tokens=4)

    found = by_recordings(model, recorder, asked, sampling, rows=2)

    assert_same(found, generate(engine_of(model, rows=2), asked, sampling))
    assert recorder.buckets == [(8, 16), (8, 19)]


def test_models_that_ask_the_host_are_decoded_operation_by_operation(capsys: pytest.CaptureFixture[str]) -> None:
    model, asked, recorder = reference("mixtral"), requests(3, shortest=16), Program()

    found = generate(recorded_engine(model, recorder, rows=512), asked, FEW)

    assert_same(found, generate(engine_of(model), asked, FEW))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("rollouts: steps run operation by operation from here on, since a step cannot be recorded")


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_grouped_products_of_experts_ask_the_host_where_the_processor_computes_them(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, asked, recorder = reference(kind).float(), requests(3), Program()

    found = generate(recorded_engine(model, recorder, rows=512, dtype=torch.float32), asked, FEW)

    assert_same(found, generate(engine_of(model, dtype=torch.float32), asked, FEW), 1e-5)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("rollouts: steps run operation by operation from here on, since a step cannot be recorded")


def test_an_engine_records_anew_for_new_weights() -> None:
    old, new = reference("qwen3"), reference("qwen3", seed=1)
    asked, sampling, recorder = requests(3), SamplingConfig(max_new_tokens=12), Program()
    engine = recorded_engine(old, recorder)
    generate(engine, asked, sampling)
    engine.sleep()

    engine.update_weights(named_parameters(new).items(), 8)
    found = generate(engine, asked, sampling)

    assert_same(found, generate(engine_of(new), asked, sampling))
    assert engine._recorder is recorder, "recordings were given up"


def test_an_interrupted_rollout_returns_after_the_look() -> None:
    calls = iter([False, False, *[True] * 50])
    engine = recorded_engine(reference("qwen3"), Steps(), rows=8)

    engine.submit(requests(5), SamplingConfig(max_new_tokens=100))
    found = engine.collect(lambda: next(calls))

    assert len(found) == 20
    assert max(len(sampled.tokens) for sampled in found) == 33


@pytest.mark.parametrize(
    ("recorder", "why"),
    [
        (Refusing(), "a step cannot be recorded (RuntimeError: operation not permitted when stream is capturing)"),
        (Wrong(0), "recorded steps drew 1 of 24 tokens otherwise than the steps themselves"),
        (Wrong(1), "log-probabilities of recorded steps are "),
    ],
    ids=["refuses", "another token", "another log-probability"],
)
def test_what_cannot_be_recorded_is_decoded_operation_by_operation(
    recorder: Steps, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, asked, sampling = reference("qwen3"), requests(3), SamplingConfig(max_new_tokens=40)
    engine = recorded_engine(model, recorder, rows=512)
    expected = generate(engine_of(model), asked, sampling)

    first, second = generate(engine, asked, sampling), generate(engine, asked, sampling)

    assert_same(first, expected)
    assert_same(second, expected)
    *given_up, line = capsys.readouterr().out.splitlines()
    assert line.startswith(f"rollouts: steps run operation by operation from here on, since {why}")
    assert all(form.startswith("rollouts: no projections are joined from here on") for form in given_up)
    assert len(recorder.buckets) == 1 + len(given_up), "nothing is tried again in the second rollout"


def test_rows_of_many_ages_are_decoded_on_when_a_later_bucket_cannot_be_recorded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class RefusesTheSecond(Steps):
        def recording_of(self, step: Any) -> Any:
            if len(self.buckets) > 1:
                raise RuntimeError("out of memory")
            return step

    model, asked, sampling = reference("qwen3"), requests(9), SamplingConfig(max_new_tokens=60, repetition_penalty=1.1)

    found = generate(recorded_engine(model, RefusesTheSecond(), rows=16), asked, sampling)

    assert_same(found, generate(engine_of(model, rows=16), asked, sampling))
    assert len(capsys.readouterr().out.splitlines()) == 1


class _AsksTheHost(DeviceRows):
    """Rows whose steps take lengths from the host, which a recording keeps as they were."""

    def step(self) -> None:
        self._now.lengths.copy_(torch.tensor(self._now.lengths.tolist()))
        super().step()


def test_a_step_that_asks_the_host_for_lengths_is_found_out_by_its_second_token() -> None:
    engine, asked = recorded_engine(reference("qwen3"), Program()), requests(2)
    with torch.no_grad(), engine.decoding(40) as decoding:
        rows = decoding.on_device
        rows.__class__ = _AsksTheHost
        decoding.submit(asked)
        decoding.begin_rows()
        rows.reserve(rows.missing_blocks(8))
        rows.settle(8)
        before = [tensor.clone() for tensor in rows.changed()]

        with pytest.raises(NotReplayable, match=r"recorded steps drew \d+ of 16 tokens otherwise"):
            rows._drawing()

        assert all(torch.equal(one, other) for one, other in zip(rows.changed(), before, strict=True))


def test_a_recording_is_not_judged_by_rows_that_only_fill_its_bucket() -> None:
    # They write one place of the scratch block together, and a GPU does so in any order.
    engine, asked = recorded_engine(reference("qwen3"), Program()), requests(1, group=3)
    with torch.no_grad(), engine.decoding(40) as decoding:
        decoding.submit(asked)
        decoding.begin_rows()
        rows = decoding.on_device
        rows.reserve(rows.missing_blocks(8))
        rows.settle(8)

        *of_rows, cursor = rows.changed()

        assert rows._bucket.rows > len(rows)
        assert {len(tensor) for tensor in of_rows} == {len(rows)}
        assert cursor.shape == (1,)


@pytest.mark.parametrize(
    ("rows", "blocks", "most", "bucket"),
    [
        (1, 1, 250, (8, 16)),
        (5, 16, 250, (8, 16)),
        (8, 17, 250, (8, 32)),
        (512, 128, 2500, (512, 128)),
        (513, 129, 2500, (1024, 160)),
        (9, 313, None, (16, 320)),
        (3, 19, 20, (8, 20)),
        (3, 1, 2, (8, 2)),
    ],
)
def test_buckets_double_up_to_a_size_and_never_exceed_what_rows_can_need(
    rows: int, blocks: int, most: int | None, bucket: tuple[int, int]
) -> None:
    assert bucket_of(rows, blocks, most) == bucket


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_cuda_graphs_draw_what_the_cpu_draws(
    kind: str, options: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    model, asked, sampling = reference(kind), requests(9), SamplingConfig(max_new_tokens=60, **options)
    expected = generate(engine_of(model, rows=16), asked, sampling)
    device = torch.device("cuda", torch.cuda.current_device())

    found = generate(recorded_engine(model, CudaRecorder(device), rows=16, device=str(device)), asked, sampling)

    assert_same(found, expected, 1e-6)
    assert capsys.readouterr().out == "", "graphs were given up"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_move_between_buckets_and_follow_new_weights(capsys: pytest.CaptureFixture[str]) -> None:
    old, new = (reference("qwen3", max_position_embeddings=1024, seed=seed) for seed in (0, 1))
    asked, sampling = requests(9, shortest=240), SamplingConfig(max_new_tokens=90)
    device = torch.device("cuda", torch.cuda.current_device())
    engine = recorded_engine(old, CudaRecorder(device), rows=16, device=str(device))
    generate(engine, asked, sampling)

    engine.update_weights(named_parameters(new).items(), 8)
    found = generate(engine, asked, sampling)

    assert_same(found, generate(engine_of(new, rows=16), asked, sampling), 1e-6)
    assert capsys.readouterr().out == "", "graphs were given up"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_that_waits_for_the_device_is_decoded_operation_by_operation(capsys: pytest.CaptureFixture[str]) -> None:
    model, asked, sampling = reference("mixtral"), requests(3), SamplingConfig(max_new_tokens=20)
    device = torch.device("cuda", torch.cuda.current_device())

    found = generate(recorded_engine(model, CudaRecorder(device), device=str(device)), asked, sampling)

    assert_same(found, generate(engine_of(model, rows=8), asked, sampling), 1e-6)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("rollouts: steps run operation by operation from here on, since a step cannot be recorded")
