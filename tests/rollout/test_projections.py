"""Steps with joined projections draw what each projection by itself draws, by fewer products."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.names import named_parameters
from holdfast.rollout.engine import generate
from holdfast.rollout.local.projections import JoinedProjections
from tests.rollout.recorders import Steps
from tests.rollout.test_fused import Counting, asked, fused_engine
from tests.rollout.test_graphs import assert_same, recorded_engine
from tests.rollout.test_inprocess import engine_of, reference

HOW = SamplingConfig(max_new_tokens=20, temperature=1.3)
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm")


class Counted(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(function).rpartition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


class CountedSteps(Steps):
    """Counts the operations of each step that is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[Counter[str]] = []

    def recording_of(self, step: Any) -> Any:
        rows = step.__self__
        before = [tensor.clone() for tensor in rows.changed()]
        with Counted() as mode:
            step()
        for tensor, value in zip(rows.changed(), before, strict=True):
            tensor.copy_(value)
        self.counted.append(mode.calls)
        return super().recording_of(step)

    def products(self) -> int:
        return sum(count for name, count in self.counted[-1].items() if name in PRODUCTS)


def products_of(model: Any, *, joined: bool) -> int:
    recorder = CountedSteps()
    engine = recorded_engine(model, recorder)
    engine._projections.use(joined)
    generate(engine, asked(5), HOW)
    return recorder.products()


@pytest.mark.parametrize(("kind", "saved"), [("qwen2", 3), ("qwen3", 3), ("gemma2", 3), ("mixtral", 2), ("phi3", 0)])
def test_a_layer_has_four_products_in_the_place_of_seven(kind: str, saved: int) -> None:
    model = reference(kind)
    layers = model.config.num_hidden_layers

    apart, joined = (products_of(model, joined=joined) for joined in (False, True))

    assert apart - joined == saved * layers


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma2", "gpt_oss"])
def test_joined_projections_draw_what_each_by_itself_draws(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, recorder = reference(kind), Steps()
    engine = recorded_engine(model, recorder)

    found = generate(engine, asked(5), HOW)

    assert_same(found, generate(engine_of(model), asked(5), HOW))
    assert engine._projections.are_sound and engine._projections.nbytes > 0
    assert capsys.readouterr().out == ""


def test_new_weights_are_joined_where_those_before_lay() -> None:
    narrow = [reference("qwen2", seed=seed).float() for seed in (0, 1)]
    recorder = Steps()
    engine = recorded_engine(narrow[0], recorder)
    generate(engine, asked(5), HOW)
    before = engine._replica.places()
    engine.update_weights(named_parameters(narrow[1]).items(), 8)

    found = generate(engine, asked(5), HOW)

    assert engine._replica.places() == before
    assert len(recorder.buckets) == len(set(recorder.buckets))
    assert_same(found, generate(engine_of(narrow[1].double()), asked(5), HOW))


def test_weights_that_the_policy_shares_stay_its_own() -> None:
    model = reference("qwen2")
    own = {value.data_ptr() for value in model.parameters()}
    engine = recorded_engine(model, Steps())

    generate(engine, asked(5), HOW)

    assert {value.data_ptr() for value in engine._replica.model.parameters()} == own
    engine.sleep()
    assert engine._projections.nbytes == 0


def test_projections_of_other_inputs_are_computed_by_themselves() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)

        def forward(self, one: Any, other: Any) -> Any:
            return self.gate_proj(one) * self.up_proj(other)

    model, (one, other) = Two().requires_grad_(False), torch.randn(2, 3, 4)
    expected, projections = model(one, other), JoinedProjections(model)
    projections.fill(())

    with projections.used():
        found = model(one, other)

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model(one, other), expected, rtol=0, atol=0)


def test_projections_that_err_are_given_up_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    model, recorder = reference("qwen2"), Steps()
    engine = recorded_engine(model, recorder)
    with torch.no_grad():
        engine._join_projections()
        for joint in engine._projections._joints:
            joint.fill = lambda _: False  # type: ignore[method-assign]
            assert joint.weight is not None
            joint.weight.mul_(1.1)

    found = generate(engine, asked(5), HOW)

    assert_same(found, generate(engine_of(model), asked(5), HOW))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("rollouts: no projections are joined from here on, since log-probabilities are ")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_compiled_layers_compute_joined_products(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, compiler = reference(kind), Counting()
    engine = fused_engine(model, compiler)

    found = generate(engine, asked(5), HOW)

    assert_same(found, generate(fused_engine(model, None), asked(5), HOW))
    assert 0 < compiler.programs <= 8
    assert capsys.readouterr().out == ""
