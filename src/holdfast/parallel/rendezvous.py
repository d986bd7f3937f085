"""The store through which the ranks of a call meet, and sockets on the loopback interface where one machine has all.

A store outlives a call: it ends with torchrun or with the process that hosts it. Each call therefore uses a key prefix
that no other call has used; under a used one, ranks would read the earlier call's addresses and failure reports.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import (  # public under torch.distributed
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed import DistNetworkError

from holdfast.errors import ConfigError

STORE_VARIABLE = "HOLDFAST_STORE"
"""Environment variable of `launch.environment`, repeated here because no layer below `launch` imports that."""

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface on which each of the two listens."""

_calls = itertools.count()
_hosted: dict[tuple[str, int], TCPStore] = {}
"""Stores that this process hosts, by address. They stay: a rank that is late in leaving one call, or early in entering
the next, must not meet a server that is about to close."""


def number_of_call() -> int:
    """Return a number that no other call of this process has had, the same on all ranks that make the same calls."""
    return next(_calls)


def store_of(call: int, rank: int, size: int, timeout: timedelta, environ: Mapping[str, str]) -> Store:
    """Return the store in which the ranks of a call meet.

    Args:
        call: Number of the call, from `number_of_call`.
        rank: Rank of this process.
        size: Number of ranks.
        timeout: Longest wait for a key.
        environ: The environment: a file of our launcher's, else MASTER_ADDR and MASTER_PORT.
    """
    # torchrun starts ranks again on the same store: what an earlier attempt left there is not ours either. Where the
    # first rank hosts it, it is new each time, and machines that came later count other attempts.
    hosted_elsewhere = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if hosted_elsewhere else "0"
    return PrefixStore(f"holdfast/{attempt}/{call}", _store(rank, size, timeout, environ))


def _store(rank: int, size: int, timeout: timedelta, environ: Mapping[str, str]) -> Store:
    if size == 1:
        return HashStore()
    file = environ.get(STORE_VARIABLE)
    if file is not None:
        # A file needs no port, which another process could take between its choice and its use.
        store = FileStore(file, size)
        store.set_timeout(timeout)
        return store
    address, port = environ.get("MASTER_ADDR", "127.0.0.1"), int(environ.get("MASTER_PORT", "29500"))
    hosted_elsewhere = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not hosted_elsewhere and (address, port) not in _hosted:
        try:
            _hosted[address, port] = TCPStore(address, port, None, True, timeout=timeout, wait_for_workers=False)
        except DistNetworkError as error:
            raise network_mistake(error, f"{address}:{port}") or error from error
    return TCPStore(address, port, None, False, timeout=timeout, wait_for_workers=False)


def network_mistake(error: BaseException, endpoint: str) -> ConfigError | None:
    """Return an error that says what to do about a port that is in use; None for any other error.

    Args:
        error: Raised by torch's TCPStore.
        endpoint: Address and port.
    """
    if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
        return None
    return ConfigError(
        f"The machines cannot meet at {endpoint}: another program on {socket.gethostname()} listens at that port. Set "
        "MASTER_PORT to a free one, or end what uses it."
    )


def on_one_machine(environ: Mapping[str, str]) -> bool:
    """Return whether an environment says that all ranks run on this machine."""
    size = environ.get("WORLD_SIZE", "1")
    return size == "1" or STORE_VARIABLE in environ or environ.get("LOCAL_WORLD_SIZE") == size


@contextmanager
def on_loopback(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let gloo and NCCL listen on the loopback interface alone within the block, where all ranks share a machine.

    Both read the environment when a group is made. What it named before, for runs over several machines, is put back.

    Args:
        environ: Of this process.
    """
    name = next((interface for _, interface in socket.if_nameindex() if interface in {"lo", "lo0"}), None)
    if name is None or not on_one_machine(environ):
        yield
        return
    before = {variable: environ[variable] for variable in _INTERFACES if variable in environ}
    environ.update(dict.fromkeys(_INTERFACES, name))
    try:
        yield
    finally:
        for variable in _INTERFACES:
            del environ[variable]
        environ.update(before)
