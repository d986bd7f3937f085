"""Join the ranks of a run: the only place outside `launch` that reads the environment."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # public under torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.sections.parallel import ParallelConfig
from holdfast.errors import ConfigError
from holdfast.parallel.failure.channel import FailureChannel, KillPoint
from holdfast.parallel.rank_log import RankLog
from holdfast.parallel.rendezvous import number_of_call, on_loopback, store_of
from holdfast.parallel.threads import given_threads

KILL_VARIABLE, BREAK_VARIABLE = "HOLDFAST_PROVE_KILL", "HOLDFAST_PROVE_BREAK"
FORMS_VARIABLE = "HOLDFAST_PROVE_FORMS"
"""Set by `holdfast prove` alone: rank:step:phase at which a rank kills itself, and what is damaged after a resume."""

AXES = ("replicate", "shard", "context", "expert")
"""Names of the mesh's axes: replicas of the model, shards of one replica, context parallelism, expert parallelism.

Samples are distributed over the first two axes, so counts of samples are summed over those and over no other. Ranks of
one context group are neighbours. FSDP2 shards parameters over `shard` and `context` as one axis, named `shard`, so that
checkpoints do not depend on how the ranks of a copy divide into the two.
"""


@dataclass(frozen=True)
class World:
    """This process's rank, its device, and the number of ranks."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    failure: FailureChannel
    """Reports this rank's failure to the other ranks, and learns of theirs."""
    local_size: int | None = None
    """Ranks on this machine; None where they were not counted."""
    break_resume: str | None = None
    """What `holdfast prove --break` damages after a resume, to show that the proof would notice."""
    began: float = field(default_factory=time.monotonic)
    """Start of `joined_world` on the monotonic clock, from which the time of a run is counted, loading included."""
    host: str = field(default_factory=socket.gethostname)
    """Name of this machine."""
    log: RankLog | None = None
    """Log of this rank's output; None under our launcher, which writes the logs itself, and in Python calls."""
    forms: dict[str, int] | None = None
    """Optional forms that a new run follows as if they were recorded: both runs of `holdfast prove` have the same."""
    threads: int | None = 1
    """CPU threads that a key or a variable names; None where the start chooses them."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and talks to the user."""
        return self.rank == 0


