"""Decoder layers compiled for steps that are recorded: norms, rotary angles, activations and sums become few kernels.

Attention over the cache is Python that changes state and stays outside: it parts a layer into programs, and those serve
all layers of a kind. What compiled layers predict is compared with what the layers themselves predict, for every
recording and before it is used. Prompts are never computed by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

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

LoseForm = Callable[[str, str], object]
"""Is told the name of an optional form that is given up, and the reason."""

MOST_PROGRAMS = 64
"""Of one function; dynamo runs it uncompiled beyond. Steps of one row and of several are programs of their own."""


class StepForm(Protocol):
    """An optional form of what recorded steps compute."""

    name: str
    """Of the form."""
    are_sound: bool
    """Whether it is used: nothing was found that it does otherwise, or that it cannot do."""

    def use(self, value: int) -> None:
        """Let steps be recorded by the form, or for 0 without it."""

    def used(self) -> AbstractContextManager[None]:
        """Compute by the form within the block."""


class CompiledLayers:
    """The layers of a model, which are compiled while a step is recorded and never else.

    Args:
        model: Whose weights may change in place and be replaced: programs take them as arguments.
        compiler: What compiles them.
    """

    name = "layers"

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

    def use(self, value: int) -> None:
        """Let steps be recorded with compiled layers, or for 0 with the layers as they are."""
        self.are_sound = bool(value)

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


def formed_graph(recorder: Recorder, rows: Replayable, predictor: Predictor, forms: Sequence[StepForm]) -> DrawToken:
    """Return the recording of a step by some forms, which do what the model itself does; see `recorded_graph`.

    Raises:
        NotReplayable: A form does something else or fails, or the step cannot be recorded.
    """
    dtype = predictor.replica.model.dtype
    try:
        _compare(rows, predictor, forms, TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]))
        with _used(forms):
            return recorded_graph(recorder, rows, dtype)
    except (torch.OutOfMemoryError, NotReplayable):
        raise
    except Exception as error:  # noqa: BLE001 - compilers raise errors of many kinds
        # A compiler's first line names the backend, and the second says what it refused.
        reason = " ".join((str(error).strip() or "no reason given").splitlines()[:2])
        message = f"{type(error).__name__}: {reason:.400}"
        raise NotReplayable(message) from None


@contextmanager
def _used(forms: Sequence[StepForm]) -> Iterator[None]:
    """Compute by all of some forms within the block."""
    with ExitStack() as stack:
        for form in forms:
            stack.enter_context(form.used())
        yield


def step_graph(
    recorder: Recorder, rows: Replayable, predictor: Predictor, forms: Sequence[StepForm], lose: LoseForm
) -> DrawToken:
    """Return the recording of a step by the forms that are used, the last of which is given up first.

    Raises:
        NotReplayable: The step cannot be recorded, by forms or without; see `recorded_graph`.
    """
    used = [form for form in forms if form.are_sound]
    while used:
        try:
            return formed_graph(recorder, rows, predictor, used)
        except NotReplayable as error:
            if error.__cause__ is not None:
                raise  # the recording failed in its midst, and none may be tried after it
            form = used.pop()
            form.use(0)
            lose(form.name, str(error))
    return recorded_graph(recorder, rows, predictor.replica.model.dtype)


def _compare(rows: Replayable, predictor: Predictor, forms: Sequence[StepForm], limit: float) -> None:
    """Compare what forms predict with what the model itself predicts; rows are then where they were.

    Both predict from the same rows, and tell the log-probabilities of the tokens that the model itself draws: at a draw
    within rounding of a boundary the forms may draw another. The second token follows the first one.

    Args:
        rows: What steps.
        predictor: What predicts.
        forms: Used together.
        limit: How far log-probabilities may lie apart, as a part of the spread of a row's logits.

    Raises:
        NotReplayable: They lie further apart.
    """
    before = copied(rows)
    try:
        for number in range(CHECKED_STEPS):
            start = copied(rows)
            with predictor.watched() as seen:
                rows.step()
            tokens, after = rows.written(CHECKED_STEPS)[0][:, number].clone(), copied(rows)
            put_back(rows, start)
            with _used(forms), predictor.watched() as seen_formed:
                rows.step()
            put_back(rows, after)
            (expected, spread), (found, _) = (
                predictor.logprobs(hidden[: len(tokens)], tokens) for (hidden,) in (seen, seen_formed)
            )
            gap = float((found - expected).abs().max()) / max(SMALLEST_SPREAD, spread)
            if not gap <= limit:  # a comparison with NaN is False
                message = f"log-probabilities are {gap:.1e} of the logits' spread from those of the model itself"
                raise NotReplayable(message)
    finally:
        put_back(rows, before)


def copied(rows: Replayable) -> list[Tensor]:
    """Return copies of what a step changes."""
    return [tensor.clone() for tensor in rows.changed()]


def put_back(rows: Replayable, values: list[Tensor]) -> None:
    """Put rows back to where copies were made."""
    for tensor, value in zip(rows.changed(), values, strict=True):
        tensor.copy_(value)
