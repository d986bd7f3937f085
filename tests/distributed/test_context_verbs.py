"""Ranks that share rows make the updates of one rank on preferences, rewards, a teacher's distributions and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import critic_cases, distill_cases, grpo_cases, preference_cases
from tests.distributed.cases import rows_of
from tests.distributed.test_critic import ppo
from tests.distributed.test_critic import scorer as critic
from tests.distributed.test_distillation import DISTILL, TEACHER
from tests.distributed.test_scorer import LOSS, scorer
from tests.tiny import tiny_directory

KIND = "starcoder2"
"""Its norms keep float64, so that shared prompts are exact too."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("policy", "teacher", "scorer", "critic")}
    tiny_directory(made["policy"], KIND)
    tiny_directory(made["teacher"], KIND, **TEACHER)
    for name, model in (("scorer", scorer()), ("critic", critic())):
        tiny_directory(made[name], KIND)
        model.save_pretrained(made[name])
    return made


def assert_lines(found: Any, expected: Any, names: tuple[str, ...]) -> None:
    for step, line in enumerate(expected):
        for name in names:
            assert found[step][name] == pytest.approx(line[name], rel=1e-9, abs=1e-10), f"{name} at {step}"


def assert_parameters(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, parameter in expected.items():
        np.testing.assert_allclose(found[name], parameter, rtol=0, atol=1e-10, err_msg=name)


PREFERENCES = {
    "dpo": {"loss": {"kind": "dpo", "beta": 0.3}},
    "kto": {"loss": {"kind": "kto"}},
    "reward": {"loss": LOSS},
}


@pytest.mark.parametrize(
    ("loss", "ranks", "data", "parallel"),
    [
        ("dpo", 2, {}, {}),
        ("dpo", 4, {"tokens_per_micro_batch": 48}, {"replicate": 2}),
        ("kto", 2, {}, {}),
        ("reward", 2, {"tokens_per_micro_batch": 48}, {}),
    ],
)
def test_preferences(  # noqa: PLR0913 - a split has three parts
    pools: Any, models: dict[str, Path], loss: str, ranks: int, data: dict[str, Any], parallel: dict[str, Any]
) -> None:
    rows = preference_cases.labelled_of(12) if loss == "kto" else preference_cases.pairs_of(12)
    path = str(models["scorer" if loss == "reward" else "policy"])
    trees = [
        preference_cases.settings(path, preference=PREFERENCES[loss], optim={"lr": 0.1}, **sections)
        for sections in ({}, {"data": data, "parallel": {"context": 2} | parallel})
    ]

    expected = pools(1).run(preference_cases.train, trees[0], rows)[0]
    for found in pools(ranks).run(preference_cases.train, trees[1], rows):
        assert_lines(found["lines"], expected["lines"], ("loss", "grad_norm", "num_tokens"))
        assert_parameters(found["parameters"], expected["parameters"])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        pytest.param(2, {}, id="shared prompts"),
        pytest.param(
            2,
            {"objective": {"kind": "gspo"}, "updates": {"passes": 2}, "data": {"average": "sequence_mean"}},
            id="sequence ratios",
        ),
        pytest.param(
            2,
            {"updates": {"mini_batches": 2, "passes": 2}, "entropy": {"top_quantile": 0.5}},
            id="several updates of uncertain tokens",
        ),
        pytest.param(4, {"data": {"tokens_per_micro_batch": 24}, "kl": {"coefficient": 0.1}}, id="context 2 x shard 2"),
    ],
)
def test_policies(pools: Any, models: dict[str, Path], ranks: int, sections: dict[str, Any]) -> None:
    trees = []
    for of_ranks in ({"data": {"tokens_per_micro_batch": 4096}}, {"parallel": {"context": 2}}):
        tree = grpo_cases.settings(str(models["policy"]), **sections)
        trees.append(tree | {name: tree.get(name, {}) | values for name, values in of_ranks.items()})

    rows = grpo_cases.prompts_of(12)
    expected = pools(1).run(grpo_cases.train, trees[0], rows)[0]
    for found in pools(ranks).run(grpo_cases.train, trees[1], rows):
        assert found["sampled"] == expected["sampled"]
        assert_lines(found["lines"], expected["lines"], ("loss", "grad_norm", "num_tokens"))
        assert_parameters(found["parameters"], expected["parameters"])


def test_a_policy_and_its_critic(pools: Any, models: dict[str, Path]) -> None:
    places = (models["policy"], models["critic"])
    rows = grpo_cases.prompts_of(12)

    expected = pools(1).run(critic_cases.train, ppo(places), rows, 2)[0]
    for found in pools(2).run(critic_cases.train, ppo(places, parallel={"context": 2}), rows, 2):
        assert_lines(found["lines"], expected["lines"], ("loss", "grad_norm", "value/loss", "value/mean"))
        assert_parameters(found["policies"][-1], expected["policies"][-1])
        assert_parameters(found["critics"][-1], expected["critics"][-1])


def test_a_student_and_its_teacher(pools: Any, models: dict[str, Path]) -> None:
    trees = [
        distill_cases.settings(models["policy"], models["teacher"], distill=DISTILL, **sections)
        for sections in ({}, {"parallel": {"context": 2}, "data": {"tokens_per_micro_batch": 24}})
    ]

    expected = pools(1).run(distill_cases.train, trees[0], rows_of(8))[0]
    for found in pools(2).run(distill_cases.train, trees[1], rows_of(8)):
        assert_lines(found["lines"], expected["lines"], ("loss", "grad_norm", "num_tokens"))
        assert_parameters(found["parameters"], expected["parameters"])
