"""Pushes weights to vLLM servers. Whole tensors travel in buckets, which are shared files, and every byte is hashed.

A push is: pause, begin, buckets, end with the name of the weights, caches reset, resume. The name is stamped last, and
a server that refuses anything stays paused: nobody samples from half a model. A server that is found dead on the way is
left out and named; one that refuses ends the run. One run pushes to a server at a time: servers keep a lease.
"""

from __future__ import annotations

import atexit
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from holdfast import patience
from holdfast.errors import ConfigError, RunStopped
from holdfast.features.vllm.responses import RPC, inspection_of
from holdfast.features.vllm.servers import VLLMServer
from holdfast.files import died_here, machine
from holdfast.http import EndpointRefuses, EndpointUnwell
from holdfast.models.files.conversion import Header
from holdfast.models.files.safetensors_files import plan_files, tensor_bytes, write_file
from holdfast.text.escaping import escaped
from holdfast.text.shortening import shortened

_MIB = 2**20
_JOIN_SECONDS = 1.0
_IS_OPEN = "already active"
"""What vLLM says of a session that nobody ended."""


def digest(tensor: Tensor) -> str:
    """Return the hash of a tensor's bytes, as the receiving end makes it."""
    data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(xxhash.xxh3_128_hexdigest(data))


@dataclass
class Inspection:
    """The answer of a server that was asked to compare its tensors with those that were sent."""

    differences: dict[str, float | None] = field(default_factory=dict)
    """By name, how far from what was sent, relative to it; None where no layer of the server can say."""
    why_not: str = ""
    """The server's address and its answer, if it could not compare; otherwise empty."""


class Leases:
    """Servers that this process alone pushes to, from the first `take` until `give_back`.

    A server keeps its lease itself, so it does not matter which way a second run comes. A thread renews them, and a
    server whose run died is free: at once for a run of the same machine, which sees that, else when the lease has not
    been renewed for `lease_stale_seconds`.

    Args:
        token: Of this start of the run, which no other has.
    """

    def __init__(self, token: str) -> None:
        self._holder = {"token": token, "host": socket.gethostname(), "pid": os.getpid(), "machine": machine()}
        self._servers: dict[str, VLLMServer] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="holdfast-server-leases", daemon=True)

    def take(self, server: VLLMServer) -> None:
        """Take or renew the lease of a server.

        Raises:
            ConfigError: Another run has it.
            EndpointRefuses, EndpointUnwell: It does not say.
        """
        times, before, replaces = patience.current, math.inf, None
        deadline = time.monotonic() + times.lease_stale_seconds + times.lease_look_seconds
        while True:
            holder, seconds_left = server.lease(self._holder, times.lease_stale_seconds, replaces)
            if holder["token"] == self._holder["token"]:
                break
            process = f"process {holder['pid']} on {shortened(escaped(holder['host']), 100)}"
            is_renewed = holder["machine"] == self._holder["machine"] or seconds_left > before
            if died_here(holder) and holder["token"] != replaces:
                replaces = holder["token"]
            elif is_renewed or time.monotonic() >= deadline:  # past it, the server counts no time down
                raise ConfigError(
                    f"rollout.engine.url: another run pushes weights to {server.url} ({process}), so samples of this "
                    "run would come from its weights. Start a server of this run's own, or end the other run."
                )
            else:
                if before == math.inf:
                    print(
                        f"{process} pushed weights to {server.url}: waiting up to {seconds_left:.0f} s for a sign that "
                        "it lives",
                        flush=True,
                    )
                before = seconds_left
                time.sleep(times.lease_look_seconds)
        self._servers[server.url] = server
        if self._thread.ident is None:
            atexit.register(self.give_back)
            self._thread.start()

    def give_back(self) -> None:
        """Let other runs have the servers."""
        if self._thread.ident is None or self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(_JOIN_SECONDS)  # it may be asking a server that hangs
        atexit.unregister(self.give_back)
        for server in self._servers.values():
            with suppress(EndpointRefuses, EndpointUnwell):
                server.lease(self._holder, 0.0)

    def _renew(self) -> None:
        while not self._ended.wait(patience.current.lease_renew_seconds):
            for server in tuple(self._servers.values()):
                with suppress(EndpointRefuses, EndpointUnwell):  # the next push sees what is wrong
                    server.lease(self._holder, patience.current.lease_stale_seconds)


