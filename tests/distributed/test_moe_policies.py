"""The router loss beside losses of preferences and of policies: by hand, and the same for every split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import grpo_cases, preference_cases
from tests.oracle.router import router_loss
from tests.tiny import tiny_directory, tiny_model

PAIRS = preference_cases.pairs_of(12)
PROMPTS = grpo_cases.prompts_of(12)
MIXTRAL = {"router_aux_loss_coef": 0.05, "output_router_logits": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_directory(tmp_path_factory.mktemp("mixtral"), "mixtral", **MIXTRAL))


def balance(sequences: list[Any], weights: list[float]) -> float:
    """Return the weighted mean of each sequence's router loss, by plain transformers."""
    model = tiny_model("mixtral", **MIXTRAL).double()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        found = [
            float(router_loss(model(torch.as_tensor(tokens)[None], output_router_logits=True).router_logits, 2))
            for tokens in sequences
        ]
    return float(np.average(found, weights=weights))


@pytest.mark.parametrize(
    ("ranks", "data"),
    [
        pytest.param(1, {}, id="1 rank, prompts shared"),
        pytest.param(1, {"packing": "none"}, id="1 rank, padded"),
        pytest.param(2, {"tokens_per_micro_batch": 96}, id="2 ranks, prompts shared, several packs"),
        pytest.param(2, {"tokens_per_micro_batch": 96, "shared_prompt": "off"}, id="2 ranks, prompts repeated"),
    ],
)
def test_both_answers_of_a_pair_weigh_the_same(pools: Any, directory: str, ranks: int, data: dict[str, Any]) -> None:
    trees = [
        preference_cases.settings(directory, data=data, model={"router_loss": kind}) for kind in ("sequence", "off")
    ]

    routed, plain = (pools(ranks).run(preference_cases.train, tree, PAIRS, 1)[0]["lines"][0] for tree in trees)

    sequences = [example.tokens for pair in preference_cases.sequences_of(PAIRS[:4]) for example in pair]
    expected = balance(sequences, [1.0] * 8)
    assert routed["router/loss"] == pytest.approx(expected, rel=1e-9)
    assert routed["loss"] == pytest.approx(plain["loss"] + 0.05 * expected, rel=1e-9)
    assert plain["router/load_max"] == pytest.approx(routed["router/load_max"], rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(1, {}, id="1 rank, prompts shared"),
        pytest.param(1, {"data": {"packing": "none"}}, id="1 rank, padded"),
        pytest.param(2, {"data": {"tokens_per_micro_batch": 48}}, id="2 ranks, groups cut over packs"),
        pytest.param(2, {"rollout": {"shared_prefix": "off"}}, id="2 ranks, prompts repeated"),
        pytest.param(2, {"parallel": {"context": 2}}, id="a row on 2 ranks, prompts shared"),
    ],
)
def test_completions_weigh_as_in_the_loss_of_the_policy(
    pools: Any, directory: str, ranks: int, changes: dict[str, Any]
) -> None:
    tree = grpo_cases.settings(directory, **changes)

    found = pools(ranks).run(grpo_cases.train, tree, PROMPTS, 1)[0]

    sampled = found["sampled"][0]
    sequences = [[*prompt, *completion] for _, prompt, completion, _, _ in sampled]
    lengths = [len(completion) for _, _, completion, _, _ in sampled]
    line = found["lines"][0]
    assert line["router/loss"] == pytest.approx(balance(sequences, lengths), rel=1e-9)
