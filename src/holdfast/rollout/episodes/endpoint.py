"""An HTTP server on loopback at which agents ask a policy for completions; an OpenAI client talks to it.

Its threads read requests and write answers alone: what a call is answered follows from the loop that samples.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.files import parse_json
from holdfast.rollout.episodes.chat_calls import MODEL, CallRefused, ChatCall, chat_call
from holdfast.text.escaping import with_whole_characters

_LOOPBACK = "127.0.0.1"
_MOST_BODY_BYTES = 1 << 26
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
    """

    def __init__(self, sampling: SamplingConfig) -> None:
        self.sampling = sampling
        self._sessions: set[str] = set()
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._is_closed = False
        self._server = _Server((_LOOPBACK, 0), _Handler)
        self._server.endpoint = self

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

    @property
    def base_url(self) -> str:
        """What a client calls its base URL."""
        return f"http://{_LOOPBACK}:{self._server.server_address[1]}/v1"

    def open(self) -> str:
        """Return the key of a new session."""
        key = secrets.token_urlsafe(24)
        self._sessions.add(key)
        return key

    def end(self, key: str) -> None:
        """End a session: what is asked with its key from now on is refused."""
        self._sessions.discard(key)

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
            key = self._session_of(authorization)
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

    def _session_of(self, authorization: str) -> str:
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


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        """Answer a request for a completion."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > len(str(_MOST_BODY_BYTES)) or int(length) > _MOST_BODY_BYTES:
            self.close_connection = True
            self._send(_error(CallRefused(f"the request has no Content-Length of {_MOST_BODY_BYTES} bytes at most")))
            return
        body = self.rfile.read(int(length))
        if self._route != _COMPLETIONS:
            self._send(_error(_no_route(self.path)))
            return
        self._send(self.server.endpoint.asked(self.headers.get("Authorization", ""), body))

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
