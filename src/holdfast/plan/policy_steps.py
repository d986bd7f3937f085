"""The step of a policy: completions are decoded a few tokens at a time at their largest, and trained at full length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch.nn.functional as F  # noqa: N812 - torch's own short name

from holdfast.config.sections.rollout import EngineConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.plan.memory import CACHE, ROLLOUT_WEIGHTS, follow_model
from holdfast.plan.steps import Step, reference_of
from holdfast.recipes.grpo import controlled_objective, update
from holdfast.rollout.cache import RowCache
from holdfast.rollout.inprocess import Decoding, InProcessEngine
from holdfast.rollout.predictor import EagerRows
from holdfast.training.build.losses import policy_objective
from holdfast.training.build.model import image_side_of
from holdfast.training.engines import open_engine
from holdfast.training.policy.critic import add_critic, train_critic, with_values
from holdfast.training.policy.experience import pack_rollout, score_rollout, with_advantages
from holdfast.training.policy.groups import CompletionSummary, GroupFact
from holdfast.training.policy.rollouts import Rollout, sample_groups
from holdfast.training.policy.run import PolicyEvaluation, PolicyRun, Sampler, awake_afterwards, is_warming_up, resting
from holdfast.training.build.begin import Live
from holdfast.training.run import Run
from holdfast.types import Finish, Group, Prompt, Trajectory

_SCORING = ("proximal", "reference", "values")
_TRAINING = ("forward", "backward", "optimizer", "critic")


def policy_step(step: Step, config: GRPOConfig) -> Callable[[], object]:
    """Return what samples for, scores for and updates a policy."""
    run = _run_of(step, config)
    rounds = config.data.batch_size
    decode = sampling_of(step, config.rollout, config.longest_prompt, rows=rounds, group=config.rollout.group_size)
    rollout = _rollout(step, config)
    scoring = min(config.updates.mini_batches, len(rollout.facts))
    step.repeats |= dict.fromkeys(_SCORING, scoring)
    step.repeats |= dict.fromkeys(_TRAINING, scoring * config.updates.passes)

    def make() -> object:
        with awake_afterwards(run.trained):
            with resting(run):
                decode()
            return _learn(step, run, rollout)

    return make


def _run_of(step: Step, config: GRPOConfig) -> PolicyRun:
    trained, objective = step.trained, policy_objective(config, step.setting)
    trained.temperature = config.rollout.temperature
    if config.rollout.replay_routing:
        trained.model.replay_routing()
    sampler = Sampler(_engine_of(step, config.rollout, tells_experts=config.rollout.replay_routing))
    evaluation = PolicyEvaluation(
        sharded=trained,
        objective=objective,
        sampler=sampler,
        score=lambda _: [],
        images=image_side_of(config, trained.origin),
        prompt_sets=(),
    )
    reference = None
    if config.reference.kind != "none" and config.kl.coefficient > 0:
        reference = reference_of(step, config.reference, "kl")
    stream: Any = None
    common = Run(
        trained=trained, evaluation=evaluation, stream=stream, source_names=(), observers=(), identity={}
    )
    run = PolicyRun(common=common, evaluation=evaluation, reference=reference)
    if config.critic is not None:
        add_critic(run, config.critic, Live())
        critic = common.companions["critic"]
        follow_model(step.ledger, critic.model)
        step.companions.append(critic)
        step.watch(critic.model)
    return run


def _learn(step: Step, run: PolicyRun, rollout: Rollout) -> object:
    """Do what `recipes.grpo.learn` does, for one mini-batch of a pass."""
    objective = controlled_objective(run)
    rollout = with_advantages(run, rollout)
    mini_batches = [step.shortened(pack_rollout(run, rollout)[0])]
    mini_batches = score_rollout(run, objective, mini_batches)
    if run.critic is not None:
        rollout, mini_batches, _ = with_values(run, run.critic, objective, rollout, mini_batches)
        train_critic(run, run.critic, mini_batches)
    return None if is_warming_up(run) else update(run, objective, mini_batches[:1])


def _rollout(step: Step, config: GRPOConfig) -> Rollout:
    """Return completions that all are as long as one may be, those of every rank on this one."""
    prompt, chosen = config.longest_prompt, config.rollout.max_new_tokens
    length, size = prompt + chosen, config.rollout.group_size
    groups, facts = [], []
    tokens, mask = np.zeros(length, np.int64), np.arange(length) >= prompt
    zeros, versions = np.zeros(length, np.float32), np.zeros(length, np.int32)
    for number in range(config.data.batch_size):
        asked = Prompt(number, tokens[:prompt], "", {})
        made = [
            Trajectory(
                prompt_id=number,
                sample_id=number * 2**20 + place,
                seed=0,
                temperature=config.rollout.temperature,
                tokens=tokens,
                loss_mask=mask,
                sampler_logprobs=zeros,
                weights_versions=versions,
                finish=Finish.LENGTH,
                completion="",
                reward=float(place % 2),
            )
            for place in range(size)
        ]
        parts = {section.label: 0.0 for section in config.reward}
        told = tuple(
            CompletionSummary(float(place % 2), parts, chosen, length, Finish.LENGTH, None, None, {}, 1.0)
            for place in range(size)
        )
        groups.append(Group(asked, tuple(made)))
        facts.append(GroupFact(number, step.setting.world.rank, told, greedy=0.0))
    return Rollout(tuple(groups), tuple(facts), tuple(facts), {}, ())


def sampling_of(
    step: Step, section: EngineConfig, prompt: int, *, rows: int, group: int | None = None
) -> Callable[[], object]:
    """Return what decodes this rank's completions, `rows` prompts over all ranks."""
    return lambda: None


def _engine_of(step: Step, section: EngineConfig, *, tells_experts: bool = False) -> Any:
    return open_engine(step.trained, section, tells_experts=tells_experts)
