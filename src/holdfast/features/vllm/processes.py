"""Servers of vLLM beside the ranks: started with a run's flags, started again when one dies, ended with the run.

vLLM's API server is one process of several, and the others outlive it when it is killed; so each server leads a session
of its own, and a guard ends all of it however this process ends. vLLM is not imported: it has a Python of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import holdfast.patience
from holdfast.config.sections.engine import StartConfig, VLLMEngineConfig
from holdfast.errors import ConfigError
from holdfast.features.vllm.lora import AdapterLimits
from holdfast.files import read_end
from holdfast.http import Endpoint
from holdfast.launch.processes import Guard, end, tied_to_this_thread
from holdfast.text.escaping import escaped

_MARK = "HOLDFAST_SERVERS"
_EXTENSION = "holdfast_vllm_extension"
_BACKEND = "holdfast"
"""Name of our transfer backend (`extension.py`)."""
_MOST_RESTARTS = 5
_TAIL, _MOST_TAIL_BYTES = 12, 1 << 16
"""Lines of a log that are shown."""
_TERM_SECONDS = 10.0
_KILL_SECONDS = 5.0
_CONNECT_SECONDS = 2.0
_BATCHED_TOKENS = 16384
_REFUSAL = ".py: error: "
"""What argparse writes between the name of a program and what it refuses."""


@dataclass(frozen=True)
class ServerSpec:
    """The model, dtype and folders of the servers that are started."""

    section: VLLMEngineConfig
    model: Path
    """Its directory: configuration and tokenizer; weights are pushed."""
    name: str
    dtype: str
    longest: int
    """Tokens of a prompt and its completion."""
    on_cpu: bool
    folder: Path
    """For logs, and the file that vLLM's workers import."""
    extension: str = f"{_EXTENSION}.Extension"
    """The class that they mix into themselves."""
    adapters: AdapterLimits | None = None
    """None where no adapters are pushed."""
    visible: Mapping[str, str] = field(default_factory=dict)
    """CUDA_VISIBLE_DEVICES of each server, by address; empty on the CPU."""


def command_of(served: ServerSpec, url: str) -> list[str]:
    """Return the command of a server at an address; the key of its routes is not in it."""
    address, start = urlsplit(url), served.section.start or StartConfig()
    flags: dict[str, str] = {
        "--model": str(served.model),
        "--served-model-name": served.name,
        "--host": address.hostname or "127.0.0.1",
        "--port": str(address.port),
        "--dtype": served.dtype,
        "--max-model-len": str(start.max_model_len or served.longest),
        # Weights come by a push before anything is sampled; a push that were missed would show at once.
        "--load-format": "dummy",
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": served.extension,
        "--weight-transfer-config": json.dumps({"backend": _BACKEND}),
        # A push clears the cache of images that the engine has, and not the one of the API's process that mirrors it.
        "--mm-processor-cache-gb": "0",
        # transformers' other image processors resize by torchvision, to other pixels than the trainer's.
        "--mm-processor-kwargs": json.dumps({"backend": "pil"}),
        # vLLM 0.32 leaves the old values packed in a tied output layer, so it is a matrix of its own there.
        "--hf-overrides": json.dumps({"tie_word_embeddings": False}),
    }
    switches = ["--enable-scale-out"]
    if served.adapters is not None:
        switches.append("--enable-lora")
        flags |= served.adapters.flags()
    if served.on_cpu:
        # A seed of its own for each request kills vLLM 0.32 on a CPU where a prompt is computed in chunks.
        switches += ["--enforce-eager", "--no-enable-chunked-prefill"]
        flags["--max-num-batched-tokens"] = str(max(_BATCHED_TOKENS, start.max_model_len or served.longest))
    own_flags, own_switches = _of_start(start)
    flags |= own_flags
    switches += own_switches
    arguments = [argument for pair in flags.items() for argument in pair]
    return [served.section.python, "-m", "vllm.entrypoints.openai.api_server", *arguments, *switches]


def _of_start(start: StartConfig) -> tuple[dict[str, str], list[str]]:
    """Return the flags with a value and those without that a section asks for."""
    flags, switches = dict[str, str](), list[str]()
    if start.tensor_parallel_size > 1:
        flags["--tensor-parallel-size"] = str(start.tensor_parallel_size)
    if start.gpu_memory_utilization is not None:
        flags["--gpu-memory-utilization"] = str(start.gpu_memory_utilization)
    if start.share:
        switches.append("--enable-sleep-mode")
    for name, value in start.flags().items():
        if isinstance(value, bool):
            switches.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags[f"--{name}"] = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return flags, switches