@dataclass(frozen=True)
class Publisher:
    """Pushes to servers from one process of a run.

    Args:
        folder: Folder in which buckets are written.
        bucket_mib: Size of a bucket.
    """

    folder: Path
    bucket_mib: float

    def push(
        self,
        servers: Sequence[VLLMServer],
        tensors: Iterator[tuple[str, Tensor]],
        headers: Mapping[str, Header],
        label: str,
        *,
        keep: bool = False,
    ) -> dict[str, str]:
        """Push to all servers, and return those that were found dead, by address, with what was seen.

        Args:
            servers: Well a moment ago.
            tensors: Whole ones on the CPU, under the names of the model's directory; not walked through on an error.
            headers: Of all of them, in their order.
            label: Name of these weights, which no others have had.
            keep: Let completions that are on their way go on, with the new weights from here on; else they end.

        Raises:
            RunStopped: A server refuses what is sent.
        """
        if not servers:
            return {}
        push = _Push(servers)
        push.each(lambda server: _begin(server, headers, keep=keep))
        for file, hashes, is_last in self._files(tensors, headers):
            content = {"update_info": {"file": str(file), "hashes": hashes, "last": is_last}}
            push.each(lambda server, content=content: server.post("/update_weights", content))  # type: ignore[misc]
        push.each(lambda server: _end(server, label))
        return push.dead

    def inspect(
        self, servers: Sequence[VLLMServer], tensors: Iterator[tuple[str, Tensor]], headers: Mapping[str, Header]
    ) -> dict[str, Inspection]:
        """Return by address how far what a server computes with is from these weights, or why it does not say."""
        inspected = {server.url: Inspection() for server in servers}
        for file, _, _ in self._files(tensors, headers):
            content = {"method": "holdfast_inspect", "kwargs": {"file": str(file)}}
            for server in servers:
                answered = inspected[server.url]
                try:
                    answered.differences |= {} if answered.why_not else inspection_of(server.post(RPC, content))
                except (EndpointRefuses, EndpointUnwell) as error:
                    answered.why_not = f"{server.url} {error}"
        return inspected

    def _files(
        self, tensors: Iterator[tuple[str, Tensor]], headers: Mapping[str, Header]
    ) -> Iterator[tuple[Path, dict[str, str], bool]]:
        """Yield buckets: the file of each, the hashes of its tensors, and whether it is the last.

        A tensor is written when it comes, and the file removed before the next begins, so that a push takes the memory
        of a tensor and of a bucket.
        """
        planned = list(plan_files(headers, int(self.bucket_mib * _MIB)).values())
        for number, names in enumerate(planned):
            file, hashes = self.folder / f"holdfast-{secrets.token_hex(8)}.safetensors", dict[str, str]()
            try:
                self._write(file, {name: headers[name] for name in names}, _hashed(tensors, hashes))
                yield file, hashes, number == len(planned) - 1
            finally:
                file.unlink(missing_ok=True)

    def _write(
        self, file: Path, headers: Mapping[str, Header], tensors: Iterator[tuple[str, Iterator[Tensor]]]
    ) -> None:
        try:
            with file.open("xb") as opened:
                write_file(opened, headers, tensors)
        except OSError as error:
            raise RunStopped(
                f"{sum(map(tensor_bytes, headers.values())) / _MIB:.0f} MiB of weights could not be written to "
                f"{file.parent} ({error}). Make room there, or name another rollout.engine.folder."
            ) from error


class _Push:
    """The state of one push: the servers that take part, and those that failed."""

    def __init__(self, servers: Sequence[VLLMServer]) -> None:
        self._servers = list(servers)
        self.dead: dict[str, str] = {}

    def each(self, ask: Callable[[VLLMServer], Any]) -> None:
        """Ask all servers side by side.

        Raises:
            RunStopped: One refuses.
        """
        if not self._servers:
            return
        with ThreadPoolExecutor(len(self._servers)) as threads:
            answers = [threads.submit(_said, ask, server) for server in self._servers]
        remaining = []
        for server, answer in zip(self._servers, answers, strict=True):
            why = answer.result()
            if why is None:
                remaining.append(server)
            elif server.is_well():
                raise RunStopped(
                    f"The server at {server.url} refuses the weights that were pushed to it: it {why}. It is paused, "
                    "and no sample of them was trained on. The same command goes on from the last checkpoint."
                )
            else:
                self.dead[server.url] = why
        self._servers = remaining


def _said(ask: Callable[[VLLMServer], Any], server: VLLMServer) -> str | None:
    """Return what went wrong; None if nothing did."""
    try:
        ask(server)
    except (EndpointRefuses, EndpointUnwell) as error:
        return str(error)
    return None


def _begin(server: VLLMServer, headers: Mapping[str, Header], *, keep: bool) -> None:
    shapes = {name: list(header.shape) for name, header in headers.items()}
    dtypes = {name: str(header.dtype) for name, header in headers.items()}
    # A request in an open session kills vLLM 0.32. What waits through a push goes on from keys and values computed anew
    # (`clear_cache`), and its answer says which of its tokens are of which weights.
    server.post("/pause", mode="keep" if keep else "abort", clear_cache="true")
    server.post("/init_weight_transfer_engine", {"init_info": {"shapes": shapes, "dtypes": dtypes}})
    try:
        server.post("/start_weight_update")
    except (EndpointRefuses, EndpointUnwell) as error:
        if _IS_OPEN not in str(error):
            raise
        # A push that ended in the middle, as where another server refused it, left its session open here.
        server.post("/finish_weight_update", {})
        server.post("/start_weight_update")


def _end(server: VLLMServer, label: str) -> None:
    server.post("/finish_weight_update", {"weight_version": label})
    server.post("/reset_prefix_cache", reset_running_requests="true")
    server.post("/resume")


def _hashed(tensors: Iterator[tuple[str, Tensor]], hashes: dict[str, str]) -> Iterator[tuple[str, Iterator[Tensor]]]:
    """Yield tensors as they come, and note their hashes."""
    for name, tensor in tensors:
        hashes[name] = digest(tensor)
        pieces = iter([tensor])
        del tensor  # no name may hold it while the next one is gathered
        yield name, pieces
