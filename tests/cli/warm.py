"""A Python that has torch and transformers imported already: real processes without the seconds of their start.

One process imports what runs need and waits. `warm-python`, a program of its own, asks it to fork a child that takes
over arguments, environment, directory and output, and ends as the child ends. Whoever starts ranks with
`sys.executable`, as the launcher does, starts this. Whoever kills it kills the child.

`warm-launcher` stands for a Python too: the command's launcher is a process of its own there, as it is for users, and
its ranks are warm. So a test sees launcher and ranks, by their environment and as parent and children.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

CLIENT = """#!{python} -SE
import json, os, signal, socket, sys
# What runs rewards or environments speaks through its input, without torch; a launcher's guard is fast as it is.
if "holdfast.processes.worker" in sys.argv or sys.argv[1] in ("-I", "-c"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [1, 2])
server.sendall(request)
child = int(server.recv(32))
def pass_on(number, frame):
    try:
        os.kill(child, number)
    except ProcessLookupError:  # it has ended, and its code is on the way
        pass
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, pass_on)
code = int(server.recv(32) or 255)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


LAUNCHER = """#!{python}
import os, runpy, sys
del sys.argv[1 : 1 + (sys.argv[1] == "-P")]
if sys.argv[1:3] != ["-m", "holdfast.cli.main"] or sys.argv[3] not in {verbs!r}:
    os.execv({program!r}, [{program!r}, *sys.argv[1:]])
sys.executable = {program!r}
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
VERBS = ("sft", "grpo", "dpo", "distill", "reward")


@dataclass(frozen=True)
class Done:
    """How a program ended, and what it said."""

    code: int
    out: str
    err: str


class WarmPython:
    """Owns the waiting process; `program` and `launcher` stand for a Python interpreter."""

    def __init__(self, directory: Path) -> None:
        self.program = directory / "warm-python"
        address = str(directory / "socket")
        self.program.write_text(CLIENT.format(python=sys.executable, address=address))
        self.launcher = directory / "warm-launcher"
        words = {"python": sys.executable, "program": str(self.program), "verbs": VERBS}
        self.launcher.write_text(LAUNCHER.format(**words))
        for program in (self.program, self.launcher):
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        context = multiprocessing.get_context("forkserver")
        ready = context.Event()
        self._process = context.Process(target=_serve, args=(address, str(self.program), ready))
        self._process.start()
        assert ready.wait(120)

    def run(self, *arguments: object, cwd: Path, timeout_seconds: float = 120.0) -> Done:
        """Run `python ARGUMENTS` and wait for its end."""
        return run([self.program, *arguments], cwd=cwd, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """End the waiting process."""
        self._process.kill()
        self._process.join(10)


def run(command: list[Any], *, cwd: Path, timeout_seconds: float = 120.0) -> Done:
    """Run a program and wait for its end."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout_seconds)
    return Done(done.returncode, done.stdout, done.stderr)


def run_and_list_imports(command: list[Any], *, cwd: Path) -> tuple[Done, set[str]]:
    """Run a program of Python; return with its end the names of the modules that it imported.

    Python does not list what `importlib.import_module` loads itself, only what that imports.
    """
    done = run(["env", "PYTHONPROFILEIMPORTTIME=1", *command], cwd=cwd)
    lines = done.err.splitlines()
    imports = [line for line in lines if line.startswith("import time:")]
    others = "".join(f"{line}\n" for line in lines if line not in imports)
    return replace(done, err=others), {line.rpartition("|")[2].strip() for line in imports}


def _serve(address: str, program: str, ready: Event) -> None:
    import torch

    from tests.forked import end_with_tests

    end_with_tests()
    torch.set_num_threads(1)
    sys.executable = program
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children that wait for runs
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        ready.set()
        while True:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _attend(client)
            client.close()


def _attend(client: socket.socket) -> None:
    """Fork the process that runs, tell the client its number and its exit code, and leave."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, outputs, _, _ = socket.recv_fds(client, 4, 2)
    request = b""
    while len(request) < int.from_bytes(head, "big"):
        request += (part := client.recv(1 << 20))
        if not part:  # it was killed while it asked
            os._exit(0)
    child = os.fork()
    if child == 0:
        client.close()
        _become(*json.loads(request), outputs)
    with contextlib.suppress(OSError):  # it has gone, and then goes the child
        client.sendall(str(child).encode().ljust(32))
    ended = os.pidfd_open(child)
    select.select([ended, client], [], [])  # the client says nothing more: it can be read once it has gone
    with contextlib.suppress(ProcessLookupError):
        if not select.select([ended], [], [], 0)[0]:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        client.sendall(str(os.waitstatus_to_exitcode(status)).encode().ljust(32))
    os._exit(0)


def _become(arguments: list[str], environment: dict[str, str], directory: str, outputs: list[int]) -> None:
    """Run `python ARGUMENTS` in this process, and end."""
    import runpy

    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(output, descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # which the waiting process may have looked up in an environment of its own
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = 0
    arguments = arguments[arguments[0] == "-P" :]
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - the edge of a process
        code = 1
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as end:
            code = int(str(end.code))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
