"""Prompts that a thread reads during an update change nothing that is handed out or saved."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from holdfast.data.batches.ahead import ReadAhead, StreamAhead
from holdfast.data.batches.candidates import CandidateReader
from holdfast.data.batches.stream import PromptStream
from holdfast.data.tokens.chat import Tokenised
from holdfast.errors import DataError, RunStopped
from holdfast.types import Prompt
from tests.batching.sources import indexed, streamed
from tests.batching.streams import Alone
from tests.batching.streams import stream as sample_stream
from tests.batching.test_ahead import Ours

ROWS = 4


def as_prompt(row: Any, sample_id: int, source: str, _: str) -> Tokenised[Any]:
    return Tokenised((Prompt(sample_id, np.arange(row["number"] + 1), "", dict(row), source),), {}, lengths=(1,))


def prompts(source: Any, tokenise: Any = as_prompt, **data: Any) -> PromptStream:
    like = sample_stream(source, **({"shuffle": True} | data))
    rows: Any = CandidateReader(like.rows.reader, tokenise, Alone())
    return PromptStream(rows, like._config)


def ahead(inner: PromptStream, last: int | None = None, minutes: float = 1.0, said: Any = None) -> StreamAhead[Any]:
    tell = said.extend if said is not None else lambda _: None
    return StreamAhead(inner, ReadAhead(Alone(), Ours(), last, minutes, tell))


def numbers(batch: Any) -> list[int] | None:
    return None if batch is None else [prompt.row["number"] for prompt in batch.own_prompts]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("source", [indexed, streamed])
def test_any_order_of_calls_gives_the_prompts_and_states_of_a_stream_without_a_thread(source: Any, seed: int) -> None:
    drawn, plain, found = random.Random(seed), prompts(source(31)), ahead(prompts(source(31)))
    step = 0
    for _ in range(60):
        match drawn.choice(["next", "next", "more", "begin", "begin", "peek", "load"]):
            case "next":
                assert numbers(found.next(step, ROWS)) == numbers(plain.next(step, ROWS))
                step += 1
            case "more":  # a further round of the same step, of other rows
                assert numbers(found.next(step, 2)) == numbers(plain.next(step, 2))
            case "begin":
                found.begin(step, ROWS, batches := drawn.randint(1, 3))
                if drawn.random() < 0.5:
                    assert numbers(found.read_ahead(step, ROWS, batches)) == numbers(
                        plain.read_ahead(step, ROWS, batches)
                    )
            case "peek":
                batches = drawn.randint(1, 3)
                assert numbers(found.read_ahead(step, ROWS, batches)) == numbers(plain.read_ahead(step, ROWS, batches))
            case "load":
                found.load_state(found.state())
        assert found.epoch == plain.epoch
        assert found.state() == plain.state()


def test_what_is_being_read_shows_in_no_state() -> None:
    gate, reached = threading.Event(), threading.Event()

    def waits(row: Any, *others: Any) -> Tokenised[Any]:
        if row["number"] == 6:
            reached.set()
            gate.wait(60)
        return as_prompt(row, *others)

    plain, found = prompts(indexed(31), shuffle=False), ahead(prompts(indexed(31), waits, shuffle=False))
    plain.next(0, ROWS), found.next(0, ROWS)
    found.begin(1, ROWS)
    assert reached.wait(30)

    state = found.state(), found.epoch, found.rows_tokenised
    gate.set()
    found.settle()

    assert state == (plain.state(), plain.epoch, plain.rows_tokenised)
    assert found.state() == plain.state()
    assert numbers(found.next(1, ROWS)) == [4, 5, 6, 7]


def test_a_thread_reads_what_was_begun_once() -> None:
    readers: list[tuple[int, str]] = []

    def noted(row: Any, *others: Any) -> Tokenised[Any]:
        readers.append((row["number"], threading.current_thread().name))
        return as_prompt(row, *others)

    found = ahead(prompts(indexed(31), noted, shuffle=False))
    found.next(0, ROWS)
    found.begin(1, ROWS)
    found.next(1, ROWS)

    assert readers == [(n, "MainThread") for n in range(4)] + [(n, "holdfast-rows") for n in range(4, 8)]


def test_a_bad_row_is_an_error_of_the_step_that_asks_for_it_and_counts_once_where_it_is_skipped() -> None:
    def refuse(row: Any, sample_id: int, source: str, name: str) -> Tokenised[Any]:
        if row["number"] == 6:
            raise DataError(f"{name} has no number.")
        return as_prompt(row, sample_id, source, name)

    found = ahead(prompts(indexed(31), refuse, shuffle=False))
    found.next(0, ROWS)
    state = found.state()
    found.begin(1, ROWS)
    found.settle()
    for _ in range(2):
        with pytest.raises(DataError, match=r"rows row 6 has no number\."):
            found.next(1, ROWS)
        assert found.state() == state

    said: list[str] = []
    inner = prompts(indexed(31), refuse, shuffle=False)
    inner.rows._skip = inner.rows.notes.append
    skipping = ahead(inner, said=said)
    skipping.next(0, ROWS)
    skipping.begin(1, ROWS)
    skipping.settle()
    assert (said, skipping.bad_rows) == ([], 0)
    assert numbers(skipping.next(1, ROWS)) == [4, 5, 7, 8]
    assert (said, skipping.bad_rows) == (["rows row 6 has no number."], 1)


def test_no_prompt_is_read_behind_the_last_step() -> None:
    inner = prompts(indexed(31))
    found = ahead(inner, last=1)

    found.next(0, ROWS)
    found.begin(1, ROWS)
    found.settle()

    assert inner.rows_tokenised == ROWS


def hanging(minutes: float) -> tuple[StreamAhead[Any], threading.Event]:
    """Return a stream that reads the second batch, and what its seventh row waits for."""
    gate = threading.Event()

    def hangs(row: Any, *others: Any) -> Tokenised[Any]:
        if row["number"] == 6:
            gate.wait(60)
        return as_prompt(row, *others)

    found = ahead(prompts(indexed(31), hangs, shuffle=False), minutes=minutes)
    found.next(0, ROWS)
    found.begin(1, ROWS)
    return found, gate


def test_prompts_that_are_not_ready_in_time_end_the_run_with_the_row_named() -> None:
    found, gate = hanging(minutes=0.005)

    with pytest.raises(RunStopped, match=r"step 2 was not ready after 0\.005 minutes .*rank 0 reads rows row 6"):
        found.next(1, ROWS)
    gate.set()


def test_a_wait_leaves_it_to_the_next_step_to_say_that_prompts_are_late() -> None:
    found, gate = hanging(minutes=0.02)

    found.wait()
    before = time.monotonic()
    with pytest.raises(RunStopped, match=r"step 2 was not ready after 0\.02 minutes"):
        found.next(1, ROWS)

    assert time.monotonic() - before < 1  # and not 1.2 s again
    gate.set()


def test_what_fails_on_one_rank_alone_is_raised_before_that_rank_talks_to_others_again() -> None:
    asked: list[str] = []

    def breaks(row: Any, *others: Any) -> Tokenised[Any]:
        asked.append(threading.current_thread().name)
        if row["number"] == 6:
            raise OSError(5, "Input/output error")
        return as_prompt(row, *others)

    found = ahead(prompts(indexed(31), breaks, shuffle=False))
    found.next(0, ROWS)
    found.begin(1, ROWS)
    found.wait()
    del asked[:]

    for act in (lambda: found.next(1, ROWS), found.settle, lambda: found.begin(2, ROWS)):
        with pytest.raises(OSError, match="Input/output error"):
            act()
    assert asked == []


def test_a_stream_s_end_is_known_from_the_batch_on_that_met_it_whatever_was_read_ahead() -> None:
    straight = ahead(prompts(streamed(20), shuffle=False))
    seen = []
    for step in range(8):
        straight.next(step, ROWS)
        straight.begin(step + 2, ROWS, 2)
        straight.settle()
        seen.append((straight.epoch, straight.state()["sizes"]))
    plain = prompts(streamed(20), shuffle=False)
    alone = []
    for step in range(8):
        plain.next(step, ROWS)
        alone.append((plain.epoch, plain.state()["sizes"]))

    assert seen == alone
    assert [sizes for _, sizes in seen].index([20]) > 3
