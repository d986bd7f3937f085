"""Reward functions that a Python caller passes as objects: they are called in this process, one after the other.

Parameters and return values are the same as for functions in a file. There is no isolation: nothing ends a function
that hangs, and what it prints or changes affects the caller's process.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from holdfast.config.sections.reward import Reward, RewardPoolConfig
from holdfast.errors import ConfigError
from holdfast.processes.user_code import CannotStart
from holdfast.rewards.base import Sample, SampleOutcome, Scored, outcome_of_exception
from holdfast.rewards.combine import combine
from holdfast.rewards.evaluation import evaluate
from holdfast.rewards.functions.signatures import BatchedCall, Bound, bind

T = TypeVar("T")
_FAULTS = (Exception, SystemExit, asyncio.CancelledError)
"""Exceptions that count as a fault of the function. KeyboardInterrupt is not one: it is meant for the caller."""


class InProcessRewards:
    """Scores samples by functions of this process, under the policies of the `rewards` section.

    The sections give the functions their names and weights, in the same order.
    """

    def __init__(
        self, functions: Sequence[Callable[..., object]], sections: Sequence[Reward], config: RewardPoolConfig
    ) -> None:
        """Recognise the signatures.

        Raises:
            ConfigError: A function cannot be called by the names of its parameters.
        """
        assert len(functions) == len(sections)
        self._sections, self._config = tuple(sections), config
        try:
            self._bound = [
                _bind(function, section.label) for function, section in zip(functions, sections, strict=True)
            ]
        except CannotStart as error:
            raise ConfigError(str(error)) from error
        self.columns = {section.label: bound.columns for section, bound in zip(sections, self._bound, strict=True)}
        """Columns of the row without which a function cannot be called, by the reward's name."""

    def try_out(self, samples: Sequence[Sample]) -> dict[str, list[SampleOutcome]]:
        """Score samples with only the functions that are called with lists; return outcomes by name of the reward."""
        labelled = zip((section.label for section in self._sections), self._bound, strict=True)
        batched = {label: bound for label, bound in labelled if isinstance(bound, BatchedCall)}
        return _outside_a_running_loop(
            lambda: {label: self._outcomes(bound, label, samples) for label, bound in batched.items()}
        )

    def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """Return the reward of each sample, in their order."""
        lines = _outside_a_running_loop(
            lambda: [
                self._outcomes(bound, section.label, samples)
                for bound, section in zip(self._bound, self._sections, strict=True)
            ]
        )
        return [
            combine(sample, outcomes, self._sections, self._config)
            for sample, *outcomes in zip(samples, *lines, strict=True)
        ]

    def _outcomes(self, bound: Bound, name: str, samples: Sequence[Sample]) -> list[SampleOutcome]:
        outcomes: dict[int, SampleOutcome | None] = {}

        def ask(places: Sequence[int]) -> None:
            asked = {place: samples[place] for place in places}
            evaluate(bound, name, asked, outcomes.__setitem__, outcome_of_exception, _FAULTS)

        size = self._config.batch_size
        with _own_randomness():
            for start in range(0, len(samples), size):
                ask(range(start, min(start + size, len(samples))))
                for place in [place for place, outcome in outcomes.items() if outcome is None]:
                    ask([place])
        return [outcome for _, outcome in sorted(outcomes.items()) if outcome is not None]


def _bind(function: Callable[..., object], name: str) -> Bound:
    if not callable(function):
        raise CannotStart(f"reward {name} is {function!r}, which cannot be called. Pass a function.")
    if inspect.isclass(function):
        raise CannotStart(f"reward {name} is the class {function.__name__}. Pass an object of it; its __call__ scores.")
    return bind(function, {}, name)


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Leave the run's own generators alone: functions that draw numbers are seeded."""
    state, array_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - the one that users draw from
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(array_state)  # noqa: NPY002


def _outside_a_running_loop(call: Callable[[], T]) -> T:
    """Call in another thread if this one runs an event loop, as notebooks do: asyncio allows one loop per thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
