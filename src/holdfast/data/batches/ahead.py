"""Read the next batches on a thread while the present one is trained.

The thread alone uses the stream, and it alone uses the stream's group of ranks. What everybody else sees of the stream
is where it stood when the batch that was handed out last was complete, so that a checkpoint knows nothing of what is
read ahead, and a resumed run reads it again.
"""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from holdfast.data.batches.candidates import Ranks
from holdfast.data.batches.prompts import PromptBatch
from holdfast.data.batches.stream import BatchStream
from holdfast.errors import RunStopped, UserError, how_to_go_on

T = TypeVar("T")

THREAD = "holdfast-rows"
"""Name of the thread; a rank that ends looks for a thread of this name that hangs."""
_CLOSING_SECONDS = 1.0


@dataclass(frozen=True)
class Position:
    """Where a stream stands, and what it has counted."""

    state: Mapping[str, Any]
    epoch: float
    bad_rows: int
    rows_tokenised: int

    @classmethod
    def of(cls, stream: BatchStream[Any, Any]) -> Position:
        """Return the present position of a stream that nobody reads."""
        return cls(stream.state(), stream.epoch, stream.bad_rows, stream.rows_tokenised)


@dataclass
class _Reading(Generic[T]):
    """A batch that is being read, or was."""

    step: int
    read: Callable[[], T | None]
    """Reads the batch."""
    done: threading.Event = field(default_factory=threading.Event)
    batch: T | None = None
    after: Position | None = None
    """Where the stream stands after the batch."""
    notes: list[str] = field(default_factory=list)
    error: BaseException | None = None
    late: bool = False
    """Whether somebody has waited for it as long as anybody may."""


class ClosableRanks(Ranks, Protocol):
    """A group of ranks that only one stream uses."""

    def close(self) -> None:
        """Give the group up."""


@dataclass(frozen=True)
class ReadAhead(Generic[T]):
    """How batches are read ahead."""

    ranks: Ranks
    """The group of the thread that trains."""
    own_ranks: ClosableRanks
    """The group of the thread that reads."""
    last_step: int | None
    """Steps of the run; no batch is read for a step behind the last one. None: nobody knows."""
    minutes: float
    """Longest wait for a batch."""
    tell: Callable[[list[str]], object]
    """Takes what reading has to tell, once the batch is asked for."""
    prepare: Callable[[T], T] = lambda batch: batch
    """Applied to each batch on the thread."""


