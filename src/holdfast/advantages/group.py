"""Advantages of completions, each compared with others of its prompt or its batch; of tokens, from a critic's values.

Throughout rewards are [P, G] float64, NaN where a completion was not scored: such a completion is in no baseline and
has advantage 0. Rewards that are identical give exactly 0, not the rounding error of their mean. Standard deviations
are those of a sample (divided by n - 1), as torch.std has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdfast.config.sections.advantage import (
    AdvantageConfig,
    BatchStdAdvantageConfig,
    DrGRPOAdvantageConfig,
    GAEAdvantageConfig,
    GPGAdvantageConfig,
    GRPOAdvantageConfig,
    MaxRLAdvantageConfig,
    OPOAdvantageConfig,
    PassAtKAdvantageConfig,
    ReinforcePPAdvantageConfig,
    ReinforcePPBaselineAdvantageConfig,
    ReMaxAdvantageConfig,
    RLOOAdvantageConfig,
    ScaledAdvantageConfig,
    UserAdvantageConfig,
)

RewardMatrix = NDArray[np.float64]
"""[P, G]: G completions of each of P prompts; NaN where a completion was not scored"""
Mask = NDArray[np.bool_]


def advantages(
    config: AdvantageConfig,
    rewards: RewardMatrix,
    rewards_by_name: Mapping[str, RewardMatrix] | None = None,
    weights: Mapping[str, float] | None = None,
    greedy: NDArray[np.float64] | None = None,
    lengths: RewardMatrix | None = None,
) -> RewardMatrix:
    """Return the advantage of every completion, [P, G].

    Give the whole rollout batch, over all ranks: some baselines and standard deviations are the batch's.

    - grpo: (r - mean of the group) / (std of the group + epsilon). Shao et al. (arXiv:2402.03300), section 4.1.2.
    - dr_grpo: r - mean of the group. Liu et al. (arXiv:2503.20783), section 3.2.
    - rloo: r - mean of the others of the group. Ahmadian et al. (arXiv:2402.14740).
    - reinforce_pp: (r - mean of the batch) / (std of the batch + epsilon). Hu et al. (arXiv:2501.03262). They normalise
      over tokens, so long completions count more; here every completion counts once.
    - reinforce_pp_baseline: c = r - mean of the group, over the batch's std of c. Likewise.
    - batch_std: r - mean of the group, over the batch's std of r. Liu et al. (arXiv:2508.08221).
    - opo: r - sum(l r) / sum(l) over the group, l being lengths. Hao et al. (arXiv:2505.23585).
    - maxrl: (r - mean) / mean of the group; 0 where the mean is not above 0. Tajwar et al. (arXiv:2602.02710).
    - gpg: r - mean of the group, times groups / groups that are not flat, of those of the batch with a baseline. Chu et
      al. (arXiv:2504.02546).
    - remax: r - reward of the greedy completion. Li et al. (arXiv:2310.10505), algorithm 1.
    - pass_at_k: see `pass_at_k`.

    Args:
        config: Which of them.
        rewards: [P, G], the weighted sum of all rewards.
        rewards_by_name: Each reward by its name, [P, G]; needed for combine: normalise_then_sum.
        weights: The factor of each reward by its name; likewise. Parts without a weight are left out.
        greedy: [P], the reward of the greedy completion of each prompt, needed for remax; NaN where it was not scored.
        lengths: [P, G], tokens of each completion, needed for opo.

    Raises:
        ValueError: What the configuration needs was not given.
    """
    if isinstance(config, ScaledAdvantageConfig) and config.combine == "normalise_then_sum":
        if rewards_by_name is None or weights is None:
            raise ValueError("combine: normalise_then_sum needs each reward and its weight by name")
        return _summed_after(config, np.isfinite(rewards), rewards_by_name, weights)
    scored = np.isfinite(rewards) & ~without_baseline(config, rewards, greedy)[:, None]
    return np.where(scored, _compared(config, np.where(scored, rewards, np.nan), greedy, lengths), 0.0)


def flat_groups(rewards: RewardMatrix, tolerance: float) -> Mask:
    """Return [P]: whether a group's scored rewards all lie within `tolerance`, or fewer than two are scored."""
    scored = np.isfinite(rewards)
    highest = np.where(scored, rewards, -np.inf).max(axis=1)
    lowest = np.where(scored, rewards, np.inf).min(axis=1)
    few = scored.sum(axis=1) < 2
    flat: Mask = few | (np.where(few, 0.0, highest) - np.where(few, 0.0, lowest) <= tolerance)
    return flat


