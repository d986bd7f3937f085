"""What the sections of rewards refuse, and what stands where nothing is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from holdfast.config.base import Section
from holdfast.config.load import from_mapping
from holdfast.config.sections.reward import Reward, RewardPoolConfig
from holdfast.errors import ConfigError
from holdfast.rewards.pool import RewardPool


class Root(Section):
    """A tree with rewards, as the verbs that use them have it."""

    run: dict[str, str]
    reward: list[Reward]
    rewards: RewardPoolConfig = RewardPoolConfig()


def read(reward: Any, **pool: Any) -> Root:
    return from_mapping({"run": {"name": "x"}, "reward": [reward], "rewards": pool}, Root)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"path": "my.py"}, "must name a function in a file"),
        ({"path": "own-scores.words:long"}, "must name a function in a file or in a module"),
        ({"path": "my.py:f", "name": "a/b"}, "one word without a slash"),
        ({"kind": "format", "regex": "("}, "is not a regular expression"),
        ("length", "no length is given; set target, min or max"),
        ({"kind": "length", "target": 5, "min": 1}, "keep one, or write two rewards"),
        ({"kind": "length", "min": 5, "max": 4}, "5 is above max=4"),
        ({"kind": "overlong", "max_length": 10, "cache": 11}, "11 is above max_length=10"),
        ({"kind": "judge", "url": "localhost", "model": "m", "prompt": "{completion}"}, "is no address"),
        ({"kind": "judge", "url": "http://h/v1", "model": "m", "prompt": "rate it"}, "would not see the completion"),
        (
            {"kind": "judge", "url": "http://h/v1", "model": "m", "prompt": "{completion}", "regex": "(a)(b)"},
            "2 groups could hold the number",
        ),
        (
            {"kind": "judge", "url": "http://h", "model": "m", "prompt": "{completion}", "api_key_variable": "sk-1"},
            "no name of a variable",
        ),
        ("mth", "no kind 'mth'"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_with_the_reason(reward: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(reward)

    assert said in str(raised.value)
    assert "reward.0" in str(raised.value)


def test_a_refused_key_is_not_repeated_in_the_message() -> None:
    judge = {
        "kind": "judge",
        "url": "http://h",
        "model": "m",
        "prompt": "{completion}",
        "api_key_variable": "sk-secret",
    }

    with pytest.raises(ConfigError) as raised:
        read(judge)

    assert "sk-secret" not in str(raised.value)


def test_names_are_those_of_the_function_or_the_kind() -> None:
    rewards = TypeAdapter(list[Reward]).validate_python(
        ["exact", {"path": "my.py:right"}, {"kind": "exact", "name": "other"}]
    )

    assert [reward.label for reward in rewards] == ["exact", "right", "other"]


def test_two_rewards_of_one_name_are_refused(tmp_path: Path) -> None:
    rewards = TypeAdapter(list[Reward]).validate_python(["exact", {"path": "my.py:exact"}])

    with pytest.raises(ConfigError, match=r"reward: two are called exact.*Give one of them a name"):
        RewardPool(rewards, RewardPoolConfig(), tmp_path, tmp_path)


def test_no_reward_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reward: there is none"):
        RewardPool([], RewardPoolConfig(), tmp_path, tmp_path)


def test_a_policy_is_a_word_or_a_number() -> None:
    config = read("exact", on_timeout="drop_group", on_nan=-1).rewards

    assert [config.on_timeout, config.on_error, config.on_nan] == ["drop_group", "drop_sample", -1.0]


def test_a_policy_that_is_neither_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rewards.on_error: 'drop' .*'drop_group' or 'drop_sample' or a number"):
        read("exact", on_error="drop")
    with pytest.raises(ConfigError, match=r"rewards.on_nan: .*true"):
        read("exact", on_nan=True)
    with pytest.raises(ValidationError):
        RewardPoolConfig(on_none=float("nan"))  # type: ignore[arg-type]  # what a file may say
