"""Generated tasks: exact answers, wrong ones on purpose, the same rows everywhere."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from holdfast.config.sections.data import SyntheticConfig
from holdfast.data.tasks.synthetic import KeyedRandom, SyntheticSource, check_answer

TASKS = get_args(SyntheticConfig.model_fields["task"].annotation)


def source(task: str, **options: Any) -> SyntheticSource:
    return SyntheticSource(SyntheticConfig.model_validate({"task": task, **options}))


def solve(row: Mapping[str, Any]) -> Any:
    """Answer from the prompt's text alone."""
    prompt = row["prompt"]
    if match := re.fullmatch(r"sort (\d+)=", prompt):
        return "".join(sorted(match[1]))
    if match := re.fullmatch(r"reverse ([a-z]+)=", prompt):
        return match[1][::-1]
    if match := re.fullmatch(r"(\d+)\+(\d+)=", prompt):
        return str(int(match[1]) + int(match[2])).rjust(len(match[1]) + 1, "0")
    raise AssertionError(prompt)


@pytest.mark.parametrize("task", ["sort", "reverse", "add"])
def test_the_answer_is_what_the_prompt_asks_for(task: str) -> None:
    for row in source(task, rows=300).scan(0):
        assert row["answer"] == row["completion"] == solve(row)
        assert check_answer(row, row["answer"])
        assert not check_answer(row, row["answer"] + "0")


def test_a_countdown_answer_reaches_the_target_with_each_number_once() -> None:
    for row in source("countdown", rows=300).scan(0):
        match = re.fullmatch(r"([\d,]+):(\d+)=", row["prompt"])
        assert match is not None
        numbers, target = sorted(map(int, match[1].split(","))), int(match[2])
        assert sorted(map(int, re.findall(r"\d+", row["answer"]))) == numbers == sorted(row["numbers"])
        assert eval(row["answer"], {}, {}) == target == row["target"] >= 0
        assert check_answer(row, row["completion"])


@pytest.mark.parametrize(
    ("expression", "right"),
    [
        ("7-3+5", True),
        ("5+7-3", True),
        ("7+5+3", False),
        ("9", False),
        ("7-3+5+0", False),
        ("7+2", False),
        ("-3+7+5", False),
        ("7 - 3 + 5", False),
        ("(7-3)+5", False),
        ("7-3+5=9", False),
        ("7-3+٥", False),
        ("", False),
    ],
)
def test_countdown_takes_any_right_expression_and_no_wrong_one(expression: str, right: bool) -> None:
    row = {"prompt": "3,5,7:09=", "answer": "7-3+5", "numbers": [3, 5, 7], "target": 9}

    assert check_answer(row, expression) is right


@pytest.mark.parametrize("task", TASKS)
def test_lengths_stay_in_their_range_and_reach_both_ends(task: str) -> None:
    column = {"sort": "digits", "reverse": "letters", "countdown": "numbers", "shapes": "shapes"}.get(task)
    rows = list(source(task, rows=200, min_length=2, max_length=4).scan(0))

    lengths = [len(row[column]) if column else len(row["answer"]) - 1 for row in rows]

    assert set(lengths) == {2, 3, 4}


@pytest.mark.parametrize("task", TASKS)
def test_noise_spoils_its_share_of_completions_and_no_question_or_answer(task: str) -> None:
    clean, noisy = source(task, rows=2000), source(task, rows=2000, noise=0.3)

    wrong = 0
    for index in range(2000):
        row = noisy.row(index)
        assert {**row, "completion": ""} == {**clean.row(index), "completion": ""}
        wrong += not check_answer(row, row["completion"])

    # The standard deviation of the share is 0.0102.
    assert abs(wrong / 2000 - 0.3) < 0.04


def test_full_noise_spoils_every_completion_even_where_shuffling_cannot() -> None:
    for task in TASKS:
        for row in source(task, rows=300, noise=1.0, min_length=1, max_length=2).scan(0):
            assert not check_answer(row, row["completion"]), row
            assert check_answer(row, row["answer"])


