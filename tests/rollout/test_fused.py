"""Steps whose layers are compiled draw what the layers themselves draw, or are found out and run uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.names import named_parameters
from holdfast.rollout.engine import Request, generate
from holdfast.rollout.local.graphs import CudaRecorder
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.rollout.sampling import Stops
from tests.rollout.recorders import Steps
from tests.rollout.test_graphs import assert_same
from tests.rollout.test_in_place import Counted
from tests.rollout.test_inprocess import EOS, origin_of, reference

HOW = SamplingConfig(max_new_tokens=6, temperature=1.3)


class Counting:
    """Compiles nothing and counts programs, which run as they were traced."""

    def __init__(self) -> None:
        self.programs = 0

    def __call__(self, program: Any, _: Any) -> Callable[..., Any]:
        self.programs += 1
        return program.forward  # type: ignore[no-any-return]  # torch's


def fused_engine(model: Any, compiler: Any, dtype: torch.dtype = torch.float64) -> InProcessEngine:
    stops = Stops(frozenset({EOS}))
    engine = InProcessEngine(
        origin_of(model), torch.device("cpu"), dtype, stops, rows=64, recorder=Steps(), compiler=compiler
    )
    engine.update_weights(named_parameters(model).items(), 7)
    return engine


def asked(rows: int) -> list[Request]:
    return [Request(0, np.arange(2, 9), tuple(range(rows)))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "mixtral"])
def test_compiled_layers_draw_what_layers_draw(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, compiler = reference(kind), Counting()
    engine = fused_engine(model, compiler)

    found = generate(engine, asked(5), HOW)

    assert_same(found, generate(fused_engine(model, None), asked(5), HOW))
    assert compiler.programs > 0
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_any_number_of_rows_and_layers_needs_few_programs() -> None:
    model, compiler = reference("qwen3", num_hidden_layers=4, layer_types=["full_attention"] * 4), Counting()
    engine = fused_engine(model, compiler)

    for rows in (1, 2, 5, 33):
        generate(engine, asked(rows), HOW)

    assert 0 < compiler.programs <= 12


@pytest.mark.slow
def test_weights_that_change_between_rollouts_are_seen() -> None:
    model, changed = reference("qwen3"), reference("qwen3")
    with torch.no_grad():
        for value in changed.parameters():
            value.mul_(1.25)
    engine = fused_engine(model, Counting())
    before = generate(engine, asked(5), HOW)

    with torch.no_grad():
        for name, value in named_parameters(engine._replica.model).items():
            value.copy_(named_parameters(changed)[name])
    found = generate(engine, asked(5), HOW)

    assert_same(found, generate(fused_engine(changed, None), asked(5), HOW))
    assert [one.tokens.tolist() for one in before] != [one.tokens.tolist() for one in found]


def refuses(_: Any, __: Any) -> Callable[..., Any]:
    raise NotImplementedError("no kernel for this\nand a second line")


def rounds(program: Any, _: Any) -> Callable[..., Any]:
    """Compile to what is 1 % away."""
    return lambda *args: tuple(
        one * 1.01 if isinstance(one, torch.Tensor) and one.is_floating_point() else one
        for one in program.forward(*args)
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("compiler", "words"), [(refuses, "no kernel for this"), (rounds, "of the logits' spread from")]
)
def test_a_compiler_that_fails_or_errs_is_named_and_decoding_goes_on(
    compiler: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = reference("qwen3")
    engine = fused_engine(model, compiler)

    found = [generate(engine, asked(5), HOW) for _ in range(2)]

    for one in found:
        assert_same(one, generate(fused_engine(model, None), asked(5), HOW))
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("rollouts: layers of recorded steps are not compiled from here on, since ") and words in said
    assert engine._recorder is not None


@pytest.mark.slow
def test_what_inductor_makes_of_layers_draws_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    model = reference("qwen3")

    found = generate(fused_engine(model, "inductor"), asked(5), HOW)

    assert_same(found, generate(fused_engine(model, None), asked(5), HOW))
    assert capsys.readouterr().out == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_cuda_graphs_of_compiled_layers_draw_what_the_cpu_draws(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, device = reference(kind), torch.device("cuda", torch.cuda.current_device())
    engine = InProcessEngine(
        origin_of(model),
        device,
        torch.float64,
        Stops(frozenset({EOS})),
        rows=64,
        recorder=CudaRecorder(device),
        compiler="inductor",
    )
    engine.update_weights(named_parameters(model).items(), 7)

    found = generate(engine, asked(33), HOW)

    assert_same(found, generate(fused_engine(model, None), asked(33), HOW), 1e-6)
    assert capsys.readouterr().out == "", "graphs or compiled layers were given up"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "lfm2", "qwen3_next"])
def test_compiled_layers_read_blocks_in_place_and_keep_states_of_rows(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, compiler, in_place = reference(kind), Counting(), Counted()
    engine = fused_engine(model, compiler)
    engine.in_place = in_place

    found = generate(engine, asked(5), HOW)

    assert_same(found, generate(fused_engine(model, None), asked(5), HOW), 1e-6)
    assert compiler.programs > 0
    assert engine._layers is not None and engine._layers.are_sound
    assert in_place.agrees
    assert len(in_place.rows) > 1
    assert "not compiled" not in capsys.readouterr().out
