"""A Slurm of two nodes on this host: its own folders and ports, and no process of it outlives the block."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_CONFIGURATION = """\
ClusterName=holdfast
SlurmctldHost={host}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
FirstJobId={ports[0]}
SlurmctldPort={ports[0]}
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool-%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=60
SlurmdTimeout=15
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=p Nodes=n1,n2 Default=YES State=UP
"""
_NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")


def missing_programs() -> list[str]:
    """Return the programs of Slurm that this host lacks."""
    return [name for name in _NEEDED if shutil.which(name) is None]


@dataclass(frozen=True)
class Cluster:
    """A running Slurm."""

    base: Path
    environ: Mapping[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, *command: str, timeout: float = 120.0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command against this cluster and return what it said."""
        return subprocess.run(
            command,
            env={**self.environ, **variables},
            cwd=self.base,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        self._start(name, "slurmd", "-N", name)

    def _start(self, name: str, *command: str) -> None:
        self.daemons[name] = subprocess.Popen(
            # Also if this process is killed.
            ["setpriv", "--pdeathsig", "TERM", *command, "-D", "-f", str(self.base / "slurm.conf")],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def start(self) -> None:
        """Start the controller and both nodes."""
        self._start("controller", "slurmctld", "-i")
        for name in ("n1", "n2"):
            self.start_node(name)

    def kill_node(self, name: str) -> float:
        """Kill a node's daemon, what supervises its tasks, and the tasks; return when."""
        daemon = self.daemons[name]
        family = [psutil.Process(daemon.pid)]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                if variables.get("SLURMD_NODENAME") == name and variables.get("SLURM_JOB_ID"):
                    parent = process.parent()
                    stepd = [parent] if parent is not None and parent.name().startswith("slurmstepd") else []
                    family += [*stepd, process]
        at = time.time()
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        daemon.wait()
        return at

    def state(self, job: str) -> str:
        """Return a job's state, such as RUNNING or COMPLETED."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return next((word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")), "")

    def await_state(self, job: str, states: set[str], seconds: float) -> str:
        """Return the state once it is one of `states`; fail with the job's output if it is not within the time."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {states}\n{self.output(job)}"
            time.sleep(0.5)
        return state

    def output(self, job: str) -> str:
        """Return what a job has written, empty before it wrote."""
        path = self.base / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def slurm(base: Path) -> Iterator[Cluster]:
    """Start a controller and two nodes, yield when both are idle, and end all three however the block ends.

    Daemons end with this process too; what a killed process had running as a job may stay.

    Args:
        base: An empty folder.
    """
    for name in ("state", "spool-n1", "spool-n2"):
        (base / name).mkdir()
    file = base / "slurm.conf"
    user = "root" if os.getuid() == 0 else os.environ["USER"]
    file.write_text(_CONFIGURATION.format(host=socket.gethostname(), user=user, base=base, ports=_free_ports(3)))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    cluster = Cluster(base, {**environ, "SLURM_CONF": str(file)})
    try:
        cluster.start()
        _await_idle(cluster)
        yield cluster
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            cluster.run("scancel", "--full", "--signal=KILL", "--user", user, timeout=10)
            cluster.run("scancel", "--user", user, timeout=10)
            _await_no_jobs(cluster)
        for daemon in reversed(cluster.daemons.values()):
            daemon.terminate()
        for daemon in cluster.daemons.values():
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _await_idle(cluster: Cluster) -> None:
    deadline = time.monotonic() + 30
    while cluster.run("sinfo", "--noheader", "--format=%T %D").stdout.split() != ["idle", "2"]:
        assert time.monotonic() < deadline, (cluster.base / "slurmctld.log").read_text()
        time.sleep(0.5)


def _await_no_jobs(cluster: Cluster) -> None:
    deadline = time.monotonic() + 15
    while cluster.run("squeue", "--noheader", timeout=10).stdout.strip() and time.monotonic() < deadline:
        time.sleep(0.5)
