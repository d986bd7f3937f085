"""The built parts of a policy's run: what a supervised run has, an engine that samples, and rewards that score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.data.tokens.vision import ImageSide
from holdfast.rewards.base import RunProgress, Sample, Scored
from holdfast.rollout.engine import RolloutEngine
from holdfast.training.engines import give_weights
from holdfast.training.run import Evaluation, Run
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


@dataclass(kw_only=True)
class SamplingEvaluation(Evaluation):
    """A model and an engine that samples from it."""

    engine: RolloutEngine
    published: int | None = None
    """Updates behind the weights that the engine has; None before it has any."""


@dataclass(kw_only=True)
class PolicyEvaluation(SamplingEvaluation):
    """A policy, an engine that samples from it, and what scores its completions."""

    config: GRPOConfig
    score: Score
    prompt_sets: Sequence[PromptSet]
    images: ImageSide | str
    """What turns the images of rows into tokens; or why there is nothing that does."""


@dataclass(kw_only=True)
class PolicyRun(PolicyEvaluation, Run):
    """Everything a step touches."""

    base: Path
    """Directory of the run's YAML, where its files are looked up."""
    reference: Reference | None
    """The policy as it was at the start of the run, frozen; None where no KL term asks for it."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the averages stand in for the weights, and the engine read each anew: copies of one are not the other."""
        rest(self)
        self.published = None
        try:
            with super().averaged():
                yield
        finally:
            rest(self)
            self.published = None

    @property
    def critic(self) -> Run | None:
        """The value model of `advantage: gae`, None without one."""
        return self.companions.get(CRITIC)


def progress_of(run: PolicyEvaluation) -> RunProgress:
    """Return where the run stands, as rewards are told."""
    if isinstance(run, PolicyRun):
        return RunProgress(run.state.step, run.total_steps or 0, run.stream.epoch)
    return RunProgress(run.state.step)


def publish(run: SamplingEvaluation) -> None:
    """Give the engine the policy's present weights; all ranks call this together."""
    if run.published != run.state.updates:
        give_weights(run.engine, run)
        run.published = run.state.updates


def rest(run: SamplingEvaluation) -> None:
    """Give the memory of the engine's weights back where they are copies: shards are gathered for each rollout."""
    if run.plan.sharded and run.published is not None:
        run.engine.sleep()
        run.published = None
