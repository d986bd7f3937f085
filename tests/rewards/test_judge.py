"""A judge behind a real server on loopback: what it is asked, what it may answer, when it is asked again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from holdfast.config.sections.reward import JudgeConfig
from holdfast.errors import ConfigError
from tests.rewards.conftest import Start, sample, samples

Answer = Callable[[dict[str, Any]], tuple[int, str]]


class Server(ThreadingHTTPServer):
    """Answers each request as `answer` says, and keeps what it was asked."""

    daemon_threads = True
    answer: Answer

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append({**content, "path": self.path})
        self.server.headers.append(dict(self.headers))
        code, text = self.server.answer(content)
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep the output of the tests clean."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def judge(server: Server, **options: Any) -> JudgeConfig:
    given = {"url": server.url, "model": "m", "prompt": "Rate {completion}", **options}
    return JudgeConfig.model_validate(given)


def test_the_judge_sees_the_prompt_the_completion_and_columns(server: Server, start: Start) -> None:
    server.answer = lambda _: (200, "Good.\nScore: 8")
    pool = start(
        "", judge(server, prompt='{prompt}|{completion}|{answer}|{"score": 1}', scale=10.0, max_tokens=5, weight=2.0)
    )

    found = pool.score([sample("I say {answer}", 0, answer="4")])[0]

    assert found.parts == {"judge": 0.8}
    assert found.reward == 1.6
    assert server.asked == [
        {
            "path": "/v1/chat/completions",
            "model": "m",
            "messages": [{"role": "user", "content": 'question|I say {answer}|4|{"score": 1}'}],
            "temperature": 0,
            "max_tokens": 5,
        }
    ]
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize(
    ("said", "regex", "expected"),
    [
        ("First 3, then 7.5", r"-?\d+(?:\.\d+)?", 7.5),
        ("<score>2</score> of 10", r"<score>(\d+)</score>", 2.0),
        ("-1", r"-?\d+(?:\.\d+)?", -1.0),
    ],
)
def test_the_last_match_is_the_number(server: Server, start: Start, said: str, regex: str, expected: float) -> None:
    server.answer = lambda _: (200, said)

    assert start("", judge(server, regex=regex)).score([sample()])[0].reward == expected


def test_an_overloaded_judge_is_asked_again(server: Server, start: Start) -> None:
    codes = iter([500, 429, 200])
    server.answer = lambda _: (next(codes), "1")

    assert start("", judge(server)).score([sample()])[0].reward == 1.0
    assert len(server.asked) == 3


def test_a_judge_that_stays_overloaded_is_an_error(server: Server, start: Start) -> None:
    server.answer = lambda _: (503, "busy")

    found = start("", judge(server, attempts=2)).score([sample()])[0]

    assert (found.reward, found.fault, len(server.asked)) == (None, "error", 2)
    assert f"EndpointBusy: {server.url} answers 503" in found.message


@pytest.mark.parametrize(
    ("code", "text", "said"), [(401, "1", "answers 401"), (200, "no idea", "holds no number: 'no idea'")]
)
def test_asking_again_is_left_where_it_would_not_help(
    server: Server, start: Start, code: int, text: str, said: str
) -> None:
    server.answer = lambda _: (code, text)

    found = start("", judge(server)).score([sample()])[0]

    assert (found.fault, len(server.asked)) == ("error", 1)
    assert said in found.message


def test_a_judge_that_is_not_there_is_an_error(server: Server, start: Start) -> None:
    found = start("", judge(server, url="http://127.0.0.1:9/v1", attempts=1)).score([sample()])[0]

    assert found.fault == "error"
    assert "http://127.0.0.1:9/v1 cannot be reached" in found.message


def test_completions_are_judged_side_by_side(server: Server, start: Start) -> None:
    together = threading.Barrier(4, timeout=10)

    def when_all_are_here(content: dict[str, Any]) -> tuple[int, str]:
        together.wait()
        return 200, str(len(content["messages"][0]["content"]))

    server.answer = when_all_are_here

    found = start("", judge(server, prompt="{completion}"), workers=1).score(samples("a", "bb", "ccc", "dddd"))

    assert [each.reward for each in found] == [1.0, 2.0, 3.0, 4.0]


def test_the_key_comes_from_the_environment(server: Server, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = lambda _: (200, "1")
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    pool = start("", judge(server, api_key_variable="JUDGE_KEY"))

    assert pool.score([sample()])[0].reward == 1.0
    assert server.headers[0]["Authorization"] == "Bearer sesame"


def test_a_key_that_is_not_set_is_refused_at_the_start(
    server: Server, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)

    with pytest.raises(ConfigError, match="the environment variable JUDGE_KEY is not set"):
        start("", judge(server, api_key_variable="JUDGE_KEY"))


def test_a_judge_may_take_longer_than_the_pool_allows_others(server: Server, start: Start) -> None:
    def after_a_while(_: dict[str, Any]) -> tuple[int, str]:
        threading.Event().wait(0.6)
        return 200, "1"

    server.answer = after_a_while

    assert start("", judge(server), timeout_seconds=0.2).score([sample()])[0].reward == 1.0