def without_advantages(
    config: AdvantageConfig,
    rewards: RewardMatrix,
    rewards_by_name: Mapping[str, RewardMatrix],
    weights: Mapping[str, float],
    trained: Mask,
    lengths: RewardMatrix | None = None,
) -> Mask:
    """Return [P]: groups all of whose trained completions have an advantage of 0, each group judged by itself.

    For advantages that compare within groups: what they take of the batch is a scale, and makes no 0 of another number.

    Args:
        config, rewards, parts, weights, lengths: As in `advantages`.
        trained: [P, G], completions that are trained; others are compared with, and learn nothing.
    """
    rows = [slice(number, number + 1) for number in range(len(rewards))]
    by_group = [
        advantages(
            config,
            rewards[row],
            {name: rewards_by_name[name][row] for name in rewards_by_name},
            weights,
            lengths=None if lengths is None else lengths[row],
        )
        for row in rows
    ]
    learned = [values[trained[row]] for row, values in zip(rows, by_group, strict=True)]
    return np.array([not values.any() for values in learned], dtype=np.bool_)


def without_baseline(config: AdvantageConfig, rewards: RewardMatrix, greedy: NDArray[np.float64] | None = None) -> Mask:
    """Return [P]: groups too few of whose completions were scored to compare them; all their advantages are 0."""
    few: Mask = np.isfinite(rewards).sum(axis=1) < config.smallest_group
    if not config.needs_greedy:
        return few
    if greedy is None:
        raise ValueError("advantage: remax needs the rewards of greedy completions")
    without: Mask = few | ~np.isfinite(greedy)
    return without


def pass_at_k(rewards: RewardMatrix, k: int, threshold: float) -> RewardMatrix:
    """Return the advantage of a completion's groups of k, each rewarded 1 if any member is right.

    Chen et al., "Pass@k Training" (arXiv:2508.10751), section 2.4, in closed form over all groups of k out of n scored
    completions, m of them wrong: with mean R = 1 - C(m, k) / C(n, k) and standard deviation s = sqrt(R (1 - R)),

        right: (1 - R) / s        wrong: (1 - R - C(m - 1, k - 1) / C(n - 1, k - 1)) / s

    Where every group of k has the same reward, s is 0 and so are the advantages.

    Args:
        rewards: [P, G], NaN where not scored; at least k are, in a row that has an advantage.
        k: Size of the groups.
        threshold: A completion is right if its reward lies above.
    """
    result = np.zeros_like(rewards)
    for row, values in zip(result, rewards, strict=True):
        scored = int(np.isfinite(values).sum())
        wrong = int((values <= threshold).sum())
        if not k <= wrong < scored:
            continue  # all groups of k hold a right one, or none does
        mean = 1 - math.comb(wrong, k) / math.comb(scored, k)
        spread = math.sqrt(mean * (1 - mean))
        row[values > threshold] = (1 - mean) / spread
        row[values <= threshold] = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(scored - 1, k - 1)) / spread
    return result


