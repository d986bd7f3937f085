"""What an engine is: requests go in, sampled tokens come out, weights arrive with a version.

Everything that samples stands behind this protocol, on weights in this process or elsewhere. An engine makes no
collective calls while it samples, so ranks with unequal work never wait for each other inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.types import Finish


@dataclass(frozen=True)
class Request:
    """One prompt, and a seed for each completion of it."""

    request_id: int
    prompt: NDArray[np.int64]
    """[P], at least one token"""
    seeds: tuple[int, ...]
    model_inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Inputs only the model understands, such as those of the prompt's images."""
    positions: NDArray[np.int64] | None = None
    """[A, P] of the prompt's tokens; None where all are 0, 1, 2, ..."""


class Sampled(NamedTuple):
    """One completion."""

    request_id: int
    place: int
    """Which of the request's seeds."""
    tokens: NDArray[np.int64]
    """[C], the stop token included"""
    logprobs: NDArray[np.float32]
    """[C], under the distribution the token was drawn from"""
    finish: Finish
    weights_version: int
    """Of the first token."""
    expert_choices: NDArray[np.int16] | None = None
    """[P + C, layers, k] of the prompt and the completion, as `holdfast.models.layers.expert_choices.CHOICES_COLUMN`"""
    segments: tuple[tuple[int, int], ...] = ()
    """First token and weights version of each part, where the weights changed on the way; else empty"""
    unscored: int = 0
    """Tokens of which the engine tells no log-probability; NaN stands for it, and nothing corrects them"""


Interrupted = Callable[[], bool]
"""Asked between tokens: whether nobody wants the completions any more."""


class Flight(Protocol):
    """Completions on their way from an engine that samples outside of this process."""

    def finished(self) -> list[Sampled]:
        """Return those that are done, also while others are waited for; any thread may ask."""

    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:
        """Return all, as `RolloutEngine.collect` does."""


@runtime_checkable
class AheadEngine(Protocol):
    """An engine that samples while this process works on something else."""

    def begin(self, requests: Sequence[Request], sampling: SamplingConfig, done: Sequence[Sampled] = ()) -> Flight:
        """Start to sample, but for completions that are done already."""


class RolloutEngine(Protocol):
    """Samples completions."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over whole tensors by canonical name; what was computed with older ones is forgotten."""

    def submit(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        """Accept requests."""

    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:
        """Return all completions of what was submitted, by request and place.

        When `interrupted` says so, completions that are not done come back as ABORT.
        """

    def sleep(self) -> bool:
        """Give memory back until the next weights arrive; return whether the present weights went with it."""

    def close(self) -> None:
        """Give everything back."""


class TurnSource(Protocol):
    """Episodes of several turns: what can be sampled follows from what was."""

    def ready(self, *, wait: bool) -> list[Request]:
        """Return the turns that can be sampled now.

        Args:
            wait: Nothing else is to be done: return nothing only where nothing is left.
        """

    def finished(self, sampled: Sequence[Sampled]) -> None:
        """Take turns that have been sampled."""


@runtime_checkable
class EpisodeEngine(Protocol):
    """An engine that takes further turns while it samples."""

    def converse(self, source: TurnSource, sampling: SamplingConfig, interrupted: Interrupted = lambda: False) -> None:
        """Sample until a source has no more turns."""


def converse(
    engine: RolloutEngine,
    source: TurnSource,
    sampling: SamplingConfig,
    interrupted: Interrupted = lambda: False,
) -> None:
    """Sample until a source has no more turns: turn by turn, or in rounds where the engine knows no other way."""
    if isinstance(engine, EpisodeEngine):
        engine.converse(source, sampling, interrupted)
        return
    while requests := source.ready(wait=True):
        source.finished(generate(engine, requests, sampling, interrupted))


def generate(
    engine: RolloutEngine,
    requests: Sequence[Request],
    sampling: SamplingConfig,
    interrupted: Interrupted = lambda: False,
) -> list[Sampled]:
    """Submit and collect."""
    engine.submit(requests, sampling)
    return engine.collect(interrupted)
