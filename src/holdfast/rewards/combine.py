"""Combine the outcomes of all rewards for a sample into its weighted sum, and apply the policy for faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from holdfast.config.sections.reward import (
    FaultPolicy,
    MathConfig,
    Reward,
    RewardPoolConfig,
)
from holdfast.rewards.base import Sample, SampleOutcome, Scored, is_number
from holdfast.text.escaping import escaped
from holdfast.text.shortening import shortened

_SHOWN = 80
_LONGEST_NAME, _LONGEST_MESSAGE = 200, 1000
"""Characters of what a function calls its parts, and of what it says; no line of ours is megabytes long."""
_DROPS: Mapping[str, Literal["sample", "group"] | None] = {
    "value": None,
    "drop_sample": "sample",
    "drop_group": "group",
}
"""What a policy leaves out, by its kind, the mildest first."""


def combine(
    sample: Sample, outcomes: Sequence[SampleOutcome], rewards: Sequence[Reward], config: RewardPoolConfig
) -> Scored:
    """Return the weighted sum of a sample's rewards.

    None beside another reward's number is left out of the sum. If several rewards fail, the fault that drops most is
    the one told.
    """
    judged = list(zip(rewards, outcomes, strict=True))
    values = {reward.label: _value(reward, outcome, config) for reward, outcome in judged}
    total = _total([reward.weight * value for reward in rewards if (value := values[reward.label]) is not None])
    faults = [(reward, outcome) for reward, outcome in judged if outcome.fault not in {None, "none"}]
    if all(outcome.fault == "none" for outcome in outcomes):
        faults = judged[:1]
        total = _fixed(config.on_none) or 0.0
    if not faults and not is_number(total):
        faults, total = _beyond(judged, total), _fixed(config.on_nan) or 0.0
    part_rewards, metrics = _told(judged, values)
    if not faults:
        return Scored(total, part_rewards, metrics)
    severity = list(_DROPS)
    reward, outcome = max(faults, key=lambda fault: severity.index(_kind(_policy(fault[0], fault[1], config))))
    cited = repr(shortened(sample.completion, _SHOWN))
    fault = shortened(outcome.message, _LONGEST_MESSAGE)
    message = escaped(f"reward {reward.label} {fault}; sample {sample.sample_id}: {cited}")
    drop = _DROPS[_kind(_policy(reward, outcome, config))]
    return Scored(total if drop is None else None, part_rewards, metrics, outcome.fault, drop, message)


def _total(weighted: Sequence[float]) -> float:
    """Add one after the other: `sum` rounds otherwise from Python 3.12 on."""
    total: float = 0
    for value in weighted:
        total += value
    return total


def _told(
    judged: Sequence[tuple[Reward, SampleOutcome]], values: Mapping[str, float | None]
) -> tuple[dict[str, float | None], dict[str, float]]:
    """Return the parts and metrics of all rewards under their names, which a user's function chose."""
    part_rewards: dict[str, float | None] = {}
    metrics: dict[str, float] = {}
    for reward, outcome in judged:
        part_rewards[reward.label] = values[reward.label]
        part_rewards |= {_named(reward, name): part_reward for name, part_reward in outcome.parts.items()}
        metrics |= {_named(reward, name): metric for name, metric in outcome.metrics.items()}
    return part_rewards, metrics


def _named(reward: Reward, name: str) -> str:
    return f"{reward.label}/{escaped(name[:_LONGEST_NAME])}"


def _beyond(judged: Sequence[tuple[Reward, SampleOutcome]], total: float) -> list[tuple[Reward, SampleOutcome]]:
    """Return the fault of a sum that is not a number, under the name of the reward that weighs most."""
    heaviest = max(judged, key=lambda pair: abs(pair[0].weight))[0]
    return [(heaviest, SampleOutcome(fault="nan", message=f"and its weight make a sum of {total}"))]


def _value(reward: Reward, outcome: SampleOutcome, config: RewardPoolConfig) -> float | None:
    """Return a reward's number, or the one that stands for its fault."""
    return outcome.value if outcome.fault in {None, "none"} else _fixed(_policy(reward, outcome, config))


def _policy(reward: Reward, outcome: SampleOutcome, config: RewardPoolConfig) -> FaultPolicy:
    if outcome.fault == "timeout":
        return _of_timeout(reward, outcome, config)
    return {"nan": config.on_nan, "none": config.on_none}.get(outcome.fault or "", config.on_error)


def _of_timeout(reward: Reward, outcome: SampleOutcome, config: RewardPoolConfig) -> FaultPolicy:
    if config.on_timeout != "auto":
        return config.on_timeout
    # A tower of powers must not pay: left out of the baseline, it would cost less than a wrong answer.
    is_wrong = isinstance(reward, MathConfig) and not outcome.is_cut_short
    return 0.0 if is_wrong else "drop_sample"


def _kind(policy: FaultPolicy) -> str:
    return policy if isinstance(policy, str) else "value"


def _fixed(policy: FaultPolicy | Literal["auto"]) -> float | None:
    return None if isinstance(policy, str) else policy