def environment_of(served: ServerSpec, environ: Mapping[str, str], url: str = "") -> dict[str, str]:
    """Return the environment of a server: ours without what describes a rank, and with the key where there is one.

    Args:
        served: What is served.
        environ: Ours.
        url: The server's address, which decides its GPUs.
    """
    inherited = {name: value for name, value in environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    variables = {
        "PYTHONPATH": str(served.folder),
        "VLLM_SERVER_DEV_MODE": "1",  # the routes of pushes
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if served.adapters is not None:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if served.on_cpu:
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1")}
        variables |= {"VLLM_CPU_KVCACHE_SPACE": environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}
    if served.visible.get(url):
        variables["CUDA_VISIBLE_DEVICES"] = served.visible[url]
    key = served.section.api_key_variable
    if key is not None:
        variables["VLLM_API_KEY"] = environ.get(key, "")
    return inherited | variables


@dataclass
class _Server:
    url: str
    log: Path
    process: subprocess.Popen[bytes]
    restarts: int = 0


@dataclass
class Servers:
    """Servers of a run; a context manager that ends them."""

    served: ServerSpec
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    _mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _servers: list[_Server] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Each server's first process."""
        return [server.process for server in self._servers]

    def __enter__(self) -> Servers:
        """Start all servers, and return when all of them answer.

        Raises:
            ConfigError: One does not start, or another one is at its address.
        """
        for url in self.served.section.url:
            _refuse_taken(url)
        source = Path(__file__).with_name("extension.py")
        shutil.copyfile(source, self.served.folder / f"{_EXTENSION}.py")
        self._guard = Guard(f"{_MARK}={self._mark}", self.environ)
        self._guard.__enter__()
        try:
            for number, url in enumerate(self.served.section.url):
                log = self.served.folder / f"server-{number}.log"
                self._servers.append(_Server(url, log, self._start(url, log)))
            self._await_all()
        except BaseException:
            self._end()
            raise
        self._watcher = threading.Thread(target=self._watch, name="holdfast-servers", daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all servers, and every process that they started."""
        self._ended.set()
        self._watcher.join()
        self._end()

    def _start(self, url: str, log: Path) -> subprocess.Popen[bytes]:
        command = command_of(self.served, url)
        environment = environment_of(self.served, self.environ, url) | {_MARK: self._mark}
        try:
            with log.open("ab") as file:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                    preexec_fn=tied_to_this_thread(),  # noqa: PLW1509 - it takes no lock
                )
        except OSError as error:
            raise ConfigError(
                f"rollout.engine.python: {self.served.section.python} cannot be started ({error}). Name the Python in "
                "whose environment vLLM is installed."
            ) from error
        self._guard.watch(process.pid)
        return process

    def _await_all(self) -> None:
        patience = holdfast.patience.current
        deadline = time.monotonic() + patience.server_start_seconds
        for server in self._servers:
            # What answers may be another one that was faster to the port, from which ours then ended.
            while (code := server.process.poll()) is not None or not is_well(server.url):
                if code is not None or time.monotonic() > deadline:
                    reason = "did not answer in time" if code is None else f"ended with exit code {code}"
                    if refusal := _refused_flags(server.log):
                        raise ConfigError(
                            f"rollout.engine.start.arguments: the server for {server.url} does not take its command "
                            f"line. vLLM says: {refusal}"
                        )
                    hint = " Where vLLM has no LoRA for this model, set rollout.engine.push: weights."
                    raise ConfigError(
                        f"rollout.engine: the server for {server.url} {reason}."
                        f"{hint if self.served.adapters is not None else ''} The end of its log:\n{tail(server.log)}"
                    )
                time.sleep(patience.server_look_seconds)

    def _watch(self) -> None:
        """Start servers again that died; weights are pushed to them with the next step's."""
        while not self._ended.wait(holdfast.patience.current.server_look_seconds):
            for server in self._servers:
                code = server.process.poll()
                if code is None or server.restarts == _MOST_RESTARTS:
                    continue
                server.restarts += 1
                print(
                    f"warning: the server at {server.url} died (exit code {code}; {server.log}), and is started again "
                    f"({server.restarts} of at most {_MOST_RESTARTS})",
                    flush=True,
                )
                self._end_one(server)
                with suppress(ConfigError):
                    server.process = self._start(server.url, server.log)

    def _end_one(self, server: _Server) -> None:
        # Its session alone: the others carry the same mark, so one that nobody carries stands in its place.
        nobody = f"{_MARK}={uuid.uuid4().hex}"
        end(nobody, [server.process.pid], 0.0, _KILL_SECONDS, lambda: _reap([server]))

    def _end(self) -> None:
        leaders = [server.process.pid for server in self._servers]
        end(f"{_MARK}={self._mark}", leaders, _TERM_SECONDS, _KILL_SECONDS, lambda: _reap(self._servers))
        self._guard.__exit__(None, None, None)


def _refused_flags(log: Path) -> str:
    """Return what vLLM's reader of the command line refuses, in its words; "" if it refused nothing."""
    lines = read_end(log, _MOST_TAIL_BYTES).splitlines()
    return next((escaped(line.partition(_REFUSAL)[2]) for line in reversed(lines) if _REFUSAL in line), "")


def _reap(servers: Sequence[_Server]) -> None:
    for server in servers:
        server.process.poll()


def _refuse_taken(url: str) -> None:
    """Refuse an address at which something listens already.

    Raises:
        ConfigError: Something does.
    """
    address, times = urlsplit(url), holdfast.patience.current
    deadline = time.monotonic() + times.server_leave_seconds
    while True:
        try:
            socket.create_connection((address.hostname or "", address.port or 0), _CONNECT_SECONDS).close()
        except OSError:
            return
        if time.monotonic() >= deadline:
            break
        time.sleep(times.server_look_seconds)
    raise ConfigError(
        f"rollout.engine.url: a server that this command did not start answers on {url}; it may serve other weights to "
        "others. End it, name another port, or set rollout.engine.start: false if it was started for this run."
    )


def keep_logs(folder: Path, run_directory: Path) -> None:
    """Add the logs of servers to those of their run, if it has begun."""
    for log in sorted(folder.glob("server-*.log")) if run_directory.is_dir() else ():
        with suppress(OSError):
            (run_directory / "logs").mkdir(exist_ok=True)
            with log.open("rb") as source, (run_directory / "logs" / log.name).open("ab") as file:
                shutil.copyfileobj(source, file)


def is_well(url: str) -> bool:
    """Return whether the server at an address is well."""
    return Endpoint(url, None, timeout_seconds=5, attempts=1).is_well("/health")


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(read_end(log, _MOST_TAIL_BYTES).splitlines()[-_TAIL:])
