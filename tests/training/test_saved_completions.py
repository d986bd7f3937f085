"""Completions of the next steps in a checkpoint are what a run writes, or the checkpoint is refused."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from holdfast.config.load import from_mapping
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.rollout.engine import Flight, Request, Sampled
from holdfast.training.policy.ahead import CompletionsAhead, largest_ahead

CONFIG = from_mapping(
    {
        "model": {"path": "m"},
        "data": {"path": "rows"},
        "steps": 4,
        "reward": "exact",
        "rollout": {
            "group_size": 4,
            "max_new_tokens": 8,
            "max_staleness": 1,
            "engine": {"kind": "vllm", "url": ["http://127.0.0.1:9"]},
        },
        "correction": {"kind": "truncate"},
    },
    GRPOConfig,
)


class Landed:
    """An engine whose completions have all come."""

    def __init__(self) -> None:
        self.done: list[Sampled] = []

    def begin(self, requests: Sequence[Request], sampling: SamplingConfig, done: Sequence[Sampled] = ()) -> Flight:
        self.done = list(done)
        return self  # type: ignore[return-value]


def record(**changes: Any) -> dict[str, Any]:
    """Return a completion of five tokens, whose weights changed before the third."""
    tokens, logprobs = np.arange(5, dtype="<i4"), np.full(5, -1, "<f4")
    return (
        largest_ahead(CONFIG)[0]
        | {
            "step": 1,
            "request_id": 3,
            "place": 2,
            "tokens": base64.b64encode(tokens.tobytes()).decode(),
            "logprobs": base64.b64encode(logprobs.tobytes()).decode(),
            "weights_version": 0,
            "segments": [[0, 0], [2, 1]],
        }
        | changes
    )


def cut(text: str, count: int) -> str:
    return base64.b64encode(base64.b64decode(text)[:count]).decode()


WRONG = {
    "tokens that are no base64": [record(tokens="?")],
    "bytes of half a token": [record(tokens=cut(record()["tokens"], 18))],
    "fewer log-probabilities than tokens": [record(logprobs=cut(record()["logprobs"], 16))],
    "bytes of half a log-probability": [record(logprobs=cut(record()["logprobs"], 19))],
    "a token below 0": [record(tokens=base64.b64encode(np.full(5, -3, "<i4").tobytes()).decode())],
    "segments in another order": [record(segments=[[2, 1], [0, 0]])],
    "segments that begin late": [record(segments=[[1, 0], [2, 1]])],
    "segments at one token": [record(segments=[[0, 0], [2, 1], [2, 2]])],
    "a segment behind the end": [record(segments=[[0, 0], [5, 1]])],
    "the same completion twice": [record(), record(place=1), record()],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_no_run_writes_is_refused_by_its_place(wrong: str) -> None:
    ahead = CompletionsAhead(Landed(), CONFIG)

    with pytest.raises(ValueError, match=rf"^ahead\.{len(WRONG[wrong]) - 1}: "):
        ahead.check(WRONG[wrong])


def test_what_a_run_writes_is_taken_and_a_place_that_the_group_has_not_is_sampled_again() -> None:
    engine = Landed()
    ahead = CompletionsAhead(engine, CONFIG)
    request = Request(3, np.arange(4), (1, 2, 3, 4))
    ahead.begin(0, [request])
    prompt = ahead._flights[0].prompts[3]
    saved = [record(prompt=prompt), record(prompt=prompt, place=99), record(prompt=prompt, step=2)]
    saved.append(record(prompt=prompt, place=1, tokens="", logprobs="", segments=[]))

    ahead.check(saved)
    ahead.restore(saved)
    ahead.begin(1, [request])

    assert [(sampled.place, sampled.tokens.tolist()) for sampled in engine.done] == [(2, [0, 1, 2, 3, 4]), (1, [])]
    assert len(ahead.tell_restored(ahead.taken_count)) == 1
