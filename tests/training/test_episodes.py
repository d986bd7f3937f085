"""A group of episodes as sequences to train on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.config.sections.data import TextConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.chat_template import ChatTemplate
from holdfast.rollout.engine import Sampled
from holdfast.rollout.episodes.episode import Episode, EpisodeRequest
from holdfast.rollout.episodes.history import TurnTemplate
from holdfast.rollout.episodes.tokens import EpisodeTokens
from holdfast.training.policy.episode_groups import group_of, trajectory_of_episode
from holdfast.training.policy.groups import CompletionSummary, GroupFact
from holdfast.training.policy.metrics import episode_metrics
from holdfast.training.policy.samples import SampleRow, sample_line, sample_table
from holdfast.types import EpisodeSummary, Finish, Prompt


def turn(tokens: list[int]) -> Sampled:
    return Sampled(0, 0, np.array(tokens, np.int64), np.full(len(tokens), -1, np.float32), Finish.STOP, 0)


def episodes() -> tuple[Prompt, list[Episode]]:
    prompt = Prompt(3, np.array([4, 9, 10, 5], np.int64), "", {})
    writer = TurnTemplate(ChatTemplate(character_tokenizer(), "", {}, "it"), (), [1])
    request = EpisodeRequest(3, 0, 1, [], prompt.tokens, {}, writer, None)
    line = EpisodeTokens.of_prompt(prompt.tokens)
    long = line.with_turn(turn([11, 12, 1])).with_observation(np.array([6, 20, 21, 5])).with_turn(turn([13, 1]))
    begun = EpisodeTokens.of_prompt(np.array([4, 9, 10, 22, 5], np.int64)).with_turn(turn([14, 1]))
    return prompt, [
        Episode(request, tokens=long, ended="done"),
        Episode(request, tokens=begun, ended="turns"),
        Episode(request, tokens=None, ended="fault"),
    ]


def test_a_group_shares_what_all_of_its_episodes_begin_with() -> None:
    prompt, begun = episodes()

    group = group_of(prompt, [trajectory_of_episode(one, SamplingConfig()) for one in begun], character_tokenizer())

    assert group.prompt.tokens.tolist() == [4, 9, 10]
    assert [trajectory.tokens.size for trajectory in group.trajectories] == [13, 7, 4]
    assert [trajectory.completion_length for trajectory in group.trajectories] == [5, 2, 0]
    assert [trajectory.finish for trajectory in group.trajectories] == [Finish.STOP, Finish.LENGTH, Finish.ERROR]


def test_an_episode_is_shown_as_a_conversation() -> None:
    said = [("user", "1 + 1?"), ("assistant", "call"), ("tool", "2"), ("assistant", "2")]
    messages = [{"role": role, "content": content} for role, content in said]
    row = SampleRow(1, 0, "1 + 1?", "2", 1.0, {}, 0.5, "stop", trained=True, messages=messages, prompt_messages=1)

    assert sample_table([("best", row)], 1).endswith("1 + 1? -> assistant: call | tool: 2 | assistant: 2")
    silent = row._replace(reward=None, messages=messages[:1])
    assert sample_table([("best", silent)], 1).endswith("1 + 1? -> (no turn)")


def test_rows_of_samples_are_trajectories_that_a_supervised_run_trains_on() -> None:
    """A row has a prompt, a completion and messages: `rows` says which of them it is."""
    asked, call = {"role": "user", "content": "1 + 1?"}, "add: 1, 1"
    said = (
        {"role": "assistant", "content": call},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
    )
    tool = {"type": "function", "function": {"name": "add"}}
    row = SampleRow(1, 0, "1 + 1?", "2", 1.0, {}, 0.5, "stop", trained=True, messages=[asked, *said], tools=(tool,))
    text = (
        "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
        "{% for message in messages %}<bos>{{ message.role }}:{{ message.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
    )
    line = json.loads(json.dumps(sample_line(row, None)))
    tokenizer, counts = character_tokenizer(), Counter[str]()

    rows = RowTokeniser(tokenizer, TextConfig(chat_template=text), Path())
    (stretch,) = rows.stretches(line, "messages", "Row 0", counts)

    trained = [token for token, is_trained in zip(stretch.tokens, stretch.trained, strict=True) if is_trained]
    assert tokenizer.decode(trained) == f"{call}<eos>2<eos>"
    assert tokenizer.decode(stretch.tokens).startswith("add<bos>user:1 + 1?<eos><bos>assistant:")
    assert "tools" not in sample_line(row._replace(messages=None), None)


def summary(**values: Any) -> EpisodeSummary:
    least: dict[str, Any] = {
        "messages": (), "prompt_messages": 1, "turns": 1, "ended": "done", "reward": 0.0, "turn_rewards": (),
        "turn_lengths": (), "called": {}, "failed_calls": 0, "cut_turns": 0, "waited_seconds": 0.0, "info": {},
    }  # fmt: skip
    return EpisodeSummary(**(least | values))


def test_metrics_count_turns_calls_failures_ends_and_waits() -> None:
    episodes = [
        summary(turns=3, called={"add": 2, "unknown": 1}, failed_calls=2, waited_seconds=0.5, info={"depth": 2.0}),
        summary(turns=1, ended="turns", cut_turns=1, called={"add": 1}, waited_seconds=1.5, info={"depth": 5.0}),
        summary(turns=2, ended="turns"),
        summary(turns=2, ended="fault"),
    ]
    facts = [CompletionSummary(0.0, {}, 1, 2, Finish.STOP, None, None, episode=episode) for episode in episodes]

    metrics = episode_metrics([GroupFact(0, 0, tuple(facts[:2])), GroupFact(1, 1, tuple(facts[2:]))])

    assert metrics == {
        "environment/turns/mean": 2.0,
        "environment/turns/max": 3.0,
        "environment/cut_turns": 1.0,
        "environment/failed_calls": 2.0,
        "environment/waited_seconds": 0.5,
        "environment/ended/done": 0.25,
        "environment/ended/fault": 0.25,
        "environment/ended/turns": 0.5,
        "environment/calls/add": 3.0,
        "environment/calls/unknown": 1.0,
        "environment/info/depth": 3.5,
    }
    assert episode_metrics([GroupFact(0, 0, (facts[0]._replace(episode=None),))]) == {}
