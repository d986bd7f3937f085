"""Read the next batch on a thread while the present one is trained.

What is read ahead is no part of a stream's position. While step 7 is trained the thread reads the rows of step 8, and a
checkpoint of step 7 says "before the rows of step 8": the run that resumes from it reads them again.

Only one thread uses a stream and the stream's group of ranks at a time: the caller waits until the thread has read.
"""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from holdfast.data.batches.candidates import Ranks
from holdfast.data.batches.stream import BatchStream
from holdfast.errors import RunStopped, UserError, how_to_go_on

T = TypeVar("T")

THREAD = "holdfast-rows"
"""Name of the thread; a rank that ends looks for a thread of this name that hangs."""
_CLOSING_SECONDS = 1.0


@dataclass
class _Reading:
    """The reading of a batch, which the stream keeps once it is read."""

    step: int
    read: Callable[[], object]
    done: threading.Event = field(default_factory=threading.Event)
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


class StreamAhead(Generic[T]):
    """A stream whose next batches a thread reads where the caller says so.

    How many rows the next batch has, and whether it or a later one is needed first, may be known to the caller alone.

    Args:
        stream: The stream; nothing else reads it from now on.
        options: How.
    """

    def __init__(self, stream: BatchStream[Any, T], options: ReadAhead[T]) -> None:
        self._stream, self._options = stream, options
        stream.rows.ranks, stream.prepare = options.own_ranks, options.prepare
        self._reading: _Reading | None = None
        self._queue: queue.SimpleQueue[_Reading | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def epoch(self) -> float:
        """Passes done; as `BatchStream.epoch`."""
        return self._stream.epoch

    @property
    def bad_rows(self) -> int:
        """Rows left out since this start because they cannot be read."""
        return self._stream.bad_rows

    @property
    def rows_tokenised(self) -> int:
        """Rows this rank has turned into tokens, for the batches that were handed out."""
        return self._stream.place.rows_tokenised

    def state(self) -> dict[str, Any]:
        """Return where the stream stands after the batch that was handed out last; as `BatchStream.state`."""
        return self._stream.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where another stream of the same data and seed stood; what was read ahead is dropped."""
        self.settle()
        self._reading = None
        self._stream.load_state(state)

    def begin(self, step: int, rows: int | None = None, batches: int = 1) -> None:
        """Begin to read a batch that will be asked for; arguments as of `BatchStream.read_ahead`.

        An error in its rows is raised where the batch is asked for, which reads it again.
        """
        last = self._options.last_step
        if last is None or step < last:
            self._take_over()
            self._begin(step, rows, batches)

    def read_ahead(self, step: int, rows: int | None = None, batches: int = 1) -> T | None:
        """Return one of the next batches, all of which stay the next; as `BatchStream.read_ahead`."""
        self._take_over()
        try:
            return self._stream.read_ahead(step, rows, batches)
        finally:
            self._tell()

    def next(self, step: int, rows: int | None = None) -> T | None:
        """Return the batch of a step (counted from 0), or None when the passes are done.

        Raises:
            DataError: As `BatchStream.next`, in the step whose row is malformed.
            RunStopped: The batch was not ready in time; the same on all ranks.
        """
        self._take_over()
        try:
            return self._stream.next(step, rows)
        finally:
            self._tell()

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
        """Wait like `settle`, but raise nothing: the next call raises."""
        if self._reading is not None and not self._reading.late:
            self._reading.late = not self._reading.done.wait(60 * self._options.minutes)

    def close(self) -> None:
        """End the thread, unless it hangs."""
        thread, self._thread = self._thread, None
        if thread is not None:
            _end(thread, self._queue)
        if thread is None or not thread.is_alive():
            self._options.own_ranks.close()

    def _begin(self, step: int, rows: int | None, batches: int) -> None:
        if self._thread is None:
            # A daemon: a process does not wait for rows that nobody trains on. It knows the queue and not this object,
            # so that it ends with a run that nobody closed.
            self._thread = threading.Thread(target=_work, args=(self._queue,), name=THREAD, daemon=True)
            self._thread.start()
            weakref.finalize(self, _end, self._thread, self._queue).atexit = False
        stream = self._stream
        self._reading = _Reading(step, lambda: stream.read_ahead(step, rows, batches))
        self._queue.put(self._reading)

    def _take_over(self) -> None:
        """Wait until the calling thread may read."""
        self.settle()
        self._reading = None

    def _tell(self) -> None:
        notes = self._stream.rows.notes
        self._options.tell(list(notes))
        notes.clear()

    def _arrive(self, reading: _Reading) -> None:
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
    """A stream whose next batch is read as soon as one is handed out."""

    def read_ahead(self, step: int, rows: int | None = None, batches: int = 1) -> T | None:
        """Return one of the next batches; as `StreamAhead.read_ahead`."""
        self._begin_once(step, rows, batches)
        return super().read_ahead(step, rows, batches)

    def next(self, step: int, rows: int | None = None) -> T | None:
        """Return the batch of a step and begin to read the next one; as `StreamAhead.next`."""
        self._begin_once(step, rows, 1)
        batch = super().next(step, rows)
        if batch is not None:
            self.begin(step + 1)
        return batch

    def _begin_once(self, step: int, rows: int | None, batches: int) -> None:
        """Let the thread read what it does not read yet, so that nobody waits for a batch without an end."""
        if self._reading is None:
            self._begin(step, rows, batches)


def _end(thread: threading.Thread, requests: queue.SimpleQueue[Any]) -> None:
    """End a thread, unless the process ends: it sleeps through that.

    A thread that frees a tensor while Python shuts down is ended within a destructor of C++, which aborts the process.
    """
    if not sys.is_finalizing():
        requests.put(None)
        if thread is not threading.current_thread():  # which may be the one that collects garbage
            thread.join(_CLOSING_SECONDS)


def _work(requests: queue.SimpleQueue[_Reading | None]) -> None:
    """Read what is requested, one batch after another, until None is requested."""
    while (reading := requests.get()) is not None:
        try:
            reading.read()
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: whoever waits raises it
            reading.error = error
        reading.done.set()
        del reading  # it knows the stream, which a thread that waits must not keep
