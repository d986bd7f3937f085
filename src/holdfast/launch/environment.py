"""Environment variables of a rank, and the number of ranks and GPUs of this machine. Nothing here imports torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from holdfast.config.sections.launch import LaunchConfig

LAUNCH_DIRECTORY_VARIABLE = "HOLDFAST_LAUNCH_DIR"
"""Set in every rank; processes of a launch are recognised by it."""
STORE_VARIABLE = "HOLDFAST_STORE"
"""Path of the file of `torch.distributed`'s store, set in every rank (parallel/rendezvous.py)."""

_DRIVER_DIRECTORY = Path("/proc/driver/nvidia/gpus")


def under_torchrun(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether torchrun, or a script that sets its variables, has started this process as one of many ranks."""
    environ = os.environ if environ is None else environ
    return "RANK" in environ and "WORLD_SIZE" in environ


SRUN_VARIABLES = ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""Variables that Slurm sets for a task of `srun`: number of nodes, of tasks, its rank, and its rank on its node."""


def srun_task(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the rank of this process among the tasks of `srun`; None outside `srun` or where it has a single task."""
    environ = os.environ if environ is None else environ
    if "SLURM_STEP_ID" not in environ or any(name not in environ for name in SRUN_VARIABLES):
        return None
    return int(environ["SLURM_PROCID"]) if int(environ["SLURM_STEP_NUM_TASKS"]) > 1 else None


def is_first_rank(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process is rank 0 under torchrun, or the command itself."""
    environ = os.environ if environ is None else environ
    return not under_torchrun(environ) or environ["RANK"] == "0"


def has_launcher(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether our own launcher started this process; it then reports this process's end to the user."""
    return LAUNCH_DIRECTORY_VARIABLE in (os.environ if environ is None else environ)


def world_size() -> int:
    """Return the number of ranks that torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def resolve_ranks(launch: LaunchConfig, environ: Mapping[str, str] | None = None) -> int:
    """Return the number of processes `launch` asks for; `auto` is one per visible GPU, or one."""
    if launch.ranks != "auto":
        return launch.ranks
    if launch.device == "cpu":
        return 1
    return max(1, cuda_devices(environ))


def computes_on_cpu(launch: LaunchConfig, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the ranks of a run compute on the CPU."""
    return launch.device == "cpu" or not cuda_devices(environ)


def visible_names(gpus: list[int], environ: Mapping[str, str] | None = None) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES that shows these GPUs, "" for none."""
    environ = os.environ if environ is None else environ
    visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return ",".join(visible[gpu] if visible else str(gpu) for gpu in gpus)


def cuda_devices(environ: Mapping[str, str] | None = None) -> int:
    """Count the GPUs CUDA would show to a process with this environment, without importing torch."""
    environ = os.environ if environ is None else environ
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return 0
    installed = _installed_gpus(environ)
    if visible is None:
        return installed
    count = 0
    for name in (entry.strip() for entry in visible.split(",")):
        # CUDA stops at the first name it does not know, and shows what stands before it.
        exists = int(name) < installed if name.isdecimal() else name.startswith(("GPU-", "MIG-")) and installed > 0
        if not exists:
            break
        count += 1
    return count


def _installed_gpus(environ: Mapping[str, str]) -> int:
    # nvidia-smi first: inside a container it sees what the container may use, /proc sees the whole machine.
    listing = nvidia_smi(environ, "-L")
    if listing is not None:
        return sum(1 for line in listing if re.match(r"GPU \d+:", line))
    try:
        return sum(1 for _ in _DRIVER_DIRECTORY.iterdir())
    except OSError:
        return 0


def nvidia_smi(environ: Mapping[str, str], *options: str) -> list[str] | None:
    """Return the lines that nvidia-smi prints; None where there is none, or it fails."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return None
    try:
        done = subprocess.run([program, *options], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with more variables."""
    return {**os.environ, **variables}


def rank_environment(
    environ: Mapping[str, str], rank: int, ranks: int, store: Path, threads: int | None, directory: Path
) -> dict[str, str]:
    """Return the environment of one rank: the user's own, plus what `torch.distributed` and Holdfast read.

    Args:
        environ: The user's environment.
        rank, ranks: Number of this rank and number of ranks.
        store: Path of the store's file, through which ranks meet.
        threads: OpenMP threads of each rank; None for those of the user's environment.
        directory: The launch directory.
    """
    return {
        # A killed rank must not take its last lines with it, and a crash in C++ must show the Python stack.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it determinism: true raises at the first product on a GPU
        **environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        STORE_VARIABLE: str(store),
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
        # The Rust tokenizers warn, and may deadlock, in a process that forks after they have started threads.
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        LAUNCH_DIRECTORY_VARIABLE: str(directory),
    }
