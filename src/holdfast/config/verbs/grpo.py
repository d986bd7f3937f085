"""The tree of `holdfast grpo`: rollouts, rewards, advantages, and the updates made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from holdfast.config.base import Mistake, OneOrSeveral
from holdfast.config.sections.advantage import AdvantageConfig, GAEAdvantageConfig, GRPOAdvantageConfig
from holdfast.config.sections.data import PromptDataConfig
from holdfast.config.sections.engine import RecordedEngineConfig
from holdfast.config.sections.environment import AgentConfig, EnvironmentSection
from holdfast.config.sections.metrics import PolicyEvaluationConfig
from holdfast.config.sections.policy import (
    ByCovariance,
    ClipConfig,
    CorrectionConfig,
    EntropyConfig,
    KLConfig,
    NoCorrectionConfig,
    OffPolicyMaskConfig,
    PolicyObjective,
)
from holdfast.config.sections.reference import ReferenceSection, ServerReferenceConfig, sync_of
from holdfast.config.sections.reward import Reward, RewardPoolConfig, repeated_labels
from holdfast.config.sections.rollout import (
    GroupsConfig,
    ReferenceConfig,
    ResidencyConfig,
    RolloutConfig,
    UpdatesConfig,
)
from holdfast.config.verbs.critic import CriticConfig, critic_training
from holdfast.config.verbs.training import TrainingConfig


class GRPOConfig(TrainingConfig):
    """Reinforcement learning from rewards of sampled completions: GRPO and its kin.

    A step samples `rollout.group_size` completions of `data.batch_size` prompts, and makes `updates` optimizer updates
    on them. `steps` counts these rounds.
    """

    verb = "grpo"
    samples = True
    data: PromptDataConfig = Field(examples=[{"path": "prompts.jsonl"}])
    rollout: RolloutConfig = RolloutConfig()
    reward: Annotated[list[Reward], Field(min_length=1, examples=["my_reward.py:score"]), OneOrSeveral()]
    """One reward or several; several are summed by their weights."""
    rewards: RewardPoolConfig = RewardPoolConfig()
    environment: EnvironmentSection | None = None
    """What the policy acts in over several turns, or an agent that asks it (`endpoint`); null: a completion is one
    answer."""
    advantage: AdvantageConfig = GRPOAdvantageConfig()
    critic: CriticConfig | None = None
    """The value model of `advantage: gae`; null: none."""
    groups: GroupsConfig = GroupsConfig()
    objective: PolicyObjective = ClipConfig()
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    correction: CorrectionConfig = NoCorrectionConfig()
    off_policy_mask: OffPolicyMaskConfig = OffPolicyMaskConfig()
    reference: ReferenceSection = ReferenceConfig()
    updates: UpdatesConfig = UpdatesConfig()
    residency: ResidencyConfig = ResidencyConfig()
    evaluation: PolicyEvaluationConfig = PolicyEvaluationConfig()

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what sections ask of each other."""
        yield from super().mistakes()
        yield from self._sampling()
        yield from self._staleness()
        yield from self._learning()
        yield from self._covariance()
        yield from self._reference()
        yield from self._critic()
        yield from self._offload()
        yield from self._environment()
        if sync_of(self.reference) is not None and self.kl.coefficient == 0:
            yield "reference.sync", "kl.coefficient is 0, so no reference can follow; set it, or leave sync out"

    @property
    def longest_prompt(self) -> int:
        """Tokens a prompt may have."""
        room = self.data.max_length - self.rollout.max_new_tokens
        return min(room, self.data.max_prompt_length or room)

    @property
    def longest_context(self) -> int:
        """Tokens that a completion may follow: a prompt's, or those of an episode before its last turn."""
        return self.longest_prompt if self.environment is None else self.data.max_length - self.rollout.max_new_tokens

    @property
    def most_trained_tokens(self) -> int:
        """Tokens of a completion, or of an episode, that may be trained."""
        turns = 1 if self.environment is None else self.environment.max_turns
        return min(turns * self.rollout.max_new_tokens, self.data.max_length)

    @property
    def environment_weight(self) -> float:
        """The weight of the rewards that an environment gives turn by turn; 0 where none are asked for."""
        return sum(reward.weight for reward in self.reward if reward.kind == "environment")

    def _sampling(self) -> Iterator[Mistake]:
        least = self.advantage.smallest_group
        if self.rollout.group_size < least:
            yield (
                "rollout.group_size",
                f"{self.rollout.group_size}, but advantage: {self.advantage.kind} compares at least {least} "
                "completions of a prompt; raise it, to 8 for example",
            )
        room = self.data.max_length - self.rollout.max_new_tokens
        if room < 1:
            yield (
                "rollout.max_new_tokens",
                f"{self.rollout.max_new_tokens} leaves no room for a prompt in data.max_length={self.data.max_length}; "
                f"raise data.max_length to {self.rollout.max_new_tokens} and the longest prompt, or lower it",
            )
        elif (limit := self.data.max_prompt_length) is not None and limit > room:
            yield (
                "data.max_prompt_length",
                f"{limit} is more than the {room} tokens that rollout.max_new_tokens={self.rollout.max_new_tokens} "
                f"leaves in data.max_length={self.data.max_length}; lower it, or raise data.max_length to "
                f"{limit + self.rollout.max_new_tokens}",
            )
        if self.data.batch_size % self.updates.mini_batches:
            yield (
                "updates.mini_batches",
                f"data.batch_size={self.data.batch_size} prompts cannot be dealt to {self.updates.mini_batches} "
                "mini-batches alike; choose a divisor",
            )
        if self.data.batch_size_schedule:
            yield "data.batch_size_schedule", "a rollout batch has one size; set data.batch_size"
        yield from self._unbiased()
        yield from self._groups()
        yield from self._one_policy()
        longest, wait = self.rewards.step_timeout_seconds, 60 * self.launch.timeout_minutes
        if longest != "auto" and longest >= wait and self.launch.ranks != 1:
            yield (
                "rewards.step_timeout_seconds",
                f"{longest:g} is not below launch.timeout_minutes={self.launch.timeout_minutes:g} ({wait:g} s), after "
                "which other ranks give up; lower it, or raise launch.timeout_minutes",
            )

    def _staleness(self) -> Iterator[Mistake]:
        """Yield what completions of older weights need, and what cannot be drawn ahead."""
        staleness = self.rollout.max_staleness
        if staleness and self.correction.kind == "off" and self.objective.kind != "path":
            yield (
                "rollout.max_staleness",
                f"{staleness} learns from completions of older weights, which biases every update; weigh tokens by "
                "correction: truncate, or use 0",
            )
        if staleness > 1 and self.groups.flat == "resample":
            yield (
                "rollout.max_staleness",
                f"{staleness} gives the next steps their prompts before this one has trained, and groups.flat: "
                "resample draws more of them for this one; use 1, or groups.flat: drop",
            )

    def _unbiased(self) -> Iterator[Mistake]:
        """Yield sampling from another distribution that no weight of each token makes up for."""
        biases, correction = self.rollout.biases(), self.correction
        if self.rollout.renormalise:
            biases = [name for name in biases if name == "repetition_penalty"]
            if self.kl.coefficient > 0:
                yield "rollout.renormalise", "a reference is scored over all tokens; leave it out, or kl.coefficient"
        if not biases:
            return
        why = f"{', '.join(biases)} draws from another distribution than the policy's, which biases every update"
        if correction.kind == "off":
            yield f"rollout.{biases[0]}", f"{why}; leave it out, or weigh tokens by correction: truncate"
        elif correction.level == "sequence":
            yield "correction.level", f"{why}, and one weight for a whole sequence leaves that so; use token"
        elif correction.kind == "mask" and not correction.weighted:
            yield "correction.weighted", f"{why}, and tokens that are kept at weight 1 leave that so; use true"

    def _one_policy(self) -> Iterator[Mistake]:
        """Yield what lets sampling and training differ."""
        if self.model.dropout or (self.model.lora is not None and self.model.lora.dropout > 0):
            key = "model.dropout" if self.model.dropout else "model.lora.dropout"
            yield key, "a ratio compares two forward passes of one policy, which dropout makes differ; turn it off"

    def _groups(self) -> Iterator[Mistake]:
        groups, labels = self.groups, [reward.label for reward in self.reward]
        if groups.between is not None and groups.between.reward.partition("/")[0] not in labels:
            yield (
                "groups.between.reward",
                f"{groups.between.reward} is none of the rewards {', '.join(labels)}, so every group would be left out",
            )
        if groups.flat != "keep" and self.advantage.smallest_group == 1:
            yield (
                "groups.flat",
                f"{groups.flat} leaves out groups whose rewards are alike, but advantage: {self.advantage.kind} does "
                "not compare within groups; use keep",
            )
        if groups.flat == "resample" and (self.overfit_batches is not None or self.limit_batches is not None):
            yield "groups.flat", "resample draws more prompts than a batch has, which the limits on batches forbid"

        if self.advantage.needs_greedy and isinstance(self.rollout.engine, RecordedEngineConfig):
            yield (
                "rollout.engine.kind",
                f"recorded has what a run sampled, and advantage: {self.advantage.kind} compares with greedy "
                "completions, which nothing records; use another advantage, or another engine",
            )

    def _learning(self) -> Iterator[Mistake]:
        for name in self.terms_of_ours() if self.objective.kind == "path" else ():
            yield name, "a loss of your own (objective.path) takes nothing from this section; write it into the loss"
        if self.objective.kind in {"gspo", "gspo_token"} and self.data.average != "sequence_mean":
            yield (
                "data.average",
                f"{self.data.average} weighs sequences by their length, and objective: {self.objective.kind} is one "
                "term per sequence; use sequence_mean",
            )
        repeated = repeated_labels(self.reward)
        if repeated:
            yield "reward", f"two rewards are called {repeated[0]}; give one of them a name"

    def _covariance(self) -> Iterator[Mistake]:
        """Yield what choosing tokens by their covariance before an update does not go with."""
        if not isinstance(self.objective, ByCovariance):
            return
        kind = self.objective.kind
        if self.critic is not None:
            yield "objective.kind", f"{kind} chooses tokens by advantages, before advantage: gae has some; use clip"
        if self.kl.coefficient > 0 and self.kl.where != "loss":
            yield "kl.where", f"{kind} chooses tokens by advantages, before the KL is taken from them; use loss"
        if kind == "kl_cov" and self.updates.count == 1:
            yield (
                "updates.mini_batches",
                "objective: kl_cov penalises what an earlier update of the rollout moved, and there is one update; use "
                "several mini_batches, or objective: clip_cov",
            )

    def terms_of_ours(self) -> list[str]:
        """Return the sections that change our losses and say something; a user's own loss takes nothing from them."""
        terms = [name for name in ("kl", "entropy") if getattr(self, name) != type(getattr(self, name))()]
        terms += ["correction"] if self.correction.kind != "off" else []
        return terms + (["off_policy_mask"] if self.off_policy_mask.max_kl is not None else [])

    def _reference(self) -> Iterator[Mistake]:
        lora = self.model.lora
        if self.reference.kind == "adapter_off" and (lora is None or lora.train or lora.path is not None):
            why = "model.lora is not set" if lora is None else "more than adapters is trained, or they start trained"
            yield "reference.kind", f"adapter_off is not the model at start, since {why}; use sharded"
        if self.kl.coefficient > 0 and self.checkpoint.init_from is not None:
            yield (
                "checkpoint.init_from",
                "the reference policy would be model.path without these weights; export that checkpoint and name the "
                "export in model.path",
            )
        if self.reference.kind == "none" and self.kl.coefficient > 0:
            yield "reference.kind", f"none, but kl.coefficient={self.kl.coefficient:g} compares with one; use auto"
        yield from self._server()

    def _offload(self) -> Iterator[Mistake]:
        for name in ("parameters", "optimizer"):
            if name in self.parallel.offloads and getattr(self.residency, name) == "host":
                yield f"residency.{name}", "parallel.offload keeps them in host memory all the time; leave it out"

    def _environment(self) -> Iterator[Mistake]:
        """Yield what episodes of several turns do not go with yet."""
        if self.environment is None:
            if any(reward.kind == "environment" for reward in self.reward):
                yield "reward", "environment is what an environment gives, and there is none; set environment.path"
            if self.advantage.turn_discount is not None:
                yield "advantage.turns", "a single answer has no turns; set environment, or leave it out"
            return
        if self.advantage.turn_discount is not None and isinstance(self.environment, AgentConfig):
            yield "advantage.turns", "an agent may ask several things at once, which have no order; use episode"
        if self.advantage.turn_discount is not None and self.objective.kind == "gspo":
            yield (
                "objective.kind",
                "gspo is one term per sequence, and turns: discounted is one per turn; use gspo_token",
            )
        if self.critic is not None:
            yield "critic", "it passes rewards back within one answer; compare episodes, by advantage: grpo for example"

    def _critic(self) -> Iterator[Mistake]:
        gae, critic = isinstance(self.advantage, GAEAdvantageConfig), self.critic
        if gae and critic is None:
            yield "critic", "advantage: gae compares with what a critic expects, and there is none; add critic: {}"
        if critic is None:
            return
        if not gae:
            yield (
                "critic",
                f"advantage: {self.advantage.kind} compares completions with each other and asks no critic; use "
                "advantage: gae, or leave critic out",
            )
        if self.kl.where == "reward_to_go":
            yield "kl.where", "advantage: gae passes rewards back to earlier tokens itself; use where: reward"
        if self.steps is not None and critic.warmup_steps >= self.steps:
            yield (
                "critic.warmup_steps",
                f"{critic.warmup_steps} leaves the policy none of {self.steps} steps; lower it, or raise steps",
            )
        if self.objective.kind == "gspo":
            yield "objective.kind", "gspo is one term per sequence, and advantage: gae is one per token; use gspo_token"
        own_mistakes = {*self.storage_mistakes()}
        for key, wrong in critic_training(self, critic).storage_mistakes():
            if (key, wrong) not in own_mistakes:
                yield "critic.optim.kind", f"with {key}: {wrong}"

    def _server(self) -> Iterator[Mistake]:
        temperature = self.rollout.temperature
        if isinstance(self.reference, ServerReferenceConfig) and self.kl.coefficient > 0 and temperature != 1:
            yield (
                "reference.kind",
                f"a server tells log-probabilities at temperature 1, and rollout.temperature={temperature:g} is that "
                "of the policy; use sharded, or temperature: 1.0",
            )
