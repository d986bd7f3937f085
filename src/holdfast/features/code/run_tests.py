"""Judge code: run a row's tests in this process, and the code in another process that does not know the tests.

The program is started by path. It reads an order from standard input and writes one line, the number of passed tests,
to standard output. The process for the code is forked before the order is read, so that it holds no copy of the tests,
and this process hides its memory. Tests call the functions that the code defined through `code.values`, so that code
which patches built-ins does not change what judges it.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# Beside this file lies a package of ours; what else stands in its folder must not shadow the standard library.
sys.path.append(str(Path(__file__).parents[3]))

from holdfast.features.code import isolation  # noqa: E402
from holdfast.features.code.values import ACTS, Peer  # noqa: E402
from holdfast.processes import kernel  # noqa: E402

_SWEEP_SECONDS = 2.0  # not of patience.py: a judge starts for each program, and imports as little as it can
_MOST_FILE_BYTES = 1 << 24
_MOST_OPEN_FILES = 64


def main() -> None:
    """Read the order, run the tests, and print how many pass."""
    ours, theirs = socket.socketpair()
    answer = os.dup(1)
    # The code runs in a child, so that whatever it does to its interpreter cannot change the answer that this process
    # writes.
    pid = os.fork()
    if pid == 0:
        os.close(answer)
        ours.close()
        _silence()
        try:
            serve_code(theirs.detach())
        finally:
            os._exit(0)  # threads and exit handlers of the code are not waited for
    theirs.close()
    kernel.adopt_orphans()
    isolation.hide()
    order = json.load(sys.stdin)
    _silence()
    signal.signal(signal.SIGALRM, lambda *_: _end(answer, 0))
    signal.setitimer(signal.ITIMER_REAL, order["timeout_seconds"])
    try:
        passed = _count(order, Peer(ours.detach(), {"call": ACTS["call"]}))
    except BaseException:  # noqa: BLE001 - the code ended, or sent what is not a message: it passes nothing more
        passed = 0
    _end(answer, passed)


def _silence() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if nothing > 2:
        os.close(nothing)


def _end(answer: int, passed: int) -> None:
    """Kill the code and everything it started, write the answer, and exit."""
    while strays := kernel.children():
        for pid in strays:
            kernel.kill_with_group(pid)
        if len(kernel.reap(strays, _SWEEP_SECONDS)) < len(strays):
            break
    os.write(answer, str(passed).encode())
    os._exit(0)


def _count(order: dict[str, Any], peer: Peer) -> int:
    """Return how many tests pass."""
    limits = {name: order[name] for name in ("memory_bytes", "cpu_seconds")}
    peer.send({"code": order["code"], **limits})
    limit(**limits)
    message = peer.receive()
    if message is None:
        return 0
    names = {name: peer.decode(value) for name, value in message["names"].items() if name in order["asked"]}
    if any(hasattr(builtins, name) for name in set(order["asked"]) - names.keys()):
        return 0  # a test would pass by the built-in function that the code was to define
    namespace = {name: _supplied(*source) for name, source in order["supplied"].items()} | names
    return sum(_passes(test, namespace) for test in order["tests"])


def _supplied(module: str, name: str | None) -> Any:
    imported = importlib.import_module(module)
    return imported if name is None else getattr(imported, name)


def _passes(test: str, namespace: dict[str, Any]) -> bool:
    try:
        exec(compile(test, "<test>", "exec"), namespace)  # noqa: S102 - the row's own text
    except BaseException:  # noqa: BLE001 - whatever a test raises, it fails; an EOFError: the code is gone
        return False
    return True


def serve_code(channel: int) -> None:
    """Receive the code, run it, send the names that it defined, and answer calls until the judge has ended."""
    # A session of its own: `killpg` then reaches the code's children, and a signal to the judge's group does not reach
    # them.
    os.setsid()
    kernel.die_with_parent()
    isolation.confine()
    peer = Peer(channel, ACTS)
    order = peer.receive()
    if order is None:
        return
    limit(order["memory_bytes"], order["cpu_seconds"])
    module = ModuleType("completion")
    # pickle and dataclasses look a class's module up in `sys.modules`, and fail for a module that is not listed there.
    sys.modules["completion"] = module
    try:
        exec(compile(order["code"], "<completion>", "exec"), module.__dict__)  # noqa: S102 - what this file is for
    except BaseException:  # noqa: BLE001 - whatever the code raises, SystemExit too, it fails
        return
    peer.send({"names": _sent_names(peer, module)})
    peer.serve()


def _sent_names(peer: Peer, module: ModuleType) -> dict[str, Any]:
    names = {}
    for name, value in list(vars(module).items()):
        if not name.startswith("__"):
            try:
                names[name] = peer.encode(value)
            except Exception:  # noqa: BLE001, S112 - a container that holds itself, for example: no test can see it
                continue
    return names


def limit(memory_bytes: int, cpu_seconds: int) -> None:
    """Limit memory, CPU time, file sizes and open files of this process and of each of its children."""
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, _MOST_FILE_BYTES),
        (resource.RLIMIT_NOFILE, _MOST_OPEN_FILES),
        # A core dump of judged code could fill the disk.
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (bound, bound))


if __name__ == "__main__":
    main()
