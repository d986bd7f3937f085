"""Groups of episodes: a policy's turns in environments, as sequences to score and to train on."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from holdfast.config.sections.environment import AgentConfig, EnvironmentSection
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.environments.pool import EnvironmentPool
from holdfast.errors import ConfigError
from holdfast.parallel.mesh import World
from holdfast.rollout.engine import AheadEngine, EpisodeRecords, TurnSource, converse
from holdfast.rollout.episodes.agents import AgentLoop
from holdfast.rollout.episodes.chat_calls import CallRefused
from holdfast.rollout.episodes.endpoint import Endpoint
from holdfast.rollout.episodes.environments import EnvironmentLoop
from holdfast.rollout.episodes.episode import Decode, Episode, EpisodeRequest, Limits
from holdfast.rollout.episodes.history import observations_of, observations_of_agents
from holdfast.rollout.episodes.proof import proved_syntax
from holdfast.rollout.episodes.sessions import Syntax
from holdfast.rollout.episodes.tokens import EpisodeTokens
from holdfast.training.engines import stops_of
from holdfast.training.policy.rewards import RewardLog
from holdfast.training.policy.rollouts import refuse_nan
from holdfast.training.policy.run import PolicyEvaluation, Seeds
from holdfast.training.run import Model, Run, StepAbandoned
from holdfast.types import EpisodeSummary, Finish, Group, Prompt, Trajectory

_TRIED = 2
"""Rows that an environment is tried on before step 1."""


@contextmanager
def open_environments(config: GRPOConfig, base: Path, world: World) -> Iterator[EnvironmentPool | None]:
    """Start this rank's environments, which end with the block; None where the configuration has none.

    Raises:
        ConfigError: The environment or a tool cannot work; the same on all ranks.
    """
    if config.environment is None:
        yield None
        return
    section, run = config.environment, Run.of(config, base, world)
    ranks = run.ranks
    log = ranks.on_all_ranks(lambda: RewardLog(run.directory, run.world.failure.directory))
    pool = EnvironmentPool(section, base, log.folder)
    try:
        ranks.on_all_ranks(pool.start)
        ranks.close()
        pool.before_step = lambda: log.settle(pool)
        yield pool
    finally:
        try:
            pool.close()
        finally:
            log.close(pool)


class Loop(TurnSource, Protocol):
    """Hands out what can be sampled of episodes, and knows what came of them."""

    @property
    def episodes(self) -> Sequence[Episode]:
        """All of them."""


@dataclass(frozen=True)
class LocalEpisodes:
    """What samples episodes in the place of single answers; implements `Episodes` of `training/policy/run.py`."""

    pool: EnvironmentPool
    section: EnvironmentSection
    rows: RowTokeniser
    syntaxes: Mapping[str, Syntax]
    """By the name of the environment."""
    max_length: int
    max_characters: int
    """That so many tokens can have."""

    def sample(
        self, policy: PolicyEvaluation, prompts: Sequence[Prompt], sampling: SamplingConfig, seeds: Seeds
    ) -> list[Group]:
        """Let this rank's prompts become episodes; all ranks call this together, and wait for each other at its end.

        Raises:
            StepAbandoned: A rank was asked to stop; the same on all ranks.
            RunStopped: The environments' processes died, logits are NaN, or what should be recorded is not; the same
                on all ranks.
        """
        run, tokenizer, sampler = policy.run, policy.model.blueprint.tokenizer, policy.sampler
        with run.phase("rollout"):
            sampler.publish(policy.model)
            if isinstance(engine := sampler.engine, EpisodeRecords):
                groups = run.ranks.on_all_ranks(
                    lambda: [engine.episodes(prompt, seeds[prompt.prompt_id], sampling) for prompt in prompts]
                )
                return [_with_text(group, tokenizer) for group in groups]
            self.pool.before_step()
            requests = [request for prompt in prompts for request in self._requests(prompt, seeds[prompt.prompt_id])]
            with self._opened(requests, sampling, policy) as loop:
                run.ranks.on_all_ranks(lambda: converse(sampler.engine, loop, sampling, run.interrupted))
            aborted = any(episode.finish is Finish.ABORT for episode in loop.episodes)
            if any(run.ranks.gather(aborted)):
                raise StepAbandoned
            with_nan = {
                episode.request.prompt_id
                for episode in loop.episodes
                if any(np.isnan(sample.logprobs).any() for sample in episode.samples)
            }
            refuse_nan(policy.model, with_nan)
            return _groups(prompts, loop.episodes, sampling, tokenizer)

    @contextmanager
    def _opened(
        self, requests: Sequence[EpisodeRequest], sampling: SamplingConfig, policy: PolicyEvaluation
    ) -> Iterator[Loop]:
        """Open what hands out turns of these episodes; all ranks call this together."""
        limits, in_order = self._limits(sampling), not isinstance(policy.sampler.engine, AheadEngine)
        yield EnvironmentLoop(requests, self.pool, decoder(policy), limits, policy.run.interrupted, in_order=in_order)

    def _requests(self, prompt: Prompt, seeds: Sequence[int]) -> list[EpisodeRequest]:
        row_name = f"Row of prompt {prompt.prompt_id}"
        messages = self.rows.conversation(prompt.row, row_name).messages
        syntax = self.syntaxes[self.pool.kind_of(prompt.row, row_name)]
        return [
            EpisodeRequest(
                prompt.prompt_id, place, seed, messages, prompt.tokens, prompt.row, syntax.writer, syntax.parse
            )
            for place, seed in enumerate(seeds)
        ]

    def _limits(self, sampling: SamplingConfig) -> Limits:
        section = self.section
        if isinstance(section, AgentConfig):
            max_seconds, ends_when_cut = None, False
        else:
            max_seconds, ends_when_cut = section.max_seconds, section.on_cut == "end"
        return Limits(
            section.max_turns,
            self.max_length,
            sampling.max_new_tokens,
            max_seconds,
            ends_when_cut,
            section.instances,
            self.max_characters,
        )

    def check_rows(self, run: Run, prompts: Sequence[Prompt]) -> None:
        """Begin an environment with rows of the first batch; all ranks call this together.

        Raises:
            ConfigError: It cannot begin with any of them, or none leaves room for a turn; the same on all ranks.
        """
        run.ranks.on_all_ranks(lambda: self._check_rows(run, prompts))

    def _check_rows(self, run: Run, prompts: Sequence[Prompt]) -> None:
        config = run.config
        assert isinstance(config, GRPOConfig)
        requests = [request for prompt in prompts[:_TRIED] for request in self._requests(prompt, (config.seed,))]
        # No turn is sampled here, so no episode would end and leave its instance to another one.
        limits = replace(self._limits(config.rollout), instances=_TRIED)
        loop = EnvironmentLoop(requests, self.pool, lambda *_: "", limits, run.interrupted)
        loop.ready(wait=True)
        while any(episode.tokens is None and episode.ended is None for episode in loop.episodes):
            loop.ready(wait=True)
        failed = [episode for episode in loop.episodes if episode.ended in {"fault", "room"}]
        loop.abandon()
        if not requests or len(failed) < len(requests):
            return
        if failed[0].ended == "fault":
            raise ConfigError(
                f"environment: begun with a row of the first batch before step 1, it {failed[0].fault}. The row's "
                f"columns are {', '.join(map(str, failed[0].request.row))}. Correct the class, or the rows."
            )
        assert failed[0].tokens is not None
        raise ConfigError(
            f"environment: its prompt has {failed[0].tokens.tokens.size} tokens for a row of the first batch, and "
            f"data.max_length={self.max_length} leaves no room for a turn of {config.rollout.max_new_tokens} behind "
            "them. Raise data.max_length, or shorten the descriptions of tools."
        )


def check_environments(policy: PolicyEvaluation) -> None:
    """Begin environments with rows of the first batch, where there are some; all ranks call this together.

    Raises:
        ConfigError: They cannot begin with any, or leave no room for a turn; the same on all ranks.
    """
    if policy.episodes is not None and policy.stream is not None:
        batch = policy.stream.read_ahead(policy.model.state.step)
        policy.episodes.check_rows(policy.run, () if batch is None else batch.own_prompts)


def episodes_of(
    config: GRPOConfig, pool: EnvironmentPool | None, model: Model, rows: RowTokeniser
) -> LocalEpisodes | None:
    """Return what samples episodes, proved on the model's own template; None where a prompt has a single answer.

    Raises:
        ConfigError: The template cannot write such episodes, or no call of a tool can be read back.
    """
    if config.environment is None:
        return None
    if pool is None:
        raise ConfigError("environment: nothing has started it. Run the file by `holdfast grpo` or `holdfast eval`.")
    section, ends = config.environment, stops_of(model).tokens
    splits = isinstance(section, AgentConfig) or section.history == "split"
    syntaxes = {}
    for name, tools in pool.tools.items():
        observations = observations_of(tools, answers=name in pool.answering)
        syntaxes[name] = proved_syntax(rows.template, tools, ends, observations, splits=splits)
    model.run.log.messages += dict.fromkeys(syntax.note for syntax in syntaxes.values() if syntax.note)
    longest = config.data.max_length
    characters = longest * max(map(len, rows.template.tokenizer.get_vocab()))
    if isinstance(section, AgentConfig):
        return AgentEpisodes(pool, section, rows, syntaxes, longest, characters, ends)
    return LocalEpisodes(pool, section, rows, syntaxes, longest, characters)


def decoder(policy: PolicyEvaluation) -> Decode:
    """Return what makes text of a policy's tokens."""
    tokenizer = policy.model.blueprint.tokenizer
    return lambda tokens, plain: str(tokenizer.decode(tokens, skip_special_tokens=plain))


