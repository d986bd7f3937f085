"""What earlier versions wrote in a configuration is read as what says the same today."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config.earlier import todays_form
from holdfast.config.load import from_mapping
from holdfast.config.public import WHOLE, public_configuration
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import as_plain
from holdfast.errors import ConfigError

LEAST: dict[str, Any] = {"steps": 3, "model": {"path": "m"}, "data": {"path": "d"}, "reward": "exact"}
PPO: dict[str, Any] = {"advantage": "gae"}
NO_DECAY = [r"bias$", r"norm", r"\bln_"]
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"checkpoint": {"rehearsal": {"enabled": False, "hours_between_failures": 5.0}}},
        {"checkpoint": {"rehearsal": False}},
    ),
    ({"metrics": {"health": {"enabled": False}}}, {"metrics": {"health": False}}),
    ({"profile": {"steps": [10, 13]}}, {"profile": [10, 13]}),
    ({"rewards": {"on_nan": {"kind": "value", "value": -1.0}}}, {"rewards": {"on_nan": -1.0}}),
    ({"rewards": {"on_error": {"value": 0}}}, {"rewards": {"on_error": 0}}),
    ({"rewards": {"on_timeout": {"kind": "auto"}}}, {"rewards": {"on_timeout": "auto"}}),
    (
        {"parallel": {"recompute": {"kind": "every_k", "k": 3, "use_reentrant": False}}},
        {"parallel": {"recompute": {"kind": "every_k", "k": 3}}},
    ),
    (
        {"rollout": {"engine": {"kind": "vllm", "url": ["http://127.0.0.1:9"], "transport": "files"}}},
        {"rollout": {"engine": {"kind": "vllm", "url": ["http://127.0.0.1:9"]}}},
    ),
    (
        PPO | {"critic": {"optim": {"kind": "adamw", "lr": 0.1, "eps": 1e-8, "ema": None, "no_decay": NO_DECAY}}},
        PPO | {"critic": {"optim": {"kind": "adamw", "lr": 0.1}}},
    ),
]


@pytest.mark.parametrize(("earlier", "today"), FORMS)
def test_an_earlier_form_is_the_same_tree(earlier: dict[str, Any], today: dict[str, Any]) -> None:
    assert from_mapping(LEAST | earlier, GRPOConfig) == from_mapping(LEAST | today, GRPOConfig)


@pytest.mark.parametrize(("earlier", "today"), FORMS)
def test_an_earlier_form_shows_the_same_outside_of_the_run(earlier: dict[str, Any], today: dict[str, Any]) -> None:
    assert public_configuration(LEAST | earlier, WHOLE) == public_configuration(LEAST | today, WHOLE)


def test_a_tree_of_today_is_not_changed() -> None:
    plain = as_plain(from_mapping(LEAST | PPO | {"critic": {}}, GRPOConfig))

    assert todays_form(plain) == plain


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"critic": {"optim": {"eps": 1e-5}}}, "critic.optim.eps"),
        ({"parallel": {"recompute": {"kind": "full", "use_reentrant": True}}}, "parallel.recompute.use_reentrant"),
        ({"parallel": {"recompute": {"use_reentrant": True}}}, "parallel.recompute.use_reentrant"),
    ],
)
def test_a_key_that_is_gone_is_refused_where_it_says_something_else(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"config: {key}: there is no such key: "):
        from_mapping(LEAST | PPO | {"critic": {}} | change, GRPOConfig)
