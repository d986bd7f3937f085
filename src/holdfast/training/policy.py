"""The built parts of a policy's run: what a supervised run has, an engine that samples, and rewards that score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.config.grpo import GRPOConfig
from holdfast.data.vision import ImageSide
from holdfast.parallel.stream import live_tensors
from holdfast.rewards.base import Sample, Scored
from holdfast.rollout.engine import RolloutEngine
from holdfast.training.reference import Reference
from holdfast.training.run import Evaluation, Run
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


@dataclass(kw_only=True)
class PolicyEvaluation(Evaluation):
    """A policy, an engine that samples from it, and what scores its completions."""

    config: GRPOConfig
    engine: RolloutEngine
    score: Score
    prompt_sets: Sequence[PromptSet]
    images: ImageSide | str
    """What turns the images of rows into tokens; or why there is nothing that does."""
    published: int | None = None
    """Updates behind the weights that the engine has; None before it has any."""


@dataclass(kw_only=True)
class PolicyRun(PolicyEvaluation, Run):
    """Everything a step touches."""

    base: Path
    """Directory of the run's YAML, where its files are looked up."""
    reference: Reference | None
    """The policy as it was at the start of the run, frozen; None where no KL term asks for it."""

    @property
    def critic(self) -> Run | None:
        """The value model of `advantage: gae`, None without one."""
        return self.companions.get(CRITIC)


def publish(run: PolicyEvaluation) -> None:
    """Give the engine the policy's present weights; all ranks call this together."""
    if run.published != run.state.updates:
        run.engine.update_weights(live_tensors(run.policy), run.state.updates)
        run.published = run.state.updates


def rest(run: PolicyEvaluation) -> None:
    """Give the memory of the engine's weights back where they are copies: shards are gathered for each rollout."""
    if run.plan.sharded and run.published is not None:
        run.engine.sleep()
        run.published = None
