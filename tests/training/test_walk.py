"""Before step 1 a policy walks through a step on two tiny groups, and nothing of it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.grpo_cases import prompts_of, settings
from tests.tiny import tiny_directory
from tests.training.walk_cases import first_step, walked_with_long_prompts, without_branches

ROWS = prompts_of(8)
SECTIONS: dict[str, dict[str, Any]] = {
    "plain": {"optim": {"kind": "adamw", "lr": 1e-2, "ema": {"decay": 0.9}}, "kl": {"coefficient": 0.1}},
    "adapters": {"model": {"lora": {"rank": 4}}, "kl": {"coefficient": 0.1}},
    "critic": {"advantage": {"kind": "gae"}, "critic": {"optim": {"lr": 1e-2}}},
    "late critic": {"advantage": {"kind": "gae"}, "critic": {"optim": {"lr": 1e-2}, "warmup_steps": 1}},
    "copied reference": {"kl": {"coefficient": 0.1}, "reference": {"sync": {"every_steps": 1, "mix": 1.0}}},
    "mixed reference": {"kl": {"coefficient": 0.1}, "reference": {"sync": {"every_steps": 1, "mix": 0.6}}},
    "controllers": {"kl": {"coefficient": 0.1, "target": 0.2}, "entropy": {"coefficient": 0.01, "target": 2.0}},
    "residency": {
        "optim": {"kind": "adamw", "lr": 1e-2, "ema": {"decay": 0.9}},
        "residency": {"optimizer": "host"},
        "kl": {"coefficient": 0.1},
    },
    "experts": {"model": {"router_loss": "sequence"}, "kl": {"coefficient": 0.1}},
}
FAILURES = {
    "unknown": ("ModelError", "A step of this run would fail where it updates: KeyError: 'branches' Two tiny groups"),
    "memory": ("ModelError", "A step of this run has no memory left where it updates: "),
    "user": ("ConfigError", "Branches are switched off."),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny model."""
    return tiny_directory(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_step_is_the_same_bit_by_bit_however_often_it_was_walked(
    pools: Any, llama: Path, tmp_path: Path, name: str, ranks: int
) -> None:
    directory = tiny_directory(tmp_path / "experts", "mixtral") if name == "experts" else llama
    tree = settings(str(directory), **SECTIONS[name], run={"dir": str(tmp_path / "runs")})

    never, twice = (pools(ranks).run(first_step, tree, ROWS, walks) for walks in (0, 2))

    for one, other in zip(never, twice, strict=True):
        assert other["changed"] == []
        assert other["looked at"] > 150
        assert other["after"] == one["after"]
        assert other["loss"] == one["loss"]
        assert other["said"] == one["said"]


@pytest.mark.cases("all")
@pytest.mark.parametrize("kind", FAILURES)
def test_what_fails_in_the_step_is_one_paragraph_by_its_cause(pools: Any, llama: Path, kind: str) -> None:
    tree = settings(str(llama), rollout={"shared_prefix": "on"})
    expected, words = FAILURES[kind]

    for raised, message in pools(2).errors(without_branches, tree, ROWS, kind):
        assert raised == expected
        assert words in message
        assert "\n" not in message


LONG = {"data": {"max_length": 1200}, "rollout": {"max_new_tokens": 10}}


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny model that reads long texts."""
    return tiny_directory(tmp_path_factory.mktemp("long"), "llama", max_position_embeddings=2048)


def test_a_model_that_gives_something_else_in_pieces_is_found_before_step_1(pools: Any, long_llama: Path) -> None:
    tree = settings(str(long_llama), **LONG)

    sound, faulty = (pools(2).run(walked_with_long_prompts, tree, ROWS, keeps) for keeps in (False, True))

    assert [rank["in pieces"] for rank in sound] == [rank["still"] for rank in sound] == [True, True]
    assert [rank["said"] for rank in sound] == [[], []]
    assert [rank["in pieces"] for rank in faulty] == [False, False], "one rank saw it, and all compute at once"
    ((said,), others) = (rank["said"] for rank in faulty)
    assert said.startswith("rollouts: long prompts are computed at once, since what ")
    assert others == []


def test_looking_at_pieces_changes_nothing_of_a_run(pools: Any, long_llama: Path) -> None:
    looked, short = (
        pools(2).run(walked_with_long_prompts, settings(str(long_llama), **sections), ROWS, False)
        for sections in (LONG, {"data": {"max_length": 600}})
    )

    assert [rank["in pieces"] for rank in short] == [None, None]
    assert [rank["loss"] for rank in looked] == [rank["loss"] for rank in short]
    assert [rank["walked"] for rank in looked] == [rank["walked"] for rank in short]
