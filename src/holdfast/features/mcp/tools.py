"""The tools of `environment.mcp`: their schemas before the run, and calls of them in an episode.

Servers are listed in a process of its own, which can be killed: the process that forks workers runs no event loop and
starts no thread. With `environment.mcp_per: rank` that process stays and serves all episodes (`shared.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from holdfast import patience
from holdfast.environments.base import MOST_LEVELS, extent_of
from holdfast.environments.instances import SUBJECT, Servers
from holdfast.environments.tools import Tool
from holdfast.errors import ConfigError
from holdfast.files import parse_json
from holdfast.processes import framing, kernel
from holdfast.processes.forks import MOST_ANSWER_BYTES
from holdfast.processes.user_code import CannotStart, describe_error
from holdfast.text.shortening import shortened

try:
    import jsonschema
    from referencing import Registry

    from holdfast.features.mcp.connection import Connection, Server
    from holdfast.features.mcp.shared import SharedConnection, pair, serve
except ImportError:
    raise ConfigError(
        "environment.mcp needs the package mcp, which is not installed. Run: pip install 'holdfast[mcp]'."
    ) from None

_LIST_SECONDS = 60.0
_NAME = re.compile(r"[A-Za-z0-9_.\-/]{1,128}")
_SHOWN = 300


class Caller(Protocol):
    """A server as an episode sees it."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what a tool answers."""

    async def close(self) -> None:
        """Give the session back."""


def servers_of(section: Mapping[str, Any], base: Path) -> Servers:
    """List the tools of every server of a section.

    Raises:
        CannotStart: A server does not start, does not answer, or lists what is no tool.
    """
    kernel.adopt_orphans()  # what a program leaves here, the fork server ends
    tools: list[Tool] = []
    callers: list[Caller] = []
    kept: list[int] = []
    for entry in section["mcp"]:
        server = Server(entry, base)
        is_shared = section["mcp_per"] == "rank" and not server.is_address
        ours, theirs = pair() if is_shared else (None, None)
        pid, listed = _listed(server, section["memory_mib"] << 20, theirs)
        caller: Caller
        if ours is None or theirs is None:
            caller = Connection(server)
        else:
            theirs.close()
            kept.append(pid)
            caller = SharedConnection(ours)
        callers.append(caller)
        tools += [_tool(values, server, caller) for values in listed]
    return Servers(tuple(tools), tuple(caller.close for caller in callers), frozenset(kept))


def _tool(values: Mapping[str, Any], server: Server, caller: Caller) -> Tool:
    name, schema = values["name"], values["parameters"]
    if not _NAME.fullmatch(name):
        raise _refusal(server, f"lists a tool called {shortened(repr(name), _SHOWN)}, which no call can name")
    if schema.get("type") != "object" or extent_of(schema).levels > MOST_LEVELS:
        raise _refusal(server, f"gives the tool {name} a schema that is of no object: {shortened(str(schema), _SHOWN)}")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise _refusal(server, f"gives the tool {name} a schema that is none: {error.message[:_SHOWN]}") from None
    # An empty registry: a schema may not name an address to be read.
    validator = kind(schema, registry=Registry())

    async def call(**arguments: Any) -> str:
        return await caller.call(name, arguments)

    parameters = {"properties": {}, **schema}
    written = {"name": name, "description": values["description"], "parameters": parameters}
    mistake_of = partial(_mistake_of, validator)
    return Tool(name, call, {"type": "function", "function": written}, {}, mistake_of=mistake_of)


def _mistake_of(validator: Any, arguments: Mapping[str, Any]) -> str:
    """Return what a schema says against arguments; "" if nothing."""
    error = jsonschema.exceptions.best_match(validator.iter_errors(dict(arguments)))
    if error is None:
        return ""
    place = "".join(f"{part}: " for part in error.absolute_path)
    return shortened(f"{place}{error.message}", _SHOWN)


def _listed(server: Server, memory_bytes: int, shares: Any) -> tuple[int, list[dict[str, Any]]]:
    """Return the tools of a server, and the process that listed them, which lives on where it shares the server.

    Raises:
        CannotStart: It does not answer in time, or nonsense.
    """
    reads, writes = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        os.close(reads)
        _in_fork(parent, memory_bytes, lambda: asyncio.run(_list(server, writes, shares)))
    os.close(writes)
    keeps = False
    try:
        answer = framing.read_frame(reads, time.monotonic() + _LIST_SECONDS, MOST_ANSWER_BYTES)
        found: dict[str, Any] = {"error": "its process ended"} if answer is None else parse_json(answer)
        if "error" in found:
            raise _refusal(server, f"cannot be used: {found['error']}")
        keeps = shares is not None
        return pid, found["tools"]
    except framing.BrokenChannel:
        raise _refusal(server, f"lists tools in more than {MOST_ANSWER_BYTES} bytes") from None
    except TimeoutError:
        raise _refusal(server, f"has not listed its tools after {_LIST_SECONDS:g} s") from None
    finally:
        os.close(reads)
        if not keeps:
            kernel.kill_with_group(pid)
            kernel.reap([pid], patience.current.supervisor_kill_seconds)


def _in_fork(parent: int, memory_bytes: int, work: Callable[[], None]) -> None:
    """Run a fork of this process to its end."""
    status = 1
    try:
        os.setsid()
        kernel.die_with_parent()
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        if os.getppid() == parent:
            work()
            status = 0
    finally:
        os._exit(status)


async def _list(server: Server, writes: int, shares: Any) -> None:
    connection = Connection(server)
    try:
        answer: dict[str, Any] = {"tools": await connection.tools()}
    except BaseException as error:  # noqa: BLE001 - the process edge
        answer = {"error": describe_error(error)}
    framing.write(writes, json.dumps(answer).encode())
    os.close(writes)
    if shares is not None and "tools" in answer:
        await serve(connection, shares)
    await connection.close()


def _refusal(server: Server, what: str) -> CannotStart:
    return CannotStart(
        f"{SUBJECT}.mcp: the server {server.name} {what}. Start it by hand in {server.base}, look at what it says to "
        "tools/list, and correct the entry or the server."
    )
