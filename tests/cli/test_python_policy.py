"""`holdfast.grpo` from Python: live rewards, alone and as one rank of many."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import holdfast
from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.surrogates import Clip
from tests.cli.fixtures import TINY
from tests.cli.test_python import reported
from tests.cli.warm import WarmPython, run
from tests.messages import Said, lacks

SCRIPT = Path(__file__).parent / "live_policy_script.py"


def settings(name: str, **sections: Any) -> dict[str, Any]:
    return {
        "steps": 3,
        "run": {"name": name},
        "model": {"dtype": "float64"},
        "data": {"batch_size": 4, "max_length": 32, "shuffle": False},
        "rollout": {"group_size": 4, "max_new_tokens": 8},
        "optim": {"kind": "sgd", "lr": 0.5, "schedule": "constant"},
        "launch": {"device": "cpu"},
    } | sections


@pytest.mark.slow
def test_live_rewards_train_alone_and_under_torchrun_to_the_same_numbers(warm: WarmPython, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]
    script = [str(SCRIPT), json.dumps(TINY)]

    alone = reported(warm.run(*script, json.dumps(settings("alone")), cwd=tmp_path))[0]
    ranks = reported(run([*torchrun, warm.program, *script, json.dumps(settings("ranks"))], cwd=tmp_path))

    assert [found["rank"] for found in ranks] == ["0", "1"]
    assert [found["step"] for found in (alone, *ranks)] == [3, 3, 3]
    assert [len(found["seen"]) for found in (alone, *ranks)] == [3, 3, 0]
    assert ranks[0]["seen"] == pytest.approx(alone["seen"], rel=1e-12)
    for name in ("loss", "grad_norm", "reward", "reward_std", "rewards/even/mean"):
        assert ranks[1]["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-9, abs=1e-12), name
    metrics = alone["metrics"]
    assert metrics["rewards/half/mean"] == 0.5
    assert metrics["reward"] == pytest.approx(metrics["rewards/even/mean"] + 0.5, rel=1e-12)
    assert metrics["rewards/even/number/mean"] == 1.5, "step 3 asks the prompts of step 1 again: numbers 0 to 3"
    assert metrics["grad_norm"] > 0


def test_the_recorded_tree_names_live_rewards_and_is_valid(warm: WarmPython, tmp_path: Path) -> None:
    warm.run(SCRIPT, json.dumps(TINY), json.dumps(settings("once", steps=1, reward="math")), cwd=tmp_path)

    recorded = yaml.safe_load((tmp_path / "runs" / "once" / "config.resolved.yaml").read_text())

    assert [(section["path"], section["weight"]) for section in recorded["reward"]] == [
        ("(given in Python).py:even", 1.0),
        ("(given in Python).py:half", 1.0),
    ]
    assert [section.label for section in from_mapping(recorded, GRPOConfig).reward] == ["even", "half"]


@pytest.mark.slow
def test_an_alarm_goes_to_the_screen_and_to_the_events_unless_it_is_turned_off(
    warm: WarmPython, tmp_path: Path
) -> None:
    """A model of random weights hardly ever ends within 8 tokens."""
    health: list[list[dict[str, Any]]] = []
    for enabled in (True, False):
        tree = settings(f"cut-{enabled}", steps=5, metrics={"health": enabled})
        done = warm.run(SCRIPT, json.dumps(TINY), json.dumps(tree), cwd=tmp_path)
        lines = (tmp_path / "runs" / f"cut-{enabled}" / "events.jsonl").read_text().splitlines()
        health.append([event for event in map(json.loads, lines) if event["event"] == "health"])
        assert ("warning: " in done.out) is enabled
        assert all(f"warning: {event['text']}\n" in done.out for event in health[-1])

    assert [[(event["step"], event["alarm"]) for event in events] for events in health] == [[(5, "truncation")], []]


def one(completion: str) -> float:  # noqa: ARG001 - a reward
    return 1.0


@pytest.mark.parametrize(
    ("rewards", "named"),
    [([], "rewards None"), ({"a b": one}, "config: reward.0.name: 'a b'"), ([one, one], "rewards={'first': one,")],
    ids=["none", "two words", "one name twice"],
)
def test_rewards_without_a_name_of_their_own_are_refused(said: Said, rewards: Any, named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        holdfast.grpo(settings("x"), rows=[{"prompt": "a"}], rewards=rewards, model=object(), tokenizer=object())

    assert lacks(str(raised.value), named) == []
    said(str(raised.value))


def test_a_python_call_for_several_ranks_names_the_verb_that_starts_them() -> None:
    with pytest.raises(ConfigError, match="`holdfast grpo "):
        holdfast.grpo(
            settings("x", launch={"ranks": 2}), rows=[{"prompt": "a"}], rewards=one, model=object(), tokenizer=object()
        )


def test_a_live_loss_beside_sections_that_would_not_act_is_refused(tmp_path: Path, said: Said) -> None:
    tree = {
        "steps": 1,
        "model": {"config": TINY, "tokenizer": "builtin:characters"},
        "data": {"synthetic": {"task": "sort"}, "max_length": 32},
        "rollout": {"max_new_tokens": 8},
        "reward": "exact",
        "kl": {"coefficient": 0.1},
        "run": {"dir": str(tmp_path)},
    }

    with pytest.raises(ConfigError, match=r"\bkl: .*objective=") as raised:
        holdfast.grpo(tree, objective=PolicyGradient(Clip()))

    said(str(raised.value))
    assert not list(tmp_path.iterdir())
