"""The search of the longest row that fits: what it executes, and that nothing longer would have fitted."""

from __future__ import annotations

import random
from typing import Any

import pytest

from holdfast.features.plan.longest import MOST_EXECUTIONS, Measured, rounded, search
from holdfast.features.plan.records import allowance, room_for_tensors


class Device:
    """Executes steps whose phases take so many bytes and so many more of each token; knows what it has executed."""

    def __init__(self, *phases: tuple[int, float]) -> None:
        self.phases, self.executed = phases, list[int]()

    def __call__(self, tokens: int) -> Measured:
        self.executed.append(tokens)
        found: dict[str, dict[str, Any]] = {}
        for number, (fixed, of_token) in enumerate(self.phases):
            grown = int(of_token * tokens)
            parts = {"parameters": fixed, "activations": grown // 2, "temporary": grown - grown // 2}
            found[f"phase {number}"] = {"total": fixed + grown, "parts": parts}
        return Measured(tokens, found)


def largest(execute: Device, tokens: int) -> int:
    return max(int(peak["total"]) for peak in execute(tokens).phases.values())


@pytest.mark.parametrize("start", [64, 4096, 100_000, 10_000_000])
def test_the_phase_that_fills_the_device_first_decides_wherever_the_search_begins(start: int) -> None:
    """The first phase is the larger one for short rows; of the second, (10^10 - 2 x 10^9) / 10^5 tokens fit."""
    execute = Device((4 * 10**9, 10_000), (2 * 10**9, 100_000))

    answer = search(execute, 10**10, start, 64)

    assert answer.tokens == 79_872  # 78 x 1024, of 80,000
    assert len(execute.executed) <= 3


def test_of_random_phases_the_answer_fits_and_the_next_length_does_not() -> None:
    draw = random.Random(41)
    for _ in range(300):
        execute = Device(*((draw.randrange(10**10), draw.uniform(1, 10**5)) for _ in range(draw.randrange(1, 5))))
        room = max(largest(execute, 64), draw.randrange(10**11))

        executed = len(execute.executed)
        answer = search(execute, room, draw.choice([1, 512, 2**20]), 64).tokens
        assert len(execute.executed) - executed <= MOST_EXECUTIONS

        assert largest(execute, answer) <= room
        assert largest(execute, answer + (1024 if answer >= 8192 else 128)) > room


def test_memory_that_grows_faster_than_its_parts_say_is_found_out_by_executing() -> None:
    """Bytes of attention that grow with the square of the tokens: an estimate goes too far, an execution says so."""

    def execute(tokens: int) -> Measured:
        total = 10**9 + tokens**2
        return Measured(tokens, {"backward": {"total": total, "parts": {"activations": tokens**2}}})

    answer = search(execute, 2 * 10**9, 16_384, 64)

    assert answer.total <= 2 * 10**9
    assert answer.tokens > 0.9 * 31_623  # the root of 10^9


def test_where_the_shortest_row_does_not_fit_it_is_what_is_told() -> None:
    execute = Device((10**9, 1000))

    answer = search(execute, 10**8, 4096, 128)

    assert answer.tokens == 128
    assert answer.total > 10**8


def test_no_more_tokens_are_tried_than_a_model_has_positions() -> None:
    execute = Device((10**9, 1))

    answer = search(execute, 10**12, 1024, 64, most=32_768)

    assert answer.tokens == 32_768
    assert execute.executed == [1024, 32_768]


def test_lengths_are_rounded_down() -> None:
    assert [rounded(tokens) for tokens in (63, 64, 8191, 8192, 100_000)] == [0, 64, 8128, 8192, 99_328]


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_peak_that_fills_the_room_leaves_its_allowance_and_no_more(ranks: int) -> None:
    memory = 79 * 2**30

    room = room_for_tensors(memory, ranks)

    assert room + allowance(room, ranks) <= memory
    assert room + 2 + allowance(room + 2, ranks) >= memory
