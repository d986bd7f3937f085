"""A group, a step and a run go on without the episodes that failed, wherever they failed, and count them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.rollout.sampling import mixed
from tests.distributed.episode_cases import AGENT, train_on_episodes, update_by_hand
from tests.distributed.grpo_cases import settings
from tests.tiny import tiny_directory, tiny_model

WORLD = """
class World:
    replayable = True
    def begin(self, row, seed):
        self.fault = row["faults"].get(str(seed))
        if self.fault == "begin":
            raise OSError("begin")
    def step(self, turn):
        from holdfast.environments.base import Observation
        if (self.fault, turn.number) in {("middle", 0), ("end", 1)}:
            raise OSError("step")
        return Observation("again", 0.0, turn.number == 1 and self.fault != "cut")
"""
ASKS = """    if row["fault"] == "begin":
        raise OSError("begin")
    first = ask(opening)
    if row["fault"] == "middle" or row["fault"] == "some" and sum(map(ord, first)) % 2:
        raise OSError("middle")
    ask(opening, first, "again")
    if row["fault"] == "end":
        raise OSError("end")
"""
FAULTS = ("begin", "begin", "middle", "end", "cut")
"""Half of what goes wrong leaves an episode without a token."""
SIZE, PROMPTS = 4, 4
AFFECTED = (
    [{0: 1}, {1: SIZE // 2}, {2: SIZE}],
    [{0: SIZE // 2, 1: SIZE // 2, 2: SIZE // 2, 3: SIZE // 2}, dict.fromkeys(range(PROMPTS), SIZE), {3: SIZE - 1}],
)
"""Per run and step: how many episodes of each prompt go wrong."""


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_directory(tmp_path_factory.mktemp("gpt2"), "gpt2")  # its norms are float64 in a float64 model
    (folder / "world.py").write_text(WORLD)
    (folder / "agent.py").write_text(AGENT + ASKS)
    return folder


def prompt_of(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "guess " + "abcdefg"[: 1 + number * 3 % 7]}]


def rows_of(steps: list[dict[int, int]], seed: int) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Return the rows of a run, and what goes wrong in each of its steps."""
    generator, rows, faults = np.random.default_rng(seed), [], []
    for step, counts in enumerate(steps):
        faults.append([])
        for prompt in range(PROMPTS):
            number = step * PROMPTS + prompt
            places = generator.permutation(SIZE)[: counts.get(prompt, 0)]
            drawn = {str(mixed(7, step, number, int(place))): str(generator.choice(FAULTS)) for place in places}
            rows.append({"prompt": prompt_of(number), "answer": "a", "faults": drawn})
            faults[-1] += drawn.values()
    return rows, faults


def compare(trained: dict[str, Any], expected: dict[str, Any]) -> None:
    losses, norms = ([line[name] for line in trained["lines"]] for name in ("loss", "grad_norm"))
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(norms, expected["norms"], rtol=1e-10)
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(trained["parameters"][name], parameter, rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.cases("pairs")
@pytest.mark.parametrize("shared_prefix", ["on", "off"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("run", "truncated"), [(0, "mask"), (1, "drop")])
def test_episodes_that_fail_or_are_cut_change_nothing_of_the_others(
    pools: Any, gpt2: Path, run: int, truncated: str, ranks: int, shared_prefix: str
) -> None:
    """One, half or all of a group, and half or all of a step, at seeded places."""
    rows, faults = rows_of(AFFECTED[run], seed=run)
    tree = settings(
        str(gpt2),
        steps=len(faults),
        seed=7,
        rollout={"group_size": SIZE, "max_new_tokens": 6, "shared_prefix": shared_prefix},
        data={"batch_size": PROMPTS, "max_length": 96, "tokens_per_micro_batch": 256},
        environment={"path": "world.py:World", "max_turns": 2, "on_cut": "continue"},
        groups={"truncated": truncated},
    )

    trained = pools(ranks).run(train_on_episodes, tree, rows, str(gpt2), len(faults))[0]
    counted = [[row for row in step if truncated == "mask" or any(row[2])] for step in trained["episodes"]]
    expected = update_by_hand(tiny_model("gpt2").double(), counted, lr=0.5)

    whole = SIZE * PROMPTS
    for line, wrong, step in zip(trained["lines"], faults, trained["episodes"], strict=True):
        failed = [fault for fault in wrong if fault != "cut"]
        assert line["rollout/completions"] == whole
        assert line["environment/ended/fault" if failed else "reward/error"] == len(failed) / (whole if failed else 1)
        assert line["reward/error"] == len(failed)
        assert line.get("environment/ended/turns", 0.0) == wrong.count("cut") / whole
        assert (line["completions/min_length"] == 0) == ("begin" in wrong)
        assert (len(step), sum(not any(row[2]) for row in step)) == (whole - len(failed), wrong.count("cut"))
    compare(trained, expected)


@pytest.mark.parametrize(("ranks", "shared_prefix"), [(1, "on"), (2, "off"), (2, "on")])
def test_agents_that_fail_change_nothing_of_the_others(pools: Any, gpt2: Path, ranks: int, shared_prefix: str) -> None:
    """Before they ask, between two calls, and after the last one; of a group some or all, and all of a step."""
    faults = [["", "begin", "some", "middle"], ["begin"] * 4, ["end", "some", "", "begin"]]
    rows = [
        {"prompt": prompt_of(number), "answer": "a", "fault": fault}
        for number, fault in enumerate(fault for step in faults for fault in step)
    ]
    tree = settings(
        str(gpt2),
        steps=len(faults),
        rollout={"group_size": SIZE, "max_new_tokens": 6, "shared_prefix": shared_prefix},
        data={"batch_size": PROMPTS, "max_length": 96, "tokens_per_micro_batch": 256},
        environment={"kind": "endpoint", "run": "agent.py:agent"},
    )

    trained = pools(ranks).run(train_on_episodes, tree, rows, str(gpt2), len(faults))[0]
    expected = update_by_hand(tiny_model("gpt2").double(), trained["episodes"], lr=0.5)

    failed = [line["reward/error"] for line in trained["lines"]]
    assert 8 < failed[0] < 12
    assert failed[1] == 16
    assert 8 < failed[2] < 12
    assert failed == [16 * line["environment/ended/fault"] for line in trained["lines"]]
    assert [16 - len({row[0] for row in step}) for step in trained["episodes"]] == failed
    compare(trained, expected)
