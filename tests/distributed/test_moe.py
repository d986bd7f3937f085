"""Mixtures of experts: losses, gradients and loads of every split against plain transformers, sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.load import from_mapping
from holdfast.config.sections.data import DataConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.parallel.mesh import World
from holdfast.training.setup.begin import Live, build_run
from holdfast.training.step import train_step
from tests.distributed.cases import rows_of, settings, train
from tests.oracle.router import reference, router_loss
from tests.tiny import tiny_directory, tiny_model

ROWS = rows_of(24)
COEFFICIENT = 0.05
FLOAT32 = 1e-7
"""What eager attention allows: its softmax is float32 even in a float64 model, over as many terms as a row has."""
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"router_aux_loss_coef": COEFFICIENT, "output_router_logits": False},
    "qwen3_moe": {"router_aux_loss_coef": COEFFICIENT, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "olmoe": {"router_aux_loss_coef": COEFFICIENT, "num_experts": 4, "num_experts_per_tok": 2},
    "sparse": {
        "model_type": "qwen3_moe",
        "router_aux_loss_coef": COEFFICIENT,
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "hidden_size": 16,
    },
}
"""The last has more experts than most batches use."""


def described(kind: str) -> tuple[str, dict[str, Any]]:
    options = dict(KINDS[kind])
    return options.pop("model_type", kind), options


def make(kind: str) -> Any:
    name, options = described(kind)
    return tiny_model(name, **options)


def examples() -> list[Any]:
    tokeniser = RowTokeniser(character_tokenizer(), DataConfig(path="rows", max_length=48), Path.cwd())
    return [tokeniser.examples(row, index, "rows").examples[0] for index, row in enumerate(ROWS)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for kind in KINDS:
        name, options = described(kind)
        made[kind] = str(tiny_directory(tmp_path_factory.mktemp(kind), name, **options))
    return made


@pytest.fixture(scope="module")
def oracle() -> Callable[..., dict[str, Any]]:
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def of(kind: str, loss: str = "sequence", rows: int = 8, attention: str = "sdpa") -> dict[str, Any]:
        if (kind, loss, rows, attention) not in made:
            model = make(kind).double()
            model.set_attn_implementation(attention)
            model.set_experts_implementation("eager")
            batches = [examples()[start : start + rows] for start in range(0, 3 * rows, rows)]
            made[kind, loss, rows, attention] = reference(model, batches, loss, COEFFICIENT, lr=0.1)
        return made[kind, loss, rows, attention]

    return of


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=tolerance)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=tolerance)
    for step, gradients in enumerate(expected["gradients"]):
        assert set(found["gradients"][step]) == set(gradients)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(
                found["gradients"][step][name], gradient, rtol=tolerance, atol=tolerance, err_msg=f"{name} at {step}"
            )
    for line, balance, loads in zip(found["metrics"], expected["router_losses"], expected["loads"], strict=True):
        relative = loads * loads.shape[1] / loads.sum(1, keepdims=True)
        if "router/loss" in line:
            assert line["router/loss"] == pytest.approx(balance, rel=tolerance)
        assert line["router/load_max"] == pytest.approx(relative.max(), rel=1e-12)
        assert line["router/load_min"] == pytest.approx(relative.min(), rel=1e-12)
        assert line["router/idle_experts"] == (loads == 0).sum()


SPLITS = [
    pytest.param("mixtral", 1, {}, {}, {}, id="mixtral, 1 rank, one pack"),
    pytest.param("mixtral", 1, {"tokens_per_micro_batch": 48}, {}, {}, id="mixtral, 1 rank, packs of 48 tokens"),
    pytest.param("mixtral", 1, {"packing": "none"}, {}, {}, id="mixtral, 1 rank, padded"),
    pytest.param("mixtral", 2, {"tokens_per_micro_batch": 64}, {}, {}, id="mixtral, 2 ranks, packs of 64 tokens"),
    pytest.param(
        "mixtral", 2, {"packing": "none", "tokens_per_micro_batch": 96}, {}, {}, id="mixtral, 2 ranks, padded"
    ),
    pytest.param("mixtral", 2, {}, {"recompute": "full"}, {}, id="mixtral, 2 ranks, recomputed"),
    pytest.param("mixtral", 2, {}, {"recompute": "selective"}, {"attention": "sdpa"}, id="mixtral, selective, sdpa"),
    pytest.param("mixtral", 2, {}, {"recompute": "full"}, {"attention": "eager"}, id="mixtral, recomputed, eager"),
    pytest.param(
        "mixtral",
        2,
        {"tokens_per_micro_batch": 64},
        {"units": [r"mlp\.experts$", r"layers\.\d+$"], "recompute": "full"},
        {},
        id="mixtral, experts as units of their own",
    ),
    pytest.param("mixtral", 4, {"tokens_per_micro_batch": 64}, {"replicate": 2}, {}, id="mixtral, 2 copies of 2 ranks"),
    pytest.param("qwen3_moe", 1, {"tokens_per_micro_batch": 64}, {}, {"attention": "sdpa"}, id="qwen3_moe, 1 rank"),
    pytest.param("qwen3_moe", 2, {"tokens_per_micro_batch": 64}, {"recompute": "full"}, {}, id="qwen3_moe, recomputed"),
    pytest.param("qwen3_moe", 4, {"packing": "none"}, {}, {"attention": "eager"}, id="qwen3_moe, 4 ranks, padded"),
    pytest.param("olmoe", 2, {"tokens_per_micro_batch": 64}, {"recompute": "selective"}, {}, id="olmoe, 2 ranks"),
]


@pytest.mark.cases(4)
@pytest.mark.parametrize(("kind", "ranks", "data", "parallel", "model"), SPLITS)
def test_every_split_gives_the_router_loss_of_each_sequence_alone(
    pools: Any,
    oracle: Any,
    directories: dict[str, str],
    kind: str,
    ranks: int,
    data: dict[str, Any],
    parallel: dict[str, Any],
    model: dict[str, Any],
) -> None:
    tree = settings(directories[kind], data=data, parallel=parallel, model=model)

    found = pools(ranks).run(train, tree, ROWS)

    eager = model.get("attention") == "eager"
    expected = oracle(kind, attention="eager" if eager else "sdpa")
    for outcome in found:
        assert_same(outcome, expected, FLOAT32 if eager else 1e-9)
    gates = [name for name in found[0]["gradients"][0] if name.endswith("gate.weight")]
    assert gates
    assert all(np.abs(found[0]["gradients"][0][name]).max() > 1e-5 for name in gates)


def test_the_hand_made_router_loss_is_the_one_of_transformers() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = make("mixtral")
    with torch.no_grad():
        logits = model(input_ids=torch.arange(2, 30)[None], output_router_logits=True).router_logits

    ours, theirs = router_loss(logits, 2), load_balancing_loss_func(logits, 4, 2)

    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.parametrize("kind", ["sequence", "batch"])
def test_ranks_that_share_a_row_have_the_router_loss_of_the_whole_row(
    pools: Any, oracle: Any, directories: dict[str, str], kind: str
) -> None:
    data = {} if kind == "batch" else {"tokens_per_micro_batch": 32}
    tree = settings(directories["mixtral"], data=data, model={"router_loss": kind}, parallel={"context": 2})

    found = pools(2).run(train, tree, ROWS)

    for outcome in found:
        assert_same(outcome, oracle("mixtral", kind))


def test_the_batch_router_loss_is_that_of_transformers_on_one_micro_batch(
    pools: Any, oracle: Any, directories: dict[str, str]
) -> None:
    for packing in ("best_fit", "none"):
        tree = settings(directories["mixtral"], data={"packing": packing}, model={"router_loss": "batch"})

        found = pools(1).run(train, tree, ROWS)

        assert_same(found[0], oracle("mixtral", "batch"))


def test_a_split_batch_gives_another_router_loss_which_has_to_be_accepted(
    pools: Any, oracle: Any, directories: dict[str, str]
) -> None:
    accepted = {"router_loss": {"kind": "batch", "allow_split": True}}
    tree = settings(directories["mixtral"], data={"tokens_per_micro_batch": 64}, model=accepted)

    found = pools(2).run(train, tree, ROWS, 1)[0]

    whole = oracle("mixtral", "batch")["router_losses"][0]
    assert abs(found["metrics"][0]["router/loss"] - whole) > 1e-3


def test_without_a_router_loss_the_loads_are_told_all_the_same(
    pools: Any, oracle: Any, directories: dict[str, str]
) -> None:
    tree = settings(directories["mixtral"], model={"router_loss": "off"}, data={"tokens_per_micro_batch": 64})

    found = pools(2).run(train, tree, ROWS)[0]

    assert_same(found, oracle("mixtral", "off"))
    assert "router/loss" not in found["metrics"][0]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 2e-5)])
def test_gradients_are_right_where_a_rank_sends_an_expert_nothing(
    pools: Any, oracle: Any, directories: dict[str, str], dtype: str, tolerance: float
) -> None:
    # Two rows, one for each rank: most of the sixteen experts get tokens from one of them, or from none.
    tree = settings(directories["sparse"], data={"batch_size": 2}, model={"dtype": dtype})
    expected = oracle("sparse", rows=2)

    found = pools(2).run(train, tree, ROWS)[0]

    assert_same(found, expected, tolerance)
    assert found["metrics"][0]["router/idle_experts"] > 0
    idle = expected["loads"][0][0] == 0
    for name in ("gate_up_proj", "down_proj"):
        gradient = found["gradients"][0][f"model.layers.0.mlp.experts.{name}"]
        assert not gradient[idle].any()
        assert all(np.abs(gradient[expert]).max() > 0 for expert in np.flatnonzero(~idle))


def test_idle_ranks_take_part_and_change_nothing(pools: Any, directories: dict[str, str]) -> None:
    model = make("mixtral").double()
    model.set_experts_implementation("eager")
    batches = [examples()[:8], examples()[8:10]]  # two rows are left for four ranks
    expected = reference(model, batches, "sequence", COEFFICIENT, lr=0.1)
    tree = settings(directories["mixtral"])

    found = pools(4).run(train, tree, ROWS[:10], 2)

    for outcome in found:
        assert_same(outcome, expected)


def test_a_batch_router_loss_is_refused_on_several_ranks(pools: Any, directories: dict[str, str]) -> None:
    tree = settings(directories["mixtral"], model={"router_loss": "batch"})

    found = pools(2).errors(train, tree, ROWS)

    assert found[0] == found[1]
    assert found[0][0] == "ConfigError"
    assert "each of 2 ranks sees a part of the batch" in found[0][1]
    assert "router_loss: {kind: batch, allow_split: true}" in found[0][1]


def with_twice_the_micro_batches(world: World, tree: dict[str, Any]) -> None:
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=ROWS))
    mini_batch = training.stream.next(0)
    assert mini_batch is not None
    doubled = replace(mini_batch, micro_batches=mini_batch.micro_batches * 2)
    train_step(training.model, doubled, training.evaluation.objective)


def test_a_batch_router_loss_is_refused_where_rows_gave_more_than_one_pass(
    pools: Any, directories: dict[str, str]
) -> None:
    tree = settings(directories["mixtral"], model={"router_loss": "batch"})

    [(kind, words)] = pools(1).errors(with_twice_the_micro_batches, tree)

    assert kind == "ConfigError"
    assert "the update of step 1 takes 2 micro-batches" in words
