"""One request to a real server on loopback: its limits of time and size, and where its key goes."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.http import Endpoint, EndpointRefuses, EndpointUnwell, api_key

Serve = Callable[[list[bytes], float], "Served"]


class Served:
    """Answers every connection with the same pieces, and notes the requests."""

    def __init__(self, pieces: list[bytes], pause_seconds: float) -> None:
        self.pieces, self.pause_seconds = pieces, pause_seconds
        self.requests: list[bytes] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.requests.append(connection.recv(65536))
            try:
                for piece in self.pieces:
                    connection.sendall(piece)
                    time.sleep(self.pause_seconds)
            except OSError:
                pass
            connection.close()

    def endpoint(self, **options: float) -> Endpoint:
        """Return a client of this server that asks once."""
        settings = {"timeout_seconds": 5.0, "attempts": 1, **options}
        return Endpoint(f"http://127.0.0.1:{self.port}/v1", "sesame", **settings)  # type: ignore[arg-type]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Served] = []

    def start(pieces: list[bytes], pause_seconds: float = 0.0) -> Served:
        servers.append(Served(pieces, pause_seconds))
        return servers[-1]

    yield start
    for server in servers:
        server.socket.close()


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_an_answer_that_trickles_is_late_in_its_head_and_in_its_body(serve: Serve) -> None:
    whole = answer(b'{"a": 1}')
    for first in (5, len(whole) - 8):
        server = serve([whole[:first], *(bytes([byte]) for byte in whole[first:])], 0.1)
        began = time.monotonic()

        with pytest.raises(EndpointUnwell, match=r"gave no whole answer within 0\.3 s"):
            server.endpoint(timeout_seconds=0.3).ask("GET", "/models")

        assert time.monotonic() - began < 2


def test_an_answer_may_have_the_most_bytes_and_not_one_more(serve: Serve) -> None:
    server = serve([answer(b'{"a": 1}')])

    assert server.endpoint(most_bytes=8).ask("GET", "/models") == {"a": 1}
    with pytest.raises(EndpointRefuses, match="answers more than 7 bytes"):
        server.endpoint(most_bytes=7).ask("GET", "/models")


def test_an_answer_that_breaks_off_is_asked_for_again(serve: Serve) -> None:
    server = serve([answer(b'{"a": 1}')[:-1]])

    with pytest.raises(EndpointUnwell, match=r"cannot be reached \(IncompleteRead\(7 bytes read, 1 more expected"):
        server.endpoint(attempts=2).ask("GET", "/models")
    assert len(server.requests) == 2


def test_the_key_goes_to_the_address_alone_past_proxies_and_redirects(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = serve([answer(b"{}")])
    server = serve([answer(b"", "302 Found", f"Location: http://127.0.0.1:{elsewhere.port}/")])
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{elsewhere.port}")

    with pytest.raises(EndpointRefuses, match="answers 302"):
        server.endpoint().ask("POST", "/completions", {"n": 1})

    assert elsewhere.requests == []
    assert server.requests[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer sesame\r\n" in server.requests[0]
    assert "sesame" not in repr(server.endpoint())


def test_a_connection_that_the_server_closed_is_replaced_without_a_word(serve: Serve) -> None:
    server = serve([answer(b'{"a": 1}')])
    endpoint = replace(server.endpoint(), keeps_open=True)

    answers = [endpoint.ask("GET", f"/{number}") for number in range(3)]
    endpoint.close()

    assert answers == [{"a": 1}] * 3
    assert [request.split()[1] for request in server.requests] == [b"/v1/0", b"/v1/1", b"/v1/2"]


def test_requests_share_a_connection_until_an_answer_of_500() -> None:
    seen: list[tuple[str, int]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return

        def do_GET(self) -> None:  # noqa: N802 - its name there
            seen.append((self.path, self.client_address[1]))
            self.send_response(500 if "broken" in self.path else 200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = Endpoint(f"http://127.0.0.1:{server.server_address[1]}", None, 5.0, 1, keeps_open=True)

    for path in ("/one", "/two", "/broken", "/three"):
        with suppress(EndpointUnwell):
            endpoint.ask("GET", path)
    endpoint.close()
    server.shutdown()
    server.server_close()

    ports = dict(seen)
    assert ports["/one"] == ports["/two"] == ports["/broken"]
    assert ports["/three"] != ports["/one"]


ASKS_AT_ITS_END = """
import atexit, sys
from holdfast.http import Endpoint
atexit.register(lambda: print(Endpoint(sys.argv[1], None, timeout_seconds=5.0, attempts=1).ask("GET", "/bye")))
"""


def open_sockets() -> set[str]:
    """Return the sockets of this process."""
    files = Path("/proc/self/fd").iterdir()
    return {target for file in files if file.is_symlink() and (target := str(file.readlink())).startswith("socket:")}


class LateChoice:
    """True, but only when the time of a request is over: its thread was kept waiting."""

    def __bool__(self) -> bool:
        time.sleep(0.5)
        return True


def test_a_connection_whose_answer_came_too_late_is_closed() -> None:
    late: Any = LateChoice()
    errors: list[Exception] = []
    before = open_sockets()

    def ask(port: int) -> None:
        try:
            Endpoint(f"http://127.0.0.1:{port}/v1", None, 0.3, 1, keeps_open=late).ask("GET", "/models")
        except EndpointUnwell as error:
            errors.append(error)  # with its traceback, which holds what the request had open

    with socket.create_server(("127.0.0.1", 0)) as server:
        asking = threading.Thread(target=ask, args=(server.getsockname()[1],))
        asking.start()
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer(b"{}"))
            asking.join()
    assert len(errors) == 1
    assert open_sockets() == before


def test_a_process_may_ask_at_its_very_end(serve: Serve) -> None:
    """In Python 3.12 no thread can start there, and the time limit of a request is one."""
    server = serve([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"])

    command = [sys.executable, "-c", ASKS_AT_ITS_END, f"http://127.0.0.1:{server.port}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert (done.stdout, done.stderr) == ("{}\n", "")
    assert len(server.requests) == 1


@pytest.mark.parametrize("end", ["\r", "\n", "\u2026", "\x7f"])
def test_a_key_that_no_header_may_hold_is_refused_without_the_key(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setenv("SERVER_KEY", f"sk-s3cret{end}")

    with pytest.raises(ConfigError, match="rollout.engine.api_key_variable: SERVER_KEY holds a line end") as error:
        api_key("SERVER_KEY", "rollout.engine")

    assert "s3cret" not in str(error.value)


def test_a_host_whose_name_cannot_be_encoded_is_not_well() -> None:
    endpoint = Endpoint("http://a..b:8700", None, 5.0, 1)

    assert not endpoint.is_well("/health")
    with pytest.raises(EndpointUnwell, match="cannot be reached"):
        endpoint.ask("GET", "/v1/models")
