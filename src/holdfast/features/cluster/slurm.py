"""Writes batch jobs for Slurm, and turns each task that `srun` starts on a node into the ranks of that node.

A job is one step of one task a node; each task is torchrun with the ranks of its node. Slurm places and requeues,
torchrun lets the nodes meet, and whether a job goes on is decided by what the run's first rank wrote
(`requeue.py`).
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.config.sections.launch import LaunchConfig
from holdfast.errors import ConfigError
from holdfast.features.cluster.ports import agreed_port
from holdfast.files import python_module
from holdfast.launch.environment import SRUN_VARIABLES, inherited, resolve_ranks, srun_task

_ASK_SECONDS = 20
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LAST_CALL_SECONDS = 10
"""For which machines that meet again wait for others, once there are enough."""
_MOST_RESTARTS = 3
"""Of a job that may lose machines."""
_AGENT_SECONDS = 30
"""Beyond the grace of a run: for the step that is under way, and for processes to go."""


@dataclass(frozen=True)
class Job:
    """What a batch job asks for."""

    command: Sequence[str]
    """Arguments of `holdfast`: a verb, the YAML file of a run, and overrides."""
    run_directory: Path
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    time: str | None
    """Time limit as Slurm writes it, such as 12:00:00; None leaves the partition's limit."""
    interface: str | None
    """Network interface over which the nodes communicate; with None, gloo and NCCL choose one."""
    grace_seconds: float
    elastic: bool = False
    """Whether the job goes on with fewer nodes when it loses one."""


