"""The first program in a sandbox: `python3 inside.py SOCKET PROCESSES BYTES COMMAND...`, standard library alone.

It leads 127.0.0.1 to the endpoint's socket, and ends everything where the sandbox has too many processes, too much
memory, or no endpoint any more.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

_LOOK_SECONDS = 0.02
_ENDPOINT_LOOKS = 50
_KILLED = 137


def main() -> None:
    """Run the command to its end."""
    path, most_processes, most_bytes, *command = sys.argv[1:]
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_lead, args=(listening, path), daemon=True).start()
    # Without this program's own environment there is neither key nor path.
    environment = {**os.environ, "OPENAI_BASE_URL": f"http://127.0.0.1:{listening.getsockname()[1]}/v1"}  # noqa: TID251
    program = subprocess.Popen(command, env=environment)
    looks = 0
    while program.poll() is None:
        looks += 1
        count, used = _used()
        is_alone = looks % _ENDPOINT_LOOKS == 0 and not _answers(path)
        if count > int(most_processes) or used > int(most_bytes) or is_alone:
            for _ in range(50):  # what forks without end is faster than one signal
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            os._exit(_KILLED)
        time.sleep(_LOOK_SECONDS)
    os._exit(program.returncode if program.returncode >= 0 else 128 - program.returncode)


def _used() -> "tuple[int, int]":
    """Return the number of processes and the bytes of memory that they have."""
    count = pages = 0
    for name in os.listdir("/proc"):  # noqa: PTH208 - a faster look
        if name.isdecimal():
            count += 1
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/statm") as file:  # noqa: PTH123
                resident, shared = file.read().split()[1:3]
                pages += int(resident) - int(shared)
    return count, pages * os.sysconf("SC_PAGE_SIZE")


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _lead(listening: socket.socket, path: str) -> None:
    while True:
        inner, _ = listening.accept()
        outer = socket.socket(socket.AF_UNIX)
        try:
            outer.connect(path)
        except OSError:
            inner.close()
            continue
        for source, target in ((inner, outer), (outer, inner)):
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
