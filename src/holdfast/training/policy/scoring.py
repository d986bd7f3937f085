"""From completions to their rewards, as reward functions see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.config.sections.environment import AgentConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.rewards.base import RunProgress, Sample, Scored
from holdfast.training.policy.run import PolicyEvaluation
from holdfast.types import Finish, Group, Prompt, Trajectory


def score_groups(policy: PolicyEvaluation, groups: Sequence[Group]) -> tuple[list[Group], list[Scored]]:
    """Return this rank's groups with their rewards, and what scoring said of each completion."""
    with policy.run.phase("reward"):
        progress = progress_of(policy)
        pairs = [(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
        samples = [
            _sample_of(prompt, trajectory, progress)
            for prompt, trajectory in pairs
            if trajectory.finish is not Finish.ERROR
        ]
        # What ends the reward processes of one rank ends the run on all.
        answered = iter(policy.run.ranks.on_all_ranks(lambda: policy.score(samples)))
        scored = [
            _of_failed_episode(policy, trajectory) if trajectory.finish is Finish.ERROR else next(answered)
            for _, trajectory in pairs
        ]
    following = iter(scored)
    rewarded = []
    for group in groups:
        trajectories = tuple(
            replace(trajectory, reward=item.reward, rewards=dict(item.parts))
            for trajectory, item in [(trajectory, next(following)) for trajectory in group.trajectories]
        )
        rewarded.append(replace(group, trajectories=trajectories))
    return rewarded, scored


def _of_failed_episode(policy: PolicyEvaluation, trajectory: Trajectory) -> Scored:
    """Leave out an episode whose environment or agent failed: that is not its doing."""
    fault = "" if trajectory.episode is None else trajectory.episode.fault
    config = policy.run.config
    is_agent = isinstance(config, GRPOConfig) and isinstance(config.environment, AgentConfig)
    whose = "agent" if is_agent else "environment"
    message = f"{whose} {fault}; the group goes on without sample {trajectory.sample_id}"
    return Scored(None, {}, {}, "error", "sample", message)


def progress_of(policy: PolicyEvaluation) -> RunProgress:
    """Return the progress of the run that reward functions receive."""
    stream, model = policy.stream, policy.model
    if stream is None or model.optimizer is None:
        return RunProgress(model.state.step)
    return RunProgress(model.state.step, model.total_steps or 0, stream.epoch)


def _sample_of(prompt: Prompt, trajectory: Trajectory, progress: RunProgress) -> Sample:
    return Sample(
        sample_id=trajectory.sample_id,
        prompt=prompt.text,
        completion=trajectory.completion,
        prompt_tokens=prompt.tokens.tolist(),
        completion_tokens=trajectory.tokens[trajectory.loss_mask].tolist(),
        finish=trajectory.finish.value,
        row=prompt.row,
        progress=progress,
        messages=None if trajectory.episode is None else trajectory.episode.messages,
        prompt_messages=0 if trajectory.episode is None else trajectory.episode.prompt_messages,
        environment_reward=None if trajectory.episode is None else trajectory.episode.reward,
    )
