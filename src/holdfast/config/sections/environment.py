"""The `environment` section: what a policy acts in over several turns, or an agent that asks it, and the limits."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from holdfast.config.base import (
    ByKind,
    EvaluatedKwargs,
    ImportPath,
    Mistake,
    OneOrSeveral,
    Positive,
    PositiveInt,
    PublicStr,
    Section,
)
from holdfast.config.sections.engine import LOOPBACK


class EnvironmentConfig(Section):
    """What a policy acts in: a class of the user's own, functions that it may call as tools, or both.

    Each episode has an instance in a process of its own. An episode has `data.max_length` tokens, and a turn begins
    where `rollout.max_new_tokens` of them are left.
    """

    kind: Literal["turns"] = "turns"
    path: ImportPath | None = None
    """`file.py:Class`, a relative file looked up beside the YAML, or `package.module:Class`; see docs/environments.md
    for its methods. A function that makes one is taken too, and a dictionary of them, of which a row's column
    `environment` names one. Null: tools alone."""
    action: ImportPath | None = None
    """`file.py:function` from the text of a turn to an action, where `path` makes an environment of gymnasium."""
    kwargs: EvaluatedKwargs = Field(default_factory=dict)
    """Arguments of its constructor."""
    tools: Annotated[list[ImportPath], OneOrSeveral()] = Field(default_factory=list)
    """`file.py:function`, each with types and a docstring, that the policy may call; public methods of the class are
    tools too."""
    mcp: Annotated[list[str], OneOrSeveral()] = Field(default_factory=list)
    """Servers of the Model Context Protocol whose tools the policy may call: a command, as in `python notes.py`, which
    runs beside the YAML, or an address, as in `http://127.0.0.1:9000/mcp`. Needs the extra `mcp`."""
    mcp_per: Literal["episode", "rank"] = "episode"
    """Whether a command of `mcp` is started by the first call of each episode, or once for all episodes of a rank."""
    max_turns: PositiveInt = 8
    """Turns after which an episode ends."""
    max_failed_calls: PositiveInt | None = None
    """Calls in a row that cannot be read or made, or whose tool raises, after which an episode ends; null: no limit."""
    max_seconds: Positive | None = None
    """Seconds after which no further turn begins; null: no limit."""
    on_cut: Literal["end", "continue"] = "end"
    """Whether a turn that was cut at `rollout.max_new_tokens` ends its episode, or is answered as any other one."""
    history: Literal["refuse", "split"] = "refuse"
    """What becomes of a chat template that writes earlier turns otherwise once another one follows: the run is refused,
    or an episode is trained as several samples, of which each has what the template wrote before its turns."""
    timeout_seconds: Positive = 30.0
    """Longest time for one answer of the environment."""
    memory_mib: PositiveInt = 4096
    """Most address space of one instance."""
    instances: PositiveInt = 64
    """Most instances of one rank at a time; further episodes wait."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield an environment that is none."""
        if self.path is None and not self.tools and not self.mcp:
            yield "path", "neither path nor tools nor mcp is set, so nothing would come of a turn; set one of them"
        for entry in self.mcp:
            if why := _why_no_server(entry):
                yield "mcp", f"an entry {why}; write a command, or an address that begins with http:// or https://"
        if self.path is None and self.kwargs:
            yield "kwargs", "there is no class (path) whose constructor would take them; leave them out"
        if self.path is None and self.action is not None:
            yield "action", "tools alone take no actions; set path to an environment of gymnasium, or leave it out"


class AgentEndpointConfig(Section):
    """Where agents ask the policy, and what they may ask. Every episode has a key of its own."""

    address: PublicStr = "127.0.0.1"
    """An address of this machine, which agents reach: `127.0.0.1`, `172.17.0.1:8800`, or `unix`, a socket in a folder
    of this user, which a container can mount. Without a port a free one is taken."""
    public: bool = False
    """Let other machines or containers reach the address. What they send is read until its key is found wrong."""
    max_request_bytes: PositiveInt = 1 << 26
    """Most bytes of one request."""
    request_seconds: Positive = 60.0
    """Longest time for a request to arrive."""
    max_requests: PositiveInt = 1000
    """Requests of one episode, refused ones included, after which all are refused."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield an address that nobody can reach, or more machines than were said to."""
        if self.address == UNIX:
            return
        host, port = host_and_port(self.address)
        if host in {"", "0.0.0.0", "::"}:  # noqa: S104 - refused
            yield "address", "agents are told this address, and it names no machine; name one, as in 172.17.0.1"
        elif not 0 <= port < 1 << 16:
            yield "address", "its port is no number below 65536; leave it out for a free one"
        elif host not in LOOPBACK and not self.public:
            yield "address", "other machines may reach it; set environment.endpoint.public, or use unix"


