"""Real servers of the Model Context Protocol behind real pools: what they answer, and what becomes of bad ones."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.environments.base import StepResult, ToolCall, Turn
from holdfast.environments.pool import Answer, EnvironmentPool
from holdfast.errors import ConfigError
from tests.environments.conftest import started
from tests.rewards.conftest import is_alive, wait_for

NOTES = '''
import os, sys, time
from mcp.server import MCPServer
server, notes = MCPServer("notes"), []
open("pids", "a").write(f"{os.getpid()}\\n")
@server.tool()
def write(text: str, times: int = 1) -> str:
    """Write a note."""
    notes.extend([text] * times)
    return f"{len(notes)} notes"
@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("the paper is wet")
@server.tool()
def die() -> str:
    """Die."""
    os._exit(3)
@server.tool()
def sleep() -> str:
    """Sleep."""
    time.sleep(1000)
@server.tool()
def large() -> str:
    """Say more than is read."""
    return "x" * (1 << 26)
if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
'''
PLAIN = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == "initialize":
        about = {"serverInfo": {"name": "s", "version": "1"}, "capabilities": {"tools": {}}}
        result = {"protocolVersion": "2025-06-18", **about}
    elif asked.get("method") == "tools/list":
        result = {"tools": LISTED}
    elif asked.get("method") == "tools/call":
        result = {"content": [], "structuredContent": {"sum": "three"}}
    elif "id" in asked:
        error = {"code": -32601, "message": "none"}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}), flush=True)
        continue
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
Start = Callable[..., EnvironmentPool]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a pool whose only tools are those of a server."""
    with started(tmp_path, "notes.py", {"mcp": f"{sys.executable} notes.py"}) as begin_with:

        def begin(source: str = NOTES, entry: str | None = None, **options: Any) -> EnvironmentPool:
            return begin_with(source, **({} if entry is None else {"mcp": entry}), **options)

        yield begin


def take(pool: EnvironmentPool, episode: int, *calls: tuple[str, dict[str, Any]]) -> Answer:
    pool.take(episode, Turn(0, "", tuple(ToolCall(name, arguments) for name, arguments in calls)))
    (answer,) = pool.answers(None)
    return answer


def begun(pool: EnvironmentPool, episode: int) -> None:
    pool.begin(episode, {}, 5)
    pool.answers(None)


def texts(answer: Answer) -> list[str]:
    assert isinstance(answer.result, StepResult)
    return [message["content"] for message in answer.result.messages]


def pids(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "pids").read_text().split()]


def test_the_tools_of_a_server_are_listed_and_called_and_each_episode_has_its_own(start: Start, tmp_path: Path) -> None:
    pool = start()
    (tools,) = pool.tools.values()
    names = [tool["function"]["name"] for tool in tools]
    written = tools[0]["function"]

    for episode in (0, 1):
        begun(pool, episode)
    first = [take(pool, 0, ("write", {"text": "a", "times": 2})), take(pool, 0, ("write", {"text": "b"}))]
    other = take(pool, 1, ("write", {"text": "c"}))

    assert names == ["write", "fail", "die", "sleep", "large"]
    assert written["description"] == "Write a note."
    assert written["parameters"]["properties"]["text"]["type"] == "string"
    assert not pool.replayable
    assert [texts(answer) for answer in (*first, other)] == [["2 notes"], ["3 notes"], ["1 notes"]]
    for episode in (0, 1):
        pool.leave(episode)
    wait_for(lambda: not any(map(is_alive, pids(tmp_path))))
    assert len(pids(tmp_path)) == 3


def test_a_failed_call_is_told_and_counted(start: Start) -> None:
    pool = start()
    begun(pool, 0)

    answer = take(pool, 0, ("write", {"text": 3}), ("write", {}), ("fail", {}), ("gone", {}), ("write", {"text": "a"}))

    assert answer.result is not None
    assert answer.result.failed_calls == 4
    assert answer.result.called == {"write": 3, "fail": 1, "unknown": 1}
    wrong, missing, failed, unknown, right = texts(answer)
    assert "text" in wrong
    assert "text" in missing
    assert "fail" in failed
    assert "gone" in unknown
    assert right == "1 notes"


@pytest.mark.slow
def test_a_server_that_dies_is_a_failed_call_and_one_that_says_too_much_is_one(start: Start) -> None:
    pool = start()
    begun(pool, 0)
    begun(pool, 1)

    dead = take(pool, 0, ("die", {}), ("write", {"text": "a"}))
    large = take(pool, 1, ("large", {}))

    assert dead.result is not None
    assert dead.result.failed_calls == 2
    assert large.result is not None
    assert large.result.failed_calls == 1


