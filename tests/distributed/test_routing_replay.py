"""Policies trained on the experts that sampled: nothing changes at the same weights, and nothing moves after them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.expert_choices import CHOICES_COLUMN
from holdfast.parallel.mesh import World
from holdfast.rewards.base import Scored
from holdfast.training.policy.build import build_policy_run
from holdfast.training.policy.experience import pack_rollout, with_advantages
from holdfast.training.policy.rollouts import next_rollout
from holdfast.training.policy.run import PolicyRun
from holdfast.training.setup.begin import Live
from holdfast.types import MiniBatch
from tests.distributed import grpo_cases
from tests.ranks import RankError
from tests.tiny import tiny_directory

PROMPTS = grpo_cases.prompts_of(12)
PASSES = {"passes": 3}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_directory(tmp_path_factory.mktemp("mixtral"), "mixtral"))


def tree_of(directory: str, *, replay: bool = True, **sections: Any) -> dict[str, Any]:
    rollout = {"replay_routing": replay} | sections.pop("rollout", {})
    return grpo_cases.settings(directory, rollout=rollout, **sections)


def trained(pools: Any, ranks: int, tree: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    found: dict[str, Any] = pools(ranks).run(grpo_cases.train, tree, PROMPTS, steps)[0]
    return found


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two runs' parameters."""
    return max(float(np.abs(one["parameters"][name] - other["parameters"][name]).max()) for name in one["parameters"])


def test_at_the_weights_that_sampled_replay_changes_nothing(pools: Any, directory: str) -> None:
    replayed, free = (trained(pools, 1, tree_of(directory, replay=replay)) for replay in (True, False))

    assert [line["router/replay_differs"] for line in replayed["lines"]] == [0.0, 0.0, 0.0]
    assert apart(replayed, free) < 1e-12
    assert "router/replay_differs" not in free["lines"][0]


def test_once_routers_have_moved_tokens_go_on_to_the_experts_that_sampled(pools: Any, directory: str) -> None:
    replayed, free = (trained(pools, 1, tree_of(directory, replay=replay, updates=PASSES)) for replay in (True, False))

    assert all(0 < line["router/replay_differs"] < 0.5 for line in replayed["lines"])
    assert apart(replayed, free) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        pytest.param(2, {"data": {"tokens_per_micro_batch": 48}}, id="2 ranks, groups cut over packs"),
        pytest.param(1, {"data": {"packing": "none"}}, id="padded, sampled by transformers"),
        pytest.param(1, {"rollout": {"shared_prefix": "off"}}, id="prompts repeated"),
        pytest.param(2, {"parallel": {"recompute": "full"}}, id="2 ranks, blocks recomputed"),
        pytest.param(2, {"parallel": {"context": 2, "recompute": "full"}}, id="a row on 2 ranks, recomputed"),
    ],
)
def test_the_result_does_not_depend_on_how_it_is_computed(
    pools: Any, directory: str, ranks: int, sections: dict[str, Any]
) -> None:
    plain = trained(pools, 1, tree_of(directory, updates=PASSES))

    found = trained(pools, ranks, tree_of(directory, updates=PASSES, **sections))

    assert apart(found, plain) < 1e-7  # the softmax of routers is in float32
    for one, other in zip(found["lines"], plain["lines"], strict=True):
        assert one["router/replay_differs"] == pytest.approx(other["router/replay_differs"], rel=1e-9)


def first_mini_batch(world: World, tree: dict[str, Any]) -> tuple[PolicyRun, MiniBatch]:
    """Sample, and return what the first update is made of."""

    def score(samples: Any) -> list[Scored]:
        return [Scored(float(len(sample.completion)), {}) for sample in samples]

    run = build_policy_run(from_mapping(tree, GRPOConfig), Path.cwd(), world, score, Live(rows=PROMPTS))
    rollout = next_rollout(run)
    assert rollout is not None
    (mini_batch,) = pack_rollout(run, with_advantages(run, rollout))
    return run, mini_batch


