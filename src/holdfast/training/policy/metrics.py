"""Metrics of a rollout, of facts that all ranks share or of sums over ranks, so that all ranks compute the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.advantages.group import flat_groups
from holdfast.config.sections.rollout import RolloutConfig
from holdfast.parallel.collectives import RankGroup
from holdfast.rewards.base import FAULTS
from holdfast.training.policy.groups import GroupFact, rewards_of
from holdfast.training.policy.rollouts import Rollout
from holdfast.training.step import UpdateNumbers
from holdfast.types import EpisodeSummary, Finish, MiniBatch, host_value

_SUMMED = {"data/rows", "data/tokens", "data/micro_batches"}
_QUANTILES = {"min": 0.0, "p01": 0.01, "median": 0.5, "p99": 0.99, "max": 1.0}
_BINS = 2**16
_LARGEST_LOG = 700.0
"""Largest argument of exp() that does not overflow a float64, with a margin."""
_LAST = {"learning_rate", "num_tokens", "optim/skipped_steps"}


def rollout_metrics(rollout: Rollout, tolerance: float) -> dict[str, float]:
    """Return rewards, lengths and faults of a step's completions under TRL's names.

    They speak of all completions that were sampled, also those that are not trained on.

    - reward, reward_std: mean over completions; mean over groups of the standard deviation within a group.
    - rewards/NAME/mean and rewards/NAME/std: of each reward and its parts, before weights.
    - frac_reward_zero_std: share of groups whose rewards are all alike; left out where groups have one completion.
    - completions/*: lengths in tokens; clipped_ratio is the share that was cut at the longest length, terminated are
      the others (0 where there are none).
    - reward/timeout, reward/error, reward/nan, reward/none: completions whose scoring failed that way, greedy ones that
      others are compared with included.
    - rollout/completions, rollout/groups, rollout/trained_groups: sampled, and trained on.
    """
    facts = rollout.sampled
    metrics = {**reward_metrics(facts), **length_metrics(facts), **episode_metrics(facts), **rollout.counted}
    if any(len(group.completions) > 1 for group in facts):
        metrics["frac_reward_zero_std"] = float(np.mean(flat_groups(rewards_of(facts), tolerance)))
    metrics |= fault_metrics(facts)
    metrics["rollout/completions"] = float(sum(len(group.completions) for group in facts))
    metrics["rollout/groups"] = float(len(facts))
    metrics["rollout/trained_groups"] = float(len(rollout.facts))
    return metrics


def reward_metrics(facts: Sequence[GroupFact]) -> dict[str, float]:
    """Return means and standard deviations of rewards.

    Completions without a reward are left out; where none has one, so are `reward` and `reward_std`.
    """
    rewards = rewards_of(facts) if facts else np.empty((0, 0))
    scored = np.isfinite(rewards)
    metrics = {"reward": float(rewards[scored].mean())} if scored.any() else {}
    spreads = [float(np.std(row[mask], ddof=1)) for row, mask in zip(rewards, scored, strict=True) if mask.sum() > 1]
    if scored.any():
        metrics["reward_std"] = float(np.mean(spreads)) if spreads else 0.0
    completions = [completion for group in facts for completion in group.completions]
    for name, numbers in _by_name([completion.metrics for completion in completions]).items():
        metrics[f"rewards/{name}"] = float(np.mean(numbers))
    for name, values in _by_name([completion.parts for completion in completions]).items():
        metrics[f"rewards/{name}/mean"] = float(np.mean(values))
        metrics[f"rewards/{name}/std"] = float(np.std(values))
    return metrics


def fault_metrics(facts: Sequence[GroupFact]) -> dict[str, float]:
    """Return reward/<fault>: how many completions' scoring failed that way, greedy ones included."""
    faults = Counter(completion.fault for group in facts for completion in group.completions)
    faults.update(group.greedy_fault for group in facts)
    return {f"reward/{kind}": float(faults[kind]) for kind in FAULTS}


def _by_name(mappings: Sequence[Mapping[str, float | None]]) -> dict[str, list[float]]:
    """Return the numbers of each name, by name; None is not a number."""
    numbers: dict[str, list[float]] = {}
    for values in mappings:
        for name, value in values.items():
            if value is not None:
                numbers.setdefault(name, []).append(value)
    return dict(sorted(numbers.items()))


def length_metrics(facts: Sequence[GroupFact]) -> dict[str, float]:
    """Return completions/* of a rollout or an evaluation."""
    completions = [completion for group in facts for completion in group.completions]
    if not completions:
        return {}
    lengths = [completion.length for completion in completions]
    ended = [completion.length for completion in completions if completion.finish is Finish.STOP]
    terminated = ended or [0]
    return {
        "completions/mean_length": float(np.mean(lengths)),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1.0 - len(ended) / len(lengths),
        "completions/mean_terminated_length": float(np.mean(terminated)),
        "completions/min_terminated_length": float(min(terminated)),
        "completions/max_terminated_length": float(max(terminated)),
    }


def episode_metrics(facts: Sequence[GroupFact]) -> dict[str, float]:
    """Return environment/* of episodes; nothing where completions are single answers.

    - environment/turns/mean and max; environment/cut_turns: of all episodes.
    - environment/ended/HOW: share of episodes that ended so (done, turns, room, seconds, cut, failed_calls, fault).
    - environment/calls/TOOL and environment/failed_calls: calls, and those that could not be made or whose tool raised.
    - environment/waited_seconds: mean time of an episode for its environment.
    - environment/info/NAME: mean of what environments told.
    """
    episodes = [fact.episode for group in facts for fact in group.completions if fact.episode is not None]
    if not episodes:
        return {}
    turns = [episode.turns for episode in episodes]
    ends = Counter(episode.ended for episode in episodes)
    metrics: dict[str, Any] = {
        "turns/mean": np.mean(turns),
        "turns/max": max(turns),
        "cut_turns": sum(episode.cut_turns for episode in episodes),
        "failed_calls": sum(episode.failed_calls for episode in episodes),
        "waited_seconds": np.mean([episode.waited_seconds for episode in episodes]),
        **{f"ended/{name}": count / len(episodes) for name, count in sorted(ends.items())},
        **_told_of(episodes),
    }
    return {f"environment/{name}": float(value) for name, value in metrics.items()}


def _told_of(episodes: Sequence[EpisodeSummary]) -> dict[str, float]:
    """Return calls by tool, and means of what environments told."""
    calls = Counter[str]()
    for episode in episodes:
        calls.update(episode.called)
    told = _by_name([episode.info for episode in episodes])
    means = {f"info/{name}": float(np.mean(numbers)) for name, numbers in told.items()}
    return {f"calls/{name}": float(count) for name, count in sorted(calls.items())} | means


def sampling_metrics(facts: Sequence[GroupFact], rollout: RolloutConfig, updates: int) -> dict[str, float]:
    """Return the age of the weights that sampled, and an estimate of the entropy.

    - sampling/staleness/mean and max, with `max_staleness`: number of updates by which the weights that sampled are
      older than the policy's; of a completion of several weights the oldest count.
    - entropy_estimate: the mean of -log p over all sampled tokens, in nats, which costs nothing. The mean of -log
      p(token) over draws of the token is the entropy of its distribution, so over many tokens this is `entropy` up to
      the noise of sampling. Left out where options restrict the draws, since p is then not the policy's, and where an
      engine tells no log-probabilities.

    Args:
        facts: Of all groups.
        rollout: The section.
        updates: Of the policy, before it learns from them.
    """
    metrics = {}
    completions = [completion for group in facts for completion in group.completions]
    ages = [updates - completion.oldest_weights for completion in completions if completion.oldest_weights >= 0]
    if rollout.max_staleness and ages:
        metrics = {"sampling/staleness/mean": float(np.mean(ages)), "sampling/staleness/max": float(max(ages))}
    tokens = sum(completion.length for completion in completions)
    total = math.fsum(completion.nll for completion in completions)
    if not rollout.biases() and tokens and not math.isnan(total):
        metrics["entropy_estimate"] = total / tokens
    return metrics


def log_ratios_of(mini_batch: MiniBatch, logprobs: Sequence[Tensor]) -> NDArray[np.float32]:
    """Return [N] log trainer - log sampler of this rank's scored tokens, in nats, where the sampler told one.

    Args:
        mini_batch: Whose tokens may carry what the policy said before the first of several updates.
        logprobs: What it said in this one, by micro-batch.
    """
    differences = []
    for batch, current in zip(mini_batch.micro_batches, logprobs, strict=True):
        sampler, proximal = (batch.per_token.get(name) for name in ("sampler_logprobs", "proximal_logprobs"))
        if sampler is None or not batch.scored.numel():
            continue
        trainer = current if proximal is None else proximal.flatten()[batch.scored]
        differences.append((trainer - sampler.flatten()[batch.scored].to(trainer.device)).float())
    if not differences:
        return np.zeros(0, np.float32)
    log_ratios: NDArray[np.float32] = host_value(torch.cat(differences), "log-probabilities beside the sampler's")
    return log_ratios[np.isfinite(log_ratios)]


def mismatch_spread(log_ratios: NDArray[np.float32], ranks: RankGroup) -> dict[str, float]:
    """Return how far apart trainer and sampler are at worst, over all tokens of a step; all ranks call this together.

    - sampling/sampling_logp_difference/max: the largest difference of a log-probability, in nats.
    - sampling/importance_sampling_ratio/QUANTILE: of trainer / sampler, before any correction. min and max are exact,
      the logarithms of the others to 0.4 %: they are read off a histogram that the ranks add up.

    Args:
        log_ratios: [N] of this rank, finite.
        ranks: That have tokens; a token is one rank's alone.
    """
    extremes = np.array([-log_ratios.min(), log_ratios.max()] if log_ratios.size else [-math.inf] * 2, np.float32)
    lowest_negated, high = ranks.largest(extremes).tolist()
    low = -lowest_negated
    if low > high:
        return {}
    counts = ranks.summed(np.bincount(_bins_of(log_ratios), minlength=_BINS))
    metrics = {"sampling/sampling_logp_difference/max": max(abs(low), abs(high))}
    for name, share in _QUANTILES.items():
        value = float(np.clip(_quantile(counts, share), low, high))
        exact = {"min": low, "max": high}.get(name, value)
        metrics[f"sampling/importance_sampling_ratio/{name}"] = math.exp(min(max(exact, -_LARGEST_LOG), _LARGEST_LOG))
    return metrics


def _bins_of(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the bins of float32 numbers, in their order: the upper 16 bits, 128 bins for every power of two."""
    bits = (values.view(np.uint32) >> 16).astype(np.int64)
    return np.where(bits < _BINS // 2, bits + _BINS // 2, _BINS - 1 - bits)


def _quantile(counts: NDArray[np.int64], share: float) -> float:
    """Return a quantile of the numbers in bins, interpolated between two of them as NumPy does."""
    ends = np.cumsum(counts)
    place = share * (int(ends[-1]) - 1)
    bins = np.searchsorted(ends, [math.floor(place), math.ceil(place)], side="right")
    bits = np.where(bins < _BINS // 2, _BINS - 1 - bins, bins - _BINS // 2).astype(np.uint32)
    before, after = ((bits << 16) + 2**15).view(np.float32).astype(np.float64)  # the middles of their bins
    return float(before + (after - before) * (place - math.floor(place)))


def of_several_updates(updates: Sequence[UpdateNumbers]) -> dict[str, float]:
    """Return one line for the updates of a step.

    A mean over tokens or sequences becomes the mean over all updates, and is left out where there were none; the loss
    is then 0. Amounts of work are summed, rates and counters have their last value, and other metrics are averaged.
    `data/order_hash` folds the hashes of all updates. clip_ratio/low_min and clip_ratio/high_max are the least and the
    most clipped update; TRL's are the extremes over processes, and depend on their number.
    """
    sums = [update.sums for update in updates]
    values_by_name = _by_name([update.metrics for update in updates])
    joined = {name: _combined(name, values) for name, values in values_by_name.items() if name not in sums[0]}
    for name in sums[0]:
        total, denominator = (math.fsum(update[name][index] for update in sums) for index in (0, 1))
        if denominator or name == "loss":
            joined[name] = total / denominator if denominator else 0.0
    return joined | _extreme_clipped(sums, "low", min) | _extreme_clipped(sums, "high", max)


def _extreme_clipped(
    sums: Sequence[Mapping[str, tuple[float, float]]], side: str, extreme: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    clipped = [update.get(f"clip_ratio/{side}_mean", (0.0, 0.0)) for update in sums]
    shares = [total / denominator for total, denominator in clipped if denominator]
    return {f"clip_ratio/{side}_{extreme.__name__}": extreme(shares)} if shares else {}


def _combined(name: str, values: Sequence[float]) -> float:
    if name == "data/order_hash":
        return float(hash(tuple(values)) % 2**52) if len(values) > 1 else values[0]
    if name in _LAST or name.startswith("learning_rate/"):
        return values[-1]
    return math.fsum(values) if name in _SUMMED else math.fsum(values) / len(values)
