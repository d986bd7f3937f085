"""Group relative policy optimisation and its kin.

Sample several completions of each prompt, score them, compare each with the others of its prompt, and raise the
probability of those that did better. Shao et al., "DeepSeekMath" (arXiv:2402.03300), section 4.1. Which comparison,
which loss and which average are the configuration's business (`advantage`, `objective`, `data.average`). With a
`critic`, completions are compared with what it expected of them, token by token: PPO (arXiv:1707.06347).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from holdfast import registry
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.objectives.base import Objective
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.regularisers import acting_entropy_coefficient, next_entropy_coefficient, next_kl_coefficient
from holdfast.parallel.mesh import World
from holdfast.training.engines import PublishedEngine
from holdfast.training.fit import Outcome, fit
from holdfast.training.policy.build import build_policy_run
from holdfast.training.policy.critic import stand_still, train_critic, with_values
from holdfast.training.policy.episodes import check_environments, open_environments
from holdfast.training.policy.evaluate import evaluate_policy
from holdfast.training.policy.experience import pack_rollout, score_rollout, with_advantages
from holdfast.training.policy.metrics import (
    entropy_estimate,
    log_ratios_of,
    mismatch_spread,
    of_several_updates,
    rollout_metrics,
    staleness_metrics,
)
from holdfast.training.policy.reward_columns import check_answers, check_columns, check_returns
from holdfast.training.policy.rewards import open_rewards
from holdfast.training.policy.rollouts import Rollout, next_rollout
from holdfast.training.policy.run import PolicyTraining, is_warming_up, restored_afterwards
from holdfast.training.policy.samples import tell_samples
from holdfast.training.policy.uncalled import tell_uncalled
from holdfast.training.policy.walk import walk_a_step
from holdfast.training.setup.begin import Live
from holdfast.training.step import train_step
from holdfast.types import MiniBatch


def grpo(config: GRPOConfig, base: Path, world: World, live: Live | None = None) -> Outcome:
    """Train, evaluate and export as the configuration says."""
    with (
        open_rewards(config, base, world, live) as rewards,
        open_environments(config, base, world) as environments,
    ):
        training = build_policy_run(config, base, world, rewards.score, live, rewards.columns, environments)
        walk_a_step(training, learn)
        check_columns(training.evaluation, rewards.columns)
        check_answers(training.evaluation, rewards.answers, rewards.unreadable)
        check_returns(training.evaluation, rewards.try_out)
        check_environments(training.evaluation)
        try:
            return fit(training.common, partial(grpo_step, training), partial(evaluate_policy, training.evaluation))
        finally:
            training.evaluation.sampler.engine.close()  # or what is sampled ahead would be waited for


def grpo_step(training: PolicyTraining) -> dict[str, float] | None:
    """Sample, score, compare, and update the policy; None when the prompts have ended."""
    with restored_afterwards(training.model):
        rollout = next_rollout(training)
        if rollout is None:
            return None
        rollout, metrics = learn(training, rollout)
        with training.run.phase("data"):
            training.prompts.wait()  # what comes now decodes by the tokenizer that prompts are made by
        if isinstance(training.evaluation.sampler.engine, PublishedEngine):
            metrics |= training.evaluation.sampler.engine.step_metrics()
        if training.config.rollout.record:
            registry.load(registry.STEP_RECORD)(training, rollout, metrics)
        tell_samples(training, rollout)
        tell_uncalled(training, rollout)
        return metrics


def learn(training: PolicyTraining, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
    """Compare the completions of each prompt, update the policy on them, and return them with their advantages.

    The walk before step 1, `holdfast plan` and `holdfast replay` call it too.
    """
    objective = controlled_objective(training)
    ages = (
        staleness_metrics(rollout.sampled, training.model.state.updates)
        if training.config.rollout.max_staleness
        else {}
    )
    rollout = with_advantages(training, rollout)
    mini_batches = score_rollout(training, objective, (training.pack or pack_rollout)(training, rollout))
    metrics: dict[str, float] = {}
    if training.critic is not None:
        rollout, mini_batches, metrics = with_values(training, training.critic, objective, rollout, mini_batches)
        metrics |= train_critic(training, training.critic, mini_batches)
    metrics |= (
        stand_still(training, mini_batches) if is_warming_up(training) else update(training, objective, mini_batches)
    )
    metrics |= ages | rollout_metrics(rollout, training.config.advantage.tolerance)
    metrics |= entropy_estimate(rollout.sampled, training.config.rollout)
    metrics |= move_coefficients(training, metrics)
    return rollout, metrics


def update(training: PolicyTraining, objective: Objective, mini_batches: list[MiniBatch]) -> dict[str, float]:
    """Update the policy on every mini-batch, once or in several passes."""
    updates = mini_batches * training.config.updates.passes
    lines, sums, log_ratios = [], [], []
    is_first_of_context = training.run.ranks.rank % training.config.parallel.context == 0
    for number, mini_batch in enumerate(updates):
        ends_step = number == len(updates) - 1
        names = training.common.source_names
        result = train_step(training.model, mini_batch, objective, source_names=names, ends_step=ends_step)
        lines.append(result.metrics)
        sums.append(result.sums)
        if number < len(mini_batches) and is_first_of_context:  # later passes have the same tokens
            log_ratios.append(log_ratios_of(mini_batch, result.logprobs))
    own = np.concatenate(log_ratios or [np.zeros(0, np.float32)])
    return of_several_updates(lines, sums) | mismatch_spread(own, training.run.ranks)


def controlled_objective(training: PolicyTraining) -> Objective:
    """Return the objective with the coefficients of the present step."""
    objective, controllers, config = training.evaluation.objective, training.model.state.controllers, training.config
    if not isinstance(objective, PolicyGradient) or not controllers:
        return objective
    # What has no target (any more) is the configuration's, whatever a checkpoint remembers.
    kl = config.kl.coefficient if config.kl.target is None else controllers["kl"]
    entropy = config.entropy.coefficient
    if config.entropy.target is not None:
        entropy = acting_entropy_coefficient(
            config.entropy, controllers["entropy"], controllers.get("measured_entropy")
        )
    return objective.with_coefficients(kl, entropy)


def move_coefficients(training: PolicyTraining, metrics: Mapping[str, float]) -> dict[str, float]:
    """Move the coefficients by what the step measured, and return those that will act in the next one."""
    config, state = training.config, training.model.state
    if config.kl.target is None and config.entropy.target is None:
        return {}
    before = state.controllers or {"kl": config.kl.coefficient, "entropy": config.entropy.coefficient}
    completions = config.data.batch_size * config.rollout.group_size
    entropy = metrics.get("entropy", math.nan)
    state.controllers = {
        "kl": next_kl_coefficient(config.kl, before["kl"], metrics.get("kl", math.nan), completions),
        "entropy": next_entropy_coefficient(config.entropy, before["entropy"], entropy),
    }
    if not math.isnan(entropy):
        state.controllers["measured_entropy"] = entropy
    return {"kl/coefficient": state.controllers["kl"], "entropy/coefficient": state.controllers["entropy"]}
