"""One server for all episodes of a rank: a process holds its session, and episodes ask over sockets.

An episode hands that process one end of a socket pair of its own, through a socket that all workers inherit. No name
stands in a file system, and no other process can ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from holdfast.environments.tools import CallMistake
from holdfast.features.mcp.connection import Connection
from holdfast.files import parse_json
from holdfast.processes import framing
from holdfast.processes.forks import MOST_ANSWER_BYTES
from holdfast.processes.user_code import describe_error

_LENGTH = struct.Struct("<Q")


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the workers' end and the holder's end of the socket over which sessions are handed."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class SharedConnection:
    """An episode's way to a server that another process holds.

    Args:
        handed: The workers' end.
    """

    def __init__(self, handed: socket.socket) -> None:
        self._handed = handed
        self._channel: socket.socket | None = None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what a tool answers.

        Raises:
            CallMistake: It failed, or the server has died.
        """
        if self._channel is None:
            self._channel, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._handed, [b"."], [theirs.fileno()])
                except OSError:
                    raise CallMistake("the server has ended") from None
        asked = json.dumps({"name": name, "arguments": dict(arguments)}).encode()
        try:
            framing.write(self._channel.fileno(), asked)
            answer = framing.read_frame(self._channel.fileno(), None, MOST_ANSWER_BYTES)
        except OSError:
            answer = None
        if answer is None:
            raise CallMistake("the server has ended")
        match parse_json(answer):
            case {"text": str(text)}:
                return text
            case {"mistake": str(mistake)}:
                raise CallMistake(mistake)
        raise CallMistake("the server answers nonsense")

    async def close(self) -> None:
        """Let the holder forget this episode."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


async def serve(connection: Connection, handed: socket.socket) -> None:
    """Answer the episodes of a rank until its processes end."""
    loop = asyncio.get_running_loop()
    handed.setblocking(False)
    tasks: set[asyncio.Task[None]] = set()
    come = asyncio.Event()
    loop.add_reader(handed.fileno(), come.set)
    while True:
        await come.wait()
        come.clear()
        with contextlib.suppress(BlockingIOError):
            while True:
                message, descriptors, _, _ = socket.recv_fds(handed, 1, 1)
                if not message:
                    return
                for descriptor in descriptors:
                    task = loop.create_task(_answer(connection, socket.socket(fileno=descriptor)))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)


async def _answer(connection: Connection, channel: socket.socket) -> None:
    """Answer one episode; where it ends, the call that it waits for is cancelled."""
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    call: asyncio.Task[bytes] | None = None
    try:
        while True:
            (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            asked = parse_json(await reader.readexactly(size))
            call = asyncio.create_task(_called(connection, asked))
            gone = asyncio.create_task(reader.read(1))  # nothing is asked while an answer is awaited
            await asyncio.wait([call, gone], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return
            gone.cancel()
            await asyncio.wait([gone])
            writer.write(framing.frame(call.result()))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        return
    finally:
        if call is not None and not call.done():
            call.cancel()
        writer.close()


async def _called(connection: Connection, asked: Mapping[str, Any]) -> bytes:
    try:
        answer = {"text": await connection.call(asked["name"], asked["arguments"])}
    except CallMistake as mistake:
        answer = {"mistake": str(mistake)}
    except Exception as error:  # noqa: BLE001 - the policy is told
        answer = {"mistake": describe_error(error)}
    return json.dumps(answer).encode()
