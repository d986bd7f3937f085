"""The built parts of a policy's run: what a supervised run has, an engine that samples, and rewards that score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.advantages.group import RewardMatrix
from holdfast.advantages.user import Groups
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.data.batches.prompts import PromptStream
from holdfast.data.tokens.vision import ImageSide
from holdfast.rewards.base import Sample, Scored
from holdfast.rollout.engine import RolloutEngine
from holdfast.training.engines import give_weights
from holdfast.training.run import Evaluation, Run, Setting, ShardedModel, Trained
from holdfast.training.scorers.reference import Reference
from holdfast.types import Prompt

CRITIC = "critic"
"""Name of the critic among the models that are trained beside the policy."""

Score = Callable[[Sequence[Sample]], list[Scored]]
"""Scores this rank's completions, in the order given."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are never trained on."""

    name: str
    prompts: Sequence[Prompt]
    """This rank's share."""


@dataclass
class Sampler:
    """An engine that samples from a model, and which of its weights the engine has."""

    engine: RolloutEngine
    published: tuple[int, bool] | None = None
    """Updates behind these weights, and whether they are averages; None before there are any."""

    def publish(self, sharded: ShardedModel) -> None:
        """Give the engine a model's present weights; all ranks call this together."""
        present = sharded.state.updates, sharded.holds_averages
        if self.published != present:
            give_weights(self.engine, sharded)
            self.published = present

    def rest(self, sharded: ShardedModel) -> None:
        """Give the memory of the engine's weights back where they are copies: shards are gathered for each rollout."""
        if sharded.plan.sharded and self.published is not None:
            self.engine.sleep()
            self.published = None


@dataclass(kw_only=True)
class PolicyEvaluation(Evaluation):
    """A policy, an engine that samples from it, and what scores its completions."""

    sampler: Sampler
    score: Score
    prompt_sets: Sequence[PromptSet]
    images: ImageSide | str
    """What turns the images of rows into tokens; or why there is nothing that does."""
    stream: PromptStream | None = None
    """The prompts that are trained on; None where a policy is evaluated alone."""
    several_sources: bool = False
    """Whether the rows of that stream come from several sources, which may differ."""

    @property
    def setting(self) -> Setting:
        """Where the policy lives."""
        return self.sharded.setting

    @property
    def config(self) -> GRPOConfig:
        """The configuration of a policy."""
        config = self.setting.config
        assert isinstance(config, GRPOConfig)
        return config


@dataclass(kw_only=True)
class PolicyRun:
    """Everything a step touches."""

    common: Run
    """What every run has."""
    evaluation: PolicyEvaluation
    """Of the policy that is trained."""
    reference: Reference | None
    """The policy as it was at the start of the run, frozen; None where no KL term asks for it."""
    user_advantage: Callable[[Groups], RewardMatrix] | None = None
    """What `advantage: path` names, checked; None without it."""

    @property
    def setting(self) -> Setting:
        """Where the run takes place."""
        return self.common.setting

    @property
    def config(self) -> GRPOConfig:
        """The configuration of a policy's run."""
        return self.evaluation.config

    @property
    def trained(self) -> Trained:
        """The policy."""
        return self.common.trained

    @property
    def critic(self) -> Trained | None:
        """The value model of `advantage: gae`, None without one."""
        return self.common.companions.get(CRITIC)
