"""The parts of a policy's run: those of a supervised run, an engine that samples, and rewards that score.

The module also offloads tensors to host memory while completions are sampled and scored (`residency`). Parameters are
offloaded once the engine has its copy, until the rollout ends, also with an error. Optimizer state and weight averages
are offloaded until the update that reads them. Between steps nothing is offloaded, so that saves, exports, evaluations
and resumes are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from holdfast.advantages.group import RewardMatrix
from holdfast.advantages.user import Groups
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.data.batches.ahead import StreamAhead
from holdfast.data.batches.stream import PromptBatch
from holdfast.data.tokens.vision import ImageSide
from holdfast.parallel.copies import copies_of
from holdfast.parallel.plan import ShardPlan
from holdfast.parallel.shards import free_copies, sharded_parameters
from holdfast.rewards.base import Sample, Scored
from holdfast.rollout.engine import RolloutEngine
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.training.engines import PublishedEngine, give_weights, settle_forms
from holdfast.training.other_models.reference import Reference
from holdfast.training.policy.ahead import CompletionsAhead
from holdfast.training.rollout_memory import TrainingMemory, settle_blocks, settle_kept
from holdfast.training.run import Evaluation, Model, Run, Training
from holdfast.types import Group, Prompt

CRITIC = "critic"
"""Name of the critic among a run's companions."""

Score = Callable[[Sequence[Sample]], list[Scored]]
"""Scores this rank's completions, in the order given."""


Seeds = Mapping[int, tuple[int, ...]]
"""By prompt id, one for each of its completions."""


class Episodes(Protocol):
    """Samples episodes in the place of single answers."""

    def sample(
        self,
        policy: PolicyEvaluation,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        seeds: Seeds,
        ahead: CompletionsAhead | None = None,
    ) -> list[Group]:
        """Let this rank's prompts become episodes; all ranks call this together."""

    def check_rows(self, run: Run, prompts: Sequence[Prompt]) -> None:
        """Begin an environment with rows of the first batch; all ranks call this together."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are never trained on."""

    name: str
    prompts: Sequence[Prompt]
    """This rank's share."""


@dataclass
class Sampler:
    """An engine that samples from a model, and the version of the weights that the engine holds."""

    engine: RolloutEngine
    published: tuple[int, bool] | None = None
    """(number of updates, whether they are averages) of the published weights; None before the first publication."""
    _beside: TrainingMemory = field(default_factory=TrainingMemory)

    def publish(self, model: Model) -> None:
        """Give the engine a model's present weights; all ranks call this together."""
        present = model.state.updates, model.holds_averages
        if self.published != present:
            give_weights(self.engine, model)
            self.settle_forms(model)
            self.published = present

    def settle_forms(self, model: Model) -> None:
        """Choose the optional forms of our own decoding, once it has weights; all ranks call this together."""
        if isinstance(self.engine, InProcessEngine):
            settle_forms(model, self.engine)

    def follow(self, model: Model) -> None:
        """Give the engine the blocks of keys and values that the run began with, if there is room for them."""
        if isinstance(self.engine, InProcessEngine) and self.engine.block_limit is not None:
            settle_blocks(model, self.engine, self.engine.block_room)

    def step_metrics(self) -> dict[str, float]:
        """Return what the engine measured since the last call; all ranks call this together."""
        return self.engine.step_metrics() if isinstance(self.engine, PublishedEngine | InProcessEngine) else {}

    def release(self, model: Model) -> None:
        """Give the memory of the engine's weights back where training does not hold them itself.

        Shards are gathered for each rollout, and so are weights whose copies rest with them (`residency`). Where an
        engine reads what training holds, it keeps what it has recorded, if memory has room for that beside training.
        """
        copies = copies_of(model.module)
        is_held = not model.plan.sharded and (copies is None or bool(copies.tensors))
        if not is_held or isinstance(self.engine, PublishedEngine):
            if self.published is not None and self.engine.sleep():
                self.published = None
        elif isinstance(self.engine, InProcessEngine) and self.engine.kept_bytes:
            settle_kept(model, self.engine, self._beside)


