"""A server between a run and vLLM that passes everything on, but for what it is told to spoil on the way."""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from safetensors.torch import load_file, save_file


@dataclass
class Spoiler:
    """What happens on the way; nothing by default."""

    request: Callable[[str, bytes], tuple[str, bytes] | None] = lambda path, body: (path, body)
    """Path and body -> those that are sent on; None: nothing is sent, and 200 is answered"""
    answer: Callable[[str, bytes], bytes] = lambda path, body: body


@contextmanager
def between(target: str, spoiler: Spoiler) -> Iterator[str]:
    """Give the address of a proxy before a server."""
    place = urlsplit(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            sent = spoiler.request(self.path, body)
            status, content = 200, b"{}"
            if sent is not None:
                connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
                headers = {"Content-Type": "application/json"}
                connection.request(self.command, sent[0], sent[1] or None, headers)
                response = connection.getresponse()
                status, content = response.status, spoiler.answer(self.path, response.read())
                connection.close()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _pass_on

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def keeps_cache(path: str, body: bytes) -> tuple[str, bytes] | None:
    """Leave caches as they are through a push."""
    if path.startswith("/reset_prefix_cache"):
        return None
    return path.replace("clear_cache=true", "clear_cache=false").replace("mode=abort", "mode=keep"), body


def swallows_buckets(path: str, body: bytes) -> tuple[str, bytes] | None:
    """Say that a push went well, of which only the name arrived."""
    return None if path.startswith("/update_weights") else (path, body)


def colder(path: str, body: bytes) -> tuple[str, bytes]:
    """Sample at another temperature than was asked for."""
    if not path.startswith("/inference"):
        return path, body
    asked = json.loads(body)
    asked["sampling_params"]["temperature"] *= 0.7
    return path, json.dumps(asked).encode()


def changes_an_element(path: str, body: bytes) -> tuple[str, bytes]:
    """Change one element of the last tensor in a bucket, in a file of its own."""
    if not path.startswith("/update_weights"):
        return path, body
    asked = json.loads(body)
    file = Path(asked["update_info"]["file"])
    tensors = load_file(file)
    tensors[sorted(tensors)[-1]].view(-1)[3] += 1e-3
    copy = Path(tempfile.mkdtemp()) / file.name
    save_file(tensors, copy)
    asked["update_info"]["file"] = str(copy)
    return path, json.dumps(asked).encode()


def encodes_again(path: str, body: bytes) -> bytes:
    """Answer other tokens than were chosen, as one that decodes and encodes does."""
    if not path.startswith("/inference"):
        return body
    told = json.loads(body)
    for choice in told.get("choices", ()):
        if len(choice["token_ids"]) > 1:
            choice["token_ids"] = [*choice["token_ids"][:-1], 7, 7]
    return json.dumps(told).encode()
