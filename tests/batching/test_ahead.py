"""A batch that is read ahead is no state: what is saved is what was handed out."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from holdfast.data.batches.ahead import BatchesAhead, ReadAhead
from holdfast.data.rows.rows import from_rows
from holdfast.data.tokens.chat import Tokenised
from holdfast.errors import DataError, RunStopped
from tests.batching.sources import as_tokens, indexed, numbered, streamed
from tests.batching.streams import Alone, held, stream
from tests.batching.test_resume import KINDS

ROOT = Path(__file__).parents[2]


class Ours(Alone):
    def close(self) -> None:
        pass


def ahead(inner: Any, last: int | None = None, minutes: float = 1.0, said: Any = None) -> BatchesAhead[Any]:
    tell = said.extend if said is not None else lambda _: None
    return BatchesAhead(inner, ReadAhead(Alone(), Ours(), last, minutes, tell))


def ready(found: BatchesAhead[Any]) -> None:
    """Wait until the next batch is read."""
    found.settle()


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("source", [indexed, streamed])
def test_state_and_epoch_after_each_batch_are_those_of_a_stream_that_reads_none_ahead(kind: str, source: Any) -> None:
    straight, found = (stream(source(31), seed=3, **KINDS[kind]) for _ in range(2))
    found = ahead(found)

    for step in range(14):
        expected, batch = straight.next(step), found.next(step)
        ready(found)

        assert held(batch) == held(expected)
        assert found.state() == straight.state()
        assert found.epoch == straight.epoch
        assert found.rows_tokenised == straight.rows_tokenised


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_was_read_ahead_and_not_used_is_read_again_after_a_resume(kind: str) -> None:
    straight = stream(streamed(31), seed=3, **KINDS[kind])
    expected = [held(straight.next(step)) for step in range(10)]
    left = ahead(stream(streamed(31), seed=3, **KINDS[kind]))
    before = [held(left.next(step)) for step in range(4)]
    ready(left)

    resumed = ahead(stream(streamed(31), seed=3, **KINDS[kind]))
    resumed.load_state(json.loads(json.dumps(left.state())))

    assert before + [held(resumed.next(step)) for step in range(4, 10)] == expected


def test_a_state_that_is_loaded_drops_what_was_read_ahead() -> None:
    found, straight = ahead(stream(indexed(30), shuffle=True)), stream(indexed(30), shuffle=True)
    start = found.state()
    found.next(0)

    found.load_state(start)

    assert held(found.next(0)) == held(straight.next(0))


def refuse_seven(row: Any, sample_id: int, source: str, name: str) -> Tokenised:
    if row["number"] == 7:
        raise DataError(f"{name} has no number.")
    return as_tokens(row, sample_id, source, name)


def test_a_bad_row_is_an_error_of_the_step_that_trains_on_it() -> None:
    found = ahead(stream(indexed(30), tokenise=refuse_seven))

    found.next(0)
    ready(found)
    state = found.state()

    with pytest.raises(DataError, match=r"rows row 7 has no number\."):
        found.next(1)
    assert found.state() == state


def test_no_batch_is_read_behind_the_last_step() -> None:
    inner = stream(indexed(30), tokenise=refuse_seven)
    found = ahead(inner, last=1)

    found.next(0)
    ready(found)

    assert inner.rows_tokenised == 4


def test_what_reading_tells_is_told_in_the_step_of_its_rows() -> None:
    said: list[str] = []
    inner = stream(indexed(30))
    inner.rows._skip = inner.rows.notes.append
    inner.rows._tokenise = refuse_seven
    found = ahead(inner, said=said)

    found.next(0)
    ready(found)
    assert (said, found.bad_rows) == ([], 0)
    found.next(1)

    assert (said, found.bad_rows) == (["rows row 7 has no number."], 1)


def test_the_next_batch_is_read_while_nobody_asks_for_it() -> None:
    readers: list[str] = []

    def noted(*row: Any) -> Tokenised:
        readers.append(threading.current_thread().name)
        return as_tokens(*row)

    found = ahead(stream(indexed(30), tokenise=noted))
    found.next(0)
    deadline = time.monotonic() + 30
    while len(readers) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)

    assert readers == ["holdfast-rows"] * 8


def test_a_reader_that_hangs_is_named() -> None:
    gate = threading.Event()

    def hangs(row: Any, sample_id: int, source: str, name: str) -> Tokenised:
        if row["number"] == 6:
            gate.wait(60)
        return as_tokens(row, sample_id, source, name)

    found = ahead(stream(indexed(30), tokenise=hangs), minutes=0.005)
    found.next(0)

    with pytest.raises(
        RunStopped, match=r"batch of step 2 was not ready after 0\.005 minutes .*: rank 0 reads rows row 6"
    ):
        found.next(1)
    gate.set()


def test_a_reader_that_dies_is_raised_where_its_batch_is_asked_for() -> None:
    def dies(row: Any, sample_id: int, source: str, name: str) -> Tokenised:
        if row["number"] == 6:
            raise SystemExit("the filter left")
        return as_tokens(row, sample_id, source, name)

    found = ahead(stream(from_rows(numbered(30), "rows"), tokenise=dies))
    found.next(0)

    with pytest.raises(SystemExit, match="the filter left"):
        found.next(1)


def test_the_thread_of_a_run_that_nobody_closed_ends_with_it() -> None:
    left = ahead(stream(indexed(30)))
    left.next(0)
    (thread,) = (thread for thread in threading.enumerate() if thread is left._thread)

    del left

    thread.join(10)
    assert not thread.is_alive()


LEFT_OPEN = """
import torch
from tests.batching.sources import indexed
from tests.batching.streams import stream
from tests.batching.test_ahead import ahead

left = ahead(stream(indexed(30)))
left.next(0)
left.settle()
left._stream.tensors = [torch.zeros(1) for _ in range(300_000)]
del left
"""


@pytest.mark.slow
def test_a_process_ends_in_order_after_a_run_that_nobody_closed() -> None:
    """Where the thread let go of tensors while Python shuts down, it would be ended within a destructor of C++."""
    ended = subprocess.run([sys.executable, "-c", LEFT_OPEN], cwd=ROOT, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr[-500:]


def test_a_thread_that_waits_keeps_no_batch() -> None:
    kept: list[weakref.ref[Any]] = []

    def prepare(batch: Any) -> Any:
        kept.append(weakref.ref(batch))
        return batch

    tell: Any = lambda _: None  # noqa: E731 - the form of an option
    found = BatchesAhead(stream(indexed(30)), ReadAhead(Alone(), Ours(), 1, 1.0, tell, prepare))

    batch = found.next(0)
    assert kept[0]() is batch
    del batch

    assert found._thread is not None
    for _ in range(100):
        if kept[0]() is None:
            return
        time.sleep(0.02)
    raise AssertionError("the thread has the batch")
