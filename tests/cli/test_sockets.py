"""What a run of the real command listens on, and what somebody else on the machine can do to it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.commands import LiveRun
from tests.cli.fixtures import write_run
from tests.cli.warm import WarmPython

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1, as /proc/net writes them."""
LISTENS = "0A"
NOBODY = 65534


class Listener(NamedTuple):
    family: socket.AddressFamily
    address: str
    port: int


@contextlib.contextmanager
def endless(place: Path, tree: dict[str, Any], warm: WarmPython | None = None) -> Iterator[LiveRun]:
    """A run on two ranks that trains for longer than the test looks at it."""
    write_run(place / "run.yaml", tree | {"steps": 100_000})
    run = LiveRun(place, warm=warm)
    try:
        run.wait_for((run.directory / "metrics.jsonl").exists, 180.0)
        run.wait_for_step(3)
        yield run
    finally:
        run.close()


def listeners(run: LiveRun) -> list[Listener]:
    """Return what processes of a run listen on."""
    sockets = set()
    for pid in run.processes():
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            sockets.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = []
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and words[9] in sockets:
                address, port = words[1].split(":")
                found.append(Listener(family, address, int(port, 16)))
    return found


def send(listener: Listener, payload: bytes) -> socket.socket:
    """Connect and send; the connection stays open."""
    there = socket.socket(listener.family)
    there.settimeout(5)
    there.connect(("127.0.0.1" if listener.family is socket.AF_INET else "::1", listener.port))
    there.sendall(payload)
    return there


@pytest.mark.slow
def test_ranks_listen_on_loopback_alone_and_go_on_whatever_somebody_sends_there(
    tmp_path: Path, tree: dict[str, Any]
) -> None:
    garbage = [os.urandom(4096), b"GET / HTTP/1.0\r\n\r\n", bytes(64), struct.pack("<BQ", 0, 2**63 - 1), b""]

    with endless(tmp_path, tree) as live:
        found = listeners(live)
        opened = [send(each, payload) for each in found for payload in garbage * 4]
        for there in opened[::2]:
            there.close()
        live.wait_for_step(len(live.lines()) + 20)
        live.terminate()
        done, _ = live.end()
        for there in opened[1::2]:
            there.close()

    assert found, "gloo listens for the other rank"
    assert [each for each in found if each.address not in LOOPBACK] == []
    assert done.code == 3
    assert "stopped" in done.out or "SIGTERM" in done.out, done.out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_write_where_the_ranks_meet(tmp_path: Path, tree: dict[str, Any], warm: WarmPython) -> None:
    with endless(tmp_path, tree, warm) as live:
        environ = live.processes()[live.rank(0)]
        words = [each.partition(b"=") for each in environ]
        (place,) = [value for name, _, value in words if name == b"HOLDFAST_STORE"]
        # A shell, since the interpreter of the tests may lie where no other user can look.
        command = ["/bin/sh", "-c", 'exec 3<>"$0"', place.decode()]

        stranger = subprocess.run(command, user=NOBODY, capture_output=True, text=True, check=False)

        assert stranger.returncode != 0
        assert "Permission denied" in stranger.stderr, stranger.stderr
        assert subprocess.run(command, check=False).returncode == 0, "the same user can"