@dataclass(frozen=True)
class AgentEpisodes(LocalEpisodes):
    """What lets agents ask the policy, and makes an episode of each one's calls."""

    ends: Collection[int]
    """Tokens that end a completion."""
    of_tools: dict[str, Syntax] = field(default_factory=dict)
    """How conversations with the tools of agents are written and read, by these tools as JSON."""

    @contextmanager
    def _opened(
        self, requests: Sequence[EpisodeRequest], sampling: SamplingConfig, policy: PolicyEvaluation
    ) -> Iterator[Loop]:
        """Open the endpoint of these agents; all ranks call this together."""
        run, limits, section = policy.run, self._limits(sampling), self.section
        assert isinstance(section, AgentConfig)
        with run.ranks.on_all_ranks(lambda: Endpoint(sampling, section.endpoint)) as endpoint:
            yield AgentLoop(requests, self.pool, endpoint, self.syntax_of, decoder(policy), limits, run.interrupted)

    def syntax_of(self, tools: tuple[Mapping[str, Any], ...]) -> Syntax:
        """Return how conversations with an agent's tools are written and read.

        Raises:
            CallRefused: The template cannot write them, or calls of them cannot be read back.
        """
        key = json.dumps(tools, sort_keys=True)
        if key not in self.of_tools:
            try:
                observations = observations_of_agents(tools)
                self.of_tools[key] = proved_syntax(self.rows.template, tools, self.ends, observations, splits=True)
            except (ConfigError, LookupError, TypeError, AttributeError, ValueError) as error:
                raise CallRefused(f"tools: {error}") from None
        return self.of_tools[key]

    def check_rows(self, run: Run, prompts: Sequence[Prompt]) -> None:
        """Look at none: what an agent does with a row is seen when it asks."""


