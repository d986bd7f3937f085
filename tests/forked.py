"""What holds for every long-lived process that the fork server of the tests makes."""

from __future__ import annotations

import os
from multiprocessing import forkserver

from holdfast.processes.kernel import die_with_parent


def end_with_tests() -> None:
    """Let the kernel kill this process when the tests end, however they end and even if it is stopped.

    The fork server leaves when nobody holds the pipe of its tests any more, and each of its processes gets a copy of
    that pipe: one that waits, or is stopped, would keep the server alive for ever.
    """
    server = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    die_with_parent()