def batch_script(job: Job) -> str:
    """Return the text of a job for `sbatch`."""
    lines = ["#!/bin/bash", f"#SBATCH --job-name={job.run_directory.name}", f"#SBATCH --nodes={job.nodes}"]
    lines += ["#SBATCH --ntasks-per-node=1"]
    lines += [f"#SBATCH --gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []
    lines += [f"#SBATCH --time={job.time}"] if job.time else []
    # Slurm looks at limits once a minute, so the signal may come that much later.
    warning = round(job.grace_seconds) + _AGENT_SECONDS + 60
    lines += ["#SBATCH --no-kill"] if job.elastic else []
    lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append", f"#SBATCH --signal=B:TERM@{warning}"]
    python = shlex.quote(sys.executable)
    command = shlex.join([*job.command, f"launch.ranks={job.ranks_per_node}"])
    interface = "".join(f"export {name}={shlex.quote(job.interface)}\n" for name in _INTERFACES if job.interface)
    return (
        "\n".join(lines)
        + "\n"
        + _BODY.format(
            folder=shlex.quote(os.fspath(Path.cwd())),
            interface=interface,
            python=python,
            options="--no-kill --wait=0" if job.elastic else "--kill-on-bad-exit=1",
            command=command,
            directory=shlex.quote(os.fspath(job.run_directory.absolute())),
        )
    )


_BODY = """
cd {folder} || exit 2

# The nodes meet on the first of them, which runs this shell, at a port that its system gives.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=$(scontrol --oneliner show node "$first" | sed 's/.*NodeAddr=\\([^ ]*\\).*/\\1/')
export MASTER_PORT=$({python} -c 'import socket; print(socket.create_server(("", 0)).getsockname()[1])')
{interface}
# Shortly before the time limit Slurm signals this shell alone. It passes SIGTERM on: the run saves and stops.
pass_on() {{ timeout 10 scancel --signal=TERM "$SLURM_JOB_ID" 2> /dev/null & }}
trap pass_on TERM

# One task a node; each starts the ranks of its node by torchrun.
srun {options} {python} -m holdfast.cli.main {command} &
step=$!
wait $step; code=$?
while kill -0 $step 2> /dev/null; do wait $step; code=$?; done  # a signal ends a wait early
trap - TERM

# A job that somebody cancels or requeues is not RUNNING any more, and is left alone.
state=$(scontrol --oneliner show job "$SLURM_JOB_ID" | sed 's/.*JobState=\\([^ ]*\\).*/\\1/')
if [ $code -ne 0 ] && [ $code -ne 2 ] && [ "$state" = RUNNING ]; then  # 2: refused
    if {python} -m holdfast.features.cluster.requeue {directory} "$SLURM_JOB_ID"; then
        scontrol requeue "$SLURM_JOB_ID"
        exec sleep 60  # until Slurm ends this shell
    fi
fi
exit $code
"""


def submit(text: str) -> str:
    """Hand a job to `sbatch` and return what it answers.

    Raises:
        ConfigError: Slurm refuses the job.
    """
    answer = subprocess.run(["sbatch"], input=text, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise ConfigError(f"sbatch refuses the job: {answer.stderr.strip()}\nChange what it names, and submit again.")
    return answer.stdout.strip()


def check_cluster(job: Job) -> None:
    """Refuse a job that this Slurm would keep waiting for ever.

    Raises:
        ConfigError: There is no Slurm, its default partition has too few nodes, or no GPUs.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "There is no sbatch on this machine, so nothing can be submitted. Leave --submit out, and hand the text to "
            "sbatch where Slurm is."
        )
    answer = subprocess.run(
        ["sinfo", "--noheader", "--format=%P %D %G"],
        capture_output=True,
        text=True,
        timeout=_ASK_SECONDS,
        check=False,
    )
    if answer.returncode != 0:
        raise ConfigError(f"Slurm does not answer: {answer.stderr.strip()}\nSubmit where `sinfo` works.")
    lines = [line.split() for line in answer.stdout.splitlines()]
    default = [line for line in lines if line[0].endswith("*")]
    if not default:
        return  # the user names a partition in the environment; sbatch says what is wrong
    name, nodes = default[0][0].rstrip("*"), sum(int(line[1]) for line in default)
    if job.nodes > nodes:
        raise ConfigError(f"--nodes {job.nodes}, but the partition {name} has {nodes}. Ask for at most {nodes}.")
    if job.gpus_per_node and not any("gpu" in line[2] for line in default):
        raise ConfigError(
            f"--gpus-per-node {job.gpus_per_node}, but no node of the partition {name} has GPUs. Leave it out, and set "
            "launch.device=cpu."
        )


@dataclass(frozen=True)
class JobStep:
    """The place of this process in a step of `srun`."""

    nodes: int
    tasks: int
    number: int
    local_number: int
    job: str
    environ: Mapping[str, str]

    def role(self, launch: LaunchConfig) -> str:
        """Return "rank" or "launcher": what each task of this step is.

        Raises:
            ConfigError: There are neither as many tasks as ranks nor as many as nodes.
        """
        ranks = self.nodes * resolve_ranks(launch, self.environ)
        if self.tasks == ranks:
            return "rank"
        if self.tasks == self.nodes:
            return "launcher"
        raise ConfigError(
            f"srun started {self.tasks} tasks on {self.nodes} nodes, and the run has {ranks} ranks, "
            f"launch.ranks={ranks // self.nodes} a node. Start {ranks} tasks, one a rank, or {self.nodes}, one a node."
        )

    def meet(self) -> dict[str, str]:
        """Agree with the other tasks where they meet: as the environment says, else at a free port of the first node.

        Raises:
            ConfigError: The first node is unknown, or does not answer.
        """
        host, port = self.environ.get("MASTER_ADDR") or self._first_node(), self.environ.get("MASTER_PORT")
        parts = (self.job, *(self.environ.get(name, "0") for name in ("SLURM_STEP_ID", "SLURM_RESTART_COUNT")))
        port = port or str(agreed_port(host, ".".join(parts), self.number, self.tasks))
        return {"MASTER_ADDR": host, "MASTER_PORT": port}

    @property
    def node(self) -> int:
        """The number of this task's node in the step."""
        return int(self.environ.get("SLURM_NODEID", self.number))

    @property
    def own_address(self) -> str:
        """Address of this task's node, as Slurm knows it."""
        address = _address_of(self.environ.get("SLURMD_NODENAME", ""))
        return address[0] if address else socket.gethostname()

    def _first_node(self) -> str:
        listed = _answer("scontrol", "show", "hostnames", self.environ["SLURM_STEP_NODELIST"]).split()
        address = _address_of(listed[0]) if listed else []
        if not address:
            raise ConfigError(
                "scontrol does not say which node of this step is the first. Set MASTER_ADDR to its address."
            )
        return address[0]

    def as_rank(self) -> dict[str, str]:
        """Return the variables that make this task one rank."""
        return {
            "RANK": str(self.number),
            "WORLD_SIZE": str(self.tasks),
            "LOCAL_RANK": str(self.local_number),
            "LOCAL_WORLD_SIZE": str(self.tasks // self.nodes),
            **self.meet(),
        }


def current_step(environ: Mapping[str, str] | None = None) -> JobStep | None:
    """Return the step of `srun` that this process is a task of; None outside one, and for a step of one task."""
    environ = os.environ if environ is None else environ
    if srun_task(environ) is None:
        return None
    nodes, tasks, number, local_number = (int(environ[name]) for name in SRUN_VARIABLES)
    return JobStep(nodes, tasks, number, local_number, environ["SLURM_JOB_ID"], environ)


def join_step(launch: LaunchConfig, grace_seconds: float) -> None:
    """Make this process, a task of `srun`, one rank, or replace it by torchrun with the ranks of its node.

    Raises:
        ConfigError: The step has neither a task a rank nor a task a node, or a network interface is missing.
    """
    step = current_step()
    if step is None:
        return
    check_interfaces()
    if step.role(launch) == "launcher":
        become_launcher(step, launch, grace_seconds)
    become_rank(step)


def become_rank(step: JobStep) -> None:
    """Make this process one rank, as torchrun would have."""
    os.environ.update(step.as_rank())


def agent_options(step: JobStep, launch: LaunchConfig) -> list[str]:
    """Return torchrun's options for one node: a fixed set of machines, or one that may shrink and grow again.

    A fixed set meets without clocks and gives the first node the first ranks. torchrun's own rendezvous compares the
    machines' clocks, so only a run that may lose machines uses it.

    Raises:
        ConfigError: launch.min_ranks is more than there are.
    """
    meeting, ranks = step.meet(), resolve_ranks(launch, step.environ)
    options = ["--nproc-per-node", str(ranks), "--rdzv-id", step.job, "--no-python"]
    address, port = meeting["MASTER_ADDR"], meeting["MASTER_PORT"]
    if launch.min_ranks is None:
        return [
            *("--nnodes", str(step.nodes), "--node-rank", str(step.node)),
            *("--master-addr", address, "--master-port", port, *options),
        ]
    fewest = math.ceil(launch.min_ranks / ranks)
    if fewest > step.nodes:
        raise ConfigError(
            f"launch.min_ranks={launch.min_ranks}, but {step.nodes} nodes have {step.nodes * ranks} ranks. Lower it, "
            "or ask for more nodes."
        )
    configuration = f"is_host={'true' if step.node == 0 else 'false'},last_call_timeout={_LAST_CALL_SECONDS}"
    return [
        *("--nnodes", f"{fewest}:{step.nodes}", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}"),
        *("--rdzv-conf", configuration, "--local-addr", step.own_address),
        *("--max-restarts", str(_MOST_RESTARTS), *options),
    ]


def become_launcher(step: JobStep, launch: LaunchConfig, grace_seconds: float) -> None:
    """Replace this process by torchrun with the ranks of its node; does not return.

    Each rank gets the command line of this process. The process is replaced so that a signal to all processes of a
    task reaches torchrun once.
    """
    options = agent_options(step, launch)
    command = [*python_module("holdfast.cli.main"), *sys.argv[1:]]
    variables = {
        **({} if launch.named_threads is None else {"OMP_NUM_THREADS": str(launch.named_threads)}),
        # torchrun kills ranks 30 seconds after SIGTERM unless this says otherwise, which may be shorter than a save
        # takes.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(grace_seconds) + _AGENT_SECONDS),
        "PYTHONUNBUFFERED": "1",
    }
    argv = [*python_module("holdfast.launch.agent"), *options, *command]
    os.execve(sys.executable, argv, inherited(variables))


def check_interfaces(environ: Mapping[str, str] | None = None) -> None:
    """Refuse an interface that this machine lacks: gloo and NCCL would end in a page of C++.

    Raises:
        ConfigError: There is no such interface.
    """
    environ = os.environ if environ is None else environ
    here = [name for _, name in socket.if_nameindex()]
    # NCCL's variable may hold prefixes, lists and negations; gloo's holds one name, or several with commas.
    for name in filter(None, environ.get(_INTERFACES[0], "").split(",")):
        if name not in here:
            raise ConfigError(
                f"{_INTERFACES[0]}={name}, but {socket.gethostname()} has no such network interface; it has "
                f"{', '.join(here)}. Name one of these."
            )


def _address_of(node: str) -> list[str]:
    described = _answer("scontrol", "--oneliner", "show", "node", node).split()
    return [field.partition("=")[2] for field in described if field.startswith("NodeAddr=")]


def _answer(*command: str) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout
