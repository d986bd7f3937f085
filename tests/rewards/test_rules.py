"""The built-in formulas against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config.sections.data import SyntheticConfig
from holdfast.config.sections.reward import (
    CodeConfig,
    CountdownConfig,
    ExactConfig,
    FormatConfig,
    JudgeConfig,
    LengthConfig,
    OverlongConfig,
    RepetitionConfig,
    Reward,
)
from holdfast.data.tasks.synthetic import SyntheticSource, check_answer
from holdfast.rewards.base import Sample
from holdfast.rewards.functions.rules import rule
from tests.rewards.conftest import Start, sample


def score(reward: Reward, each: Sample) -> Any:
    return rule(reward.model_dump())(each)


def of_tokens(*tokens: int) -> Sample:
    return Sample(0, "", "", [], list(tokens), "stop", {})


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [(" 42\n", "42", 1.0), ("42", 42, 1.0), ("42", 42.0, 1.0), ("4.2", 4.2, 1.0), ("42.", "42", 0.0), ("", "42", 0.0)],
)
def test_exact_compares_the_stripped_completion(completion: str, answer: object, expected: float) -> None:
    assert score(ExactConfig(), sample(completion, answer=answer)) == expected


def test_exact_takes_another_column() -> None:
    assert score(ExactConfig(column="solution"), sample("b", solution="b", answer="a")) == 1.0


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("3+4-5", 1.0),
        (" 4 - 5 + 3 ", 1.0),
        ("3+4-05", 1.0),
        ("(3+4)-5", 1.0),
        ("3+4+5", 0.0),
        ("2", 0.0),
        ("7-5", 0.0),
        ("3+4-5+5-5", 0.0),
        ("3+4-5 or 1", 0.0),
        ("__import__('os')", 0.0),
        ("3**4", 0.0),
        ("3+4-", 0.0),
        ("3/0+4-5", 0.0),
        ("(" * 150, 0.0),
        ("", 0.0),
    ],
)
def test_countdown_accepts_any_right_expression(expression: str, expected: float) -> None:
    assert score(CountdownConfig(), sample(expression, numbers=[3, 4, 5], target=2)) == expected


@pytest.mark.parametrize(("expression", "target"), [("(1+2)*4", 12), ("4/2*1", 2), ("4/(1-2)", -4), ("1/2*4", 2)])
def test_countdown_multiplies_and_divides_without_rounding(expression: str, target: int) -> None:
    numbers = [int(digit) for digit in expression if digit.isdigit()]

    assert score(CountdownConfig(), sample(expression, numbers=numbers, target=target)) == 1.0
    assert score(CountdownConfig(), sample(expression, numbers=numbers, target=target + 1)) == 0.0


def test_countdown_and_exact_agree_with_the_generated_tasks() -> None:
    for task, reward in (("countdown", CountdownConfig()), ("sort", ExactConfig()), ("add", ExactConfig())):
        source = SyntheticSource(SyntheticConfig(task=task, rows=50, noise=0.5))
        rows = [dict(source.row(place)) for place in range(50)]

        found = [score(reward, sample(row["completion"], **row)) for row in rows]

        assert found == [float(check_answer(row, row["completion"])) for row in rows]
        assert 0 < sum(found) < 50


@pytest.mark.parametrize(
    ("mode", "completion", "expected"),
    [
        ("fullmatch", "<think>a\nb</think> 4", 1.0),
        ("fullmatch", "x <think>a</think> 4", 0.0),
        ("search", "x <think>a</think> 4 y", 1.0),
        ("search", "x <think>a 4", 0.0),
    ],
)
def test_format_matches_the_whole_or_a_part(mode: Any, completion: str, expected: float) -> None:
    assert score(FormatConfig(regex="<think>.*</think> [0-9]", mode=mode), sample(completion)) == expected


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (5, 0.5), (10, 1.0), (12, 0.8), (20, 0.0), (50, 0.0)])
def test_length_falls_in_a_line_around_the_target(length: int, expected: float) -> None:
    assert score(LengthConfig(target=10), of_tokens(*range(length))) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("length", "expected"), [(2, 0.0), (3, 1.0), (5, 1.0), (6, 0.0)])
def test_length_is_1_inside_the_range(length: int, expected: float) -> None:
    assert score(LengthConfig(min=3, max=5), of_tokens(*range(length))) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((1, 2, 3, 4), 0.0),
        ((1, 2, 1, 2, 1), -0.5 * 2),  # 12 21 12 21: two of four occurred before; penalty 2
        ((7, 7, 7, 7), -2 * 2 / 3),  # three times 77
        ((1,), 0.0),
        ((), 0.0),
    ],
)
def test_repetition_is_the_share_of_ngrams_seen_before(tokens: tuple[int, ...], expected: float) -> None:
    assert score(RepetitionConfig(ngram=2, penalty=2.0), of_tokens(*tokens)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (21, -1.0), (500, -1.0)]
)
def test_overlong_is_equation_13_of_dapo(length: int, expected: float) -> None:
    assert score(OverlongConfig(max_length=20, cache=4), of_tokens(*range(length))) == expected


def test_every_rule_works_in_a_worker(start: Start) -> None:
    rewards = [
        ExactConfig(weight=2.0),
        FormatConfig(regex="[0-9]+"),
        LengthConfig(min=2),
        RepetitionConfig(),
        OverlongConfig(max_length=4, cache=4),
        CountdownConfig(weight=0.0),
    ]

    found = start("", *rewards).score([sample("12", answer="12", numbers=[3, 4], target=7)])[0]

    assert found.parts == {
        "exact": 1.0, "format": 1.0, "length": 1.0, "repetition": 0.0, "overlong": -0.5, "countdown": 0.0
    }  # fmt: skip
    assert found.reward == 2.0 + 1.0 + 1.0 - 0.5


def test_a_pool_knows_the_columns_that_rules_look_at(start: Start) -> None:
    judge = JudgeConfig(url="http://localhost:1/v1", model="m", prompt="{prompt} {completion} {gold} {gold} {not this}")
    rewards = [ExactConfig(column="gold"), CountdownConfig(), LengthConfig(min=2), CodeConfig(), judge]

    assert start("", *rewards).columns == {
        "exact": ("gold",), "countdown": ("numbers", "target"), "length": (), "code": ("tests",), "judge": ("gold",)
    }  # fmt: skip


def test_a_missing_column_is_told_with_those_that_are_there(start: Start) -> None:
    found = start("", ExactConfig()).score([sample("12", solution="12", level=3)])[0]

    assert (found.reward, found.fault, found.drop) == (None, "error", "sample")
    assert "the row has no column answer; it has solution, level" in found.message
