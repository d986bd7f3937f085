"""What references, teachers and judges answer is read as it stands or refused by route and path; nothing is converted.

A real server on loopback returns the bytes of a test; a seeded mutator changes answers of the right form anywhere.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from holdfast.config.sections.reward import JudgeConfig
from holdfast.config.sections.server import ServerConfig
from holdfast.features.served_models.client import Client
from holdfast.http import EndpointMistaken, EndpointRefuses
from holdfast.rewards.base import Sample
from holdfast.rewards.functions.judge import Judge
from tests.mutants import mutated

TOKENS = [5, 9, 17, 33, 12]
LOGPROBS = [None, -0.25, -1.5, -7.125, -0.0]
ROWS = [None, *({str(t): {"logprob": p, "rank": 1}} for t, p in zip(TOKENS[1:], LOGPROBS[1:], strict=True))]
MUTANTS = 300


def completion(**choice: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "text": "", **choice}], "usage": {"prompt_tokens": len(TOKENS)}}


def echo() -> dict[str, Any]:
    names = [*(f"token_id:{token}" for token in TOKENS), "token_id:3"]
    return completion(logprobs={"tokens": names, "token_logprobs": [*LOGPROBS, -2.0]})


RIGHT: dict[str, Callable[[], Any]] = {
    "prompt_logprobs": lambda: completion(prompt_logprobs=copy.deepcopy(ROWS)),
    "echo": echo,
    "models": lambda: {"data": [{"id": "tiny", "max_model_len": 128}, {"id": "other", "max_model_len": None}]},
    "judge": lambda: {"choices": [{"message": {"role": "assistant", "content": "I rate it 7"}}]},
}


class Server(ThreadingHTTPServer):
    """Returns the same bytes to every request."""

    daemon_threads = True
    content = b""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content)

    do_GET = do_POST  # noqa: N815 - its name there

    def log_message(self, *_: object) -> None:
        """Keep the output of the tests clean."""


@pytest.fixture
def server() -> Iterator[Server]:
    opened = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield opened
    opened.shutdown()
    opened.server_close()
    thread.join()


def ask(server: Server, name: str, content: bytes) -> Any:
    """Return what our client reads from an answer."""
    server.content = content
    url = f"http://127.0.0.1:{server.server_port}/v1"
    if name == "judge":
        section = JudgeConfig(url=url, model="m", prompt="Rate {completion}", attempts=1).model_dump()
        sample = Sample(0, "", "", [], [], "stop", {})
        return asyncio.run(Judge.of(section, "judge")(sample))
    answers: Any = "echo" if name == "echo" else "prompt_logprobs"
    client = Client.of(ServerConfig(url=url, model="tiny", answers=answers, attempts=1), "teacher")
    return client.models() if name == "models" else client.logprobs(TOKENS)


def as_it_stands(name: str, answer: Any) -> Any:
    """Return what an answer says, read by the shortest way there is."""
    if name == "models":
        return [(model["id"], model.get("max_model_len")) for model in answer["data"]]
    choice = answer["choices"][0]
    if name == "judge":
        return choice["message"]["content"]
    if name == "echo":
        return dict(enumerate(choice["logprobs"]["token_logprobs"][: len(TOKENS)]))
    return {
        index: choice["prompt_logprobs"][index][str(token)]["logprob"] for index, token in enumerate(TOKENS) if index
    }


@pytest.mark.parametrize("name", RIGHT)
def test_changed_answers_are_named_or_mean_what_they_say(server: Server, name: str) -> None:
    draw, outcomes = random.Random(39), {"named": 0, "accepted": 0}
    for number in range(MUTANTS):
        content, path = mutated(RIGHT[name](), draw)
        try:
            result = ask(server, name, content)
        except EndpointRefuses as error:
            outcomes["named"] += 1
            assert str(error).isprintable()
            assert len(str(error)) < 600
            if isinstance(error, EndpointMistaken):
                assert "needed" in str(error) or "what is no JSON" in str(error), str(error)
            continue
        except Exception as error:
            raise AssertionError(f"mutant {number} of {name} at {path}: {content[:300]!r}") from error
        outcomes["accepted"] += 1
        expected = as_it_stands(name, json.loads(content))
        if name == "models":
            assert [tuple(model) for model in result] == expected
            assert all(type(longest) in {int, type(None)} and type(model) is str for model, longest in expected)
        elif name == "judge":
            assert type(expected) is str
            assert result == float(re.findall(r"-?\d+(?:\.\d+)?", expected)[-1])
        else:
            assert len(result) == len(TOKENS)
            for index, value in list(expected.items()):
                if index:
                    assert type(value) in {int, float}
                    assert result[index] == value
                    assert -9999 < value <= 1e-4

    assert min(outcomes.values()) >= 25, outcomes


def spoiled(name: str, change: Callable[[Any], Any]) -> bytes:
    answer = json.loads(json.dumps(RIGHT[name]()))
    change(answer)
    return json.dumps(answer).encode()


def of_row(**values: Any) -> Callable[[Any], Any]:
    return lambda answer: answer["choices"][0]["prompt_logprobs"][2].update(values)


def of_message(content: Any) -> Callable[[Any], Any]:
    return lambda answer: answer["choices"][0]["message"].update(content=content)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("prompt_logprobs", of_row(**{"17": {"logprob": 5e-4}}), "[2].17.logprob 0.0005, where the logarithm of"),
        ("prompt_logprobs", of_row(**{" 17": {"logprob": -1.0}}), '[2].key " 17", where the id of a token below'),
        ("prompt_logprobs", of_row(**{"17": {"logprob": True}}), "[2].17.logprob true, where the logarithm of"),
        ("echo", lambda a: a["choices"][0]["logprobs"]["tokens"].__setitem__(1, "token_id:9 "), 'tokens[1] "9 "'),
        ("echo", lambda a: a["choices"][0]["logprobs"]["tokens"].pop(), "token_logprobs a list of 6, where"),
        ("models", lambda a: a["data"][0].update(id=3), "/models with data[0].id 3, where a text is needed"),
        ("models", lambda a: a["data"][0].update(max_model_len="128"), 'data[0].max_model_len "128", where a whole'),
        ("judge", of_message([{"text": "7"}]), "choices[0].message.content a list of 1, where a text is needed"),
        ("judge", of_message(7), "/chat/completions with choices[0].message.content 7, where a text is needed"),
        ("judge", of_message(None), "choices[0].message.content null, where a text is needed"),
    ],
)  # fmt: skip
def test_values_of_another_type_are_not_converted(server: Server, name: str, change: Any, words: str) -> None:
    with pytest.raises(EndpointMistaken) as error:
        ask(server, name, spoiled(name, change))

    assert words in str(error.value)
