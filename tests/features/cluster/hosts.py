"""Hosts on this machine: network namespaces with a name each, on a cable that delays, loses and can be cut.

The cable is a thread that carries frames between two taps: this is what `tc netem` does, for kernels without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_MTU = 60_000


def missing() -> str:
    """Return what this machine lacks to make hosts; empty if nothing."""
    programs = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if programs:
        return f"{', '.join(programs)} is not installed: apt-get install iproute2"
    if os.getuid() != 0:
        return "network namespaces need root"
    made = subprocess.run(["ip", "netns", "add", "holdfast-probe"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "holdfast-probe"], capture_output=True, check=False)
    if made.returncode != 0 or not os.access("/dev/net/tun", os.W_OK):
        return "this kernel, or this container, makes no network namespaces or taps"
    return ""


@dataclass
class Cable:
    """What happens to frames between two taps."""

    taps: tuple[int, int]
    delay_seconds: float = 0.0
    loss: float = 0.0
    up: bool = True
    carried: int = 0
    dropped: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Carry frames until stopped."""
        chance, late, count = random.Random(7), [], 0
        while not self._stop.is_set():
            wait = max(0.0, late[0][0] - time.monotonic()) if late else 0.1
            for tap in select.select(self.taps, [], [], wait)[0]:
                frame = os.read(tap, 1 << 16)
                if not self.up or chance.random() < self.loss:
                    self.dropped += 1
                    continue
                other = self.taps[1] if tap == self.taps[0] else self.taps[0]
                count += 1
                heapq.heappush(late, (time.monotonic() + self.delay_seconds, count, other, frame))
            while late and late[0][0] <= time.monotonic():
                _, _, other, frame = heapq.heappop(late)
                if self.up:
                    self.carried += 1
                    with contextlib.suppress(OSError):
                        os.write(other, frame)

    def stop(self) -> None:
        """Carry nothing more."""
        self._stop.set()


@dataclass
class Host:
    """A namespace with an address and a host name."""

    name: str
    address: str
    space: str
    number: int
    own: Path | None = None
    """A folder that is this host's own: what others see at its path is another one."""
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command on this host; what it prints goes to a file."""
        disk = f"mount --bind {self.own}.{self.name} {self.own}; " if self.own is not None else ""
        if self.own is not None:
            Path(f"{self.own}.{self.name}").mkdir(exist_ok=True)
            self.own.mkdir(exist_ok=True)
        inside = ["sh", "-c", f'{disk}hostname {self.name}; exec "$@"', "sh", *command]
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, "unshare", "--uts", "--mount", *inside],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "PYTHONUNBUFFERED": "1", **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def pids(self) -> list[int]:
        """Return what runs here."""
        listed = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to everything that runs here, until nothing new appears."""
        seen: set[int] = set()
        while new := set(self.pids()) - seen:
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            seen |= new


@dataclass
class Hosts:
    """Two hosts and their cable."""

    first: Host
    second: Host
    cable: Cable

    def power_off(self, host: Host) -> None:
        """End a host as a power cut does: nothing of it says goodbye to anybody."""
        self.cable.up = False
        host.signal(signal.SIGKILL)

    def elastic(self, host: Host) -> tuple[str, ...]:
        """Return torchrun's options where one host of the two is enough, as `launch.min_ranks` has Slurm's tasks."""
        return (
            *("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.first.address}:29500"),
            *("--rdzv-conf", f"is_host={'true' if host.number == 0 else 'false'},last_call_timeout=10"),
            *("--local-addr", host.address, "--max-restarts", "3"),
        )

    def agent(
        self, host: Host, base: Path, *command: str, ranks: int = 1, options: tuple[str, ...] = (), **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start torchrun, without its tracebacks, for a command of ours; its screen is `base/HOST.out`."""
        meeting = options or (
            *("--nnodes", "2", "--node-rank", str(host.number)),
            *("--master-addr", self.first.address, "--master-port", "29500"),
        )
        return host.start(
            *(sys.executable, "-m", "holdfast.launch.agent", *meeting),
            *("--nproc-per-node", str(ranks), "--no-python"),
            *(sys.executable, "-m", "holdfast.cli.main", *command),
            log=base / f"{host.name}.out",
            **variables,
        )


def _tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts(names: Mapping[str, str] | None = None) -> Iterator[Hosts]:
    """Make hosts `a` and `b`, yield them, and end everything that runs on them."""
    mark = f"hf{os.getpid() % 10_000}"
    hosts, taps = [], []
    try:
        for number, name in enumerate(names or ("a", "b")):
            host = Host(name, f"10.77.0.{number + 1}", f"{mark}{name}", number)
            _ip("netns", "add", host.space)
            hosts.append(host)
            taps.append(_tap(f"{mark}t{number}"))
            _ip("link", "set", f"{mark}t{number}", "netns", host.space, "name", "eth0")
            _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.space, "link", "set", "eth0", "mtu", str(_MTU), "up")
            _ip("-n", host.space, "link", "set", "lo", "up")
        cable = Cable((taps[0], taps[1]))
        thread = threading.Thread(target=cable.run, daemon=True)
        thread.start()
        try:
            yield Hosts(hosts[0], hosts[1], cable)
        finally:
            cable.stop()
            thread.join()
    finally:
        for host in hosts:
            host.signal(signal.SIGKILL)
            for process in host.started:
                process.wait(timeout=30)
            subprocess.run(["ip", "netns", "del", host.space], capture_output=True, check=False)
        for tap in taps:
            os.close(tap)
