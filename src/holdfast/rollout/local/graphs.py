"""Record a decoding step once and replay it for every further token: on CUDA one launch takes the place of hundreds.

A recorded step repeats the same operations on the same memory. It is right only if the step asks the host for nothing
that changes from token to token. Nobody has to believe that of a model: every recording is compared with the step
itself before it is used, over two tokens, so that a value of the first one that is baked in shows in the second.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import NamedTuple, Protocol, TextIO

import torch
from torch import Tensor

DrawToken = Callable[[], None]
"""Draws one token in every row, and changes nothing but tensors in place."""

CHECKED_STEPS = 2
"""Tokens that a recording and the step itself must agree on."""

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Dtype of the computation -> how far log-probabilities may lie apart, relative where they exceed 1 in magnitude."""
_TOLERANCE_OF_16_BITS = 1e-2


class NotReplayable(Exception):  # noqa: N818 - says what is so, as the errors of `errors.py` do
    """A step that cannot be recorded, or whose recording does something else; the rows are where they were."""


class Recorder(Protocol):
    """Turns a step into something that repeats it without running its code."""

    nbytes: int
    """Of memory that recordings keep for themselves."""

    def record(self, step: DrawToken) -> DrawToken:
        """Return what repeats the operations of a step; the step may run meanwhile, any number of times.

        Raises:
            RuntimeError: The step cannot be recorded.
        """

    def forget(self) -> None:
        """Know that nothing that was recorded will be repeated any more."""


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: only one of them runs at a time.

    A step must be a function of its buffers alone; tests check that on CPUs.

    Args:
        device: Whose work is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool = torch.cuda.graph_pool_handle()
        self.nbytes = 0

    def record(self, step: DrawToken) -> DrawToken:
        """Return the replay of a graph; see `Recorder`."""
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's
            stream = self._stream
            current = torch.cuda.current_stream(self._device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream), _waits() as places:
                step()  # libraries load kernels and take their workspace at the first call, which no graph may do
            current.wait_stream(stream)
            if places:  # a recording that fails midway leaves torch's memory in disorder, so it is not tried
                message = f"it waits for the device in {places[0]}"
                raise RuntimeError(message)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads copy checkpoints and watch NCCL; what they call is none of the recording's.
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    reserved = torch.cuda.memory_reserved(self._device)
                    step()
                    self.nbytes += torch.cuda.memory_reserved(self._device) - reserved
            finally:
                torch.cuda.set_stream(current)  # torch leaves its own behind where a recording fails
        return graph.replay

    def forget(self) -> None:
        """Take another pool: torch gives one up with its last graph."""
        self._pool = torch.cuda.graph_pool_handle()
        self.nbytes = 0


@contextmanager
def _waits() -> Iterator[list[str]]:
    """Collect the places where this thread waits for the device inside the block.

    torch could raise there, but would in every thread, and a save in the background may wait.
    """
    mode, thread, places = torch.cuda.get_sync_debug_mode(), get_ident(), list[str]()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        shown = warnings.showwarning

        def note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if "synchronizing CUDA operation" not in str(message):
                shown(message, category, filename, lineno, file, line)
            elif get_ident() == thread:
                places.append(f"{filename}:{lineno}")

        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)


class Replayable(Protocol):
    """What a step changes."""

    def step(self) -> None:
        """Draw one token in every row."""

    def changed(self) -> Sequence[Tensor]:
        """Return what a step reads and then changes; what it only writes, at places that follow from these, is not."""

    def written(self, count: int) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probabilities of the first steps since the last look, [rows, count] each."""


def recorded_graph(recorder: Recorder, rows: Replayable, dtype: torch.dtype) -> DrawToken:
    """Return the recording of a step that was seen to do what the step does; rows are then where they were before.

    Args:
        recorder: What records.
        rows: What steps.
        dtype: Of the computation.

    Raises:
        NotReplayable: The step cannot be recorded, or its recording does something else.
    """
    before = [tensor.clone() for tensor in rows.changed()]

    def put_back() -> None:
        for tensor, value in zip(rows.changed(), before, strict=True):
            tensor.copy_(value)

    def after(step: DrawToken) -> _After:
        for _ in range(CHECKED_STEPS):
            step()
        copies = [[tensor.clone() for tensor in some] for some in (rows.written(CHECKED_STEPS), rows.changed())]
        put_back()
        (tokens, logprobs), changed = copies
        return _After(tokens, logprobs, changed)

    expected = after(rows.step)
    try:
        replay = recorder.record(rows.step)
    except RuntimeError as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        message = f"a step cannot be recorded ({type(error).__name__}: {reason})"
        raise NotReplayable(message) from error
    finally:
        put_back()
    if difference := _difference(after(replay), expected, _TOLERANCES.get(dtype, _TOLERANCE_OF_16_BITS)):
        raise NotReplayable(difference)
    return replay


class _After(NamedTuple):
    """What some steps wrote, and the state they left."""

    tokens: Tensor
    logprobs: Tensor
    changed: list[Tensor]


def _difference(replayed: _After, expected: _After, tolerance: float) -> str:
    """Say what recorded steps did otherwise than the steps themselves; "" if nothing."""
    if others := int((replayed.tokens != expected.tokens).sum()):
        return f"recorded steps drew {others} of {expected.tokens.numel()} tokens otherwise than the steps themselves"
    gap = float(((replayed.logprobs - expected.logprobs).abs() / expected.logprobs.abs().clamp(min=1)).max())
    if not gap <= tolerance:
        return f"log-probabilities of recorded steps are {gap:.1e} from those of the steps themselves"
    if not all(torch.equal(one, other) for one, other in zip(replayed.changed, expected.changed, strict=True)):
        return "recorded steps leave rows in another state than the steps themselves"
    return ""