def routed(world: World, tree: dict[str, Any]) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Sample, turn every router upside down, and return what packs carry and what a pass over them chose."""
    run, mini_batch = first_mini_batch(world, tree)
    policy: PolicyModel = run.trained.model
    for name, parameter in policy.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data.neg_()
    found = []
    for batch in mini_batch.micro_batches:
        assert policy.routers is not None
        with policy.routers.choices() as chosen:
            policy(batch)
        found.append((batch.per_token[CHOICES_COLUMN].flatten(0, 1).numpy(), torch.stack(chosen, 1).numpy()))
    return found


def test_a_pass_sends_every_token_where_its_rollout_did(pools: Any, directory: str) -> None:
    found = pools(1).run(routed, tree_of(directory))[0]

    for told, chosen in found:
        known = told[:, 0, 0] > 0
        assert 0 < (~known).sum() < known.sum()
        assert np.array_equal(told[known], chosen[known])


def scored_with_wrong_choices(world: World, tree: dict[str, Any]) -> dict[str, float]:
    """Return how far choices that nobody made move log-probabilities: of the policy, and of its reference."""
    run, mini_batch = first_mini_batch(world, tree)
    batch = mini_batch.micro_batches[0]
    told = batch.per_token[CHOICES_COLUMN]
    others = replace(batch, per_token={**batch.per_token, CHOICES_COLUMN: torch.where(told > 0, 5 - told, told)})
    found = {}
    for name, model in (("policy", run.trained.model), ("reference", run.reference)):
        with torch.no_grad():
            one, other = (model(each).logprobs for each in (batch, others))  # type: ignore[misc,operator,union-attr]
        found[name] = float((one - other).abs().max())
    return found


@pytest.mark.parametrize("kind", ["sharded", "adapter_off"])
def test_a_reference_is_routed_by_its_own_routers(pools: Any, directory: str, kind: str) -> None:
    lora = {"model": {"lora": {"rank": 4, "targets": ["q_proj"]}}}
    tree = tree_of(directory, reference={"kind": kind}, kl={"coefficient": 0.1}, **lora)

    found = pools(1).run(scored_with_wrong_choices, tree)[0]

    assert found["policy"] > 1e-2
    assert found["reference"] == 0.0


@pytest.mark.parametrize(
    ("kind", "sections", "message"),
    [
        ("llama", {}, r"rollout\.replay_routing: llama cannot: it is no mixture of experts\. Leave it out\."),
        (
            "mixtral",
            {"parallel": {"compile": "blocks"}},
            r"parallel\.compile: blocks, but rollout\.replay_routing says which experts compute",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_step_1(
    pools: Any, tmp_path: Path, kind: str, sections: dict[str, Any], message: str
) -> None:
    tree = tree_of(str(tiny_directory(tmp_path, kind)), **sections)

    with pytest.raises(RankError, match=message):
        pools(1).run(grpo_cases.train, tree, PROMPTS, 1)


def test_a_step_that_was_kept_is_made_again_with_its_experts() -> None:
    from holdfast.features.forensics import recorder
    from holdfast.types import Finish, Group, Prompt, Trajectory

    choices = np.arange(20, dtype=np.int16).reshape(5, 2, 2)
    prompt = Prompt(3, np.array([5, 6]), "ab", {})
    trajectory = Trajectory(
        3, 3 * 2**20, 1, 1.0, np.arange(5), np.arange(5) >= 2, np.zeros(5, np.float32), np.zeros(5, np.int32),
        Finish.STOP, per_token={CHOICES_COLUMN: choices},
    )  # fmt: skip
    line = recorder.group_line(Group(prompt, (trajectory,)))

    again = recorder.trajectory_of_record(prompt, line["completions"][0])

    assert np.array_equal(again.per_token[CHOICES_COLUMN], choices)