def test_a_tool_beyond_its_time_ends_its_episode_and_nothing_is_left(start: Start, tmp_path: Path) -> None:
    pool = start(timeout_seconds=3.0)
    begun(pool, 0)

    answer = take(pool, 0, ("sleep", {}))

    assert answer.fault == "timeout"
    wait_for(lambda: not any(map(is_alive, pids(tmp_path))))


@pytest.mark.slow
@pytest.mark.parametrize("per", ["episode", "rank"])
def test_nothing_is_left_of_a_server_when_the_processes_are_killed(start: Start, tmp_path: Path, per: str) -> None:
    pool = start(mcp_per=per)
    begun(pool, 0)
    take(pool, 0, ("write", {"text": "a"}))
    assert is_alive(pids(tmp_path)[-1])

    assert pool._process is not None
    os.kill(pool._process.pid, signal.SIGKILL)

    wait_for(lambda: not any(map(is_alive, pids(tmp_path))))


@pytest.mark.slow
def test_episodes_of_a_rank_may_share_a_server_and_one_that_is_killed_takes_nothing_along(
    start: Start, tmp_path: Path
) -> None:
    pool = start(mcp_per="rank", timeout_seconds=30.0)
    for episode in range(3):
        begun(pool, episode)

    shared = [texts(take(pool, episode, ("write", {"text": "a"}))) for episode in (0, 1)]
    failed = take(pool, 0, ("write", {}), ("fail", {}))

    assert shared == [["1 notes"], ["2 notes"]]
    assert failed.result is not None
    assert failed.result.failed_calls == 2
    assert len(pids(tmp_path)) == 1
    pool.close()
    wait_for(lambda: not any(map(is_alive, pids(tmp_path))))


@pytest.mark.slow
def test_a_shared_server_that_dies_is_a_failed_call_of_every_episode(start: Start) -> None:
    pool = start(mcp_per="rank")
    begun(pool, 0)
    begun(pool, 1)

    answers = [take(pool, 0, ("die", {})), take(pool, 1, ("write", {"text": "a"}))]

    assert [answer.result.failed_calls for answer in answers if answer.result is not None] == [1, 1]


@pytest.mark.slow
def test_an_address_is_called_over_http(start: Start, tmp_path: Path, free_port: int) -> None:
    (tmp_path / "notes.py").write_text(NOTES)
    address = f"http://127.0.0.1:{free_port}/mcp"
    with subprocess.Popen([sys.executable, "notes.py", str(free_port)], cwd=tmp_path) as server:
        try:
            wait_for(lambda: _listens(address))
            pool = start(entry=address)
            begun(pool, 0)

            answers = take(pool, 0, ("write", {"text": "a"}), ("fail", {}))
        finally:
            server.kill()

    assert texts(answers)[0] == "1 notes"
    assert answers.result is not None
    assert answers.result.failed_calls == 1


def _listens(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=1)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listing(*tools: dict[str, Any]) -> str:
    return PLAIN.replace("LISTED", repr(list(tools)))


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "source",
    [
        listing({"name": "add", "inputSchema": {"type": "object", "properties": 3}}),
        listing({"name": "add", "inputSchema": {"type": "array"}}),
        listing({"name": "two words", "inputSchema": OBJECT}),
        listing({"name": "add", "inputSchema": OBJECT}, {"name": "add", "inputSchema": OBJECT}),
        listing({"name": "add", "inputSchema": "none"}),
        "raise SystemExit(3)",
        "print('x' * (1 << 26))",
        "print('hello', flush=True)",
    ],
    ids=["schema", "array", "name", "twice", "text", "exits", "large", "words"],
)
def test_a_server_that_lies_or_does_not_start_refuses_the_run(start: Start, source: str) -> None:
    with pytest.raises(ConfigError, match="environment"):
        start(source)


def test_a_program_that_is_not_there_refuses_the_run(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"environment\.mcp.*no_such_program"):
        start(entry="no_such_program")


def test_a_result_that_breaks_its_own_schema_is_a_failed_call(start: Start) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    pool = start(listing({"name": "add", "inputSchema": OBJECT, "outputSchema": schema}))
    begun(pool, 0)

    answer = take(pool, 0, ("add", {"a": 1}))

    assert answer.result is not None
    assert answer.result.failed_calls == 1, json.dumps(texts(answer))
