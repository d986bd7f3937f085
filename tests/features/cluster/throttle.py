"""A way to a server that stands still for a while."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Throttle:
    """Passes connections on to a port of this machine."""

    target: int
    _server: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _turn: threading.Lock = field(default_factory=threading.Lock)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.getsockname()[1])

    def serve(self) -> None:
        """Accept connections until closed."""
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.target)) as server:
            back = threading.Thread(target=self._copy, args=(server, client), daemon=True)
            back.start()
            self._copy(client, server, waits=True)
            back.join()

    def _copy(self, source: socket.socket, sink: socket.socket, *, waits: bool = False) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 14):
                if waits:
                    with self._turn:
                        pass
                sink.sendall(chunk)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def stand_still(self, seconds: float) -> None:
        """Let nothing through to the server for so long."""
        with self._turn:
            time.sleep(seconds)

    def close(self) -> None:
        """Accept no more."""
        self._server.close()


@contextlib.contextmanager
def throttled(target: int) -> Iterator[Throttle]:
    """Yield a proxy in front of a port."""
    throttle = Throttle(target)
    threading.Thread(target=throttle.serve, daemon=True).start()
    yield throttle
    throttle.close()
