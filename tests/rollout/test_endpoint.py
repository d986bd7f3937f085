"""Where agents ask: addresses, sockets, keys, and requests that are too large, too slow, too many or not theirs."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from holdfast.config.sections.environment import AgentEndpointConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.errors import ConfigError
from holdfast.rollout.episodes.endpoint import Endpoint

BODY = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hello"}]}).encode()


def endpoint(**options: Any) -> Endpoint:
    return Endpoint(SamplingConfig(), AgentEndpointConfig.model_validate(options))


def connected(served: Endpoint) -> socket.socket:
    if served.base_url.startswith("unix:"):
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(served.base_url.removeprefix("unix:"))
        return channel
    host, _, port = served.base_url.removeprefix("http://").removesuffix("/v1").rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)))


def said(key: str, length: int) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"
    return (head + (f"Authorization: Bearer {key}\r\n" if key else "") + "\r\n").encode()


def status(served: Endpoint, key: str, body: bytes = BODY, length: int | None = None) -> int:
    with connected(served) as channel:
        channel.sendall(said(key, len(body) if length is None else length) + body)
        channel.shutdown(socket.SHUT_WR)
        return int(channel.makefile("rb").readline().split()[1])


def answering(served: Endpoint) -> threading.Thread:
    def answer() -> None:
        for call in served.take(10.0):
            call.answer({"choices": []})

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize("address", ["127.0.0.1", "unix", "[::1]"])
def test_an_agent_asks_at_an_address_and_at_a_socket(address: str) -> None:
    with endpoint(address=address) as served:
        thread = answering(served)

        found = status(served, served.open())

        thread.join()
    assert found == 200


def test_a_socket_is_this_users_alone_and_goes_with_its_endpoint_and_with_a_dead_process() -> None:
    left = Path("/tmp") / "holdfast-agents-999999999-left"
    left.mkdir(exist_ok=True)

    with endpoint(address="unix") as served:
        folder = Path(served.base_url.removeprefix("unix:")).parent
        mode = folder.stat().st_mode & 0o777

    assert mode == 0o700
    assert not folder.exists()
    assert not left.exists()


def test_a_guess_is_refused_and_counted_and_an_agent_that_asks_after_its_end_is_no_guess() -> None:
    with endpoint() as served:
        key = served.open()
        served.end(key)

        found = [status(served, guess) for guess in ("", "guess", key)]
        guesses = served.guesses

    assert found == [401, 401, 401]
    assert guesses == 2


def test_a_guess_is_refused_before_its_body_is_read() -> None:
    with endpoint() as served:
        found = status(served, "guess", b"", length=1 << 25)

    assert found == 401


def test_a_request_that_is_too_large_or_one_too_many_is_refused() -> None:
    with endpoint(max_request_bytes=100, max_requests=3) as served:
        key = served.open()
        thread = answering(served)

        found = [status(served, key, b"x" * 101), status(served, key), status(served, key, b"no JSON")]
        found.append(status(served, key))

        thread.join()
    assert found == [400, 200, 400, 429]


def test_a_request_that_comes_too_slowly_holds_nothing() -> None:
    with endpoint(request_seconds=0.4) as served, connected(served) as channel:
        channel.sendall(said(served.open(), 1000))
        began, answer = time.monotonic(), b""
        while time.monotonic() - began < 0.3:
            channel.sendall(b" ")
            time.sleep(0.05)
        answer = channel.makefile("rb").read()
        seconds = time.monotonic() - began

    assert seconds < 5
    assert b" 200 " not in answer


def test_two_runs_on_one_port_are_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        with pytest.raises(ConfigError, match=f"environment.endpoint.address=127.0.0.1:{port}"):
            endpoint(address=f"127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["10.1.2.3", "example.org:80", "0.0.0.0", "", "127.0.0.1:99999", "127.0.0.1:a"])
def test_an_address_that_others_reach_is_open_by_name_alone(address: str) -> None:
    with pytest.raises(ValidationError) as refused:
        AgentEndpointConfig.model_validate({"address": address})
    assert refused.value.errors()


def test_an_open_address_listens_where_it_says() -> None:
    host = socket.gethostbyname(socket.gethostname())
    if host.startswith("127."):
        pytest.skip(f"this machine has no other address ({os.uname().nodename})")

    with endpoint(address=host, public=True) as served:
        assert status(served, "guess") == 401