def _groups(
    prompts: Sequence[Prompt], episodes: Sequence[Episode], sampling: SamplingConfig, tokenizer: Any
) -> list[Group]:
    by_prompt: dict[int, list[Episode]] = {prompt.prompt_id: [] for prompt in prompts}
    for episode in episodes:
        by_prompt[episode.request.prompt_id].append(episode)
    return [group_of(prompt, by_prompt[prompt.prompt_id], sampling, tokenizer) for prompt in prompts]


def group_of(prompt: Prompt, episodes: Sequence[Episode], sampling: SamplingConfig, tokenizer: Any) -> Group:
    """Return the episodes of a prompt; their group's prompt is what all of them begin with."""
    lines = [episode.samples or [EpisodeTokens.of_prompt(prompt.tokens)] for episode in episodes]
    heads = [
        sample.tokens[: int(np.argmax(sample.turns >= 0)) or sample.tokens.size] for line in lines for sample in line
    ]
    shared = heads[0][: min(head.size for head in heads)]
    for head in heads:
        differs = np.flatnonzero(head[: shared.size] != shared)
        shared = shared[: int(differs[0])] if differs.size else shared
    pairs = zip(episodes, lines, strict=True)
    group = Group(
        replace(prompt, tokens=shared), tuple(_trajectory(episode, line, sampling) for episode, line in pairs)
    )
    return group if np.array_equal(shared, prompt.tokens) else _with_text(group, tokenizer)


def _with_text(group: Group, tokenizer: Any) -> Group:
    """Return the group with the text of its prompt's tokens."""
    text = tokenizer.decode(group.prompt.tokens.tolist(), skip_special_tokens=False)
    return replace(group, prompt=replace(group.prompt, text=text))


def _trajectory(episode: Episode, line: Sequence[EpisodeTokens], sampling: SamplingConfig) -> Trajectory:
    request = episode.request
    summary = EpisodeSummary(
        messages=tuple(episode.messages),
        prompt_messages=episode.prompt_messages,
        turns=sum(sample.turn_count for sample in line),
        ended=str(episode.ended),
        reward=episode.reward,
        turn_rewards=tuple(episode.turn_rewards),
        turn_lengths=tuple(length for sample in line for length in sample.turn_lengths),
        called=dict(episode.called),
        failed_calls=episode.failed_calls,
        cut_turns=episode.cut_turns,
        waited_seconds=episode.waited_seconds,
        info=episode.info,
        fault=episode.fault,
        samples=tuple((sample.tokens.size, int(sample.sampled.sum())) for sample in line),
        tools=request.writer.tools,
    )
    return Trajectory(
        prompt_id=request.prompt_id,
        sample_id=request.prompt_id * 2**20 + request.place,
        seed=request.seed,
        temperature=sampling.temperature,
        tokens=np.concatenate([sample.tokens for sample in line]),
        loss_mask=np.concatenate([sample.sampled for sample in line]),
        sampler_logprobs=np.concatenate([sample.logprobs for sample in line]),
        weights_versions=np.concatenate([sample.weights_versions for sample in line]),
        finish=episode.finish,
        completion=episode.last_text,
        episode=summary,
    )
