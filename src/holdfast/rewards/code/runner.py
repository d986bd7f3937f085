"""Run judged code, and answer what its judge asks of it. The process of the code holds no test and no secret."""

from __future__ import annotations

import os
import resource
import sys
from types import ModuleType
from typing import Any

from holdfast.rewards.code.values import ACTS, Peer
from holdfast.rewards.processes.confinement import confine
from holdfast.rewards.processes.lifetime import die_with_parent

_MOST_FILE_BYTES = 1 << 24
_MOST_OPEN_FILES = 64


def serve_code(channel: int) -> None:
    """Take an order from the channel, run its code, send the names that it made, and answer until the judge is gone."""
    os.setsid()
    die_with_parent()
    confine()
    peer = Peer(channel, ACTS)
    order = peer.receive()
    if order is None:
        return
    limit(order["memory_bytes"], order["cpu_seconds"])
    module = ModuleType("completion")
    sys.modules["completion"] = module
    try:
        exec(compile(order["code"], "<completion>", "exec"), module.__dict__)  # noqa: S102 - what this file is for
    except BaseException:  # noqa: BLE001 - whatever the code raises, SystemExit too, it fails
        return
    peer.send({"names": _names(peer, module)})
    peer.serve()


def _names(peer: Peer, module: ModuleType) -> dict[str, Any]:
    names = {}
    for name, value in list(vars(module).items()):
        if not name.startswith("__"):
            try:
                names[name] = peer.encode(value)
            except Exception:  # noqa: BLE001, S112 - a container that holds itself, for example: no test can see it
                continue
    return names


def limit(memory_bytes: int, cpu_seconds: int) -> None:
    """Bound what this process and each of its children may take."""
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, _MOST_FILE_BYTES),
        (resource.RLIMIT_NOFILE, _MOST_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (bound, bound))