class StreamAhead(ABC, Generic[T]):
    """A stream that a thread reads ahead, and where it stood when a batch was handed out last.

    Args:
        stream: The stream; nothing else reads it from now on.
        options: How.
    """

    def __init__(self, stream: BatchStream[Any, T], options: ReadAhead[T]) -> None:
        self._stream, self._options = stream, options
        stream.rows.ranks = options.own_ranks
        self._position = Position.of(stream)
        self._reading: _Reading[T] | None = None
        self._queue: queue.SimpleQueue[_Reading[T] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def next(self, step: int) -> T | None:
        """Return the batch of a step (counted from 0), or None when the passes are done.

        Raises:
            DataError: As `BatchStream.next`, in the step whose row is malformed.
            RunStopped: The batch was not ready in time; the same on all ranks.
        """

    @abstractmethod
    def read_ahead(self, step: int) -> T | None:
        """Return the next batch, which stays the next; as `BatchStream.read_ahead`."""

    @property
    def epoch(self) -> float:
        """Passes done; as `BatchStream.epoch`."""
        return self._position.epoch

    @property
    def bad_rows(self) -> int:
        """Rows left out since this start because they cannot be read."""
        return self._position.bad_rows

    @property
    def rows_tokenised(self) -> int:
        """Rows this rank has turned into tokens, for the batches that were handed out."""
        return self._position.rows_tokenised

    def state(self) -> dict[str, Any]:
        """Return where the stream stood after the batch that was handed out last, as JSON-ready values."""
        return dict(self._position.state)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where another stream of the same data and seed stood; what was read ahead is dropped."""
        self.settle()
        self._reading = None
        self._stream.load_state(state)
        self._position = Position.of(self._stream)

    def settle(self) -> None:
        """Wait until nothing is being read: rows and tokenizers are not made for several threads.

        Raises:
            RunStopped: The batch that is being read was not ready in time; the same on all ranks.
            Exception: Reading failed on this rank in a way that other ranks do not know of.
        """
        if self._reading is None:
            return
        self._arrive(self._reading)
        error = self._reading.error
        if error is not None and not isinstance(error, UserError):  # a user's error comes in its step, on all ranks
            raise error

    def wait(self) -> None:
        """Wait likewise, and leave it to whoever asks for the batch to raise."""
        if self._reading is not None and not self._reading.late:
            self._reading.late = not self._reading.done.wait(60 * self._options.minutes)

    def close(self) -> None:
        """End the thread, unless it hangs."""
        thread, self._thread = self._thread, None
        if thread is not None:
            _end(thread, self._queue)
        if thread is None or not thread.is_alive():
            self._options.own_ranks.close()

    def _begin(self, step: int, read: Callable[[], T | None]) -> _Reading[T]:
        if self._thread is None:
            # A daemon: a process does not wait for rows that nobody trains on. It knows the queue and not this object,
            # so that it ends with a run that nobody closed.
            arguments = (self._queue, self._stream)
            self._thread = threading.Thread(target=_work, args=arguments, name=THREAD, daemon=True)
            self._thread.start()
            weakref.finalize(self, _end, self._thread, self._queue).atexit = False
        reading = self._reading = _Reading[T](step, read)
        self._queue.put(reading)
        return reading

    def _tell(self, reading: _Reading[T]) -> None:
        notes, reading.notes = reading.notes, []
        self._options.tell(notes)

    def _arrive(self, reading: _Reading[T]) -> None:
        if reading.done.wait(0 if reading.late else 60 * self._options.minutes):
            return
        # Other ranks wait for the late one's rows, and so no rank has the batch: all come here.
        reads = {rank: what for rank, what in enumerate(self._options.ranks.gather(self._stream.rows.reads)) if what}
        late = ", ".join(f"rank {rank} reads {what}" for rank, what in reads.items()) or "all ranks have read theirs"
        raise RunStopped(
            f"The batch of step {reading.step + 1} was not ready after {self._options.minutes:g} minutes "
            f"(launch.timeout_minutes): {late}. A filter, a film, a file system or a tokenizer does not answer. "
            f"{how_to_go_on(reading.step)}"
        )


class BatchesAhead(StreamAhead[T]):
    """A stream whose next batch is read while the present one is trained."""

    def read_ahead(self, step: int) -> T | None:
        """Return the next batch, which stays the next; as `BatchStream.read_ahead`."""
        return self._wait(step).batch

    def next(self, step: int) -> T | None:
        """Return the batch of a step (counted from 0) and begin to read the next one; as `StreamAhead.next`."""
        reading = self._wait(step)
        assert reading.after is not None
        self._position, self._reading = reading.after, None
        last = self._options.last_step
        if reading.batch is not None and (last is None or step + 1 < last):
            self._begin_next(step + 1)
        return reading.batch

    def _wait(self, step: int) -> _Reading[T]:
        if self._reading is not None and self._reading.step != step:
            self.load_state(self.state())
        reading = self._reading or self._begin_next(step)
        self._arrive(reading)
        self._tell(reading)
        if reading.error is not None:
            raise reading.error
        return reading

    def _begin_next(self, step: int) -> _Reading[T]:
        return self._begin(step, partial(_next_batch, self._stream, step, self._options.prepare))


class PromptsAhead(StreamAhead[PromptBatch]):
    """A stream of prompts, the next of which are read while a policy is updated.

    How many rows a batch has, and whether it is the next or a later one, is known to the caller alone, who therefore
    says when reading may begin.
    """

    def begin(self, step: int, rows: int, batches: int = 1) -> None:
        """Begin to read a batch that will be asked for; arguments as of `BatchStream.read_ahead`.

        An error in its rows is raised where the batch is asked for, which reads it again.
        """
        last = self._options.last_step
        if last is None or step < last:
            self._take_over()
            self._begin(step, partial(self._stream.read_ahead, step, rows, batches))

    def read_ahead(self, step: int, rows: int | None = None, batches: int = 1) -> PromptBatch | None:
        """Return one of the next batches, all of which stay the next; as `BatchStream.read_ahead`."""
        with self._reads_here():
            return self._stream.read_ahead(step, rows, batches)

    def next(self, step: int, rows: int | None = None) -> PromptBatch | None:
        """Return the prompts of a step; arguments as of `BatchStream.next`, errors as of `StreamAhead.next`."""
        with self._reads_here():
            batch = self._stream.next(step, rows)
        self._position = Position.of(self._stream)
        return batch

    @contextmanager
    def _reads_here(self) -> Iterator[None]:
        """Let the calling thread read within the block."""
        self._take_over()
        try:
            yield
        finally:
            self._options.tell(_taken_notes(self._stream))

    def _take_over(self) -> None:
        self.settle()
        if self._reading is not None:
            self._tell(self._reading)
            self._reading = None


def _end(thread: threading.Thread, requests: queue.SimpleQueue[Any]) -> None:
    """End a thread, unless the process ends: it sleeps through that.

    A thread that frees a tensor while Python shuts down is ended within a destructor of C++, which aborts the process.
    """
    if not sys.is_finalizing():
        requests.put(None)
        if thread is not threading.current_thread():  # which may be the one that collects garbage
            thread.join(_CLOSING_SECONDS)


def _work(requests: queue.SimpleQueue[_Reading[T] | None], stream: BatchStream[Any, T]) -> None:
    """Read what is requested, one batch after another, until None is requested."""
    while (reading := requests.get()) is not None:
        _read(reading, stream)
        del reading  # a batch belongs to whoever asked for it, and not to a thread that waits


def _read(reading: _Reading[T], stream: BatchStream[Any, T]) -> None:
    try:
        reading.batch = reading.read()
        reading.after = Position.of(stream)
    except BaseException as error:  # noqa: BLE001 - the edge of a thread: whoever waits raises it
        reading.error = error
    reading.notes = _taken_notes(stream)
    reading.done.set()


def _next_batch(stream: BatchStream[Any, T], step: int, prepare: Callable[[T], T]) -> T | None:
    batch = stream.next(step)
    return None if batch is None else prepare(batch)


def _taken_notes(stream: BatchStream[Any, Any]) -> list[str]:
    notes = list(stream.rows.notes)
    stream.rows.notes.clear()
    return notes
