"""Ray as a launcher: a placement group, an actor a rank, the environment that torchrun would set, the same program.

Ray places processes and reports that one is gone. It restarts nothing, and owns neither training nor its failures: what
happened is said by the ranks, and the run goes on from the newest verified checkpoint: by the same command, or at once
with fewer ranks.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

from holdfast.config.sections.launch import LaunchConfig
from holdfast.errors import ConfigError, HoldfastError, RunStopped, UserError, how_to_go_on
from holdfast.features.cluster.ports import free_port
from holdfast.launch.processes import Guard
from holdfast.launch.terminal import StopSignals, tell
from holdfast.launch.verdict import EXIT_WITHOUT_RESULT, IN_ORDER, Death, how_it_ended, lost_ranks
from holdfast.parallel.failure.reports import HANG, Failure

_LOOK_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
_TAIL = 1 << 13
_MARK = "HOLDFAST_RAY_RANK"
_CHUNK = 1 << 16
_RAY_PLACE_SECONDS = 60.0
"""For Ray to find places for the ranks of a run."""
_RAY_SETTLE_SECONDS = 20.0
"""For ranks to name one that Ray has lost, and to end, before they are killed."""
_RAY_LAST_RANKS_SECONDS = 300.0
"""For all ranks to end after one that ended in order; the first may still export."""


class RankProcess:
    """What runs inside an actor: it holds the process of one rank, passes signals on and hands back what that prints.

    If the actor dies, however it does, the guard of `launch/processes.py` ends the rank and what that has started.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None

    def place(self) -> tuple[str, str, list[str]]:
        """Return this machine's address as Ray knows it, its name, and the GPUs that Ray gives this actor."""
        import ray

        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), gpus

    def free_port(self) -> int:
        """Return a port of this machine at which nobody listens now."""
        return free_port()

    def start(self, command: Sequence[str], folder: str, variables: Mapping[str, str]) -> None:
        """Start the rank.

        Raises:
            FileNotFoundError: The folder is not there on this machine.
        """
        mark = f"{_MARK}={uuid.uuid4().hex}"
        environ = {**os.environ, **variables, _MARK: mark.partition("=")[2]}
        self._guard = Guard(mark, environ)
        # Ray's threads block signals, which a child inherits: it would never hear of a request to stop.
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._process = subprocess.Popen(
            list(command),
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._guard.watch(self._process.pid)

    def read(self, seconds: float) -> tuple[bytes, int | None]:
        """Return what the rank has printed since, waiting for it, and its exit code once it has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            chunk = os.read(self._process.stdout.fileno(), _CHUNK) if selector.select(seconds) else b""
        return chunk, None if chunk else self._process.poll()

    def send(self, number: int) -> None:
        """Send the rank a signal."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.Signals(number))


@dataclass(frozen=True)
class RayOptions:
    """What the command line asks of Ray."""

    ranks: int
    gpus_per_rank: int
    address: str | None
    """Address of a cluster; "auto" is the one that runs here, and with None Ray decides and may start its own."""


@dataclass
class _Rank:
    number: int
    actor: Any
    host: str
    tail: bytes = b""
    code: int | None = None
    gone: str = ""
    """The reason that Ray gives for the end of the rank's actor; empty while the actor lives."""
    pending: list[Any] = field(default_factory=list)
    ended_at: float = math.inf
    ended_by_launcher: bool = False
    hung: bool = False
    """Whether the launcher ended it since it did not end after the others had, in order."""

    @property
    def death(self) -> Death:
        code = -SIGKILL if self.code is None else self.code
        report = None
        if self.hung:
            report = Failure(self.number, "silent", "", HANG, "it did not end after the others", None, self.ended_at)
        return Death(self.number, code, self.ended_at, "", report, "", self.ended_by_launcher and not self.gone)

    @property
    def ended(self) -> bool:
        return self.code is not None or bool(self.gone)


def launch_ray(command: Sequence[str], options: RayOptions, launch: LaunchConfig, fewer: Sequence[int] = ()) -> int:
    """Run `command` once per rank on a Ray cluster and return the exit code of the whole.

    Args:
        command: The argv of one rank.
        options: What the command line asks of Ray.
        launch: The section `launch`.
        fewer: Numbers of ranks with which the run goes on when some are lost; see `launch.fewer`.

    Raises:
        ConfigError: Ray is not installed, does not answer, or has no room for the run.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed here. Install it beside Holdfast with `pip install 'holdfast[ray]'`, or start the "
            "run without it: `holdfast launch slurm`, or torchrun."
        ) from error
    _check_address(options.address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(address=options.address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_ray(options.address, str(error).strip().partition("\n")[0]) from error
    try:
        return _attempts(ray, options, command, launch, fewer)
    finally:
        ray.shutdown()


def _attempts(ray: Any, options: RayOptions, command: Sequence[str], launch: LaunchConfig, fewer: Sequence[int]) -> int:
    number = options.ranks
    while True:
        try:
            group = _placed(ray, replace(options, ranks=number), launch)
        except ConfigError as error:
            if number == options.ranks:
                raise
            tell(f"{error}\n{how_to_go_on(1)}")
            return RunStopped.exit_code
        ranks = _actors(ray, replace(options, ranks=number), launch, group)
        _start(ray, ranks, command, launch)
        with StopSignals() as stops:
            _watch(ray, ranks, stops)
        code = _code(ranks)
        if code != RunStopped.exit_code or not _died(ranks):
            return code
        left = len(ranks) - len(lost_ranks([rank.death for rank in ranks]))
        goes_on = left < number and not stops.any
        number = max((each for each in fewer if each <= left), default=0) if goes_on else 0
        if not number:
            tell(how_to_go_on(1))
            return code
        words = f"The run goes on with {number} of {options.ranks} ranks"
        tell(f"{words}, from the newest verified checkpoint if there is one.")
        _leave(ray, ranks, group)


def _leave(ray: Any, ranks: Sequence[_Rank], group: Any) -> None:
    """Give the places of an attempt back to Ray."""
    for rank in ranks:
        with suppress(ray.exceptions.RayError):
            ray.kill(rank.actor)
    ray.util.remove_placement_group(group)


def _check_address(address: str | None) -> None:
    """Refuse an address at which nobody listens: Ray would try for a minute."""
    host, _, port = (address or "").rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise _no_ray(address, error.strerror or str(error)) from error


def _no_ray(address: str | None, reason: str) -> ConfigError:
    return ConfigError(
        f"No Ray answers at --address {address}: {reason}. Start one by `ray start --head`, or leave the option out."
    )


def _placed(ray: Any, options: RayOptions, launch: LaunchConfig) -> Any:
    total, bundle = ray.cluster_resources(), {"CPU": float(launch.named_threads or 1)}
    if options.gpus_per_rank:
        bundle["GPU"] = float(options.gpus_per_rank)
    for name, needed in bundle.items():
        if total.get(name, 0) < needed * options.ranks:
            raise ConfigError(
                f"{options.ranks} ranks need {needed * options.ranks:g} {name}s, {needed:g} each, and this Ray has "
                f"{total.get(name, 0):g}. Lower --ranks{' or leave out --gpus-per-rank' if name == 'GPU' else ''}, or "
                "add nodes to the cluster."
            )
    from ray.util.placement_group import placement_group

    group = placement_group([bundle] * options.ranks, strategy="PACK")
    if not group.wait(timeout_seconds=_RAY_PLACE_SECONDS):
        raise ConfigError(
            f"Ray has not placed {options.ranks} ranks in {_RAY_PLACE_SECONDS:.0f} s: other work holds "
            f"what they need ({', '.join(f'{amount:g} {name}' for name, amount in bundle.items())} each). Wait for it, "
            "or lower --ranks."
        )
    return group


def _actors(ray: Any, options: RayOptions, launch: LaunchConfig, group: Any) -> list[_Rank]:
    """Return an actor a rank, those of one machine next to each other."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    remote = ray.remote(RankProcess)
    actors = [
        remote.options(
            num_cpus=launch.named_threads or 1,
            num_gpus=options.gpus_per_rank,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(options.ranks)
    ]
    locations = ray.get([actor.place.remote() for actor in actors], timeout=_RAY_PLACE_SECONDS)
    by_node: defaultdict[str, list[int]] = defaultdict(list)
    for index, (_, node, _) in enumerate(locations):
        by_node[node].append(index)
    order = [index for members in by_node.values() for index in members]
    return [_Rank(number, actors[index], locations[index][0]) for number, index in enumerate(order)]


def _start(ray: Any, ranks: Sequence[_Rank], command: Sequence[str], launch: LaunchConfig) -> None:
    locations = ray.get([rank.actor.place.remote() for rank in ranks])
    port = ray.get(ranks[0].actor.free_port.remote())
    starts = []
    for rank, (_, node, _) in zip(ranks, locations, strict=True):
        members = [number for number, location in enumerate(locations) if location[1] == node]
        gpus = [gpu for number in members for gpu in locations[number][2]]
        variables = {
            "RANK": str(rank.number),
            "WORLD_SIZE": str(len(ranks)),
            "LOCAL_RANK": str(members.index(rank.number)),
            "LOCAL_WORLD_SIZE": str(len(members)),
            "MASTER_ADDR": locations[0][0],
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(launch.named_threads or 1),
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            # Ray shows each actor its own GPU alone; ranks choose theirs by LOCAL_RANK, as under torchrun.
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
        }
        starts.append(rank.actor.start.remote(list(command), os.fspath(Path.cwd()), variables))
    try:
        ray.get(starts)
    except ray.exceptions.RayTaskError as error:
        raise ConfigError(
            f"A rank could not be started: {str(error.cause)}. The run's folder must be there on every machine."
        ) from error


def _watch(ray: Any, ranks: Sequence[_Rank], stops: StopSignals) -> None:
    """Print what the first rank prints until all ranks have ended, or one is gone and the others had their time."""
    settled_by = ended_by = math.inf
    while not all(rank.ended for rank in ranks):
        for request, text in stops.to_pass_on():
            tell(text)
            _send(ranks, request)
        if stops.now or time.monotonic() > min(settled_by, ended_by):
            for rank in ranks:
                if not rank.ended and not rank.ended_by_launcher:
                    rank.ended_by_launcher, rank.hung = True, not stops.now and settled_by == math.inf
            _send(ranks, SIGKILL)
        for rank in ranks:
            _look(ray, rank)
        if _died(ranks):
            settled_by = min(settled_by, time.monotonic() + _RAY_SETTLE_SECONDS)
        if any(rank.ended for rank in ranks):
            ended_by = min(ended_by, time.monotonic() + _RAY_LAST_RANKS_SECONDS)


def _look(ray: Any, rank: _Rank) -> None:
    """Take what a rank has printed, if its actor has answered; ask again."""
    if rank.ended:
        return
    if not rank.pending:
        rank.pending.append(rank.actor.read.remote(_LOOK_SECONDS))
    ready, _ = ray.wait(rank.pending, timeout=_LOOK_SECONDS if rank.number == 0 else 0.02)
    if not ready:
        return
    rank.pending.clear()
    try:
        chunk, rank.code = ray.get(ready[0])
        rank.ended_at = math.inf if rank.code is None else time.time()
    except ray.exceptions.RayError as error:
        rank.gone, rank.ended_at = " ".join(str(error).split()), time.time()
        tell(f"Rank {rank.number} on {rank.host}: its actor is gone. Ray says: {rank.gone[:300]}")
        return
    rank.tail = (rank.tail + chunk)[-_TAIL:]
    if rank.number == 0 and chunk:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def _send(ranks: Sequence[_Rank], number: int) -> None:
    for rank in ranks:
        if not rank.ended:
            rank.actor.send.remote(int(number))


def _died(ranks: Sequence[_Rank]) -> bool:
    return any(rank.gone or rank.code not in {None, *IN_ORDER} for rank in ranks)


def _code(ranks: Sequence[_Rank]) -> int:
    codes = {rank.code for rank in ranks if not rank.gone}
    if UserError.exit_code in codes:
        if ranks[0].code != UserError.exit_code:  # else it has told what is wrong
            refused = next(rank for rank in ranks if rank.code == UserError.exit_code)
            tell(refused.tail.decode(errors="replace"))
        return UserError.exit_code
    if _died(ranks):
        for rank in ranks:
            if rank.hung:
                tell(f"Rank {rank.number} on {rank.host} hung: it did not end after the others had ended.")
            elif not (rank.gone or rank.ended_by_launcher or rank.code in {None, *IN_ORDER}):
                _tell_death(rank)
        return RunStopped.exit_code
    if EXIT_WITHOUT_RESULT in codes:
        return HoldfastError.exit_code
    return RunStopped.exit_code if RunStopped.exit_code in codes else 0


def _tell_death(rank: _Rank) -> None:
    log = rank.tail.decode(errors="replace").strip() if rank.number else ""
    tell(f"Rank {rank.number} on {rank.host} {how_it_ended(rank.code or 0)}. {log}".rstrip())