@contextmanager
def joined_world(launch: LaunchConfig, call: int | None = None, *, logs: bool = False) -> Iterator[World]:
    """Join the other ranks for the length of a block; a failure in it reaches all of them.

    RANK, WORLD_SIZE and LOCAL_RANK come from the launcher, torchrun or Slurm, and so does the place where ranks meet; a
    process without them is a world of its own. Tensors on the CPU travel over gloo, tensors on a GPU over NCCL.

    Args:
        launch: Device, threads and the longest wait for another rank.
        call: From `number_of_call`, if the caller took it before something that may fail; None: take one now.
        logs: Whether the output of this process may be redirected to a log, since it is a rank and nothing else.

    Raises:
        ConfigError: A GPU was asked for and there is none.
        RankFailed: Another rank failed, and this one could not go on without it.
    """
    began = time.monotonic()
    call = number_of_call() if call is None else call
    rank = int(os.environ.get("RANK", "0"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", str(rank))))
    device = _device(launch.device, local_rank)
    threads = given_threads(launch, os.environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=launch.timeout_minutes)
    directory = os.environ.get("HOLDFAST_LAUNCH_DIR")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with on_loopback(os.environ), _threads(threads or 1):
        store = store_of(call, rank, size, timeout, os.environ)
        agree_on_device(store, f"rank {rank} on {machine_name()}", size, device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        try:
            host = machine_name()
            channel = FailureChannel(
                store,
                rank,
                size,
                Path(directory) if directory else None,
                _kill_point(rank),
                "" if directory or size == 1 else host,
            )
            with channel.guard():
                counted = ranks_on(store, host)  # on all ranks, although a launcher may have told some of them
                local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or counted
                log = RankLog(rank, size, host) if logs and not directory and size > 1 else None
                broken = os.environ.get(BREAK_VARIABLE)
                forms = json.loads(os.environ.get(FORMS_VARIABLE, "null"))
                yield World(
                    rank, size, local_rank, device, channel, local_size, broken, began, host, log, forms, threads
                )
                dist.barrier()  # whoever hosts the store stays as long as another rank needs it
        finally:
            # Python calls may follow in this process; a second `init_process_group` raises while a
            # default group exists.
            dist.destroy_process_group()
            forget_meshes()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with so many CPU threads within the block, or with what the block chooses."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def forget_meshes() -> None:
    """Drop all device meshes, which keep process groups, and with them sockets and threads, alive."""
    _meshes.clear()


def machine_name() -> str:
    """Return this machine's name: that of the Slurm node, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def ranks_on(store: Store, machine: str) -> int:
    """Count the ranks that give this machine's name; all ranks call this together, each with its own."""
    name = f"ranks on {machine}"
    store.add(name, 1)
    dist.barrier()
    return int(store.add(name, 0))


def agree_on_device(store: Store, name: str, size: int, device: torch.device) -> None:
    """Refuse ranks of which some compute on GPUs and others on the CPU; all ranks call this together.

    Args:
        store: All ranks', under a prefix that nobody has used.
        name: Of this rank, with its machine.
        size: Number of ranks.
        device: Where this rank computes.

    Raises:
        ConfigError: Some have no GPU; on all ranks.
    """
    counts = {kind: f"ranks on {kind}" for kind in ("cpu", "cuda")}
    number = store.add(counts[device.type], 1)
    store.set(f"{counts[device.type]}/{number}", name)
    if sum(store.add(count, 0) for count in counts.values()) == size:
        store.set("all ranks have a device", "")
    store.wait(["all ranks have a device"])
    on_cpu = store.add(counts["cpu"], 0)
    if 0 < on_cpu < size:
        names = [store.get(f"{counts['cpu']}/{index}").decode() for index in range(1, min(on_cpu, _NAMED) + 1)]
        more = f" and {on_cpu - _NAMED} more" if on_cpu > _NAMED else ""
        raise ConfigError(
            f"{size - on_cpu} of {size} ranks have a GPU, and torch finds none for {', '.join(names)}{more}. Look at "
            "`nvidia-smi` and torch's build there, or set launch.device: cpu."
        )


_NAMED = 4


def _kill_point(rank: int) -> KillPoint | None:
    setting = os.environ.get(KILL_VARIABLE)
    if not setting:
        return None
    who, step, phase = setting.split(":", 2)
    return KillPoint(int(step), phase) if rank == int(who) else None


def _device(setting: str, local_rank: int) -> torch.device:
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ConfigError("launch.device: cuda, but torch finds no GPU here. Set launch.device: cpu or auto.")
    if setting == "cpu" or not available:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local_rank} of this machine has no GPU of its own: there are {torch.cuda.device_count()}. "
            "Lower launch.ranks, or set launch.device: cpu."
        )
    return torch.device("cuda", local_rank)


_meshes: dict[tuple[str, str, str, int, int], tuple[object, DeviceMesh]] = {}
"""By device type, names of axes and shape: the default process group at the time, and the mesh that was built in it."""


def mesh_shape(parallel: ParallelConfig, ranks: int) -> tuple[int, int]:
    """Return copies of the model, and the ranks that share one: shard x context.

    Raises:
        ConfigError: replicate x shard x context is not the number of ranks.
    """
    if parallel.context > 1:
        return _mesh_shape_with_context(parallel, ranks)
    if parallel.shard == "auto" and ranks % parallel.replicate:
        raise ConfigError(
            f"parallel.replicate={parallel.replicate} copies cannot be spread over {ranks} ranks. Set "
            f"launch.ranks to a multiple of {parallel.replicate}, or lower parallel.replicate."
        )
    shard = ranks // parallel.replicate if parallel.shard == "auto" else parallel.shard
    if parallel.replicate * shard != ranks:
        raise ConfigError(
            f"parallel.replicate={parallel.replicate} x parallel.shard={shard} is not the number of ranks, "
            f"{ranks}. Set shard: auto, or launch.ranks: {parallel.replicate * max(shard, 1)}."
        )
    return parallel.replicate, shard


def _mesh_shape_with_context(parallel: ParallelConfig, ranks: int) -> tuple[int, int]:
    step = parallel.replicate * parallel.context
    if ranks % step:
        raise ConfigError(
            f"parallel.replicate={parallel.replicate} copies of context groups of {parallel.context} ranks cannot be "
            f"spread over {ranks} ranks. Set launch.ranks to a multiple of {step}, or lower parallel.context."
        )
    if parallel.shard not in {"auto", ranks // step}:
        raise ConfigError(
            f"parallel.replicate={parallel.replicate} x parallel.shard={parallel.shard} x parallel.context="
            f"{parallel.context} is not the number of ranks, {ranks}. Set shard: auto, or shard: {ranks // step}."
        )
    return parallel.replicate, ranks // parallel.replicate


def build_mesh(parallel: ParallelConfig, world: World) -> DeviceMesh:
    """Arrange the ranks on the axes over which parameters are copied and sharded, named `replicate` and `shard`.

    Other axes have no process group here: each group costs threads on every rank. For the same reason all models of a
    process with equal shapes share one mesh.

    Raises:
        ConfigError: replicate x shard x context is not the number of ranks.
    """
    return _mesh(world, mesh_shape(parallel, world.size), (AXES[0], AXES[1]))


def context_mesh(parallel: ParallelConfig, world: World) -> DeviceMesh:
    """Return the mesh whose axis `context` joins this rank with those that share its rows."""
    return _mesh(world, (world.size // parallel.context, parallel.context), ("data", "context"))


def _mesh(world: World, shape: tuple[int, int], names: tuple[str, str]) -> DeviceMesh:
    key = (world.device.type, *names, *shape)
    among, mesh = _meshes.get(key, (None, None))
    # A mesh from an earlier call of this process refers to groups that are destroyed.
    if mesh is None or not dist.is_initialized() or among is not dist.group.WORLD:
        mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
        _meshes[key] = dist.group.WORLD, mesh
    return mesh
