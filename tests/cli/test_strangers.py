"""A stranger who writes into the store where the ranks of torchrun meet: calls have a prefix of their own each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.cli.fixtures import TINY
from tests.cli.test_python import MANY_CALLS, reported
from tests.cli.warm import Done, WarmPython

GARBAGE = [os.urandom(4096), b"GET / HTTP/1.0\r\n\r\n", bytes(64), b"\xff" * 9, b""]


def a_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connected(port: int, process: subprocess.Popen[bytes]) -> TCPStore:
    """Return a client of the store, once torchrun serves it."""
    while process.poll() is None:
        try:
            return TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=5), wait_for_workers=False)
        except RuntimeError:
            time.sleep(0.1)
    raise AssertionError("torchrun ended before it served a store")


def write_nonsense(store: TCPStore) -> int:
    """Overwrite every key of calls that all ranks have left, and some that belong to no call; return how many ended."""
    calls = {key: int(name.group(1)) for key in store.list_keys() if (name := re.search(r"holdfast/0/(\d+)/", key))}
    ended = max(calls.values(), default=0) - 1  # a rank may still be leaving the call before the newest one
    others = ["holdfast/1/0/0", "holdfast/0", "holdfast/0/later/failure", "default_pg/0//0", "failure", "0"]
    for key in (*(key for key, call in calls.items() if call < ended), *others):
        store.set(key, "nonsense")
    return ended


@pytest.mark.slow
def test_ten_calls_go_on_whatever_a_stranger_writes_under_other_keys_and_sends_to_the_port(
    warm: WarmPython, tmp_path: Path
) -> None:
    port = a_free_port()
    opened: list[socket.socket] = []
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1", "--master-port"]
    command = [*torchrun, port, "--no-python", "--nproc-per-node", 2, warm.program, MANY_CALLS, json.dumps(TINY)]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = subprocess.Popen([str(word) for word in command], cwd=tmp_path, stdout=out, stderr=err)
    ended = 0
    try:
        store = connected(port, process)
        deadline = time.monotonic() + 240
        with contextlib.suppress(RuntimeError, OSError):  # torchrun ended, and its store with it
            while time.monotonic() < deadline:
                ended = max(ended, write_nonsense(store))
                for payload in GARBAGE:
                    opened.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                    opened[-1].sendall(payload)
                time.sleep(0.5)
        process.wait(60)
    finally:
        process.terminate()  # torchrun ends its ranks
        process.wait(60)
        for each in opened:
            each.close()

    found = reported(Done(process.returncode, (tmp_path / "out").read_text(), (tmp_path / "err").read_text()))
    ends = {rank: [each["how"] for each in found if each["rank"] == rank] for rank in range(2)}
    fine = [1, 1, 1]
    assert ends == dict.fromkeys(range(2), [*fine, "ConfigError", "DataError", 1, "ObserverFailed", *fine])
    assert ended > 3, "calls have keys there"
