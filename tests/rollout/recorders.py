"""Recorders that need no GPU: what a CUDA graph does with a step, done with a traced program, and what can go wrong."""

from __future__ import annotations

from typing import Any

from torch.fx.experimental.proxy_tensor import make_fx

from holdfast.rollout.local.graphs import DrawToken


class Steps:
    """Records nothing: the step itself runs, in the memory that it had, whatever rows lie there."""

    nbytes = 0

    def __init__(self) -> None:
        self.buckets: list[tuple[int, int]] = []
        """Rows and blocks of what was recorded."""

    def record(self, step: Any) -> DrawToken:
        self.buckets.append(tuple(step.__self__._bucket))
        return self.recording_of(step)

    def recording_of(self, step: Any) -> DrawToken:
        rows = step.__self__
        recorded = rows._part, rows._bucket

        def replay() -> None:
            present, (rows._part, rows._bucket) = (rows._part, rows._bucket), recorded
            step()
            rows._part, rows._bucket = present

        return replay

    def forget(self) -> None:
        pass


class Program(Steps):
    """Records the tensor operations of one step, with the very tensors they met; Python runs no more."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()
        self.calls = 0
        """Runs of the step's own code while it was recorded."""

    def recording_of(self, step: DrawToken) -> DrawToken:
        def run() -> tuple[()]:
            self.calls += 1
            step()
            return ()

        program = make_fx(run)()
        self.operations |= {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        return lambda: program() and None


class Refusing(Steps):
    """Cannot record, as CUDA cannot what waits for the host."""

    def recording_of(self, step: DrawToken) -> DrawToken:
        step()
        raise RuntimeError("operation not permitted when stream is capturing\nand a second line")


class Wrong(Steps):
    """Replays a step that draws another second token than the step itself.

    Args:
        what: 0 changes the token, 1 its log-probability.
    """

    def __init__(self, what: int) -> None:
        super().__init__()
        self._what = what

    def recording_of(self, step: Any) -> DrawToken:
        rows = step.__self__

        def replay() -> None:
            step()
            rows.written(2)[self._what][0, 1] += 1

        return replay
