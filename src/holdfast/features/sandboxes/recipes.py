"""The command lines of sandboxes: no network, a root that cannot be written, a working directory in memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.processes.user_code import CannotStart

_INSIDE, _SOCKET, _FILES, _WORK = "/holdfast/inside.py", "/holdfast/endpoint.sock", "/files", "/work"
_OWN = {"proc", "dev", "tmp", "work", "files", "holdfast", "sys"}
_END_SECONDS = 20.0
_VARIABLES = ("OPENAI_API_KEY",)


class Recipe:
    """How a program is started in a sandbox.

    Args:
        section: `environment.sandbox`.
        base: The YAML's directory, which the sandbox reads as /files.

    Raises:
        CannotStart: The sandbox's program is not installed, or no sandbox starts here.
    """

    def __init__(self, section: Mapping[str, Any], base: Path) -> None:
        self._section, self._base, self._kind = section, base.resolve(), str(section["kind"])
        program = "bwrap" if self._kind == "bubblewrap" else self._kind
        self._program = shutil.which(program) or ""
        self.passes_environment = self._kind == "bubblewrap"
        """Whether the program sees the environment that it is started with; a container has one of its own."""
        if not self._program:
            raise CannotStart(
                f"environment.sandbox: {program} is not installed. Install {self._kind}, or name another kind."
            )
        if self._kind == "bubblewrap":
            self._try()

    def command(self, command: list[str], row: Mapping[str, Any], socket: str) -> list[str]:
        """Return the command line that runs a program for a row.

        Args:
            command: The program, as the sandbox sees it.
            row: Its column `image` is taken before the section's.
            socket: The endpoint's.
        """
        image = row.get("image") or self._section["image"]
        limits = [str(self._section["processes"]), str(self._section["memory_mib"] << 20)]
        inner = ["python3", _INSIDE, _SOCKET, *limits, *command]
        mounts = {str(Path(__file__).with_name("inside.py")): _INSIDE, str(self._base): _FILES}
        if self._kind == "bubblewrap":
            return self._bubblewrap(None if image is None else str(image), mounts, socket, inner)
        return self._container(str(image), mounts, socket, inner)

    def clear(self, pid: int) -> None:
        """Remove the container of a worker that was killed; a bubblewrap's ends with its worker."""
        if self._kind != "bubblewrap":
            arguments = [self._program, "rm", "--force", _name(pid)]
            subprocess.run(arguments, capture_output=True, timeout=_END_SECONDS, check=False)

    def _try(self) -> None:
        command = self._bubblewrap(None, {}, None, ["true"])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotStart(
                f"environment.sandbox: bwrap starts no sandbox on this machine ({done.stderr.strip()[:200]}). Allow "
                "user namespaces (sysctl user.max_user_namespaces), or name another kind."
            )

    def _bubblewrap(
        self, image: str | None, mounts: Mapping[str, str], socket: str | None, inner: list[str]
    ) -> list[str]:
        size = str(self._section["disk_mib"] << 20)
        command = [self._program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        command += _root(Path("/usr"), "/usr") if image is None else []
        entries = Path("/").iterdir() if image is None else (self._base / image).iterdir()
        for entry in sorted(entries):
            if entry.name not in _OWN and (image is not None or entry.is_symlink()):
                command += _root(entry, f"/{entry.name}")
        command += ["--proc", "/proc", "--dev", "/dev"]
        for folder in (_WORK, "/tmp"):  # noqa: S108 - in the sandbox
            command += ["--size", size, "--tmpfs", folder]
        for source, target in mounts.items():
            command += ["--ro-bind", source, target]
        if socket is not None:
            command += ["--bind", socket, _SOCKET]
        return [*command, "--remount-ro", "/", "--chdir", _WORK, "--setenv", "HOME", _WORK, "--", *inner]

    def _container(self, image: str, mounts: Mapping[str, str], socket: str, inner: list[str]) -> list[str]:
        section, command = self._section, [self._program, "run", "--rm", "--interactive", "--init"]
        command += ["--name", _name(os.getpid()), "--label", "holdfast", "--network", "none", "--read-only"]
        command += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        command += ["--memory", f"{section['memory_mib']}m", "--pids-limit", str(section["processes"])]
        for folder in (_WORK, "/tmp"):  # noqa: S108 - in the sandbox
            command += ["--tmpfs", f"{folder}:size={section['disk_mib']}m,mode=1777"]
        for source, target in mounts.items():
            command += ["--volume", f"{source}:{target}:ro"]
        command += ["--volume", f"{socket}:{_SOCKET}", "--workdir", _WORK, "--env", f"HOME={_WORK}"]
        for name in _VARIABLES:  # their values stand in no command line
            command += ["--env", name]
        return [*command, image, *inner]


def _root(entry: Path, target: str) -> list[str]:
    if entry.is_symlink():
        return ["--symlink", str(entry.readlink()), target]
    return ["--ro-bind", str(entry), target]


def _name(pid: int) -> str:
    return f"holdfast-{os.uname().nodename}-{pid}"
