"""Groups of episodes: a policy's turns in environments, as sequences to score and to train on."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.config.sections.environment import AgentConfig, EnvironmentSection
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.chat_template import ChatTemplate
from holdfast.environments.pool import EnvironmentPool
from holdfast.errors import ConfigError
from holdfast.parallel.mesh import World
from holdfast.rollout.engine import AheadEngine, EpisodeRecords, Interrupted, Request, RolloutEngine, converse
from holdfast.rollout.episodes.agents import AgentLoop
from holdfast.rollout.episodes.chat_calls import CallRefused
from holdfast.rollout.episodes.endpoint import Endpoint
from holdfast.rollout.episodes.environments import EnvironmentLoop
from holdfast.rollout.episodes.episode import EpisodeRequest, Limits
from holdfast.rollout.episodes.history import observations_of, observations_of_agents
from holdfast.rollout.episodes.loop import EpisodeLoop
from holdfast.rollout.episodes.proof import proved_syntax
from holdfast.rollout.episodes.sessions import Syntax
from holdfast.training.engines import stops_of
from holdfast.training.policy.ahead import CompletionsAhead
from holdfast.training.policy.episode_groups import (
    group_of,
    trajectory_of_episode,
    trajectory_of_sampled,
    with_text,
)
from holdfast.training.policy.rewards import RewardLog
from holdfast.training.policy.rollouts import refuse_nan, requests_of
from holdfast.training.policy.run import PolicyEvaluation, Seeds
from holdfast.training.run import Model, Run, StepAbandoned
from holdfast.types import Finish, Group, Prompt, Trajectory

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


@dataclass(frozen=True)
class Writing:
    """How one thread writes and reads episodes: what templates and tokenizers remember is no other thread's."""

    template: ChatTemplate
    syntaxes: Mapping[str, Syntax]
    """By the name of the environment."""
    of_tools: dict[str, Syntax] = field(default_factory=dict)
    """How conversations with the tools of agents are written and read, by these tools as JSON."""

    def copied(self) -> Writing:
        """Return a copy for another thread."""
        return deepcopy(self)

    def text_of(self, tokens: list[int], plain: bool) -> str:  # noqa: FBT001 - as `Decode` is called
        """Return the text of tokens; if `plain`, special ones are left out."""
        return str(self.template.tokenizer.decode(tokens, skip_special_tokens=plain))


