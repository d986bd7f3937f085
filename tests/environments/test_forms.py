"""Environments in the forms of TRL and of gymnasium, in their processes, unchanged."""

from __future__ import annotations

import pytest

from holdfast.environments.base import StepResult, ToolCall, Turn
from holdfast.environments.pool import EnvironmentPool
from holdfast.errors import ConfigError, DataError
from tests.environments.conftest import Start

OF_TRL = '''
    import asyncio
    class Counter:
        def __init__(self, start=0):
            self.start = start
        def reset(self, **row):
            self.count = self.start
            return " with " + ", ".join(sorted(row))
        def add(self, number: int) -> dict:
            """Add.

            Args:
                number: What.
            """
            self.count += number
            return {"count": self.count}
    class Slow:
        def reset(self, prompt, **row):
            self.lock = None
            return " slowly"
        async def wait(self, seconds: float) -> str:
            """Wait.

            Args:
                seconds: How long.
            """
            self.lock = self.lock or asyncio.Lock()
            async with self.lock:
                await asyncio.sleep(seconds)
            return "waited"
        async def get_reward(self):
            return 0.25
    def counting():
        return Counter(5)
    World = {"count": counting, "slow": Slow}
'''


def result(pool: EnvironmentPool) -> StepResult:
    (answer,) = pool.answers(None)
    assert answer.result is not None, answer.message
    return answer.result


def called(pool: EnvironmentPool, *calls: ToolCall) -> list[str]:
    pool.take(0, Turn(0, "", calls))
    return [str(message["content"]) for message in result(pool).messages]


def test_a_row_names_its_environment_of_several(start: Start) -> None:
    pool = start(OF_TRL)

    names = {name: [tool["function"]["name"] for tool in tools] for name, tools in pool.tools.items()}
    assert names == {"count": ["add"], "slow": ["wait"]}
    assert pool.tools_of({"environment": "slow"}, "Row 1")[0]["function"]["name"] == "wait"
    with pytest.raises(DataError, match="Row 1 has environment 'fast', and there is count, slow. Correct the row"):
        pool.kind_of({"environment": "fast"}, "Row 1")
    with pytest.raises(DataError, match="Row 1 has no column environment, and there is count, slow"):
        pool.kind_of({}, "Row 1")


def test_whether_a_turn_without_calls_is_answered_is_known_of_each_environment(start: Start) -> None:
    source = """
    class Talks:
        def begin(self, row): ...
        def step(self, turn): ...
        def add(self, a: int) -> int: return a
    class Calls:
        def begin(self, row): ...
        def add(self, a: int) -> int: return a
    World = {"talks": Talks, "calls": Calls, "made": lambda: Talks()}
    """

    assert start(source).answering == {"talks", "made"}
    assert start(OF_TRL).answering == frozenset()


def test_an_environment_of_trl_is_told_what_trl_tells_it(start: Start) -> None:
    """It adds without looking at types, what it returns is written as Python writes it, and errors are dictionaries."""
    pool = start(OF_TRL)
    pool.begin(0, {"environment": "count", "prompt": "go", "answer": 3}, 5)
    assert result(pool).messages[0]["content"] == " with answer, prompt"

    said = called(pool, ToolCall("add", {"number": 2}), ToolCall("add", {"number": 0.5}))
    wrong = called(pool, ToolCall("sub", {}), ToolCall("add", {"number": "x"}), ToolCall("add", {}))

    assert said == ["{'count': 7}", "{'count': 7.5}"]
    assert wrong[0] == "{'error': 'Tool sub not found.'}"
    assert wrong[1].startswith("{'error': \"unsupported operand type(s) for +=")
    assert wrong[2].startswith("{'error': \"Counter.add() missing 1 required positional argument")


def test_coroutines_of_an_episode_share_a_loop(start: Start) -> None:
    pool = start(OF_TRL)
    pool.begin(0, {"environment": "slow", "prompt": "go"}, 5)
    assert result(pool).messages[0]["content"] == " slowly"

    assert called(pool, ToolCall("wait", {"seconds": 0.01})) == ["waited"]
    assert called(pool, ToolCall("wait", {"seconds": 0.01})) == ["waited"]
    pool.take(0, Turn(2, "done"))
    assert (ended := result(pool)).done
    assert ended.reward == 0.25


GYM = """
    import gymnasium
    MOVES = ("left", "down", "right", "up")
    def parse(text):
        return MOVES.index(text.strip())
    def number(text):
        return int(text)
"""


def test_frozen_lake_is_played_by_words(start: Start) -> None:
    """On the map of 4 x 4 that does not slip, down, down, right, right, down, right reaches the goal."""
    pytest.importorskip("gymnasium")
    kwargs = {"id": "FrozenLake-v1", "is_slippery": False}
    pool = start(GYM, path="gymnasium:make", kwargs=kwargs, action="world.py:parse")
    pool.begin(0, {"prompt": "play"}, 5)
    seen = [result(pool)]

    for number, word in enumerate(["down", "jump", "down", "right", "right", "down", "right"]):
        pool.take(0, Turn(number, word))
        seen.append(result(pool))

    assert pool.tools == {"": ()}
    assert pool.replayable
    assert pool.answering == {""}
    contents = [step.messages[0]["content"] for step in seen]
    assert contents[:2] + contents[3:] == ["0", "4", "8", "9", "10", "14", "15"]
    assert contents[2] == "error: ValueError: tuple.index(x): x not in tuple"
    assert [step.reward for step in seen] == [0] * 7 + [1.0]
    assert [step.done for step in seen] == [False] * 7 + [True]
    assert [step.failed_calls for step in seen] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert seen[1].info == {"prob": 1.0}


def test_blackjack_is_dealt_by_the_seed_of_the_row(start: Start) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    pool = start(GYM, path="gymnasium:make", kwargs={"id": "Blackjack-v1"}, action="world.py:number")
    world = gymnasium.make("Blackjack-v1")

    hands = []
    for episode, (row, seed) in enumerate([({"seed": 3}, 8), ({"seed": 3}, 9), ({}, 9)]):
        pool.begin(episode, row, seed)
        hands.append(result(pool).messages[0]["content"])
    pool.take(0, Turn(0, "2"))
    refused = result(pool)
    pool.take(0, Turn(1, "0"))
    stuck = result(pool)

    expected, _ = world.reset(seed=3)
    _, reward, ended, _, _ = world.step(0)
    assert hands[0] == hands[1] == str(tuple(map(int, expected)))
    assert hands[2] == str(tuple(map(int, world.reset(seed=9)[0])))
    assert refused.messages[0]["content"] == "error: '2' is no action of Discrete(2)"
    assert (stuck.reward, stuck.done) == (reward, ended) == (reward, True)


def test_a_map_in_text_is_what_the_policy_reads(start: Start) -> None:
    pytest.importorskip("gymnasium")
    kwargs = {"id": "FrozenLake-v1", "render_mode": "ansi"}
    pool = start(GYM, path="gymnasium:make", kwargs=kwargs, action="world.py:parse")
    pool.begin(0, {}, 5)

    assert "FHFH" in result(pool).messages[0]["content"]


def test_what_cannot_be_adapted_is_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match="World in .* has no reset and step, and action is of environments of gym"):
        start(GYM.replace("import gymnasium", "") + "\n    class World: ...", action="world.py:parse")
    with pytest.raises(ConfigError, match="is an environment of gymnasium, which takes actions, and a turn is text"):
        start("class World:\n    action_space = None\n    def reset(self, seed): ...\n    def step(self, action): ...")
