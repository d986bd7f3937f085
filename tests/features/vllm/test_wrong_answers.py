"""Answers of the wrong form: each is named by server, route and place, and nothing of them is trained on.

What a server says of itself and of a proof ends a run before step 1; a completion is one failed request, asked of
another server. Beside the planted list a seeded mutator changes recorded replies of a real vLLM anywhere.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.errors import ConfigError, RunStopped
from holdfast.features.vllm.prompts import ServedPrompt
from holdfast.features.vllm.responses import server_lease_of
from holdfast.features.vllm.servers import VLLMServer
from holdfast.http import EndpointMistaken, EndpointRefuses
from holdfast.metrics.sink import METRICS, read_metrics
from tests.features.vllm.served import ServedModel, served_tree, serving
from tests.features.vllm.test_served_runs import run
from tests.features.vllm.test_vllm_replies import recorded
from tests.mutants import mutated

DEEP = b"[" * 100_000 + b"]" * 100_000


def of_itself(change: Callable[[dict[str, Any]], None]) -> Any:
    """Change what a server says of itself."""

    def answer(path: str, told: Any) -> Any:
        if path == "/collective_rpc" and "identity" in told["results"][0]:
            change(told["results"][0])
        return told

    return answer


def of_a_lease(path: str, told: Any) -> Any:
    """Say something else of who pushes."""
    if path == "/collective_rpc" and "seconds" in told["results"][0]:
        told["results"][0]["holder"]["token"] = 3
    return told


def instead(path_of_answer: str, content: Any) -> Any:
    """Answer something else at a route."""
    return lambda path, told: content if path == path_of_answer else told


@pytest.mark.parametrize("seconds", [1e300, math.inf, math.nan, 86401])
def test_a_lease_longer_than_a_day_is_refused(seconds: float) -> None:
    holder = {"token": "z", "host": "elsewhere", "pid": 1, "machine": ["other", "other"]}

    with pytest.raises(EndpointMistaken, match=r"results\[0\].seconds .*, where a number up to 86400 is needed"):
        server_lease_of({"results": [{"holder": holder, "seconds": seconds}]})


def of_a_proof(change: Callable[[dict[str, Any]], None]) -> Any:
    """Change the log-probabilities of a prompt."""

    def answer(path: str, told: Any) -> Any:
        if "prompt_logprobs" in told:
            change(told["prompt_logprobs"][3])
        return told

    return answer


def of_completions(change: Callable[[dict[str, Any]], None]) -> Any:
    """Change completions, but not what a proof asks."""

    def answer(path: str, told: Any) -> Any:
        for choice in told.get("choices", ()) if path == "/inference/v1/generate" else ():
            if len(choice["token_ids"]) > 1:
                change(choice)
        return told

    return answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (of_itself(lambda facts: facts.pop("block")), "/collective_rpc with results[0].block missing, where a whole"),
        (of_itself(lambda facts: facts.update(block=2**30)), "block 1073741824, where a whole number from 1 to 65536"),
        (of_itself(lambda facts: facts.update(longest="abc")), 'results[0].longest "abc", where a whole number from 1'),
        (of_itself(lambda facts: facts.update(tied="no")), 'results[0].tied "no", where true or false is needed'),
        (of_itself(lambda facts: facts.update(dtype=32)), "results[0].dtype 32, where a text is needed"),
        (of_itself(lambda facts: facts.update(identity="../x")), 'identity "../x", where letters, digits and dashes'),
        (of_a_lease, "/collective_rpc with results[0].holder.token 3, where a text is needed"),
        (instead("/collective_rpc", {"results": []}), "results a list of 0, where a list of at least 1 is needed"),
        (instead("/collective_rpc", DEEP), "POST /collective_rpc with what is no JSON: [[[["),
        (instead("/v1/models", {"data": {"id": "policy"}}), "/v1/models with data an object, where a list of"),
        (instead("/v1/models", {"data": [{"id": "a", "parent": "b"}]}), "serves adapters alone, and no model"),
    ],
)  # fmt: skip
def test_a_server_that_says_something_else_of_itself_is_told_before_step_1(
    tmp_path: Path, answer: Any, words: str
) -> None:
    served = ServedModel(answer=answer)
    with serving(served) as url, pytest.raises(ConfigError) as error:
        run(tmp_path, served_tree([url], str(tmp_path)))

    assert f"rollout.engine.url: {url} " in str(error.value)
    assert words in str(error.value)
    assert "`holdfast serve RUN.yaml` starts one" in str(error.value)
    assert not served.events
    assert not (tmp_path / "r").exists()


def shorter(row: dict[str, Any]) -> None:
    del row[next(iter(row))]


def all_of(value: Any) -> Callable[[dict[str, Any]], None]:
    """Give one log-probability of a row a value."""
    return lambda row: row[next(iter(row))].update(logprob=value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (of_a_proof(shorter), "prompt_logprobs[3] an object, where an object of at least 20 tokens is needed"),
        (
            of_a_proof(lambda row: row.update(x=row[next(iter(row))])),
            'prompt_logprobs[3].key "x", where the id of a token below 64',
        ),
        (of_a_proof(all_of(0.5)), ".logprob 0.5, where the logarithm of a probability"),
        (of_a_proof(all_of(math.nan)), ".logprob NaN, where the logarithm of a probability"),
        (of_a_proof(all_of("-1.5")), '.logprob "-1.5", where the logarithm of a probability'),
        (lambda path, told: DEEP if "choices" in told else told, "with what is no JSON"),
    ],
)
def test_a_proof_of_other_answers_ends_a_run_before_step_1(tmp_path: Path, answer: Any, words: str) -> None:
    served = ServedModel(answer=answer)
    with serving(served) as url, pytest.raises(RunStopped) as error:
        run(tmp_path, served_tree([url], str(tmp_path)))

    assert f"The server at {url} took the weights, and then answers " in str(error.value)
    assert "/inference/v1/generate with " in str(error.value)
    assert words in str(error.value)
    assert not any(what.startswith("asked") for _, what in served.events)


def a_log_probability(value: Any) -> Any:
    return of_completions(lambda choice: choice["logprobs"]["content"][1].update(logprob=value))


def a_token(value: Any) -> Any:
    def change(choice: dict[str, Any]) -> None:
        choice["token_ids"][1] = choice["logprobs"]["content"][1]["token_id"] = value

    return of_completions(change)


WRONG = {
    "a positive log-probability": (a_log_probability(0.7), "content[1].logprob 0.7, where the logarithm of"),
    "an infinite one": (a_log_probability(math.inf), "content[1].logprob Infinity, where"),
    "one that is a text": (a_log_probability("NaN"), 'content[1].logprob "NaN", where'),
    "a token that is a text": (a_token("7"), 'token_ids[1] "7", where a whole number from 0 to 63'),
    "a token beyond the vocabulary": (a_token(64), "token_ids[1] 64, where a whole number from 0 to 63"),
    "a token that is no whole number": (a_token(7.0), "token_ids[1] 7.0, where"),
    "weights without a name": (
        of_completions(lambda choice: choice["weight_versions"][0].update(version=3)),
        "weight_versions[0].version 3, where a text is needed",
    ),
    "brackets": (lambda path, told: DEEP if len(_tokens(told)) > 1 else told, "with what is no JSON: [["),
}


def _tokens(told: dict[str, Any]) -> list[int]:
    tokens: list[int] = told["choices"][0]["token_ids"] if "choices" in told else []
    return tokens


@pytest.mark.parametrize("name", WRONG)
def test_a_completion_of_another_form_is_asked_for_again_and_then_named(tmp_path: Path, name: str) -> None:
    answer, words = WRONG[name]
    served = ServedModel(answer=answer)
    with serving(served) as url, pytest.raises(RunStopped) as error:
        run(tmp_path, served_tree([url], str(tmp_path)))

    assert f"The server at {url} answers " in str(error.value)
    assert words in str(error.value)
    assert "one completion was asked for 2 times" in str(error.value)


def test_a_completion_of_another_form_is_taken_from_another_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, right = ServedModel(answer=WRONG["a positive log-probability"][0]), ServedModel()
    with serving(wrong) as url, serving(right) as other:
        run(tmp_path, served_tree([url, other], str(tmp_path), steps=2))

    assert capsys.readouterr().out.count(f"warning: the server at {url} answers ") == 1
    metrics = [line for line in read_metrics(tmp_path / "r" / METRICS) if "loss" in line]
    assert [line["sampling/sampling_logp_difference/max"] < 1e-4 for line in metrics] == [True, True]


class Scripted(ServedModel):
    """Computes nothing."""

    def post(self, path: str, query: Any, asked: Any) -> Any:
        return {}


MUTANTS = 200


def plain_numbers(values: list[Any]) -> list[float]:
    """Return log-probabilities as they stand in JSON; what is none of a number is NaN."""
    assert all(value is None or type(value) in {int, float} for value in values), values
    return [math.nan if value is None or not value > -9999 else value for value in values]


def same_completion(server: VLLMServer, content: bytes) -> None:
    reply = server.complete("a", ServedPrompt([5, 9, 17, 33, 12]), {"max_tokens": 6})
    choice = json.loads(content)["choices"][0]
    assert all(type(token) is int and 0 <= token < 64 for token in choice["token_ids"])
    assert reply.tokens.tolist() == choice["token_ids"]
    logprobs = plain_numbers([entry["logprob"] for entry in choice["logprobs"]["content"]])
    assert np.array_equal(reply.logprobs, np.array(logprobs, np.float32), equal_nan=True)
    assert all(not value > 1e-4 for value in logprobs)
    assert reply.finish.value == choice["finish_reason"]
    assert list(reply.spans) == [(span["start"], span["version"]) for span in choice["weight_versions"]]


def same_proof(server: VLLMServer, content: bytes) -> None:
    *rows, last = server.tops(ServedPrompt([5, 9, 17, 33, 12]), 20)
    told = json.loads(content)
    plain = [{int(name): entry["logprob"] for name, entry in row.items()} for row in told["prompt_logprobs"][1:]]
    top = told["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [*rows, last] == [*plain, {entry["token_id"]: entry["logprob"] for entry in top}]
    for row in (*rows, last):
        assert len(row) >= 20
        assert all(0 <= token < 64 and math.isfinite(value) and value <= 1e-4 for token, value in row.items())


def same_state(server: VLLMServer, content: bytes) -> None:
    state = server.state()
    told = json.loads(content)
    facts = told["results"][0] if "results" in told else recorded("identity")["answer"]["results"][0]
    assert dict(state.facts) == {name: facts.get(name) for name in state.facts}
    assert all(type(state.facts[name]) is type(value) for name, value in facts.items() if name in state.facts)
    assert len(state.facts) >= 13
    if "data" in told:
        assert state.model in {each["id"] for each in told["data"]}


def same_lease(server: VLLMServer, content: bytes) -> None:
    holder, seconds = server.lease({"token": "a"}, 60.0)
    lease = json.loads(content)["results"][0]
    assert holder == {name: lease["holder"][name] for name in ("token", "host", "pid", "machine")}
    assert seconds == lease["seconds"]
    assert not seconds < 0


KINDS = {
    "generate": ("/inference/v1/generate", same_completion),
    "stop": ("/inference/v1/generate", same_completion),
    "prompt_logprobs": ("/inference/v1/generate", same_proof),
    "lease": ("/collective_rpc", same_lease),
    "identity": ("/collective_rpc", same_state),
    "models": ("/v1/models", same_state),
}


def test_changes_of_recorded_replies_are_named_or_mean_what_they_say() -> None:
    draw, outcomes = random.Random(20), {"named": 0, "accepted": 0}
    now: dict[str, Any] = {}
    served = Scripted(answer=now.get)
    with serving(served) as url, closing(VLLMServer.of(url, VLLMEngineConfig(url=[url]))) as opened:
        server = replace(opened, vocabulary=64)
        for number in range(MUTANTS):
            name = draw.choice(list(KINDS))
            path, same = KINDS[name]
            content, place = mutated(recorded(name)["answer"], draw)
            now.clear()
            now |= {each: json.dumps(recorded(other)["answer"]).encode() for other, (each, _) in KINDS.items()}
            now[path] = content
            try:
                same(server, content)
            except EndpointMistaken as error:
                outcomes["named"] += 1
                words = str(error)
                assert path in words, words
                assert re.search(r"where .+ is needed$|with what is no JSON", words), words
                assert len(words) < 600
                assert words.isprintable(), words
            except EndpointRefuses as error:  # of the right form, and of something else than was asked for
                outcomes["named"] += 1
                assert str(error).isprintable()
            except Exception as error:
                raise AssertionError(f"mutant {number} of {name} at {place}: {content[:300]!r}") from error
            else:
                outcomes["accepted"] += 1

    assert outcomes["named"] >= 80, outcomes
    assert outcomes["accepted"] >= 20, outcomes