@dataclass(frozen=True)
class LocalEpisodes:
    """What samples episodes in the place of single answers; implements `Episodes` of `training/policy/run.py`."""

    pool: EnvironmentPool
    section: EnvironmentSection
    rows: RowTokeniser
    writing: Writing
    """Of the thread that trains."""
    max_length: int
    max_characters: int
    """That so many tokens can have."""

    def sample(
        self,
        policy: PolicyEvaluation,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        seeds: Seeds,
        ahead: CompletionsAhead | None = None,
    ) -> list[Group]:
        """Let this rank's prompts become episodes; all ranks call this together, and wait for each other at its end.

        Raises:
            StepAbandoned: A rank was asked to stop; the same on all ranks.
            RunStopped: The environments' processes died, logits are NaN, or what should be recorded is not; the same
                on all ranks.
        """
        run, tokenizer, sampler = policy.run, policy.model.blueprint.tokenizer, policy.sampler
        step = policy.model.state.step
        with run.phase("rollout"):
            if ahead is None or not ahead.is_begun(step):
                sampler.publish(policy.model)
            if isinstance(engine := sampler.engine, EpisodeRecords):
                groups = run.ranks.on_all_ranks(
                    lambda: [engine.episodes(prompt, seeds[prompt.prompt_id], sampling) for prompt in prompts]
                )
                return [with_text(group, tokenizer) for group in groups]
            self.pool.before_step()
            requests = requests_of(run, prompts, seeds, with_rows=True)

            def trajectories() -> list[Trajectory]:
                if ahead is None:
                    return self._sampled_now(sampler.engine, requests, sampling, run.interrupted)
                episodes = ahead.begin(step, requests).collect(run.interrupted)
                return [trajectory_of_sampled(one, seeds[one.request_id][one.place], sampling) for one in episodes]

            episodes = run.ranks.on_all_ranks(trajectories)
            aborted = any(episode.finish is Finish.ABORT for episode in episodes)
            if any(run.ranks.gather(aborted)):
                raise StepAbandoned
            if ahead is not None:
                ahead.end(step)
            refuse_nan(policy.model, {each.prompt_id for each in episodes if np.isnan(each.sampler_logprobs).any()})
            return _groups(prompts, episodes, tokenizer)

    def _sampled_now(
        self, engine: RolloutEngine, requests: Sequence[Request], sampling: SamplingConfig, interrupted: Interrupted
    ) -> list[Trajectory]:
        episodes = [episode for request in requests for episode in self.requests(request, self.writing)]
        with self.opened(episodes, sampling, engine, self.writing, interrupted) as loop:
            converse(engine, loop, sampling, interrupted)
        return [trajectory_of_episode(episode, sampling) for episode in loop.episodes]

    @contextmanager
    def opened(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: SamplingConfig,
        engine: object,
        writing: Writing,
        interrupted: Interrupted,
    ) -> Iterator[EpisodeLoop]:
        """Open what hands out turns of these episodes."""
        limits, in_order = self._limits(sampling), not isinstance(engine, AheadEngine)
        yield EnvironmentLoop(requests, self.pool, writing.text_of, limits, interrupted, in_order=in_order)

    def requests(self, request: Request, writing: Writing) -> list[EpisodeRequest]:
        """Return the episodes that begin with a prompt."""
        row_name = f"Row of prompt {request.request_id}"
        assert request.row is not None
        row, messages = request.row, self.rows.conversation(request.row, row_name).messages
        syntax = writing.syntaxes[self.pool.kind_of(row, row_name)]
        return [
            EpisodeRequest(request.request_id, place, seed, messages, request.prompt, row, syntax.writer, syntax.parse)
            for place, seed in enumerate(request.seeds)
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
            section.max_failed_calls,
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
        # No turn is sampled here, so no episode would end and leave its instance to another one.
        tried = prompts[: min(_TRIED, self.section.instances)]
        asked = requests_of(run, tried, {prompt.prompt_id: (config.seed,) for prompt in tried}, with_rows=True)
        requests = [request for each in asked for request in self.requests(each, self.writing)]
        loop = EnvironmentLoop(requests, self.pool, lambda *_: "", self._limits(config.rollout), run.interrupted)
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
    writing = Writing(rows.template, syntaxes)
    if isinstance(section, AgentConfig):
        return AgentEpisodes(pool, section, rows, writing, longest, characters, ends)
    return LocalEpisodes(pool, section, rows, writing, longest, characters)


@dataclass(frozen=True)
class AgentEpisodes(LocalEpisodes):
    """What lets agents ask the policy, and makes an episode of each one's calls."""

    ends: Collection[int]
    """Tokens that end a completion."""

    @contextmanager
    def opened(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: SamplingConfig,
        engine: object,  # noqa: ARG002 - agents are never waited for
        writing: Writing,
        interrupted: Interrupted,
    ) -> Iterator[EpisodeLoop]:
        """Open the endpoint of these agents."""
        syntax_of, limits, section = partial(self._syntax_of, writing), self._limits(sampling), self.section
        assert isinstance(section, AgentConfig)
        with Endpoint(sampling, section.endpoint) as endpoint:
            yield AgentLoop(requests, self.pool, endpoint, syntax_of, writing.text_of, limits, interrupted)

    def _syntax_of(self, writing: Writing, tools: tuple[Mapping[str, Any], ...]) -> Syntax:
        """Return how conversations with an agent's tools are written and read.

        Raises:
            CallRefused: The template cannot write them, or calls of them cannot be read back.
        """
        key = json.dumps(tools, sort_keys=True)
        if key not in writing.of_tools:
            try:
                observations = observations_of_agents(tools)
                writing.of_tools[key] = proved_syntax(writing.template, tools, self.ends, observations, splits=True)
            except (ConfigError, LookupError, TypeError, AttributeError, ValueError) as error:
                raise CallRefused(f"tools: {error}") from None
        return writing.of_tools[key]

    def check_rows(self, run: Run, prompts: Sequence[Prompt]) -> None:
        """Look at none: what an agent does with a row is seen when it asks."""


def _groups(prompts: Sequence[Prompt], episodes: Sequence[Trajectory], tokenizer: Any) -> list[Group]:
    by_prompt: dict[int, list[Trajectory]] = {prompt.prompt_id: [] for prompt in prompts}
    for episode in episodes:
        by_prompt[episode.prompt_id].append(episode)
    return [group_of(prompt, by_prompt[prompt.prompt_id], tokenizer) for prompt in prompts]
