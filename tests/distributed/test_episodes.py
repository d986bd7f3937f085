"""An episode trains as the same tokens in one row, of which those count that the policy chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.episode_cases import (
    AGENT,
    sample_with_nan,
    told_in_steps,
    train_on_episodes,
    try_rows,
    update_by_hand,
)
from tests.distributed.grpo_cases import settings
from tests.tiny import tiny_directory, tiny_model

WORLD = """
class World:
    replayable = True
    def begin(self, row):
        self.last = row["turns"]
    def step(self, turn):
        from holdfast.environments.base import Observation
        return Observation("no, " * (1 + turn.number) + "again", 0.0, turn.number + 1 >= self.last)
WORLDS = {"one": World, "two": type("Two", (World,), {})}
"""
MORTAL = WORLD.replace(
    "def begin(self, row):", "def begin(self, row, seed):\n        if seed % 3 == 0: raise OSError(seed)"
)
SLOW = """
import time
class World:
    def begin(self, row):
        time.sleep(600)
    def step(self, turn): ...
"""
ROWS = [
    {
        "prompt": [{"role": "user", "content": "guess " + "abcdefg"[: 1 + row * 3 % 7]}],
        "answer": "a",
        "turns": turns,
        "environment": ("one", "two")[row % 2],
    }
    for row, turns in enumerate([3, 1, 2, 3, 2, 3, 1, 2])
]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_directory(tmp_path_factory.mktemp("gpt2"), "gpt2")  # its norms are float64 in a float64 model
    (folder / "world.py").write_text(WORLD)
    (folder / "mortal.py").write_text(MORTAL)
    (folder / "slow.py").write_text(SLOW)
    return folder


QUOTING = (
    "{% for message in messages %}{% if message.role == 'user' %}<user>{{ message.content }}"
    "{% elif loop.revindex < 3 %}<assistant>{{ message.content }}<eos>"
    "{% else %}<assistant>({{ message.content }})<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Writes turns before the last in brackets, so that every turn after the second begins a sample."""
SPLITS = [
    pytest.param(1, {}, id="1 rank, packed, prompts shared"),
    pytest.param(1, {"rollout": {"shared_prefix": "off"}}, id="1 rank, packed, prompts repeated"),
    pytest.param(1, {"data": {"packing": "none"}}, id="1 rank, padded"),
    pytest.param(2, {"rollout": {"shared_prefix": "on"}}, id="2 ranks, packed, prompts shared"),
    pytest.param(2, {"data": {"packing": "none"}}, id="2 ranks, padded"),
    pytest.param(1, {"data": {"chat_template": QUOTING}}, id="1 rank, split"),
    pytest.param(2, {"data": {"chat_template": QUOTING}}, id="2 ranks, split"),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("ranks", "changes"), SPLITS)
