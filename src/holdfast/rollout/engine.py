"""The protocol of rollout engines, which receive weights with a version, and turn requests into sampled tokens.

All engines implement it, whether they sample in this process or elsewhere. An engine makes no collective calls while it
samples, so that ranks with unequal work never wait for each other inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.content.image_files import ImageFiles, pixel_digest, png_url
from holdfast.errors import DataError
from holdfast.types import EpisodeSummary, Finish, Group, Prompt, PromptImages


@dataclass(frozen=True)
class RequestImages:
    """The images of a prompt for an engine whose own processor reads them."""

    prompt_id: int
    """Number of the prompt, for errors."""
    prompt: PromptImages
    """Sources and digests of the images, in the order of the prompt."""
    files: ImageFiles
    """Reader of the sources."""

    @cached_property
    def urls(self) -> tuple[str, ...]:
        """The images as files without loss, upright and in RGB as the trainer has read them, within URLs.

        All completions of the prompt share them.

        Raises:
            DataError: An image cannot be read any more, or has changed.
        """
        return tuple(map(self._url, self.prompt.sources, self.prompt.digests))

    def _url(self, source: Any, digest: str) -> str:
        image = self.files.open(source, f"an image of prompt {self.prompt_id}")
        if pixel_digest(image) != digest:
            raise DataError(
                f"An image of prompt {self.prompt_id} ({str(source):.120}) has other pixels than when its row was "
                "read: its file has changed during the run. Restore it; the same command then goes on from the last "
                "checkpoint."
            )
        return png_url(image)


@dataclass(frozen=True)
class Request:
    """A prompt, and a seed for each completion of it."""

    request_id: int
    """Number of the request, which its completions repeat."""
    prompt: NDArray[np.int64]
    """[P] token ids, at least one"""
    seeds: tuple[int, ...]
    """Seed of each completion; their number is the number of completions."""
    model_inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Inputs only the model understands, such as those of the prompt's images."""
    positions: NDArray[np.int64] | None = None
    """[A, P] of the prompt's tokens; None where all are 0, 1, 2, ..."""
    images: RequestImages | None = None
    """None where the prompt has none."""
    row: Mapping[str, Any] | None = None
    """Columns of the prompt's row, where an episode begins with it."""


class EndedEpisode(NamedTuple):
    """What an episode came to."""

    summary: EpisodeSummary
    last_text: str
    """What the policy said last."""


class Sampled(NamedTuple):
    """A sampled completion, or an episode, whose tokens are all that it is trained as, its prompt included."""

    request_id: int
    """Number of the request."""
    place: int
    """Index of the request's seed."""
    tokens: NDArray[np.int64]
    """[C] token ids, the stop token included"""
    logprobs: NDArray[np.float32]
    """[C] log-probabilities in nats, under the distribution that the token was drawn from"""
    finish: Finish
    """Reason of the end."""
    weights_version: int
    """Version of the weights that sampled the first token."""
    segments: tuple[tuple[int, int], ...] = ()
    """(first token, weights version) of each part, if the weights changed during the completion; else empty"""
    unscored: int = 0
    """Number of tokens without a log-probability from the engine; theirs is NaN, and no correction applies to them"""
    episode: EndedEpisode | None = None
    """None of a completion; the segments of an episode have version -1 where the policy chose nothing"""


Interrupted = Callable[[], bool]
"""Called between tokens; returns whether sampling should be abandoned."""


class Flight(Protocol):
    """Completions that an engine outside of this process is sampling."""

    def finished(self) -> list[Sampled]:
        """Return those that are done, also while others are waited for; any thread may ask."""

    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:
        """Return all, as `RolloutEngine.collect` does."""

    def end(self) -> None:
        """Give up what is not done."""


@runtime_checkable
class AheadEngine(Protocol):
    """An engine that can sample in the background while this process trains."""

    def begin(self, requests: Sequence[Request], sampling: SamplingConfig, done: Sequence[Sampled] = ()) -> Flight:
        """Start to sample, but for completions that are done already."""


class RolloutEngine(Protocol):
    """The protocol of an engine, which samples completions."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights, and discard everything computed with older ones.

        Args:
            tensors: Pairs of a canonical name and an unsharded tensor. Every step of the iteration gathers shards from
                all ranks, so the engine iterates within this call.
            version: Number of optimizer updates that the weights have had.
        """

    def submit(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        """Accept requests; `collect` samples their completions.

        Args:
            requests: Prompts of this rank; there may be none.
            sampling: Temperature, largest length, stop texts and the other keys of the section `rollout`.
        """

    def collect(self, interrupted: Interrupted = lambda: False) -> list[Sampled]:
        """Return all completions of the submitted requests, ordered by request and place.

        Args:
            interrupted: Asked between tokens. Once it returns True, completions that are not finished are returned
                with `Finish.ABORT`. Default: never.
        """

    def sleep(self) -> bool:
        """Free memory until the next weights arrive.

        Returns:
            Whether the present weights were freed too, so that new ones must arrive before the next request.
        """

    def close(self) -> None:
        """Release all resources."""


@runtime_checkable
class EpisodeRecords(Protocol):
    """An engine that has whole episodes, which an earlier run sampled."""

    def episodes(self, prompt: Prompt, seeds: Sequence[int], sampling: SamplingConfig) -> Group:
        """Return the episodes of a prompt; their group's prompt has the tokens that all of them begin with."""


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


Conversation = Callable[[TurnSource, Interrupted], None]
"""Samples until a source has no more turns, in any thread; once interrupted it ends early."""


@runtime_checkable
class AheadEpisodeEngine(Protocol):
    """An engine that can sample turns in the background while this process trains."""

    def conversation(self, sampling: SamplingConfig) -> Conversation:
        """Return what samples turns from the present weights, or newer ones; it is called once."""


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
