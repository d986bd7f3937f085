"""The critic of PPO: building it, rewards per token, values, generalised advantages, and its updates.

A critic is a second model that is trained together with the policy. It has its own sharding plan, optimizer and state,
and `train_step` updates it like any other model. Schulman et al., "Proximal Policy Optimization Algorithms"
(arXiv:1707.06347).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.advantages.group import explained_variance, generalised_advantages, spread_of, whitened
from holdfast.config.sections.advantage import GAEAdvantageConfig
from holdfast.config.verbs.critic import CriticConfig, critic_training
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import ConfigError, ModelError, PlanError, RunStopped
from holdfast.models.setup.model import Blueprint, blueprint
from holdfast.objectives.base import Objective
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.regularisers import kl_estimate
from holdfast.objectives.supervised import ValueLoss
from holdfast.training.other_models.reference import on_tokens, scored
from holdfast.training.policy.metrics import of_several_updates
from holdfast.training.policy.rollouts import Rollout
from holdfast.training.policy.run import CRITIC, PolicyTraining
from holdfast.training.run import Logbook, Model, Run
from holdfast.training.setup.begin import Live, give_optimizer
from holdfast.training.setup.model import build_policy
from holdfast.training.step import UpdateNumbers, train_step
from holdfast.types import Batch, MiniBatch, Trajectory, host_value

Build = Callable[[Run, Blueprint], Model]
"""Places a model on its ranks."""


def add_critic(training: PolicyTraining, section: CriticConfig, live: Live, build: Build = build_policy) -> None:
    """Give a policy's training the critic that its configuration asks for; all ranks call this together.

    Raises:
        ConfigError, ModelError, PlanError: The critic cannot be built, or reads other tokens than the policy writes;
            the same on all ranks.
    """
    try:
        critic = _critic(training, section, live, build)
    except (ConfigError, ModelError, PlanError) as error:  # its configuration keys are not those of the policy
        raise type(error)(f"The critic (section critic) cannot be built: {error}") from error
    training.companions[CRITIC] = critic
    training.model.state.companions[CRITIC] = critic.state


def _critic(training: PolicyTraining, section: CriticConfig, live: Live, build: Build) -> Model:
    policy, config, ranks = training.model, critic_training(training.config, section), training.run.ranks
    if live.model is not None and section.path is None:
        raise ConfigError(
            "the policy was given in Python (model=), and there are no files of it to start from. Name a directory in "
            "critic.path, such as the one the policy was loaded from."
        )
    if isinstance(training.evaluation.images, ImageSide):
        raise ConfigError(
            f"{training.model.blueprint.family.name} sees images, and a critic reads text alone. Use an advantage that "
            "compares completions with each other, such as advantage: grpo."
        )
    has_own_files = section.path is not None
    origin = ranks.first_rank_first(
        lambda: blueprint(
            config.model,
            training.run.base,
            seed=config.seed,
            tokenizer=None if has_own_files else policy.blueprint.tokenizer,
            scorer=True,
        ),
    )
    with ranks.together():
        _check_tokens(policy.blueprint, origin)
    if policy.module.padded:
        config = config.model_copy(update={"data": config.data.model_copy(update={"packing": "none"})})
    if training.run.world.is_first:
        print("critic: its plan:", flush=True)
    critic = build(replace(training.run, config=config, log=Logbook()), origin)
    if critic.module.padded and not policy.module.padded:
        raise ConfigError(
            f"{origin.family.name} is trained with one sequence per row ({origin.family.why_not_packed}), and the "
            "policy's are packed. Set data.packing: none."
        )
    give_optimizer(critic, policy.total_steps)
    critic.host_offload = policy.host_offload
    return critic


def _check_tokens(policy: Blueprint, critic: Blueprint) -> None:
    """Compare the vocabularies of the policy and the critic.

    Raises:
        ModelError: Critic and policy disagree on a token.
    """
    policy_tokens, critic_tokens = (
        {number: token for token, number in origin.tokenizer.get_vocab().items()} for origin in (policy, critic)
    )
    differ = [
        number
        for number in sorted({*policy_tokens, *critic_tokens})
        if policy_tokens.get(number) != critic_tokens.get(number)
    ]
    if differ:
        first = differ[0]
        raise ModelError(
            f"its tokenizer is not the policy's: they differ in {len(differ)} tokens, the first of them {first}, which "
            f"is {_token_text(policy_tokens, first)} to the policy and {_token_text(critic_tokens, first)} to the "
            "critic. A critic reads the policy's tokens as they are. Name a model with the policy's tokenizer in "
            "critic.path, or leave it out."
        )


def _token_text(tokens: dict[int, Any], number: int) -> str:
    return repr(tokens[number]) if number in tokens else "none"


_Numbers = NDArray[np.float64]


class _Estimates(NamedTuple):
    """Advantages, returns and values of the scored tokens of a micro-batch, [N] each."""

    advantages: _Numbers
    returns: _Numbers
    values: _Numbers
    sequence: NDArray[np.int64]


def with_rewards(rollout: Rollout, exact: type[np.floating[Any]]) -> Rollout:
    """Return the rollout with every completion's reward on its last token, and advantages that are still to come."""

    def rewarded(trajectory: Trajectory) -> Trajectory:
        rewards = np.zeros(trajectory.tokens.size, exact)
        trained_indices = np.flatnonzero(trajectory.loss_mask)
        if trained_indices.size and trajectory.reward is not None:
            rewards[trained_indices[-1]] = trajectory.reward
        carried = {**trajectory.per_token, "rewards": rewards}
        return replace(trajectory, advantages=np.zeros_like(rewards), per_token=carried)

    groups = [
        replace(group, trajectories=tuple(rewarded(trajectory) for trajectory in group.trajectories))
        for group in rollout.groups
    ]
    return replace(rollout, groups=tuple(groups))


