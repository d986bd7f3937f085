"""Completions of the next step, sampled by servers while the present one updates (`rollout.max_staleness: 1`).

Prompts are drawn early and stay the stream's next ones, so a checkpoint of a step says that they are still to come. It
holds those of their completions that are done, of all ranks: a resume trains them first, on any number of ranks, and
asks for the others again with the same ids and seeds. Nothing of a reward or an advantage is made ahead.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.rollout.engine import AheadEngine, Flight, Request, Sampled
from holdfast.types import Finish


class Ahead:
    """What is on its way; behind `training/run.py: AheadOfStep`."""

    def __init__(self, engine: AheadEngine, config: GRPOConfig) -> None:
        self._engine, self._config = engine, config
        self.flight: Flight | None = None
        """Of the next step; it stays until all of it has come."""
        self._restored: list[Sampled] = []

    def begin(self, requests: Sequence[Request]) -> Flight:
        """Ask for this rank's completions of a step, unless they are on their way."""
        if self.flight is None:
            done, self._restored = self._restored, []
            self.flight = self._engine.begin(requests, self._config.rollout, done)
        return self.flight

    def finished(self) -> Callable[[], list[dict[str, Any]]]:
        """Return what tells the completions that this rank has of the next step; it may be asked later."""
        flight, restored = self.flight, self._restored
        mark = self._mark()
        return lambda: [_saved(one, mark) for one in (restored if flight is None else flight.finished())]

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over what a checkpoint has of the next step, from all ranks."""
        mark = self._mark()
        self.flight, self._restored = None, [_sampled(one) for one in saved if one["mark"] == mark]

    def largest(self) -> list[dict[str, Any]]:
        """Return as many bytes as a checkpoint may have of completions, over all ranks."""
        rollout = self._config.rollout
        size = rollout.max_new_tokens
        one = Sampled(0, 0, np.zeros(size, np.int64), np.zeros(size, np.float32), Finish.LENGTH, 0)
        return [_saved(one, self._mark())] * (self._config.data.batch_size * rollout.group_size)

    def _mark(self) -> str:
        """Return what decides a completion besides weights and prompt: after a change of it none is taken over."""
        config = self._config
        sampling = config.rollout.model_dump(include={*SamplingConfig.model_fields, "seed"})
        return xxhash.xxh3_64_hexdigest(json.dumps([config.seed, sampling], sort_keys=True).encode())


def _saved(one: Sampled, mark: str) -> dict[str, Any]:
    return {
        "mark": mark,
        "request_id": one.request_id,
        "place": one.place,
        "tokens": base64.b64encode(one.tokens.astype("<i4").tobytes()).decode(),
        "logprobs": base64.b64encode(one.logprobs.astype("<f4").tobytes()).decode(),
        "finish": one.finish.value,
        "weights_version": one.weights_version,
        "segments": [list(part) for part in one.segments],
    }


def _sampled(saved: Mapping[str, Any]) -> Sampled:
    """Read what `_saved` wrote.

    Raises:
        ValueError: It is something else.
    """
    tokens = np.frombuffer(base64.b64decode(saved["tokens"], validate=True), "<i4").astype(np.int64)
    logprobs = np.frombuffer(base64.b64decode(saved["logprobs"], validate=True), "<f4").astype(np.float32)
    if tokens.shape != logprobs.shape:
        raise ValueError(f"{tokens.size} tokens have {logprobs.size} log-probabilities")
    return Sampled(
        int(saved["request_id"]),
        int(saved["place"]),
        tokens,
        logprobs,
        Finish(saved["finish"]),
        int(saved["weights_version"]),
        None,
        tuple((int(start), int(version)) for start, version in saved["segments"]),
        int(np.count_nonzero(np.isnan(logprobs))),
    )
