"""Requests to an HTTP endpoint that answers JSON, with one time limit and one size limit for the whole answer.

No redirect is followed and no proxy is used: an API key is sent to the configured address and nowhere else.

This module uses `http.client` and not httpx, whose time-outs apply to each single read, write and connect. An endpoint
that sends a byte now and then never exceeds those, and a rank that waits for it blocks all other ranks. Here one timer
limits the whole answer.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import tenacity

from holdfast import patience
from holdfast.errors import ConfigError
from holdfast.files import parse_json
from holdfast.text.escaping import escaped
from holdfast.text.shortening import shortened

_TRIED_AGAIN = frozenset({408, 409, 429})
_BUSY = frozenset({429, 503})
_FAILURES = (OSError, http.client.HTTPException, UnicodeError)
"""What connecting and reading raise; UnicodeError for the name of a host that cannot be encoded."""
_SHOWN = 400


class EndpointRefuses(Exception):  # noqa: N818 - the name says what happened
    """The endpoint rejected the request (such as 400 or 401) or sent an unusable answer; a retry would not help."""


class EndpointMistaken(EndpointRefuses):
    """The answer is not JSON or does not have the documented form; another server may do better."""


class EndpointUnwell(Exception):  # noqa: N818 - the name says what happened
    """The endpoint cannot be reached, timed out, or is overloaded; a retry may succeed."""


class EndpointBusy(EndpointUnwell):
    """The endpoint answered 429 or 503: it has not begun with the request, which may be sent again safely."""


def pause_seconds(tries: int) -> float:
    """Return the pause after so many failed attempts: it doubles with each, up to a largest."""
    times = patience.current
    return min(times.http_longest_pause_seconds, times.http_first_pause_seconds * 2.0 ** (tries - 1))


@dataclass(frozen=True)
class Endpoint:
    """A client of one address; safe to share between threads."""

    url: str
    key: str | None = field(repr=False)
    timeout_seconds: float
    """Time limit of one attempt, from connecting to the last byte of the answer."""
    attempts: int
    most_bytes: int = 1 << 28
    """Size limit of one answer."""
    given_up: threading.Event = field(default_factory=threading.Event)
    """Once set, requests that wait for their next attempt are not retried."""
    keeps_open: bool = False
    """Whether a connection serves several requests. If the server has closed an idle connection, the request is sent
    again over a new one, so set this only where requests may be repeated."""
    tried_again: type[EndpointUnwell] = EndpointUnwell
    """Errors after which `ask` retries; `EndpointBusy` for requests that must not be carried out twice."""
    may_be_empty: bool = False
    """Whether an empty body is a valid answer, returned as None."""
    is_text: bool = False
    """Whether answers are text, which is not read as JSON."""
    _idle: list[http.client.HTTPConnection] = field(default_factory=list, repr=False, compare=False)
    _busy: set[socket.socket] = field(default_factory=set, repr=False, compare=False)

    @property
    def longest_seconds(self) -> float:
        """Time of all attempts and the pauses between them."""
        return self.attempts * (self.timeout_seconds + patience.current.http_longest_pause_seconds)

    def ask(self, method: str, path: str, content: Any = None) -> Any:
        """Send a request and return the JSON of its answer, retrying after errors of the class `tried_again`.

        Raises:
            EndpointRefuses: The request was rejected, or its answer is unusable.
            EndpointUnwell: The last attempt failed too. Messages continue a sentence that begins with the endpoint.
        """
        again = tenacity.Retrying(
            stop=tenacity.stop_any(
                tenacity.stop_after_attempt(self.attempts), tenacity.stop_when_event_set(self.given_up)
            ),
            wait=lambda state: pause_seconds(state.attempt_number),
            sleep=tenacity.sleep_using_event(self.given_up),
            retry=tenacity.retry_if_exception_type(self.tried_again),
            reraise=True,
        )
        return again(self._once, method, path, content)

    def is_well(self, path: str) -> bool:
        """Return whether a route answers 200 now."""
        message = _Message("GET", urlsplit(self.url.rstrip("/") + path), None, {"Connection": "close"})
        try:
            return self._over(None, message, time.monotonic() + self.timeout_seconds)[0] == 200
        except (*_FAILURES, EndpointUnwell):
            return False

    def _once(self, method: str, path: str, content: Any) -> Any:
        headers = {"Content-Type": "application/json", "Connection": "keep-alive" if self.keeps_open else "close"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        body = None if content is None else json.dumps(content).encode()
        url = urlsplit(self.url.rstrip("/") + path)
        status, received = self._exchange(_Message(method, url, body, headers))
        if status in _TRIED_AGAIN or status >= 500:
            raise (EndpointBusy if status in _BUSY else EndpointUnwell)(f"answers {status} {_line(received)}")
        if status != 200:
            raise EndpointRefuses(f"answers {status} {_line(received)}")
        if len(received) > self.most_bytes:
            raise EndpointRefuses(f"answers more than {self.most_bytes} bytes")
        try:
            return self._content(received)
        except ValueError as error:
            raise EndpointMistaken(f"answers {method} {path} with what is no JSON: {_line(received)}") from error

    def _content(self, received: bytes) -> Any:
        if self.is_text:
            return received.decode()
        return parse_json(received) if received or not self.may_be_empty else None

    def _exchange(self, message: _Message) -> tuple[int, bytes]:
        deadline = time.monotonic() + self.timeout_seconds
        try:
            waiting = self._waiting_connection()
            if waiting is not None:
                # A server that answered 500, or was started again, has closed what looks open from here.
                with suppress(ConnectionError, http.client.BadStatusLine):
                    return self._over(waiting, message, deadline)
            return self._over(None, message, deadline)
        except _FAILURES as error:
            if time.monotonic() >= deadline:
                raise EndpointUnwell(self._late) from error
            raise EndpointUnwell(f"cannot be reached ({_line(error)})") from error

    def _waiting_connection(self) -> http.client.HTTPConnection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    @property
    def _late(self) -> str:
        return f"gave no whole answer within {self.timeout_seconds:g} s"

    def _over(
        self, connection: http.client.HTTPConnection | None, message: _Message, deadline: float
    ) -> tuple[int, bytes]:
        if connection is None:
            connection = self._connected(message.url)
        stays_open = False
        # A time-out of the socket is one of each read: an endpoint that sends a byte now and then never meets it.
        alarm = threading.Timer(max(0.0, deadline - time.monotonic()), _hang_up, (connection.sock,))
        alarm.daemon = True
        try:
            alarm.start()
        except RuntimeError as error:
            if "shutdown" not in str(error):  # as a process of Python 3.12 ends, no thread can start
                raise
        opened = connection.sock  # a connection forgets it when it closes
        self._busy.add(opened)
        try:
            connection.request(message.method, message.target, message.body, message.headers)
            response = connection.getresponse()
            received = response.read(self.most_bytes + 1)
            if response.length and len(received) <= self.most_bytes:
                raise http.client.IncompleteRead(received, response.length)
            # A part of the answer that is still to come would begin the next one.
            may_stay = self.keeps_open and response.isclosed() and not response.will_close
            if time.monotonic() >= deadline:  # what came may be the part before the alarm
                raise EndpointUnwell(self._late)
            stays_open = may_stay and response.status < 500
        finally:
            alarm.cancel()
            self._busy.discard(opened)
            if not stays_open:
                connection.close()
        if stays_open:
            self._idle.append(connection)
        return response.status, received

    def _connected(self, url: SplitResult) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=self.timeout_seconds)
        connection.connect()
        return connection

    def hang_up(self) -> None:
        """Shut down the sockets of all running requests, which then raise `EndpointUnwell` at once."""
        for opened in tuple(self._busy):
            _hang_up(opened)

    def close(self) -> None:
        """Close connections that wait for a request."""
        while self._idle:
            self._idle.pop().close()


class _Message(NamedTuple):
    method: str
    url: SplitResult
    body: bytes | None
    headers: dict[str, str]

    @property
    def target(self) -> str:
        return self.url.path + (f"?{self.url.query}" if self.url.query else "")


def _hang_up(opened: socket.socket) -> None:
    with suppress(OSError):
        # `close` does not wake a thread that blocks in recv on the same socket; `shutdown` does.
        opened.shutdown(socket.SHUT_RDWR)


def _line(answer: object) -> str:
    """Return an endpoint's answer, escaped and on one line of at most 400 characters."""
    text = answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
    text = escaped(" ".join(text.split()))
    return shortened(text, _SHOWN)


def api_key(variable: str | None, section: str) -> str | None:
    """Return the key that an environment variable holds.

    Raises:
        ConfigError: The variable is not set, or holds what no header may hold; the message never shows the key.
    """
    if variable is None:
        return None
    # The one secret that may not stand in a YAML; everything else about a run does.
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"{section}.api_key_variable: the environment variable {variable} is not set. Export {variable}, or remove "
            "api_key_variable."
        )
    # http.client prints the whole header, with the key, where it refuses one.
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{section}.api_key_variable: {variable} holds a line end or a character that no header may hold. Export "
            f"{variable} again with the key alone."
        )
    return key
