"""The sections that describe a policy's loss: what they become, and what they refuse by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from holdfast.config.sections.advantage import AdvantageConfig
from holdfast.config.sections.policy import (
    CorrectionConfig,
    EntropyConfig,
    KLConfig,
    NoCorrectionConfig,
    OffPolicyMaskConfig,
    PolicyObjective,
)
from holdfast.objectives.policy import build_policy_objective
from holdfast.objectives.surrogates import CISPO, DPPO, GSPO, SAPO, Clip, ClipCov, GSPOToken, KLCov, Reinforce


def read(kind: Any, value: Any) -> Any:
    return TypeAdapter(kind).validate_python(value)


@pytest.mark.parametrize(
    ("section", "surrogate"),
    [
        ({}, Clip(0.2, 0.2, None)),
        ({"high": 0.28, "dual_clip": 3}, Clip(0.2, 0.28, 3.0)),
        ({"kind": "clip", "delta": 4}, Clip(0.2, 0.2, 4.0)),
        ("gspo", GSPO(3e-4, 4e-4)),
        ({"kind": "gspo_token", "low": 0.1, "high": 0.2}, GSPOToken(0.1, 0.2)),
        ({"kind": "clip_cov", "low": 0.1, "high": 0.3}, ClipCov(0.1, 0.3)),
        ({"kind": "kl_cov", "coefficient": 0.5}, KLCov(0.5)),
        ({"kind": "dppo", "divergence": "kl", "low": 0.04, "high": 0.05, "cap": 5}, DPPO("kl", 0.04, 0.05, 5.0)),
        ("cispo", CISPO(1.0, 4.0)),
        ({"kind": "cispo", "low": 0.5, "high": 1}, CISPO(0.5, 1.0)),
        ("sapo", SAPO(1.0, 1.05)),
        ({"kind": "sapo", "tau_negative": 2}, SAPO(1.0, 2.0)),
        ("reinforce", Reinforce()),
    ],
)
def test_a_section_becomes_its_surrogate(section: Any, surrogate: Any) -> None:
    objective = build_policy_objective(
        read(PolicyObjective, section), KLConfig(), EntropyConfig(), NoCorrectionConfig(), OffPolicyMaskConfig()
    )

    assert objective.surrogate == surrogate


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (PolicyObjective, {"dual_clip": 3, "delta": 4}, "delta: delta and dual_clip both bound the ratio"),
        (PolicyObjective, {"dual_clip": 0.9}, "dual_clip: 0.9 would clip the policy that sampled; use more than 1"),
        (PolicyObjective, {"delta": 1.1}, "delta: 1.1 is not above 1 \\+ high = 1.2; raise delta"),
        (PolicyObjective, {"low": 1.5}, "less than or equal to 1"),
        (PolicyObjective, {"kind": "gspo", "dual_clip": 3}, "dual_clip"),
        (KLConfig, {"target": 0.1}, "coefficient: 0 stays 0 however far the KL is from its target"),
        (KLConfig, {"coefficient": 0.1, "estimator": "k1"}, "estimator: the gradient of k1 in the loss is zero"),
        (
            KLConfig,
            {"coefficient": 0.1, "where": "reward", "importance_weighted": True},
            "importance_weighted: where: reward has no gradient to weight",
        ),
        (
            KLConfig,
            {"coefficient": 0.1, "where": "reward_to_go", "estimator": "straight_through"},
            "estimator: where: reward_to_go has no gradient to pass through",
        ),
        (EntropyConfig, {"lowest": 2}, "lowest: 2.0 is above highest=1.0"),
        (EntropyConfig, {"target": 1, "coefficient": 3}, "coefficient: 3.0 is not between lowest=0.0 and highest=1.0"),
        (EntropyConfig, {"top_quantile": 0}, "greater than 0"),
        (CorrectionConfig, {"kind": "mask", "low": 1.5}, "low: the range 1.5 to 5.0 leaves out the ratio 1"),
        (CorrectionConfig, {"cap": 3}, "cap"),
        (OffPolicyMaskConfig, {"max_kl": 0}, "greater than 0"),
        (AdvantageConfig, {"kind": "rloo", "combine": "sum_then_normalise"}, "combine"),
        (AdvantageConfig, {"kind": "pass_at_k", "k": 1}, "greater than or equal to 2"),
    ],
)
def test_nonsense_is_refused_by_name(kind: Any, value: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        read(kind, value)


@pytest.mark.parametrize(
    "value",
    [
        {"coefficient": 0.1, "estimator": "k1", "importance_weighted": True},
        {"coefficient": 0.1, "estimator": "k1", "where": "reward"},
        {"coefficient": 0.1, "target": 0.1},
    ],
)
def test_what_a_refusal_advises_is_accepted(value: Any) -> None:
    assert read(KLConfig, value).coefficient == 0.1


@pytest.mark.parametrize(
    ("kind", "smallest", "greedy"),
    [
        ("grpo", 2, False),
        ("dr_grpo", 2, False),
        ("rloo", 2, False),
        ("opo", 2, False),
        ("maxrl", 2, False),
        ("gpg", 2, False),
        ("batch_std", 2, False),
        ("reinforce_pp", 1, False),
        ("reinforce_pp_baseline", 2, False),
        ("remax", 1, True),
        ("pass_at_k", 5, False),
    ],
)
def test_an_advantage_says_what_it_compares(kind: str, smallest: int, greedy: bool) -> None:
    section = read(AdvantageConfig, kind)

    assert (section.smallest_group, section.needs_greedy) == (smallest, greedy)