@pytest.mark.parametrize("task", TASKS)
def test_a_preference_pair_has_the_rows_question_a_right_and_a_wrong_answer(task: str) -> None:
    rows = source(task, rows=200)

    for index in range(200):
        row, pair = rows.row(index), rows.preference_pair(index)
        assert pair["prompt"] == row["prompt"]
        assert check_answer(row, pair["chosen"])
        assert not check_answer(row, pair["rejected"])


AREAS = {"circle": 88, "square": 100, "cross": 112, "bar": 56}
"""Pixels that each shape covers, counted on paper."""


def test_a_picture_shows_what_the_answer_says() -> None:
    for row in source("shapes", rows=100, min_length=1, max_length=3).scan(0):
        assert row["prompt"].count("<image>") == len(row["images"]) == 1
        pixels = np.asarray(Image.open(io.BytesIO(row["images"][0])), dtype=np.int64)
        names = row["answer"].split(", ")
        assert pixels.shape == (16, 16 * len(names), 3)
        for cell, name in zip(np.split(pixels, len(names), axis=1), names, strict=True):
            colour, shape = name.split()
            covered = cell[(cell.max(2) >= 120) | (cell.max(2) - cell.min(2) > 0)]
            assert len(covered) == AREAS[shape], name
            strongest = {"red": 0, "green": 1, "blue": 2}.get(colour)
            same = (covered.max(1) == covered.min(1)).all()
            assert same if strongest is None else (covered.argmax(1) == strongest).all(), name


def test_pairs_and_labels_show_the_picture_of_their_question() -> None:
    plain, pairs, labels = (
        SyntheticSource(SyntheticConfig(task="shapes"), rows) for rows in ("answers", "pairs", "labels")
    )

    for number in range(20):
        row, pair, labelled = plain.row(number), pairs.row(number), labels.row(number)
        assert pair["images"] == labelled["images"] == row["images"]
        assert pair["chosen"] == row["answer"] != pair["rejected"]
        assert labelled["label"] == (labelled["completion"] == row["answer"])


def test_rows_never_change() -> None:
    assert source("sort").row(0) == {
        "prompt": "sort 093073=", "completion": "003379", "answer": "003379", "digits": "093073",
    }  # fmt: skip
    assert source("add", noise=0.5).row(0) == {
        "prompt": "03970+64989=", "completion": "068968", "answer": "068959", "terms": [3970, 64989],
    }  # fmt: skip
    assert source("countdown").preference_pair(0) == {
        "prompt": "4,6,1,8,1:12=", "chosen": "8+1+6-4+1", "rejected": "1+4+6-8+1",
    }  # fmt: skip


def test_a_row_depends_on_seed_and_number_alone() -> None:
    rows = source("reverse", rows=50)
    backwards = [rows.row(index) for index in reversed(range(50))]

    assert backwards[::-1] == list(rows.scan(0)) == list(source("reverse", rows=5000).scan(0))[:50]
    assert list(rows.scan(47)) == [rows.row(47), rows.row(48), rows.row(49)]
    assert source("reverse", rows=50, seed=1).row(0) != rows.row(0)
    with pytest.raises(IndexError):
        rows.row(50)


def test_the_fingerprint_follows_the_configuration() -> None:
    fingerprints = {
        source("sort").fingerprint,
        source("sort", seed=1).fingerprint,
        source("sort", noise=0.5).fingerprint,
        source("reverse").fingerprint,
    }

    assert len(fingerprints) == 4
    assert source("sort").fingerprint in fingerprints


def test_draws_are_uniform() -> None:
    draws = KeyedRandom("uniform")
    counts = [0] * 10

    for _ in range(10_000):
        counts[draws.below(10)] += 1

    # Chi-square with 9 degrees of freedom: 27.9 is passed once in 1,000 seeds.
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 27.9


def test_a_shuffle_reaches_every_order_equally_often() -> None:
    draws = KeyedRandom("orders")
    orders: dict[str, int] = {}

    for _ in range(6000):
        order = "".join(draws.shuffled("abc"))
        orders[order] = orders.get(order, 0) + 1

    # Chi-square with 5 degrees of freedom: 20.5 is passed once in 1,000 seeds.
    assert len(orders) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in orders.values()) < 20.5