def with_values(
    training: PolicyTraining, critic: Model, objective: Objective, rollout: Rollout, mini_batches: Sequence[MiniBatch]
) -> tuple[Rollout, list[MiniBatch], dict[str, float]]:
    """Add value, return and advantage of every token, as they are before the first update; all ranks call this.

    Returns:
        The rollout with the mean advantage of each completion, for those who look at it; the mini-batches; metrics.
    """
    section = training.config.advantage
    assert isinstance(section, GAEAdvantageConfig)
    with training.run.phase("values"):
        valued = [scored(training.model, critic.module, mini_batch, "values") for mini_batch in mini_batches]
    with training.run.phase("advantage"):
        batches = [batch for mini_batch in valued for batch in mini_batch.micro_batches]
        estimates = [_estimate(objective, section, batch) for batch in batches]
        metrics = _metrics(training, estimates)
        if section.whiten:
            of_all = spread_of(
                np.concatenate([estimate.advantages for estimate in estimates]), training.run.gather_once
            )
            estimates = [
                estimate._replace(advantages=whitened(estimate.advantages, of_all, section.epsilon))
                for estimate in estimates
            ]
        keeps_proximal = training.config.updates.count > 1
        done = iter(
            [_carried(batch, estimate, keeps_proximal) for batch, estimate in zip(batches, estimates, strict=True)]
        )
        result = [
            replace(mini_batch, micro_batches=tuple(next(done) for _ in mini_batch.micro_batches))
            for mini_batch in valued
        ]
        return _with_mean_advantages(training, rollout, batches, estimates), result, metrics


def _metrics(training: PolicyTraining, estimates: Sequence[_Estimates]) -> dict[str, float]:
    """Return how well values predict returns; the explained share is left out if all returns are alike."""
    returns, values = (
        np.concatenate([getattr(estimate, name) for estimate in estimates]) for name in ("returns", "values")
    )
    of_returns, errors = (spread_of(numbers, training.run.gather_once) for numbers in (returns, returns - values))
    metrics = {"value/mean": of_returns.mean - errors.mean, "value/return": of_returns.mean}
    explained = explained_variance(of_returns, errors)
    return metrics if explained is None else {**metrics, "value/explained_variance": explained}


