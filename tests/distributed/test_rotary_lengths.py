"""Rotary angles that depend on a text's length: no split of texts on both sides of a boundary changes an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.data.tasks.synthetic import character_tokenizer
from tests.distributed import cases, critic_cases, distill_cases, grpo_cases, preference_cases, reward_cases
from tests.distributed import test_sharded_rewards as sharded_rewards
from tests.distributed.test_critic import RATES, ppo, scorer
from tests.distributed.test_split_invariance import examples
from tests.models.architectures import DYNAMIC, LONGROPE, forgetful
from tests.oracle import preference as oracle
from tests.ranks import RankError
from tests.tiny import tiny_directory, tiny_model

BOUNDARY = 28
KINDS: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": BOUNDARY, "rope_parameters": LONGROPE},
    "starcoder2": {"max_position_embeddings": BOUNDARY, "rope_parameters": DYNAMIC},
}
ROWS, PAIRS = cases.rows_of(24), preference_cases.pairs_of(12)
SPLITS = [
    pytest.param(1, {}, id="1 rank"),
    pytest.param(1, {"tokens_per_micro_batch": 96}, id="1 rank, batches of 96 tokens"),
    pytest.param(2, {}, id="2 ranks"),
    pytest.param(2, {"tokens_per_micro_batch": 96}, id="2 ranks, batches of 96 tokens"),
    pytest.param(2, {"packing": "none", "tokens_per_micro_batch": 128}, id="2 ranks, padded"),
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("model"), kind, tie_word_embeddings=True, **KINDS[kind])


def upstream(kind: str) -> Any:
    return forgetful(tiny_model(kind, tie_word_embeddings=True, **KINDS[kind]).double())


def assert_same(outcome: dict[str, Any], expected: dict[str, Any]) -> None:
    for step, gradients in enumerate(expected["gradients"]):
        assert set(outcome["gradients"][step]) == set(gradients)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(outcome["gradients"][step][name], gradient, rtol=0, atol=1e-5, err_msg=name)
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(outcome["parameters"][name], parameter, rtol=0, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def supervised(kind: str) -> dict[str, Any]:
    batches = [examples()[start : start + 8] for start in (0, 8, 16)]
    for batch in batches:
        lengths = [example.tokens.size for example in batch]
        assert min(lengths) < BOUNDARY < max(lengths) - 1

    def token_mean(batch: list[Any]) -> tuple[list[float], list[float]]:
        return [1.0] * len(batch), [float(example.trained_tokens) for example in batch]

    return cases.reference(upstream(kind), batches, token_mean, lr=0.1)


@pytest.mark.parametrize(("ranks", "data"), SPLITS)
def test_texts_on_both_sides_are_trained_as_each_alone(
    pools: Any, directory: Path, supervised: dict[str, Any], ranks: int, data: dict[str, Any]
) -> None:
    tree = cases.settings(str(directory), data=data | {"average": "token_mean"})

    for outcome in pools(ranks).run(cases.train, tree, ROWS):
        np.testing.assert_allclose(outcome["losses"], supervised["losses"], rtol=1e-6)
        assert_same(outcome, supervised)


@pytest.fixture(scope="module")
def preferred(kind: str) -> dict[str, Any]:
    lengths = [[example.tokens.size for example in pair] for pair in preference_cases.sequences_of(PAIRS)]
    assert any(min(pair) <= BOUNDARY < max(pair) for pair in lengths), "no pair has its answers on both sides"
    assert any(min(pair) > BOUNDARY for pair in lengths), "no pair is beyond"
    return preference_cases.by_hand(upstream(kind), PAIRS, oracle.dpo(0.3), lr=0.5)


@pytest.mark.parametrize(("ranks", "data"), SPLITS)
def test_answers_on_both_sides_are_trained_as_each_alone(
    pools: Any, directory: Path, preferred: dict[str, Any], ranks: int, data: dict[str, Any]
) -> None:
    tree = preference_cases.settings(str(directory), data=data)

    for outcome in pools(ranks).run(preference_cases.train, tree, PAIRS):
        np.testing.assert_allclose([line["loss"] for line in outcome["lines"]], preferred["losses"], rtol=1e-5)
        assert_same(outcome, preferred)


@pytest.mark.parametrize(
    ("ranks", "data"), [(1, {"packing": "none"}), (2, {"packing": "none", "tokens_per_micro_batch": 96})]
)
def test_a_teacher_reads_texts_on_both_sides_as_each_alone(
    pools: Any, tmp_path: Path, kind: str, directory: Path, ranks: int, data: dict[str, Any]
) -> None:
    student = tiny_directory(tmp_path / "student", "starcoder2")
    texts = distill_cases.texts_of(ROWS[:8], character_tokenizer())
    models = tiny_model("starcoder2").double(), upstream(kind)
    expected = distill_cases.by_hand(*models, [texts[:4], texts[4:]], 0.5, beta=0.5)

    tree = distill_cases.settings(student, directory, data=data, distill={"loss": {"kind": "jsd", "beta": 0.5}})
    outcome = pools(ranks).run(distill_cases.train, tree, ROWS[:8])[0]

    assert_same(outcome, expected)


@pytest.mark.slow
def test_a_critic_reads_texts_on_both_sides_although_they_share_a_prompt(pools: Any, tmp_path: Path) -> None:
    lengths = {"max_position_embeddings": 18, "rope_parameters": DYNAMIC}
    policy = tiny_directory(tmp_path / "policy", "starcoder2")
    scorer(**lengths).save_pretrained(tmp_path / "critic")
    character_tokenizer().save_pretrained(tmp_path / "critic")
    tree = ppo((policy, tmp_path / "critic"), rollout={"group_size": 3}, data={"packing": "none"})

    outcome = pools(2).run(critic_cases.train, tree, grpo_cases.prompts_of(12), 2)[0]

    critic = forgetful(scorer(**lengths).double())
    expected = critic_cases.by_hand(tiny_model("starcoder2").double(), critic, outcome["sampled"], RATES)
    tokens = {len(item[1]) + len(item[2]) for step in outcome["sampled"] for item in step}
    assert min(tokens) < 18 < max(tokens) - 1
    for name, parameter in expected["critic"].items():
        np.testing.assert_allclose(outcome["critics"][-1][name], parameter, rtol=0, atol=1e-6, err_msg=name)


def test_a_reward_model_in_shards_scores_each_text_as_alone(pools: Any, tmp_path: Path) -> None:
    lengths = {"max_position_embeddings": 12, "rope_parameters": DYNAMIC}
    path = sharded_rewards.directory(tmp_path / "m", **lengths)
    texts = [sharded_rewards.dealt(sharded_rewards.TEXTS, [3, 4])] * 2

    outcome = pools(2).run(reward_cases.score, sharded_rewards.tree(path, tmp_path, max_length=64), texts)

    expected = [sharded_rewards.alone(path, [f"sort 31={text}"])[0] for text in sharded_rewards.TEXTS]
    for call in range(2):
        rewards = [item.reward for of_rank in outcome for item in of_rank[call]]
        np.testing.assert_allclose(rewards, expected, rtol=1e-5, atol=1e-5)


POLICIES = {
    "phi3": ("original_max_position_embeddings", {"rope_parameters": {"short_factor": LONGROPE["long_factor"]}}),
    "starcoder2": ("max_position_embeddings", {"max_position_embeddings": 25}),
}
"""The field that a boundary follows from, and the override that does away with the boundary."""


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", POLICIES, indirect=True)
def test_a_policy_that_may_cross_a_boundary_is_refused_with_two_ways_out(pools: Any, tmp_path: Path, kind: str) -> None:
    field, override = POLICIES[kind]
    settings = KINDS[kind] | {field: 24}
    path = str(tiny_directory(tmp_path / "policy", kind, tie_word_embeddings=True, **settings))
    prompts = grpo_cases.prompts_of(12)

    def sampled_as_trained(tree: dict[str, Any]) -> bool:
        outcome = pools(2).run(grpo_cases.train, tree, prompts, 2)[0]
        differences = [line["sampling/sampling_logp_difference/mean"] for line in outcome["lines"]]
        return max(differences) < 1e-5

    with pytest.raises(RankError, match=r"data\.max_length allows sequences of 25 tokens.* beyond 24: .*Lower data"):
        pools(2).run(grpo_cases.train, grpo_cases.settings(path, data={"max_length": 25}), prompts, 1)
    assert sampled_as_trained(grpo_cases.settings(path, data={"max_length": 24}))
    data, model = {"max_length": 25}, {"config_override": override}
    assert sampled_as_trained(grpo_cases.settings(path, data=data, model=model, rollout={"engine": "transformers"}))
