"""Episodes as a step needs them: each as one sequence, in groups, and as what is saved of one that has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.rollout.engine import EndedEpisode, Sampled
from holdfast.rollout.episodes.episode import Episode
from holdfast.rollout.episodes.tokens import EpisodeTokens
from holdfast.types import EpisodeSummary, Group, Prompt, Trajectory


def group_of(prompt: Prompt, episodes: Sequence[Trajectory], tokenizer: Any) -> Group:
    """Return the episodes of a prompt; their group's prompt is what all of them begin with."""
    heads = [head for episode in episodes for head in _heads(episode)]
    shared = heads[0][: min(head.size for head in heads)]
    for head in heads:
        differs = np.flatnonzero(head[: shared.size] != shared)
        shared = shared[: int(differs[0])] if differs.size else shared
    group = Group(replace(prompt, tokens=shared), tuple(episodes))
    return group if np.array_equal(shared, prompt.tokens) else with_text(group, tokenizer)


def _heads(episode: Trajectory) -> Iterator[NDArray[np.int64]]:
    """Yield the tokens of each sample before the first that the policy chose."""
    assert episode.episode is not None
    edges = np.cumsum([0, *(tokens for tokens, _ in episode.episode.samples)]).tolist()
    for start, end in pairwise(edges):
        is_chosen = episode.loss_mask[start:end]
        yield episode.tokens[start:end][: int(np.argmax(is_chosen)) if is_chosen.any() else end - start]


def with_text(group: Group, tokenizer: Any) -> Group:
    """Return the group with the text of its prompt's tokens."""
    text = tokenizer.decode(group.prompt.tokens.tolist(), skip_special_tokens=False)
    return replace(group, prompt=replace(group.prompt, text=text))


def _samples_of(episode: Episode) -> list[EpisodeTokens]:
    """Return what an episode is trained as: its prompt alone where its environment has not begun."""
    return episode.samples or [EpisodeTokens.of_prompt(episode.request.prompt)]


def _summary_of(episode: Episode) -> EpisodeSummary:
    """Return what an episode came to."""
    samples = _samples_of(episode)
    return EpisodeSummary(
        messages=tuple(episode.messages),
        prompt_messages=episode.prompt_messages,
        turns=sum(sample.turn_count for sample in samples),
        ended=str(episode.ended),
        reward=episode.reward,
        turn_rewards=tuple(episode.turn_rewards),
        turn_lengths=tuple(length for sample in samples for length in sample.turn_lengths),
        called=dict(episode.called),
        failed_calls=episode.failed_calls,
        cut_turns=episode.cut_turns,
        waited_seconds=episode.waited_seconds,
        info=episode.info,
        fault=episode.fault,
        samples=tuple((sample.tokens.size, int(sample.sampled.sum())) for sample in samples),
        tools=episode.request.writer.tools,
    )


def trajectory_of_episode(episode: Episode, sampling: SamplingConfig) -> Trajectory:
    """Return an episode as one sequence, its samples one after another."""
    request, samples = episode.request, _samples_of(episode)
    return Trajectory(
        prompt_id=request.prompt_id,
        sample_id=request.prompt_id * 2**20 + request.place,
        seed=request.seed,
        temperature=sampling.temperature,
        tokens=np.concatenate([sample.tokens for sample in samples]),
        loss_mask=np.concatenate([sample.sampled for sample in samples]),
        sampler_logprobs=np.concatenate([sample.logprobs for sample in samples]),
        weights_versions=np.concatenate([sample.weights_versions for sample in samples]),
        finish=episode.finish,
        completion=episode.last_text,
        episode=_summary_of(episode),
    )


def sampled_of(episode: Episode) -> Sampled:
    """Return an episode in the form in which completions are finished ahead, and saved."""
    request, samples = episode.request, _samples_of(episode)
    versions = np.concatenate([sample.weights_versions for sample in samples])
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    return Sampled(
        request.prompt_id,
        request.place,
        np.concatenate([sample.tokens for sample in samples]),
        np.concatenate([sample.logprobs for sample in samples]),
        episode.finish,
        int(versions[0]),
        tuple((start, int(versions[start])) for start in starts),
        episode=EndedEpisode(_summary_of(episode), episode.last_text),
    )


def trajectory_of_sampled(sampled: Sampled, seed: int, sampling: SamplingConfig) -> Trajectory:
    """Return an episode that was sampled ahead, or saved, as one sequence."""
    assert sampled.episode is not None
    versions = np.full(sampled.tokens.size, sampled.weights_version, np.int32)
    for start, version in sampled.segments:
        versions[start:] = version
    return Trajectory(
        prompt_id=sampled.request_id,
        sample_id=sampled.request_id * 2**20 + sampled.place,
        seed=seed,
        temperature=sampling.temperature,
        tokens=sampled.tokens,
        loss_mask=versions >= 0,
        sampler_logprobs=sampled.logprobs,
        weights_versions=versions,
        finish=sampled.finish,
        completion=sampled.episode.last_text,
        episode=sampled.episode.summary,
    )
