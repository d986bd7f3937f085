"""Real bubblewraps around programs that behave, and that fork, fill, print, hang and reach for what is outside."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.environment import AgentConfig, AgentEndpointConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.environments.pool import Answer, EnvironmentPool
from holdfast.features.sandboxes.recipes import Recipe
from holdfast.rollout.episodes.endpoint import Endpoint
from tests.rewards.conftest import wait_for

_CAN_RUN = shutil.which("bwrap") is not None and (
    subprocess.run(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"], check=False).returncode == 0
)
needs_bubblewrap = pytest.mark.skipif(not _CAN_RUN, reason="bubblewrap starts no sandbox here")
SECTION = {"kind": "docker", "image": "python:3.13", "processes": 8, "memory_mib": 64, "disk_mib": 16}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """Listen at a socket."""
    with Endpoint(SamplingConfig(), AgentEndpointConfig(address="unix")) as served:
        yield served


def start(folder: Path, source: str, **options: Any) -> EnvironmentPool:
    (folder / "agent.py").write_text(textwrap.dedent(source))
    values = {"kind": "endpoint", "command": ["python3", "/files/agent.py"], "endpoint": {"address": "unix"}}
    sandbox = {"processes": 32, "memory_mib": 256, "disk_mib": 16, **options.pop("sandbox", {})}
    pool = EnvironmentPool(
        AgentConfig.model_validate({**values, "sandbox": sandbox, **options}), folder, folder / "logs"
    )
    pool.start()
    return pool


def run(endpoint: Endpoint, folder: Path, source: str, **options: Any) -> Answer:
    with start(folder, source, **options) as pool:
        pool.run(0, {"word": "moon"}, 5, endpoint.base_url, endpoint.open())
        (answer,) = pool.answers(None)
    return answer


def sandboxes(mark: str) -> list[int]:
    """Return the processes on this machine whose command line has a mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes()
        except OSError:
            continue
        if mark.encode() in command and int(entry.parent.name) != os.getpid():
            found.append(int(entry.parent.name))
    return found


@needs_bubblewrap
def test_a_program_in_a_sandbox_reads_its_row_asks_the_policy_and_has_a_place_to_work(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    def answer() -> None:
        for call in endpoint.take(20.0):
            call.answer({"choices": []})

    thread = threading.Thread(target=answer)
    thread.start()

    answered = run(endpoint, tmp_path, """
        import json, os, pathlib, sys, urllib.request
        row = json.load(sys.stdin)
        pathlib.Path("note").write_text(row["word"])
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
        asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
        assert json.load(urllib.request.urlopen(asked)) == {"choices": []}
        assert pathlib.Path("/work/note").read_text() == "moon"
    """)  # fmt: skip

    thread.join()
    assert (answered.fault, answered.message) == (None, "")


BAD = {
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 22))",
    "disk": "file = open('/work/large', 'wb')\nwhile True: file.write(bytes(1 << 20)), file.flush()",
    "exits": "raise SystemExit(7)",
    "root": "open('/usr/bin/new', 'w')",
    "files": "open('/files/new', 'w')",
    "network": "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=3)",
    "home": f"open({str(Path(__file__).resolve())!r})",
}


@needs_bubblewrap
@pytest.mark.parametrize("name", BAD)
def test_what_a_sandbox_forbids_is_a_fault_of_one_episode(name: str, endpoint: Endpoint, tmp_path: Path) -> None:
    answer = run(endpoint, tmp_path, BAD[name], timeout_seconds=60)

    assert answer.fault == "raised"
    assert "sandbox" in answer.message
    wait_for(lambda: not sandboxes(str(tmp_path)))


@needs_bubblewrap
def test_a_program_that_hangs_or_prints_without_end_ends_with_its_time(endpoint: Endpoint, tmp_path: Path) -> None:
    source = "import time\nwhile True: print('x' * (1 << 20))"

    answer = run(endpoint, tmp_path, source, timeout_seconds=3)

    assert answer.fault == "timeout"
    wait_for(lambda: not sandboxes(str(tmp_path)))


RUN = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.features.sandboxes.test_recipes import start
from holdfast.config.sections.environment import AgentEndpointConfig
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.rollout.episodes.endpoint import Endpoint
SOURCE = '''
import os, time
os.fork()
os.setsid()
os.fork()
time.sleep(1000)
'''
with Endpoint(SamplingConfig(), AgentEndpointConfig(address="unix")) as endpoint:
    pool = start(Path({folder!r}), SOURCE)
    pool.run(0, {{}}, 5, endpoint.base_url, endpoint.open())
    print("runs", flush=True)
    time.sleep(1000)
"""


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize("who", ["run", "server", "worker", "sandbox"])
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_nothing_is_left_of_a_sandbox_whoever_is_killed(who: str, seconds: float, tmp_path: Path) -> None:
    """Kill at twenty places: four processes, five times."""
    source = RUN.format(root=str(Path(__file__).parents[3]), folder=str(tmp_path))
    program = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, start_new_session=True)
    assert program.stdout is not None
    assert program.stdout.readline() == b"runs\n"
    time.sleep(seconds)

    if (pid := _found(who, program.pid)) is not None:
        os.kill(pid, signal.SIGKILL)
    if who != "run":
        time.sleep(0.5)
        program.kill()

    program.wait()
    program.stdout.close()
    wait_for(lambda: not sandboxes(str(tmp_path)))


def _found(who: str, pid: int) -> int | None:
    for step in ["run", "server", "worker", "sandbox"]:
        if who == step:
            return pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            return None
        pid = int(children[0])
    return None


def test_a_container_has_no_network_and_no_key_in_its_command_line(tmp_path: Path) -> None:
    recipe = Recipe.__new__(Recipe)
    recipe._section, recipe._base, recipe._kind, recipe._program = SECTION, tmp_path, "docker", "docker"

    command = recipe.command(["sh", "-c", "true"], {"image": "row:1"}, "/tmp/endpoint.sock")

    text = " ".join(command)
    assert "row:1 python3" in text
    for part in ("--network none", "--memory 64m", "--pids-limit 8", "--read-only", "--cap-drop ALL", "--rm"):
        assert part in text
    assert text.endswith("/holdfast/endpoint.sock 8 67108864 sh -c true")
    assert text.count("OPENAI_API_KEY") == 1