@dataclass(kw_only=True)
class PolicyEvaluation(Evaluation):
    """A policy, an engine that samples from it, and the function that scores its completions."""

    sampler: Sampler
    score: Score
    prompt_sets: Sequence[PromptSet]
    images: ImageSide | str
    """What turns the images of rows into tokens; or why there is nothing that does."""
    episodes: Episodes | None = None
    """What samples episodes of several turns; None where a completion is one answer."""
    stream: StreamAhead[PromptBatch] | None = None
    """The prompts that are trained on; None where a policy is evaluated alone."""
    several_sources: bool = False
    """Whether the rows of that stream come from several sources, which may differ."""

    @property
    def run(self) -> Run:
        """Where the policy lives."""
        return self.model.run

    @property
    def config(self) -> GRPOConfig:
        """The configuration of a policy."""
        config = self.run.config
        assert isinstance(config, GRPOConfig)
        return config


@dataclass(kw_only=True)
class PolicyTraining(Training):
    """The parts of policy optimisation: an engine that samples, rewards that score, and a reference."""

    evaluation: PolicyEvaluation
    stream: StreamAhead[PromptBatch]
    """Prompts."""
    reference: Reference | None = None
    """The policy as it was at the start of the run, frozen; None where no KL term asks for it."""
    user_advantage: Callable[[Groups], RewardMatrix] | None = None
    """The function that `advantage: path` names, checked; None without it."""
    ahead: CompletionsAhead | None = None
    """Completions of the next steps, if they are sampled ahead."""
    steps_without_calls: int = 0
    """Latest steps of this process in a row whose episodes called none of their tools."""

    @property
    def config(self) -> GRPOConfig:
        """The configuration of a policy's run."""
        return self.evaluation.config

    def continued(self) -> None:
        """Give the engine the blocks of keys and values that the run began with."""
        self.evaluation.sampler.follow(self.model)

    @property
    def critic(self) -> Model | None:
        """The value model of `advantage: gae`, None without one."""
        return self.companions.get(CRITIC)


_PARAMETERS, _OPTIMIZER = "parameters", "optimizer"


@contextmanager
def offloaded(training: PolicyTraining) -> Iterator[None]:
    """Offload what `residency` names within the block; the optimizer stays offloaded behind it."""
    section = training.config.residency
    if section.parameters == section.optimizer == "stay":
        yield
        return
    host = training.model.host_offload
    everyone = [training.model, *training.companions.values()]
    try:
        with training.run.phase("to_host"):  # before the engine's copy takes memory
            if section.optimizer == "host":
                for model in everyone:
                    host.offload(_OPTIMIZER, _states(model), staying=sharded_parameters(model.module).values())
        with training.run.phase("rollout"):
            training.evaluation.sampler.publish(training.model)  # what is offloaded cannot be gathered
        with training.run.phase("to_host"):
            if section.parameters == "host":
                host.offload(_PARAMETERS, _own_parameters(training))
                for companion in training.companions.values():
                    host.offload(_PARAMETERS, sharded_parameters(companion.module).values())
                for model in everyone:
                    free_copies(model.module)
        yield
    finally:
        training.model.restore(_PARAMETERS)


@contextmanager
def restored_afterwards(model: Model) -> Iterator[None]:
    """Restore whatever is still offloaded when the block ends, however it ends."""
    try:
        yield
    finally:
        model.restore()


def note_what_stays(training: PolicyTraining) -> None:
    """Note that `residency.parameters` moves nothing of a policy that the engine reads itself."""
    if training.config.residency.parameters == "host" and not _own_parameters(training):
        training.run.log.messages.append(f"note: {moves_nothing(training.model.plan)}")


def moves_nothing(plan: ShardPlan) -> str:
    """Return the note on `residency.parameters` where the policy is whole on each rank."""
    return (
        "residency.parameters: host moves nothing of the policy here: it is not sharded, and what samples reads the "
        f"very weights that are trained (one rank that computes in {plan.compute_dtype}, as it stores)"
    )


def _own_parameters(training: PolicyTraining) -> list[Tensor]:
    """Return the parameters that the engine has copies of: what is gathered, or cast."""
    if training.model.plan.whole:
        return []
    computed: torch.dtype = getattr(torch, training.model.plan.compute_dtype)
    replicated, gathered = set(training.model.plan.replicated), training.model.plan.shard > 1
    return [
        value
        for name, value in sharded_parameters(training.model.module).items()
        if name not in replicated and (gathered or value.dtype != computed)
    ]


def _states(model: Model) -> list[Tensor]:
    states = model.updater.state.values()
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return tensors + ([] if model.averages is None else list(model.averages.tensors.values()))


def is_warming_up(training: PolicyTraining) -> bool:
    """Whether only the critic is trained in this step."""
    return training.config.critic is not None and training.model.state.step < training.config.critic.warmup_steps
