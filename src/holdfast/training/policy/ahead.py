"""Sample the completions of the next step on servers while the present step updates (`rollout.max_staleness: 1`).

The prompts are peeked from the stream and not consumed, so that a checkpoint lists them as still to come. A checkpoint
also holds the finished completions of all ranks. A resumed run trains these first, on any number of ranks, and requests
the missing ones again with the same ids and seeds. Rewards and advantages are not computed ahead.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.rollout.engine import AheadEngine, Flight, Request, Sampled
from holdfast.types import Finish


class CompletionsAhead:
    """Completions of the next step that are being sampled; implements `AheadOfStep` of `training/run.py`."""

    def __init__(self, engine: AheadEngine, config: GRPOConfig) -> None:
        self._engine, self._config = engine, config
        self.flight: Flight | None = None
        """Of the next step; it stays until all of it has come."""
        self._restored: list[_Restored] = []
        """From a checkpoint, of all ranks."""
        self._prompts: dict[int, str] = {}
        """Digests of those asked for, by id."""
        self.saved_count = 0
        """Completions that the checkpoint had, of all ranks; 0 once a step has begun with them."""
        self.taken_count = 0
        """Of these, those that this rank's prompts took."""

    def begin(self, requests: Sequence[Request]) -> Flight:
        """Ask for this rank's completions of a step, unless they are on their way.

        A completion from a checkpoint is taken if it is of the same prompt, token by token: its id alone says which
        place in the data it had, and the data may be other ones.
        """
        if self.flight is None:
            self._prompts = {request.request_id: _digest(request) for request in requests}
            done = [
                restored.sampled
                for restored in self._restored
                if self._prompts.get(restored.sampled.request_id) == restored.prompt
            ]
            self._restored, self.taken_count = [], len(done)
            self.flight = self._engine.begin(requests, self._config.rollout, done)
        return self.flight

    def end(self, taken: int) -> list[str]:
        """Note that all completions of the step arrived; return a message if some from a checkpoint were not used.

        Args:
            taken: Completions of the checkpoint that ranks took, all together.
        """
        dropped, self.saved_count = self.saved_count - taken, 0
        self.flight, self.taken_count = None, 0
        if dropped <= 0:
            return []
        return [
            f"note: {dropped} completions that the checkpoint has of this step are of other prompts than the run draws "
            "now, of other sampling, or without a mark of their prompt; they are sampled again"
        ]

    def finished(self) -> Callable[[], list[dict[str, Any]]]:
        """Return a function that lists this rank's finished completions of the next step; it may be called later."""
        flight, restored, prompts = self.flight, self._restored, self._prompts
        mark = self._mark()
        if flight is None:
            return lambda: [_as_plain(completion.sampled, completion.prompt, mark) for completion in restored]
        return lambda: [_as_plain(sampled, prompts[sampled.request_id], mark) for sampled in flight.finished()]

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the completions of the next step, of all ranks, from a checkpoint."""
        mark = self._mark()
        marked = [record for record in saved if record["mark"] == mark]
        self.flight, self._restored = (
            None,
            [_Restored(record["prompt"], _sampled_from(record)) for record in marked],
        )
        self.saved_count, self.taken_count = len(saved), 0

    def largest(self) -> list[dict[str, Any]]:
        """Return as many bytes as a checkpoint may have of completions, over all ranks."""
        rollout = self._config.rollout
        size = rollout.max_new_tokens
        longest = Sampled(0, 0, np.zeros(size, np.int64), np.zeros(size, np.float32), Finish.LENGTH, 0)
        return [_as_plain(longest, "0" * 32, self._mark())] * (self._config.data.batch_size * rollout.group_size)

    def _mark(self) -> str:
        """Return a hash of the settings that decide a completion; saved completions with another hash are discarded."""
        config = self._config
        sampling = config.rollout.model_dump(include={*SamplingConfig.model_fields, "seed"})
        return xxhash.xxh3_64_hexdigest(json.dumps([config.seed, sampling], sort_keys=True).encode())


class _Restored(NamedTuple):
    prompt: str
    """Digest."""
    sampled: Sampled


def _digest(request: Request) -> str:
    return xxhash.xxh3_128_hexdigest(request.prompt.astype("<i8").tobytes())


def _as_plain(sampled: Sampled, prompt: str, mark: str) -> dict[str, Any]:
    return {
        "mark": mark,
        "prompt": prompt,
        "request_id": sampled.request_id,
        "place": sampled.place,
        "tokens": base64.b64encode(sampled.tokens.astype("<i4").tobytes()).decode(),
        "logprobs": base64.b64encode(sampled.logprobs.astype("<f4").tobytes()).decode(),
        "finish": sampled.finish.value,
        "weights_version": sampled.weights_version,
        "segments": [list(segment) for segment in sampled.segments],
    }


def _sampled_from(saved: Mapping[str, Any]) -> Sampled:
    """Read what `_as_plain` wrote.

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
