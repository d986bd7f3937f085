"""An HTTP server at which agents ask a policy for completions; an OpenAI client talks to it.

Its threads read requests and write answers alone: what a call is answered follows from the loop that samples.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import shutil
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from holdfast.config.sections.environment import UNIX, AgentEndpointConfig, host_and_port
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.errors import ConfigError
from holdfast.files import parse_json
from holdfast.rollout.episodes.chat_calls import MODEL, CallRefused, ChatCall, chat_call
from holdfast.text.escaping import with_whole_characters

_MOST_CONNECTIONS = 1024
_PIECE_BYTES = 1 << 16
_FOLDERS = "holdfast-agents-"
_COMPLETIONS, _MODELS = "/v1/chat/completions", "/v1/models"


class Call:
    """One request of an agent, until it is answered.

    Args:
        key: Of its session.
        asked: What it asks for.
    """

    def __init__(self, key: str, asked: ChatCall) -> None:
        self.key, self.asked = key, asked
        self.taken_at = 0.0
        """When the loop took it."""
        self._replies: queue.SimpleQueue[tuple[int, Mapping[str, Any]]] = queue.SimpleQueue()

    def answer(self, reply: Mapping[str, Any]) -> None:
        """Send a completion."""
        self._replies.put((200, reply))

    def refuse(self, refusal: CallRefused) -> None:
        """Send an error."""
        self._replies.put(_error(refusal))

    def reply(self) -> tuple[int, Mapping[str, Any]]:
        """Wait for status and body."""
        return self._replies.get()


class Endpoint:
    """Serves the sessions of one rank's agents while it is entered.

    Args:
        sampling: How completions are drawn.
        config: Where it listens, and what it refuses.

    Raises:
        ConfigError: It cannot listen there.
    """

    def __init__(self, sampling: SamplingConfig, config: AgentEndpointConfig | None = None) -> None:
        self.sampling, self.config = sampling, config or AgentEndpointConfig()
        self.guesses = 0
        """Requests without a key, or with one that no episode has had."""
        self._sessions: dict[str, int] = {}
        """Requests by key."""
        self._ended: set[str] = set()
        self._counting = threading.Lock()
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._is_closed = False
        self._folder: Path | None = None
        self._server = self._listening()
        self._server.endpoint = self

    def _listening(self) -> _Server:
        if self.config.address == UNIX:
            self._folder = _own_folder()
            path: Any = str(self._folder / "endpoint.sock")
            return _UnixServer(path, _Handler)
        host, port = host_and_port(self.config.address)
        try:
            family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            kind = _Server6 if family == socket.AF_INET6 else _Server
            return kind((str(place[0]), int(place[1])), _Handler)
        except OSError as error:
            raise ConfigError(
                f"environment.endpoint.address={self.config.address}: agents cannot ask there ({error.strerror}). "
                "Another run may have the port: leave it out for a free one, or name an address of this machine."
            ) from None

    def __enter__(self) -> Endpoint:
        """Listen."""
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Listen no more, and refuse what is still asked."""
        self._is_closed = True
        self._sessions.clear()
        self._server.shutdown()
        self._server.server_close()
        for call in self.take(0.0):
            call.refuse(session_ended())
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def base_url(self) -> str:
        """What a client calls its base URL."""
        if self._folder is not None:
            return f"{UNIX}:{self._folder / 'endpoint.sock'}"
        host, port = host_and_port(self.config.address)[0], self._server.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port!s}/v1"

    def open(self) -> str:
        """Return the key of a new session."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = 0
        return key

    def end(self, key: str) -> None:
        """End a session: what is asked with its key from now on is refused."""
        with self._counting:
            if self._sessions.pop(key, None) is not None:
                self._ended.add(key)

    def take(self, wait_seconds: float) -> list[Call]:
        """Return the calls that have come.

        Args:
            wait_seconds: Longest wait for the first.
        """
        calls: list[Call] = []
        try:
            calls.append(self._calls.get(timeout=wait_seconds) if wait_seconds else self._calls.get_nowait())
            while True:
                calls.append(self._calls.get_nowait())
        except queue.Empty:
            return calls

    def asked(self, authorization: str, body: bytes) -> tuple[int, Mapping[str, Any]]:
        """Return status and body of the answer to a request; called in the thread of its connection."""
        try:
            key = self.session_of(authorization)
            try:
                values = parse_json(_with_whole_characters(body))
            except ValueError as error:
                raise CallRefused(f"the body is no JSON ({error})") from None
            call = Call(key, chat_call(values, self.sampling))
        except CallRefused as refusal:
            return _error(refusal)
        self._calls.put(call)
        if self._is_closed:
            call.refuse(session_ended())
        return call.reply()

    def count(self, authorization: str) -> None:
        """Count a request before its body is read.

        Raises:
            CallRefused: It has no key of an episode, or its episode has asked too often.
        """
        try:
            key = self.session_of(authorization)
        except CallRefused:
            with self._counting:
                self.guesses += authorization.rpartition(" ")[2].strip() not in self._ended
            raise
        with self._counting:
            if key not in self._sessions:
                raise session_ended()
            self._sessions[key] += 1
            asked = self._sessions[key]
        if asked > self.config.max_requests:
            raise CallRefused(
                f"this episode has asked {self.config.max_requests} times (environment.endpoint.max_requests); return",
                429,
                "rate_limit_exceeded",
            )

    def session_of(self, authorization: str) -> str:
        """Return the key of a request.

        Raises:
            CallRefused: No episode has it now.
        """
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() == "bearer" and key.strip() in self._sessions:
            return key.strip()
        if not authorization:
            raise CallRefused(
                "this endpoint answers the agents of a run alone, and the request has no session. Pass the api_key "
                "that agent(row, base_url, api_key) is given, or OPENAI_API_KEY of the program's environment.",
                401,
                "invalid_api_key",
            )
        raise session_ended()


def _own_folder() -> Path:
    """Return a new folder of this user; those of processes that were killed are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        pid = left.name.removeprefix(_FOLDERS).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists() and left.stat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDERS}{os.getpid()}-"))


