"""A connection to one server: a program over its standard streams, or an address over HTTP.

A program is a child of the process that connects, in its group, and ends with it. Neither a program nor an address is
read beyond a limit of bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx2
from mcp import Client
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import CallToolResult, jsonrpc_message_adapter

from holdfast.environments.tools import CallMistake
from holdfast.files import parse_json
from holdfast.processes import kernel
from holdfast.processes.forks import MOST_ANSWER_BYTES

_ADDRESSES = ("http://", "https://")
_LEAVE_SECONDS = 2.0
"""For a program to end when its standard input does."""
_LOOKS = 200
_MOST_TOOLS = 1024


class Server(NamedTuple):
    """A server by its entry of `environment.mcp`."""

    entry: str
    base: Path
    """Where a command runs."""

    @property
    def is_address(self) -> bool:
        """Whether it runs already, somewhere."""
        return self.entry.startswith(_ADDRESSES)

    @property
    def name(self) -> str:
        """What a message calls it: neither arguments nor a password."""
        if self.is_address:
            return str(httpx2.URL(self.entry).copy_with(username=None, password=None, query=None))
        return shlex.split(self.entry)[0]


class Connection:
    """A session with one server, opened by the first call and held by a task of the running loop.

    Args:
        server: The server.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._holder: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[Client] | None = None
        self._closing: asyncio.Event | None = None

    async def tools(self) -> list[dict[str, Any]]:
        """Return name, description and schema of every tool.

        Raises:
            Exception: The server does not start, or answers nonsense.
        """
        client, cursor, found = await self._client(), None, list[dict[str, Any]]()
        while len(found) <= _MOST_TOOLS:
            page = await client.list_tools(cursor=cursor)
            found += [
                {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                for tool in page.tools
            ]
            if (cursor := page.next_cursor) is None:
                return found
        raise ValueError(f"it lists more than {_MOST_TOOLS} tools")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what a tool answers, as text.

        Raises:
            CallMistake: The tool failed; the message is its own.
            Exception: The server died, or answers nonsense.
        """
        client = await self._client()
        return _text_of(await client.call_tool(name, dict(arguments)))

    async def close(self) -> None:
        """End the session and its program; closed already, do nothing."""
        if self._holder is not None and self._closing is not None:
            self._closing.set()
            await asyncio.wait([self._holder])
            self._holder = None

    async def _client(self) -> Client:
        if self._opened is None:
            self._opened, self._closing = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._holder = asyncio.create_task(self._hold(self._opened, self._closing))
        return await asyncio.shield(self._opened)

    async def _hold(self, opened: asyncio.Future[Client], closing: asyncio.Event) -> None:
        """Hold what has to be entered and left in one task."""
        try:
            async with Client(_streams(self._server)) as client:
                opened.set_result(client)
                await closing.wait()
        except BaseException as error:  # noqa: BLE001 - told to the caller, or the end of a session that is over
            if not opened.done():
                opened.set_exception(_first(error))


def _first(error: BaseException) -> BaseException:
    """Return the first error of a task group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _text_of(result: CallToolResult) -> str:
    parts = []
    for block in result.content:
        match block.type:
            case "text":
                parts.append(block.text)
            case "resource":
                parts.append(getattr(block.resource, "text", f"[{block.resource.uri}]"))
            case kind:
                parts.append(f"[{kind}]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(parts)
    if result.is_error:
        raise CallMistake(text or "the tool failed and says nothing")
    return text


@asynccontextmanager
async def _streams(server: Server) -> AsyncIterator[TransportStreams]:
    if server.is_address:
        client = httpx2.AsyncClient(transport=_Limited(), timeout=httpx2.Timeout(30.0, read=None))
        async with (
            client,
            streamable_http_client(server.entry, http_client=client, max_sse_event_size=MOST_ANSWER_BYTES) as streams,
        ):
            yield streams
    else:
        async with _program_streams(server) as streams:
            yield streams


class _Limited(httpx2.AsyncHTTPTransport):
    """Reads no JSON answer beyond the limit; events have one of their own."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if "text/event-stream" not in response.headers.get("content-type", ""):
            response.stream = _LimitedStream(response.stream)
        return response


class _LimitedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        count = 0
        async for chunk in self._stream:
            count += len(chunk)
            if count > MOST_ANSWER_BYTES:
                raise httpx2.ReadError(_too_long())
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def _too_long() -> str:
    return f"it answers more than {MOST_ANSWER_BYTES} bytes"


@asynccontextmanager
async def _program_streams(server: Server) -> AsyncIterator[TransportStreams]:
    # mcp's own `stdio_client` starts a session of its own, which outlives a worker that is killed, and reads lines
    # without a limit.
    program, *arguments = shlex.split(server.entry)
    process = await asyncio.create_subprocess_exec(
        str(server.base / program) if os.sep in program else program,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=server.base,
        limit=MOST_ANSWER_BYTES,
        preexec_fn=kernel.die_with_parent,
    )
    heard, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, said = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        assert process.stdout is not None
        async with heard:
            with contextlib.suppress(anyio.BrokenResourceError, ConnectionError, ValueError):  # a line over the limit
                while line := await process.stdout.readline():
                    await heard.send(_message_of(line))

    async def write() -> None:
        assert process.stdin is not None
        async with said:
            with contextlib.suppress(ConnectionError):
                async for message in said:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    process.stdin.write(text.encode() + b"\n")
                    await process.stdin.drain()
                return
        await heard.aclose()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(write)
        try:
            yield incoming, outgoing
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
            await incoming.aclose()
            await outgoing.aclose()
            tasks.cancel_scope.cancel()


def _message_of(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_python(parse_json(line.decode("utf-8", "replace"))))
    except ValueError as error:
        return error


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    for step in range(2 * _LOOKS):
        # Not `process.wait`, which waits for its pipes too, and a child of its own may hold them open.
        if process.returncode is not None:
            return
        if step == _LOOKS:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.sleep(_LEAVE_SECONDS / _LOOKS)
