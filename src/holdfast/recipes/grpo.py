"""Group relative policy optimisation and its kin.

A step samples several completions of each prompt, scores them, compares each with the others of its prompt, and raises
the probability of the better ones. Shao et al., "DeepSeekMath" (arXiv:2402.03300), section 4.1. The configuration
chooses the comparison, the loss and the average (`advantage`, `objective`, `data.average`). With a `critic`,
completions are compared with its expectation, token by token: PPO (arXiv:1707.06347).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from holdfast import registry
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.objectives.base import Objective
from holdfast.parallel.mesh import World
from holdfast.training.fit import Outcome, fit
from holdfast.training.policy.build import build_policy_run
from holdfast.training.policy.coefficients import controlled_objective, move_coefficients
from holdfast.training.policy.critic import stand_still, train_critic, with_values
from holdfast.training.policy.episodes import check_environments, open_environments
from holdfast.training.policy.evaluate import evaluate_policy
from holdfast.training.policy.experience import pack_rollout, with_advantages, with_logprobs
from holdfast.training.policy.groups import share_facts
from holdfast.training.policy.metrics import (
    log_ratios_of,
    mismatch_spread,
    of_several_updates,
    rollout_metrics,
    sampling_metrics,
)
from holdfast.training.policy.reward_columns import check_answers, check_columns, check_returns
from holdfast.training.policy.rewards import open_rewards
from holdfast.training.policy.rollouts import (
    Rollout,
    begin_next_rollouts,
    drawn_prompts,
    merged_rounds,
    prompts_put_back,
    round_of,
    sample,
    seeds_of,
    tell_rollout,
    with_greedy,
)
from holdfast.training.policy.run import PolicyTraining, is_warming_up, offloaded, restored_afterwards
from holdfast.training.policy.samples import tell_samples, tell_uncalled
from holdfast.training.policy.scoring import score_groups
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
            return fit(training, partial(grpo_step, training), partial(evaluate_policy, training.evaluation))
        finally:
            if training.ahead is not None:
                training.ahead.close()  # or what is sampled ahead would be waited for
            training.evaluation.sampler.engine.close()


def grpo_step(training: PolicyTraining) -> dict[str, float] | None:
    """Sample, score, compare, pack and update; return the metrics, which `fit` writes, or None without prompts.

    Raises:
        StepAbandoned: A rank was asked to stop; the same on all ranks.
        RunStopped: No completion had a reward for too many steps in a row, or too many updates were skipped.
    """
    with restored_afterwards(training.model):
        rollout = next_rollout(training)
        if rollout is None:
            return None
        rollout, metrics = learn(training, rollout)
        with training.run.phase("data"):
            training.stream.wait()  # samples are decoded by the tokenizer that makes prompts
        metrics |= training.evaluation.sampler.step_metrics()
        if training.config.rollout.record:
            registry.load(registry.STEP_RECORD)(training, rollout, metrics)
        tell_samples(training, rollout)
        tell_uncalled(training, rollout)
        return metrics


def next_rollout(training: PolicyTraining) -> Rollout | None:
    """Sample completions of prompts and score them; None when the prompts have ended.

    With `groups.flat: resample` there are several rounds: groups whose rewards are all alike are replaced by others.

    Raises:
        StepAbandoned, RunStopped: As `grpo_step`.
    """
    evaluation, config, ranks = training.evaluation, training.config, training.run.ranks
    rounds: list[Rollout] = []
    with offloaded(training), prompts_put_back(training):
        for batch in drawn_prompts(training, rounds):  # until the rounds have enough groups that differ in reward
            ahead = None if rounds else training.ahead  # the completions of the first round may be on their way
            seeds = seeds_of(training, batch, training.model.state.step)
            groups = sample(evaluation, batch.own_prompts, config.rollout, seeds, ahead)
            # A completion whose reward fails is dropped; an error that ends one rank's rewards is raised on all ranks.
            groups, scored = score_groups(evaluation, groups)
            # Rewards and lengths of every rank's groups: each rank knows what is dropped, and how much is trained on.
            facts = share_facts(ranks, groups, scored)
            if config.advantage.needs_greedy:
                facts, scored = with_greedy(training, batch.own_prompts, facts, scored)
            rounds.append(round_of(training, batch, groups, facts, scored))
        evaluation.sampler.release(training.model)
    if not rounds:
        return None
    rollout = merged_rounds(rounds, config.data.batch_size)
    tell_rollout(training, rollout)
    # Engines outside of the process sample the next completions while this step updates.
    begin_next_rollouts(training)
    return rollout


def learn(training: PolicyTraining, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
    """Compare the completions of each prompt, pack them and update the policy; return them with their advantages.

    The walk before step 1 and `holdfast replay` call it too.
    """
    rollout = with_advantages(training, rollout)
    mini_batches = pack_rollout(training, rollout)
    return learn_from(training, rollout, mini_batches)


def learn_from(
    training: PolicyTraining, rollout: Rollout, mini_batches: list[MiniBatch]
) -> tuple[Rollout, dict[str, float]]:
    """Update the policy on the mini-batches of a rollout, which `holdfast plan` packs on its own."""
    updates_before = training.model.state.updates
    objective = controlled_objective(training)
    # Proximal log-probabilities, of the policy before its first update, cost a forward pass; a single update needs
    # none, since its ratio is 1. The reference's are for the KL term.
    mini_batches = with_logprobs(training, objective, mini_batches)
    metrics: dict[str, float] = {}
    if training.critic is not None:
        rollout, mini_batches, metrics = with_values(training, training.critic, objective, rollout, mini_batches)
        metrics |= train_critic(training, training.critic, mini_batches)
    if is_warming_up(training):
        metrics |= stand_still(training, mini_batches)
    else:
        metrics |= update(training, objective, mini_batches)
    metrics |= rollout_metrics(rollout, training.config.advantage.tolerance)
    metrics |= sampling_metrics(rollout.sampled, training.config.rollout, updates_before)
    metrics |= move_coefficients(training, metrics)
    return rollout, metrics


def update(training: PolicyTraining, objective: Objective, mini_batches: list[MiniBatch]) -> dict[str, float]:
    """Update the policy on every mini-batch, once or in several passes."""
    run, updates = training.run, mini_batches * training.config.updates.passes
    numbers, log_ratios = [], []
    is_first_of_context = run.ranks.rank % run.config.parallel.context == 0
    for index, mini_batch in enumerate(updates):
        ends_step = index == len(updates) - 1
        names = training.source_names
        made = train_step(training.model, mini_batch, objective, source_names=names, ends_step=ends_step)
        numbers.append(made.read())
        if index < len(mini_batches) and is_first_of_context:  # later passes have the same tokens
            log_ratios.append(log_ratios_of(mini_batch, made.logprobs))
    own = np.concatenate(log_ratios or [np.zeros(0, np.float32)])
    return of_several_updates(numbers) | mismatch_spread(own, run.ranks)