class SandboxConfig(Section):
    """Where the program of `environment.command` runs: without a network but the endpoint, on a root that it cannot
    write. It reads the YAML's folder as /files and works in /work, which is empty."""

    kind: Literal["bubblewrap", "podman", "docker"] = "bubblewrap"
    image: PublicStr | None = None
    """Root of the file system, with a python3: a folder for bubblewrap, an image's name for the others. A row's column
    `image` is taken before it. Null: this machine's /usr, for bubblewrap alone."""
    processes: PositiveInt = 128
    """Most processes of a sandbox."""
    memory_mib: PositiveInt = 1024
    """Most memory of all its processes, without its files."""
    disk_mib: PositiveInt = 128
    """Most bytes of the files in /work, and as many in /tmp; they lie in memory."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a container without an image."""
        if self.kind != "bubblewrap" and self.image is None:
            yield "image", f"{self.kind} runs an image, and none is set; name one"


class AgentConfig(Section):
    """An agent that owns its loop: code of the user's own that asks the policy over HTTP, as it would ask OpenAI.

    Each episode runs it once, in a process of its own, and ends when it returns.
    """

    kind: Literal["endpoint"] = "endpoint"
    run: ImportPath | None = None
    """`file.py:agent`, a function of `(row, base_url, api_key)`, or a coroutine; what it returns is the reward."""
    command: list[str] = Field(default_factory=list)
    """A program and its arguments, in the place of `run`: it reads the row as JSON from its standard input, and has
    OPENAI_BASE_URL and OPENAI_API_KEY in its environment."""
    endpoint: AgentEndpointConfig = Field(default_factory=AgentEndpointConfig)
    sandbox: SandboxConfig | None = None
    kwargs: EvaluatedKwargs = Field(default_factory=dict)
    """Further arguments of the function."""
    max_turns: PositiveInt = 8
    """Completions that an agent may ask for; a further one is refused."""
    max_failed_calls: PositiveInt | None = None
    """Calls in a row that cannot be read, after which a further completion is refused; null: no limit."""
    timeout_seconds: Positive = 600.0
    """Longest time of an agent, after which its process is killed."""
    memory_mib: PositiveInt = 4096
    """Most address space of one agent."""
    instances: PositiveInt = 64
    """Most agents of one rank at a time; further episodes wait."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield an agent that is none, or two."""
        if self.run is None and not self.command:
            yield "run", "neither run nor command is set, so nobody would ask the policy; set one of them"
        if self.run is not None and self.command:
            yield "command", "run is set too; leave one of them out"
        if self.sandbox is not None and not self.command:
            yield "sandbox", "a program runs in it, and command is not set; set it, or leave sandbox out"
        if self.sandbox is not None and self.endpoint.address != UNIX:
            yield (
                "sandbox",
                "its program asks at a socket alone; set environment.endpoint.address: unix",
            )
        if self.command and self.kwargs:
            yield "kwargs", "a program takes its arguments in command; leave them out"


UNIX = "unix"
"""Address of a socket in the file system."""


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of an address; the port is 0 where there is none, and -1 where it is no number."""
    host, colon, port = address.rpartition(":")
    if not colon or ":" in host.strip("[]") and not address.startswith("["):
        return address.strip("[]"), 0
    if address.endswith("]"):
        return address.strip("[]"), 0
    return host.strip("[]"), int(port) if port.isdecimal() and len(port) <= 5 else -1


def _why_no_server(entry: str) -> str:
    try:
        words = shlex.split(entry)
    except ValueError as error:
        return f"is no command: {error}"
    if not words:
        return "is empty"
    return "has another scheme" if "://" in words[0] and not words[0].startswith(("http://", "https://")) else ""


EnvironmentSection = Annotated[EnvironmentConfig | AgentConfig, ByKind("turns")]