def _compared(
    config: AdvantageConfig,
    rewards: RewardMatrix,
    greedy: NDArray[np.float64] | None,
    lengths: RewardMatrix | None,
) -> RewardMatrix:
    """Return advantages where rewards are scored; anything elsewhere."""
    match config:
        case GRPOAdvantageConfig():
            return _scaled(_centred(rewards, config.tolerance), _deviations(rewards) + config.epsilon)
        case DrGRPOAdvantageConfig():
            return _centred(rewards, config.tolerance)
        case RLOOAdvantageConfig():
            peers = np.maximum(np.isfinite(rewards).sum(axis=1, keepdims=True) - 1, 1)
            return _scaled(_centred(rewards, config.tolerance), peers / (peers + 1))
        case OPOAdvantageConfig():
            return _centred(rewards, config.tolerance, _lengths_at(rewards, lengths))
        case MaxRLAdvantageConfig():
            mean = _mean(rewards)
            right = mean > config.tolerance
            return np.where(right, _centred(rewards, config.tolerance) / np.where(right, mean, 1.0), 0.0)
        case GPGAdvantageConfig():
            uneven = int((~flat_groups(rewards, config.tolerance)).sum())
            groups = int(np.isfinite(rewards).any(axis=1).sum())
            return _centred(rewards, config.tolerance) * (groups / max(uneven, 1))
        case ReinforcePPAdvantageConfig():
            batch = rewards.reshape(1, -1)
            scaled = _scaled(_centred(batch, config.tolerance), _deviations(batch) + config.epsilon)
            return np.reshape(scaled, rewards.shape)
        case ReinforcePPBaselineAdvantageConfig() | BatchStdAdvantageConfig():
            return _over_batch(config, rewards)
        case ReMaxAdvantageConfig():
            assert greedy is not None
            difference = rewards - greedy[:, None]
            return np.where(np.abs(difference) <= config.tolerance, 0.0, difference)
        case PassAtKAdvantageConfig():
            return pass_at_k(rewards, config.k, config.threshold)
        case GAEAdvantageConfig() | UserAdvantageConfig():
            raise ValueError(f"advantage: {config.kind} is not made of rewards here (advantages/group.py, user.py)")


def _over_batch(
    config: ReinforcePPBaselineAdvantageConfig | BatchStdAdvantageConfig, rewards: RewardMatrix
) -> RewardMatrix:
    """Return centred rewards over a standard deviation of the whole batch: their own, or that of the rewards."""
    centred = measured = _centred(rewards, config.tolerance)
    if isinstance(config, BatchStdAdvantageConfig):
        measured = rewards
    spread = _deviations(np.where(np.isfinite(rewards), measured, np.nan).reshape(1, -1))
    return _scaled(centred, spread + config.epsilon)


def _centred(rewards: RewardMatrix, tolerance: float, weights: RewardMatrix | None = None) -> RewardMatrix:
    """Return rewards less the mean of their row, weighted or plain; exactly 0 in a flat row and where not scored."""
    scored = np.isfinite(rewards)
    mean = _mean(rewards)
    if weights is not None:
        mean = _sum(weights * rewards) / np.maximum(_sum(weights), 1.0)
    return np.where(scored & ~flat_groups(rewards, tolerance)[:, None], rewards - mean, 0.0)


def _lengths_at(rewards: RewardMatrix, lengths: RewardMatrix | None) -> RewardMatrix:
    """Return the lengths of scored completions, and 0 of others."""
    if lengths is None:
        raise ValueError("advantage: opo needs the lengths of completions")
    return np.where(np.isfinite(rewards), lengths, 0.0)


def _mean(rewards: RewardMatrix) -> RewardMatrix:
    """Return the mean of each row's scored rewards, [P, 1]; 0 of none."""
    mean: RewardMatrix = _sum(rewards) / np.maximum(np.isfinite(rewards).sum(axis=1, keepdims=True), 1)
    return mean


def _deviations(rewards: RewardMatrix) -> RewardMatrix:
    """Return the standard deviation of each row's scored rewards, [P, 1]; 0 of fewer than two."""
    count = np.isfinite(rewards).sum(axis=1, keepdims=True)
    spread: RewardMatrix = np.sqrt(_sum((rewards - _mean(rewards)) ** 2) / np.maximum(count - 1, 1))
    return spread


def _sum(rewards: RewardMatrix) -> RewardMatrix:
    total: RewardMatrix = np.nansum(rewards, axis=1, keepdims=True)
    return total


def _scaled(values: RewardMatrix, spread: RewardMatrix) -> RewardMatrix:
    """Return values / spread, 0 where both are 0."""
    scaled: RewardMatrix = values / np.where(spread > 0, spread, 1.0)
    return scaled