def train_critic(training: PolicyTraining, critic: Model, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
    """Make the critic's updates of a step, as many as the policy's, and return its metrics as value/*.

    Raises:
        RunStopped: Too many updates in a row were skipped.
    """
    # Its schedule follows the policy's steps; and until the policy's step ends, the critic is in the middle of it.
    critic.state.step, critic.updating = training.model.state.step, False
    section = training.config.critic
    assert section is not None
    objective = ValueLoss(section.value_clip)
    updates = []
    with training.run.phase("critic"):
        for mini_batch in [*mini_batches] * training.config.updates.passes:
            try:
                numbers = train_step(critic, mini_batch, objective, ends_step=False).read()
            except RunStopped as error:
                raise RunStopped(f"The critic (section critic): {error}") from error
            own = {name: value for name, value in numbers.metrics.items() if name not in mini_batch.metrics}
            updates.append(UpdateNumbers(own, numbers.sums))
    critic.run.log.batches.clear()  # nobody reads the critic's log, which would grow with every step
    metrics = of_several_updates(updates)
    return {f"value/{name.removeprefix('optim/')}": value for name, value in metrics.items() if name != "num_tokens"}


def stand_still(training: PolicyTraining, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
    """End a step without an update of the policy, and return what the step says of its data."""
    state = training.model.state
    state.step += 1
    state.tokens += sum(mini_batch.tokens for mini_batch in mini_batches)
    state.samples += sum(mini_batch.samples for mini_batch in mini_batches)
    still = {"loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0, "optim/skipped_steps": float(state.skipped_steps)}
    data_metrics = of_several_updates([UpdateNumbers(dict(mini_batch.metrics), {}) for mini_batch in mini_batches])
    return {**data_metrics, **still, "num_tokens": float(state.tokens)}


def _estimate(objective: Objective, section: GAEAdvantageConfig, batch: Batch) -> _Estimates:
    values, rewards = (
        host_value(column, "values and rewards of tokens, for advantages")
        for column in (_scored_values(batch, "values"), _token_rewards(objective, batch))
    )
    sequence = host_value(batch.sequence_ids.flatten()[batch.scored], "sequences of tokens, for advantages")
    advantages = generalised_advantages(rewards, values, sequence, section.gamma, section.lam)
    return _Estimates(advantages, advantages + values, values, sequence)


def _token_rewards(objective: Objective, batch: Batch) -> Tensor:
    """Return [N] rewards, less the KL divergence of each token where that is charged to rewards."""
    rewards = _scored_values(batch, "rewards")
    if not isinstance(objective, PolicyGradient) or not objective.charged_to_rewards:
        return rewards
    proximal, reference = _scored_values(batch, "proximal_logprobs"), _scored_values(batch, "reference_logprobs")
    return rewards - objective.kl.coefficient * kl_estimate(objective.kl.estimator, proximal, reference)


def _scored_values(batch: Batch, name: str) -> Tensor:
    """Return [N] values of the chosen tokens in float64."""
    return batch.per_token[name].flatten()[batch.scored].to(torch.float64)


def _carried(batch: Batch, estimate: _Estimates, keeps_proximal: bool) -> Batch:
    """Return the batch with advantages and returns, without what they were made of and no loss reads."""
    left_out = {"rewards"} if keeps_proximal else {"rewards", "proximal_logprobs"}
    columns = {name: values for name, values in batch.per_token.items() if name not in left_out}
    for name, values, like in (
        ("advantages", estimate.advantages, batch.per_token["advantages"]),
        ("returns", estimate.returns, batch.per_token["values"]),
    ):
        columns[name] = on_tokens(batch, torch.as_tensor(values, dtype=like.dtype, device=like.device))
    return replace(batch, per_token=columns)


def _with_mean_advantages(
    training: PolicyTraining, rollout: Rollout, batches: Sequence[Batch], estimates: Sequence[_Estimates]
) -> Rollout:
    own_means: dict[int, float] = {}
    for batch, estimate in zip(batches, estimates, strict=True):
        for index in np.unique(estimate.sequence):
            own_means[batch.sample_ids[index]] = float(estimate.advantages[estimate.sequence == index].mean())
    means = {sample: mean for rank_means in training.run.ranks.gather(own_means) for sample, mean in rank_means.items()}
    groups = [
        replace(
            group,
            trajectories=tuple(
                replace(
                    trajectory, advantages=np.where(trajectory.loss_mask, means.get(trajectory.sample_id, 0.0), 0.0)
                )
                for trajectory in group.trajectories
            ),
        )
        for group in rollout.groups
    ]
    return replace(rollout, groups=tuple(groups))