def session_ended() -> CallRefused:
    """Return the refusal of a call whose session is over, or never was."""
    return CallRefused(
        "there is no such session: its agent has returned or was ended, or the key is another one. Pass the api_key "
        "that agent(row, base_url, api_key) is given, and ask before it returns.",
        401,
        "invalid_api_key",
    )


def _error(refusal: CallRefused) -> tuple[int, Mapping[str, Any]]:
    kind = "authentication_error" if refusal.status == 401 else "invalid_request_error"  # noqa: PLR2004 - of HTTP
    return refusal.status, {
        "error": {"message": str(refusal), "type": kind, "param": None, "code": refusal.code},
    }


def _with_whole_characters(body: bytes) -> str:
    """Return the text with U+FFFD in the place of half a surrogate pair, which no tokenizer takes."""
    text = body.decode("utf-8", "replace")
    if "\\ud" not in text.lower():
        return text
    return with_whole_characters(json.dumps(parse_json(text), ensure_ascii=False))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    endpoint: Endpoint

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own; close one too many."""
        if threading.active_count() > _MOST_CONNECTIONS:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a connection that breaks is its agent's."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _UnixServer(_Server):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        """Bind to a path, which has no host."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = UNIX, 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        """Wait no longer for any part of a request than for all of it."""
        super().setup()
        self.connection.settimeout(self.server.endpoint.config.request_seconds)

    def do_POST(self) -> None:
        """Answer a request for a completion."""
        authorization = self.headers.get("Authorization", "")
        try:
            self.server.endpoint.count(authorization)
            body = self._body()
            if self._route != _COMPLETIONS:
                raise _no_route(self.path)
        except CallRefused as refusal:
            self.close_connection = True  # what it still says is no request
            self._send(_error(refusal))
        else:
            self._send(self.server.endpoint.asked(authorization, body))

    def _body(self) -> bytes:
        """Return what was sent.

        Raises:
            CallRefused: It is too long, or comes too slowly.
        """
        config, length = self.server.endpoint.config, self.headers.get("Content-Length", "")
        most = config.max_request_bytes
        if not length.isdecimal() or len(length) > len(str(most)) or int(length) > most:
            raise CallRefused(f"the request has no Content-Length of {most} bytes at most")
        deadline, body = time.monotonic() + config.request_seconds, bytearray()
        while len(body) < int(length):
            piece = self.rfile.read1(min(int(length) - len(body), _PIECE_BYTES))
            if not piece or time.monotonic() > deadline:
                raise CallRefused(f"the request has not arrived within {config.request_seconds:g} s", 408)
            body += piece
        return bytes(body)

    def do_GET(self) -> None:
        """List the one model."""
        if self._route != _MODELS:
            self._send(_error(_no_route(self.path)))
            return
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "holdfast"}
        self._send((200, {"object": "list", "data": [model]}))

    @property
    def _route(self) -> str:
        return self.path.partition("?")[0].rstrip("/")

    def _send(self, reply: tuple[int, Mapping[str, Any]]) -> None:
        status, values = reply
        body = json.dumps(values).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # its agent has gone
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the parent's name
        """Print nothing: calls are counted."""


def _no_route(path: str) -> CallRefused:
    return CallRefused(f"there is no {path}: this endpoint has POST {_COMPLETIONS} and GET {_MODELS}", 404)