def test_an_episode_is_trained_as_one_row_with_its_mask(
    pools: Any, gpt2: Path, ranks: int, changes: dict[str, Any]
) -> None:
    rollout = {"group_size": 4, "max_new_tokens": 6} | changes.get("rollout", {})
    data = {"batch_size": 4, "max_length": 96} | changes.get("data", {})
    environment = {"path": "world.py:WORLDS", "max_turns": 3, "on_cut": "continue", "history": "split"}
    tree = settings(str(gpt2), steps=2, rollout=rollout, data=data, environment=environment)

    trained = pools(ranks).run(train_on_episodes, tree, ROWS, str(gpt2), 2)[0]
    expected = update_by_hand(tiny_model("gpt2").double(), trained["episodes"], lr=0.5)

    rows = [row for step in trained["episodes"] for row in step]
    assert {row[4] for row in rows} == {1, 2, 3}
    if "chat_template" in data:
        assert len(rows) > 2 * 4 * 4, "an episode is several samples"
    else:
        assert any(not chosen for row in rows for chosen in row[2][row[2].index(True) :]), "something was observed"
    losses, norms = ([line[name] for line in trained["lines"]] for name in ("loss", "grad_norm"))
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(norms, expected["norms"], rtol=1e-10)
    assert set(trained["parameters"]) == set(expected["parameters"])
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(trained["parameters"][name], parameter, rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(("ranks", "packing"), [(1, "best_fit"), (2, "none")])
def test_observed_tokens_take_no_part_in_entropy_and_kl(pools: Any, gpt2: Path, ranks: int, packing: str) -> None:
    """Neither in the loss nor in any mean that a run tells."""
    tree = settings(
        str(gpt2),
        steps=2,
        rollout={"group_size": 4, "max_new_tokens": 6},
        data={"batch_size": 4, "max_length": 96, "packing": packing},
        environment={"path": "world.py:WORLDS", "max_turns": 3, "on_cut": "continue"},
        kl={"coefficient": 0.3},
        entropy={"coefficient": 0.2},
    )

    trained = pools(ranks).run(train_on_episodes, tree, ROWS, str(gpt2), 2)[0]
    expected = update_by_hand(tiny_model("gpt2").double(), trained["episodes"], lr=0.5, kl=0.3, entropy=0.2)

    assert expected["means"][1][1] > 1e-4, "the policy has left its reference"
    told = [[line["entropy"], line["kl"], line["entropy_estimate"]] for line in trained["lines"]]
    np.testing.assert_allclose([line[:2] for line in told], [means[:2] for means in expected["means"]], atol=1e-10)
    np.testing.assert_allclose([line[2] for line in told], [means[2] for means in expected["means"]], rtol=1e-5)
    np.testing.assert_allclose([line["loss"] for line in trained["lines"]], expected["losses"], rtol=0, atol=1e-10)
    np.testing.assert_allclose([line["grad_norm"] for line in trained["lines"]], expected["norms"], rtol=1e-10)
    assert max(line["sampling/sampling_logp_difference/max"] for line in trained["lines"]) < 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_goes_on_without_the_episodes_whose_environment_failed(pools: Any, gpt2: Path, ranks: int) -> None:
    settled = tree(gpt2, "mortal.py:World", max_turns=3, on_cut="continue")
    settled["rollout"] |= {"group_size": 4, "max_new_tokens": 6}

    trained = pools(ranks).run(train_on_episodes, settled, ROWS, str(gpt2), 2)[0]
    expected = update_by_hand(tiny_model("gpt2").double(), trained["episodes"], lr=0.5)

    failed = [line["environment/ended/fault"] for line in trained["lines"]]
    assert [16 - len({row[0] for row in step}) for step in trained["episodes"]] == [16 * share for share in failed]
    assert all(0 < share < 1 for share in failed)
    np.testing.assert_allclose([line["loss"] for line in trained["lines"]], expected["losses"], rtol=0, atol=1e-10)
    np.testing.assert_allclose([line["grad_norm"] for line in trained["lines"]], expected["norms"], rtol=1e-10)


ASKS = """    first = ask(opening)
    ask(opening, first, "again")
    if row["turns"] > 1:
        ask(opening, first, "other way")
    if row["turns"] > 2:
        ask("sum up")
"""
UNMARKED = "{% for message in messages %}{{ message.content }}<eos>{% endfor %}"
"""Conversations that begin otherwise have no first token in common."""


@pytest.mark.cases(1)
@pytest.mark.parametrize(("ranks", "shared_prefix"), [(1, "on"), (2, "auto")])
def test_every_answer_to_an_agent_is_trained_once_in_a_row_with_its_mask(
    pools: Any, gpt2: Path, ranks: int, shared_prefix: str
) -> None:
    (gpt2 / "agent.py").write_text(AGENT + ASKS)
    rollout = {"group_size": 4, "max_new_tokens": 6, "shared_prefix": shared_prefix}
    data = {"batch_size": 4, "max_length": 96, "chat_template": UNMARKED}
    environment = {"kind": "endpoint", "run": "agent.py:agent"}
    tree = settings(str(gpt2), steps=2, rollout=rollout, data=data, environment=environment)

    trained = pools(ranks).run(train_on_episodes, tree, ROWS, str(gpt2), 2)[0]
    expected = update_by_hand(tiny_model("gpt2").double(), trained["episodes"], lr=0.5)

    rows = [row for step in trained["episodes"] for row in step]
    samples = {episode: [row for row in rows if row[0] == episode] for episode in {row[0] for row in rows}}
    assert {(len(several), several[0][4]) for several in samples.values()} == {(1, 2), (2, 3), (3, 4)}
    losses, norms = ([line[name] for line in trained["lines"]] for name in ("loss", "grad_norm"))
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(norms, expected["norms"], rtol=1e-10)
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(trained["parameters"][name], parameter, rtol=0, atol=1e-10, err_msg=name)


def tree(gpt2: Path, path: str, **environment: Any) -> dict[str, Any]:
    data = {"batch_size": 4, "max_length": 96}
    return settings(str(gpt2), steps=1, data=data, environment={"path": path, **environment})


def test_rows_are_tried_where_one_environment_lives_at_a_time(pools: Any, gpt2: Path) -> None:
    (seconds,) = pools(1).run(try_rows, tree(gpt2, "world.py:WORLDS", instances=1), ROWS, str(gpt2), False)

    assert seconds < 5


def test_a_stop_ends_the_trial_of_rows(pools: Any, gpt2: Path) -> None:
    (seconds,) = pools(1).run(try_rows, tree(gpt2, "slow.py:World"), ROWS, str(gpt2), True)

    assert seconds < 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_episodes_of_a_policy_whose_logits_are_nan_stop_the_run(pools: Any, gpt2: Path, ranks: int) -> None:
    said = pools(ranks).run(sample_with_nan, tree(gpt2, "world.py:WORLDS"), ROWS, str(gpt2))

    assert len(set(said)) == 1, "all ranks say the same"
    assert "The policy's logits are not finite (NaN) for 4 prompts of step 1, the first one prompt 0" in said[0]


CALLING = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<bos>{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)
"""Writes calls so that they can be read back, and of tools their names."""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tools", ["tools.py:add", None])
def test_tools_that_no_policy_calls_are_told_with_what_it_wrote(
    pools: Any, gpt2: Path, ranks: int, tools: str | None
) -> None:
    (gpt2 / "tools.py").write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    environment = {"tools": tools} if tools else {"path": "world.py:WORLDS", "max_turns": 2, "on_cut": "continue"}
    data = {"batch_size": 2, "max_length": 96, "chat_template": CALLING}
    rollout = {"group_size": 2, "max_new_tokens": 6}
    settled = settings(str(gpt2), steps=4, rollout=rollout, data=data, environment=environment)

    told = pools(ranks).run(told_in_steps, settled, ROWS, str(gpt2), 4)[0]

    warned = [[line for line in lines if "no tool was called" in line] for lines in told]
    assert [len(lines) for lines in warned] == ([0, 0, 1, 0] if tools else [0] * 4)
    for (line,) in filter(None, warned):
        assert "3 steps" in line