def _summed_after(
    config: ScaledAdvantageConfig,
    scored: Mask,
    rewards_by_name: Mapping[str, RewardMatrix],
    weights: Mapping[str, float],
) -> RewardMatrix:
    """Return the weighted sum of each reward's own advantages over the batch's standard deviation of that sum.

    GDPO (arXiv:2601.05242): the mean over the batch, which the paper takes off too, is 0 for centred groups. A reward
    that says nothing of a completion moves it neither way.
    """
    scored = scored & ~without_baseline(config, np.where(scored, 0.0, np.nan))[:, None]
    alone = config.model_copy(update={"combine": "sum_then_normalise"})
    total = np.zeros(scored.shape)
    for name, weight in weights.items():
        total += weight * advantages(alone, np.where(scored, rewards_by_name[name], np.nan))
    spread = _deviations(np.where(scored, total, np.nan).reshape(1, -1)) + config.epsilon
    return np.where(scored, _scaled(total, spread), 0.0)


Values = NDArray[np.float64]
"""[N], one number per chosen token"""
T = TypeVar("T")
Gather = Callable[[T], Sequence[T]]
"""Returns what every rank gave."""


def generalised_advantages(
    rewards: Values, values: Values, sequence: NDArray[np.int64], gamma: float, lam: float
) -> Values:
    """Return [N] advantages: A_t = d_t + gamma lambda A_(t+1) with d_t = r_t + gamma V_(t+1) - V_t.

    Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv:1506.02438),
    eq. 16. After a sequence's last token there is nothing: value and advantage are 0. Tokens between, which the policy
    did not choose, are not given and take no time.

    Args:
        rewards: [N]
        values: [N], each before its token is chosen.
        sequence: [N], which sequence a token belongs to; a sequence's tokens stand in their order.
        gamma: Discount.
        lam: The paper's lambda.
    """
    if not rewards.size:
        return np.zeros(0)
    order = np.argsort(sequence, kind="stable")
    _, row, lengths = np.unique(sequence[order], return_inverse=True, return_counts=True)
    column = np.arange(order.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    reward, value, advantage = np.zeros((3, lengths.size, int(lengths.max()) + 1))
    reward[row, column], value[row, column] = rewards[order], values[order]
    for t in range(advantage.shape[1] - 2, -1, -1):
        # Past a row's end rewards and values are 0, and so is what comes from there.
        advantage[:, t] = reward[:, t] + gamma * value[:, t + 1] - value[:, t] + gamma * lam * advantage[:, t + 1]
    result = np.empty(order.size)
    result[order] = advantage[row, column]
    return result


_ROUNDING = 1e-12
"""Relative deviation of numbers that are alike but for the last digits of their mean in float64."""


class Spread(NamedTuple):
    """Mean and variance of numbers that several ranks hold parts of."""

    mean: float
    variance: float
    """Sample variance (divided by n - 1); 0 for fewer than two numbers."""

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)


def spread_of(numbers: Values, gather: Gather[tuple[int, float]]) -> Spread:
    """Return mean and variance over all ranks, in two passes; all ranks call this together."""
    sums = gather((numbers.size, math.fsum(numbers)))
    count = sum(size for size, _ in sums)
    mean = math.fsum(total for _, total in sums) / max(count, 1)
    squares = gather((numbers.size, math.fsum((numbers - mean) ** 2)))
    return Spread(mean, math.fsum(total for _, total in squares) / max(count - 1, 1))


def whitened(advantages: Values, spread: Spread, epsilon: float) -> Values:
    """Return (A - mean) / (standard deviation + epsilon); one token, or tokens that are all alike, give 0."""
    if spread.deviation <= _ROUNDING * max(1.0, abs(spread.mean)):
        return np.zeros_like(advantages)
    return (advantages - spread.mean) / (spread.deviation + epsilon)


def explained_variance(returns: Spread, errors: Spread) -> float | None:
    """Return 1 - Var(R - V) / Var(R): 1 where values are right, 0 where they say no more than a constant would.

    None where all returns are alike.
    """
    return 1 - errors.variance / returns.variance if returns.variance > 0 else None
