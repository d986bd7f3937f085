"""Sample the completions of the next steps on servers while the present step updates (`rollout.max_staleness`).

A completion is one answer or, with an environment, one episode: `EpisodesAhead` is the engine then.

Steps keep their prompts and their order: a completion that takes long delays its own step alone, and nothing is older
than `max_staleness` updates. The prompts are peeked from the stream and not consumed, so that a checkpoint lists them
as still to come. A checkpoint also holds the finished completions of all ranks. A resumed run trains these first, on
any number of ranks, and requests the missing ones again with the same ids and seeds. Rewards and advantages are not
computed ahead.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import xxhash
from pydantic import TypeAdapter

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.rollout.engine import AheadEngine, EndedEpisode, Flight, Request, Sampled
from holdfast.types import EpisodeSummary, Finish

_CHARACTERS = 4
"""Of a token's text, about; for sizes alone."""
_EPISODE = TypeAdapter(EpisodeSummary)
_LARGEST_NUMBER = 10**9
"""Above which steps, updates and prompts of a run are not counted on."""


class CompletionsAhead:
    """Completions of the next steps that are being sampled; implements `AheadOfStep` of `training/run.py`."""

    def __init__(self, engine: AheadEngine, config: GRPOConfig) -> None:
        self._engine, self._config = engine, config
        self._flights: dict[int, _StepFlight] = {}
        """By step, counted from 0; each stays until all of its completions have come."""
        self._restored: list[_StepCompletion] = []
        """From a checkpoint, of all ranks, as far as no flight has taken them."""
        self.restored_count = 0
        """Completions that the checkpoint had, of all ranks; 0 once it was told how many of them were taken."""
        self.taken_count = 0
        """Of these, those that this rank's prompts took."""

    def is_begun(self, step: int) -> bool:
        """Say whether the completions of a step are on their way."""
        return step in self._flights

    def begin(self, step: int, requests: Sequence[Request]) -> Flight:
        """Ask for this rank's completions of a step, unless they are on their way.

        A completion from a checkpoint is taken if it is of the same prompt, token by token: its id alone says which
        place in the data it had, and the data may be other ones.
        """
        if step not in self._flights:
            prompts = {request.request_id: _digest(request) for request in requests}
            places = {(request.request_id, place) for request in requests for place in range(len(request.seeds))}

            def is_asked(restored: _StepCompletion) -> bool:
                sampled = restored.sampled
                return (
                    restored.step in {None, step}
                    and prompts.get(sampled.request_id) == restored.prompt
                    and (sampled.request_id, sampled.place) in places
                )

            done = [restored.sampled for restored in self._restored if is_asked(restored)]
            self._restored = [restored for restored in self._restored if not is_asked(restored)]
            self.taken_count += len(done)
            self._flights[step] = _StepFlight(self._engine.begin(requests, self._config.rollout, done), prompts)
        return self._flights[step].flight

    def end(self, step: int) -> None:
        """Note that all completions of a step have come."""
        self._flights.pop(step, None)

    def close(self) -> None:
        """Give up what is on its way."""
        for flight, _ in self._flights.values():
            flight.end()

    def tell_restored(self, taken: int) -> list[str]:
        """Return a message if completions of the checkpoint were not used, once, when all steps ahead have begun.

        Args:
            taken: Completions of the checkpoint that ranks took, all together.
        """
        dropped, self.restored_count, self.taken_count = self.restored_count - taken, 0, 0
        self._restored = []
        if dropped <= 0:
            return []
        return [
            f"note: {dropped} completions that the checkpoint has of the next steps are of other prompts than the run "
            "draws now, of other sampling, or without a mark of their prompt; they are sampled again"
        ]

    def finished(self) -> Callable[[], list[dict[str, Any]]]:
        """Return a function that lists this rank's finished completions of the next steps; it may be called later."""
        flights, restored, mark = dict(self._flights), list(self._restored), self._mark()
        return lambda: [
            *(_as_plain(item, mark) for item in restored),
            *(
                _as_plain(_StepCompletion(prompts[sampled.request_id], step, sampled), mark)
                for step, (flight, prompts) in flights.items()
                for sampled in flight.finished()
            ),
        ]

    def check(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Look at completions of a checkpoint before they are restored.

        Raises:
            ValueError: One is not what a run writes, or stands there twice; by its place.
        """
        seen: set[tuple[Any, ...]] = set()
        for number, record in enumerate(saved):
            try:
                _check_shapes(_sampled_from(record))
            except ValueError as error:
                raise ValueError(f"ahead.{number}: {error}") from None
            key = tuple(record.get(name) for name in ("mark", "step", "request_id", "place"))
            if key in seen:
                raise ValueError(f"ahead.{number}: the same completion stands there before")
            seen.add(key)

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the completions of the next steps, of all ranks, from a checkpoint."""
        mark = self._mark()
        marked = [record for record in saved if record["mark"] == mark]
        self._flights = {}
        self._restored = [
            _StepCompletion(record["prompt"], record.get("step"), _sampled_from(record)) for record in marked
        ]
        self.restored_count, self.taken_count = len(saved), 0

    def largest(self) -> list[dict[str, Any]]:
        """Return as many bytes as a checkpoint may have of completions, over all ranks."""
        return largest_ahead(self._config)

    def _mark(self) -> str:
        return _mark_of(self._config)


def largest_ahead(config: GRPOConfig) -> list[dict[str, Any]]:
    """Return as many bytes as a checkpoint of a run may have of completions of the next steps, over all ranks."""
    rollout, size, parts, episode = config.rollout, config.rollout.max_new_tokens, 1, None
    if config.environment is not None:
        size, parts = config.data.max_length, 2 * config.environment.max_turns
        # What environments say has no largest size but that of the tokens that are made of it.
        text = "x" * (_CHARACTERS * size)
        numbers, names = (float(_LARGEST_NUMBER),) * parts, {"unknown": _LARGEST_NUMBER}
        summary = EpisodeSummary(
            ({"role": "assistant", "content": text},), parts, parts, "failed_calls", numbers[0], numbers,
            (size,) * parts, names, _LARGEST_NUMBER, parts, numbers[0], {}, samples=((size, size),) * parts,
        )  # fmt: skip
        episode = EndedEpisode(summary, text)
    tokens, logprobs, number = np.zeros(size, np.int64), np.zeros(size, np.float32), _LARGEST_NUMBER
    segments = ((size, number),) * (parts + rollout.max_staleness)
    longest = Sampled(number, rollout.group_size, tokens, logprobs, Finish.LENGTH, number, segments, episode=episode)
    count = config.data.batch_size * rollout.group_size * rollout.max_staleness
    return [_as_plain(_StepCompletion("0" * 32, number, longest), _mark_of(config))] * count


def _mark_of(config: GRPOConfig) -> str:
    """Return a hash of the settings that decide a completion; saved completions with another hash are discarded."""
    sampling = config.rollout.model_dump(include={*SamplingConfig.model_fields, "seed"})
    decisive = [config.seed, sampling]
    if config.environment is not None:
        decisive += [config.data.max_length, config.environment.model_dump(mode="json", exclude={"instances"})]
    return xxhash.xxh3_64_hexdigest(json.dumps(decisive, sort_keys=True).encode())


class _StepFlight(NamedTuple):
    flight: Flight
    prompts: Mapping[int, str]
    """Digests of the prompts, by id."""


class _StepCompletion(NamedTuple):
    prompt: str
    """Digest."""
    step: int | None
    """Counted from 0; None where the checkpoint does not say, which then has completions of one step alone."""
    sampled: Sampled


def _digest(request: Request) -> str:
    """Return a hash of a prompt: of its tokens, and of what the model or an environment sees besides."""
    hashed = xxhash.xxh3_128(request.prompt.astype("<i8").tobytes())
    for name in sorted(request.model_inputs):
        hashed.update(name.encode() + np.ascontiguousarray(request.model_inputs[name]).tobytes())
    if request.row is not None:
        hashed.update(json.dumps(dict(request.row), sort_keys=True, default=str).encode())
    return hashed.hexdigest()


def _as_plain(completion: _StepCompletion, mark: str) -> dict[str, Any]:
    sampled, episode = completion.sampled, completion.sampled.episode
    told = {} if episode is None else {"episode": asdict(episode.summary), "last_text": episode.last_text}
    return {
        "mark": mark,
        "prompt": completion.prompt,
        "step": completion.step,
        "request_id": sampled.request_id,
        "place": sampled.place,
        "tokens": base64.b64encode(sampled.tokens.astype("<i4").tobytes()).decode(),
        "logprobs": base64.b64encode(sampled.logprobs.astype("<f4").tobytes()).decode(),
        "finish": sampled.finish.value,
        "weights_version": sampled.weights_version,
        "segments": [list(segment) for segment in sampled.segments],
        **told,
    }


def _sampled_from(saved: Mapping[str, Any]) -> Sampled:
    """Read what `_as_plain` wrote.

    Raises:
        ValueError: It is no number of tokens, or of log-probabilities, or no summary of an episode.
    """
    tokens = np.frombuffer(base64.b64decode(saved["tokens"], validate=True), "<i4").astype(np.int64)
    logprobs = np.frombuffer(base64.b64decode(saved["logprobs"], validate=True), "<f4").astype(np.float32)
    episode = None
    if saved.get("episode") is not None:
        episode = EndedEpisode(_EPISODE.validate_python(saved["episode"]), str(saved["last_text"]))
    return Sampled(
        int(saved["request_id"]),
        int(saved["place"]),
        tokens,
        logprobs,
        Finish(saved["finish"]),
        int(saved["weights_version"]),
        tuple((int(start), int(version)) for start, version in saved["segments"]),
        int(np.count_nonzero(np.isnan(logprobs))),
        episode,
    )


def _check_shapes(sampled: Sampled) -> None:
    """Check what a completion has for its tokens.

    Raises:
        ValueError: There is too much, or too little of it.
    """
    size, starts = sampled.tokens.size, [start for start, _ in sampled.segments]
    if size != sampled.logprobs.size:
        raise ValueError(f"it has {size} tokens and {sampled.logprobs.size} log-probabilities")
    if size and sampled.tokens.min() < 0:
        raise ValueError(f"it has a token {sampled.tokens.min()}")
    if starts and (starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= max(1, size)):
        raise ValueError(f"its segments begin at {starts}, and it has {size} tokens")
    if sampled.episode is not None:
        _check_episode(sampled, sampled.episode.summary)


def _check_episode(sampled: Sampled, summary: EpisodeSummary) -> None:
    """Check what an episode came to for its tokens.

    Raises:
        ValueError: Something is of other tokens, or of other turns.
    """
    ends = [*(start for start, _ in sampled.segments[1:]), sampled.tokens.size]
    chosen = sum(end - start for (start, version), end in zip(sampled.segments, ends, strict=True) if version >= 0)
    tokens, of_samples = (sum(sizes) for sizes in zip(*summary.samples, strict=True)) if summary.samples else (0, 0)
    if (tokens, of_samples, sum(summary.turn_lengths)) != (sampled.tokens.size, chosen, chosen):
        raise ValueError(
            f"its samples have {tokens} tokens, {of_samples} of them chosen, its turns {sum(summary.turn_lengths)}; "
            f"it has {sampled.tokens.size} and {chosen}"
        )
    if not summary.turns == len(summary.turn_lengths) == len(summary.turn_rewards):
        raise ValueError(
            f"it has {summary.turns} turns, {len(summary.turn_lengths)} lengths and {len(summary.turn_rewards)} rewards"
        )
