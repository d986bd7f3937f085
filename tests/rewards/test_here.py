"""Live functions score in this process as they would in a file's, faults included."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from holdfast.config.sections.reward import RewardPoolConfig
from holdfast.errors import ConfigError
from holdfast.rewards.base import Sample, Scored
from holdfast.rewards.in_process import InProcessRewards
from tests.rewards.conftest import sample, samples, user


def score(*functions: Callable[..., object], of: list[Sample], **options: Any) -> list[Scored]:
    sections = [user(f"given.py:reward_{number}") for number in range(len(functions))]
    return InProcessRewards(functions, sections, RewardPoolConfig.model_validate(options)).score(of)


def letters(completion: str) -> int:
    return len(completion)


def batched(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


async def slow(completion: str) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"score": len(completion) / 2, "vowels": sum(letter in "aeiou" for letter in completion)}


def test_single_batched_and_async_functions_are_summed_with_weight_one() -> None:
    found = score(letters, batched, slow, of=samples("ab", "abc", answer="ab"))

    assert [item.reward for item in found] == [2 + 1 + 1.0, 3 + 0 + 1.5]
    assert found[1].parts == {"reward_0": 3.0, "reward_1": 0.0, "reward_2": 1.5, "reward_2/vowels": 1.0}


def test_an_object_with_a_call_scores() -> None:
    class Longest:
        def __init__(self) -> None:
            self.longest = 0

        def __call__(self, completion: str) -> float:
            self.longest = max(self.longest, len(completion))
            return float(self.longest)

    assert [item.reward for item in score(Longest(), of=samples("ab", "a", "abc"))] == [2.0, 2.0, 3.0]


def moody(completion: str) -> object:
    match completion:
        case "raises":
            raise ValueError("no mood")
        case "text":
            return "1"
        case "nan":
            return math.nan
        case "none":
            return None
    return 1.0


def test_faults_have_the_policies_of_the_section() -> None:
    policies = {"on_error": "drop_group", "on_nan": -1, "on_none": "drop_sample"}

    found = score(moody, of=samples("fine", "raises", "text", "nan", "none"), **policies)

    assert [item.reward for item in found] == [1.0, None, None, -1.0, None]
    assert [item.fault for item in found] == [None, "error", "error", "nan", "none"]
    assert [item.drop for item in found] == [None, "group", "group", None, "sample"]
    assert found[1].message.startswith("reward reward_0 raised ValueError: no mood (test_here.py:")
    assert found[2].message == (
        "reward reward_0 returned a str '1'; a reward is a number, None or a dict; sample 2: 'text'"
    )


def test_one_bad_completion_of_a_batched_function_fails_alone() -> None:
    calls = []

    def strict(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        return [1 / len(text) for text in completions]

    found = score(strict, of=samples("ab", "", "a", "abcd", "ab"), batch_size=3)

    assert [item.reward for item in found] == [0.5, None, 1.0, 0.25, 0.5]
    assert calls == [3, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("answer", "returned"),
    [
        (5, "a int"), ([1.0], "1 value"), (np.ones(3), "3 values"), (None, "None"), ("ab", "a str 'ab'"),
        ((1.0 for _ in "ab"), "a generator"),
    ],
    ids=["number", "too few", "too many", "none", "text", "generator"],
)  # fmt: skip
def test_a_batched_function_that_returns_something_else_is_an_error_of_all(answer: object, returned: str) -> None:
    calls = []

    def odd(completions: list[str]) -> object:
        calls.append(len(completions))
        return answer

    found = score(odd, of=samples("ab", "cd"))

    assert calls == [2]
    assert [(item.reward, item.fault) for item in found] == [(None, "error")] * 2
    assert f"returned {returned} for 2 completions; a batched reward" in found[0].message


def test_functions_of_lists_alone_are_tried_out() -> None:
    sections = [user("given.py:a"), user("given.py:b")]
    here = InProcessRewards([letters, lambda completions: [len(completions)]], sections, RewardPoolConfig())

    assert {label: [each.is_malformed for each in of] for label, of in here.try_out(samples("a", "b")).items()} == {
        "b": [True, True]
    }


def leaves(completion: str) -> float:
    return sys.exit("enough") if completion == "exit" else 1.0


async def leaves_later(completion: str) -> float:
    await asyncio.sleep(0)
    if completion == "cancel":
        raise asyncio.CancelledError
    return leaves(completion)


def leaves_as_one(completions: list[str]) -> list[float]:
    return [leaves(completion) for completion in completions]


@pytest.mark.parametrize("function", [leaves, leaves_later, leaves_as_one])
def test_a_function_that_leaves_the_program_is_an_error(function: Callable[..., object]) -> None:
    found = score(function, of=samples("fine", "exit", "fine"))

    assert [(item.reward, item.fault) for item in found] == [(1.0, None), (None, "error"), (1.0, None)]
    assert "raised SystemExit: enough" in found[1].message


def test_a_cancelled_coroutine_is_an_error() -> None:
    assert [item.fault for item in score(leaves_later, of=samples("fine", "cancel"))] == [None, "error"]


def test_an_array_is_a_list() -> None:
    def array(completions: list[str]) -> np.ndarray:
        return np.array([len(text) for text in completions])

    assert [item.reward for item in score(array, of=samples("ab", "c"))] == [2.0, 1.0]


def test_draws_repeat_and_the_runs_own_generators_stay() -> None:
    def drawn(completion: str) -> float:  # noqa: ARG001 - a signature
        return random.random() + np.random.rand()  # noqa: NPY002

    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    first = [item.reward for item in score(drawn, of=samples("a", "b"))]
    after = (random.random(), np.random.rand())  # noqa: NPY002
    second = [item.reward for item in score(drawn, of=samples("a", "b"))]
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002

    assert first == second
    assert first[0] != first[1]
    assert after == (random.random(), np.random.rand())  # noqa: NPY002


def test_an_async_function_scores_where_a_loop_runs_already() -> None:
    async def notebook() -> list[Scored]:
        return score(slow, of=[sample("abcd")])

    assert asyncio.run(notebook())[0].reward == 2.0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (dict, "reward reward_0 is the class dict. Pass an object of it; its __call__ scores."),
        (3, "reward reward_0 is 3, which cannot be called. Pass a function."),
        (lambda: 1, "reward reward_0: it takes no named parameter, so it sees nothing. Give it one, for example "
                    "completion."),
    ],
)  # fmt: skip
def test_what_cannot_score_is_refused(function: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        score(function, of=[])

    assert str(raised.value) == said
