"""Decoder layers compiled for steps that are recorded: norms, rotary angles, activations and sums become few kernels.

Attention over the cache is Python that changes state and stays outside: it parts a layer into programs, and those serve
all layers of a kind. What compiled layers predict is compared with what the layers themselves predict, for every
recording and before it is used. Prompts are never computed by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.models.check.forward import SMALLEST_SPREAD, TOLERANCE
from holdfast.models.layers.family import blocks_of
from holdfast.rollout.local.graphs import (
    CHECKED_STEPS,
    DrawToken,
    NotReplayable,
    Recorder,
    Replayable,
    recorded_graph,
)
from holdfast.rollout.local.predictor import Predictor

Compiler = str | Callable[..., Any]
"""A backend of torch.compile."""

MOST_PROGRAMS = 64
"""Of one function; dynamo runs it uncompiled beyond. Steps of one row and of several are programs of their own."""


class CompiledLayers:
    """The layers of a model, which are compiled while a step is recorded and never else.

    Args:
        model: Whose weights may change in place and be replaced: programs take them as arguments.
        compiler: What compiles them.
    """

    def __init__(self, model: nn.Module, compiler: Compiler) -> None:
        self._calls: list[tuple[nn.Module, Any]] = []
        self.are_sound = True
        """Whether nothing was found that they do otherwise, or that they cannot do."""
        for path in blocks_of(model):
            layer = model.get_submodule(path)
            # torch keeps what `compile` made in `_compiled_call_impl` and looks there at every call.
            # None runs the layer as it is.
            layer.compile(backend=compiler, dynamic=True)
            self._calls.append((layer, layer._compiled_call_impl))
            layer._compiled_call_impl = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let layers run compiled within the block."""
        # Without the first, the number by which a layer finds its keys would make each layer a program of its own.
        limits = {
            "allow_unspec_int_on_nn_module": True,
            "recompile_limit": MOST_PROGRAMS,
            "suppress_errors": False,  # what fails is named
        }
        with torch._dynamo.config.patch(limits):
            for layer, call in self._calls:
                layer._compiled_call_impl = call
            try:
                yield
            finally:
                for layer, _ in self._calls:
                    layer._compiled_call_impl = None


def fused_graph(recorder: Recorder, rows: Replayable, predictor: Predictor, layers: CompiledLayers | None) -> DrawToken:
    """Return the recording of a step, with compiled layers where they do what the layers do; see `recorded_graph`.

    Raises:
        NotReplayable: The step cannot be recorded, with compiled layers or without.
    """
    dtype = predictor.replica.model.dtype
    if layers is not None and layers.are_sound:
        try:
            _compare(rows, predictor, layers, TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]))
            with layers.used():
                return recorded_graph(recorder, rows, dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - compilers raise errors of many kinds
            if isinstance(error, NotReplayable) and error.__cause__ is not None:
                raise  # the recording failed in its midst, and none may be tried after it
            layers.are_sound = False
            kind = "" if isinstance(error, NotReplayable) else f"{type(error).__name__}: "
            # A compiler's first line names the backend, and the second says what it refused.
            reason = " ".join((str(error).strip() or "no reason given").splitlines()[:2])
            print(f"rollouts record steps with layers that are not compiled: {kind}{reason:.400}", flush=True)
    return recorded_graph(recorder, rows, dtype)


def _compare(rows: Replayable, predictor: Predictor, layers: CompiledLayers, limit: float) -> None:
    """Compare what compiled layers predict with what the layers themselves predict; rows are then where they were.

    Both predict from the same rows, and tell the log-probabilities of the tokens that the layers themselves draw: at a
    draw within rounding of a boundary the compiled ones may draw another. The second token follows the first one.

    Args:
        rows: What steps.
        predictor: What predicts.
        layers: Its layers.
        limit: How far log-probabilities may lie apart, as a part of the spread of a row's logits.

    Raises:
        NotReplayable: They lie further apart.
    """
    before = _copies(rows)
    try:
        for number in range(CHECKED_STEPS):
            start = _copies(rows)
            with predictor.watched() as seen:
                rows.step()
            tokens, after = rows.written(CHECKED_STEPS)[0][:, number].clone(), _copies(rows)
            _put(rows, start)
            with layers.used(), predictor.watched() as seen_compiled:
                rows.step()
            _put(rows, after)
            (expected, spread), (found, _) = (
                predictor.logprobs(hidden[: len(tokens)], tokens) for (hidden,) in (seen, seen_compiled)
            )
            gap = float((found - expected).abs().max()) / max(SMALLEST_SPREAD, spread)
            if not gap <= limit:  # a comparison with NaN is False
                message = f"log-probabilities are {gap:.1e} of the logits' spread from those of the layers themselves"
                raise NotReplayable(message)
    finally:
        _put(rows, before)


def _copies(rows: Replayable) -> list[Tensor]:
    return [tensor.clone() for tensor in rows.changed()]


def _put(rows: Replayable, values: list[Tensor]) -> None:
    for tensor, value in zip(rows.changed(), values, strict=True):
        tensor.copy_(value)
