"""Two real Slurm nodes on this host run, requeue and refuse what a user would start there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest

from tests.checkpoint.store import serving
from tests.features.cluster.jobs import (
    ENDED,
    EXAMPLE,
    HOLDFAST,
    SMALL,
    await_step,
    events,
    saved_steps,
    submitted,
    weights,
)
from tests.features.cluster.page import WITH_PROGRAMS, commands, write_run
from tests.features.cluster.slurm import Cluster, missing_programs, slurm
from tests.features.cluster.throttle import throttled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_programs()), reason="Slurm is not installed here: tools/install_slurm.sh installs it"
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def test_a_requeued_job_ends_with_the_weights_of_a_straight_one(cluster: Cluster) -> None:
    straight = submitted(cluster, "straight", "steps=60")
    assert cluster.await_state(straight, ENDED, 120) == "COMPLETED", cluster.output(straight)

    job = submitted(cluster, "requeued", "steps=60")
    await_step(cluster, job, "requeued", 5)
    assert cluster.run("scontrol", "requeue", job).returncode == 0

    assert cluster.await_state(job, ENDED, 180) == "COMPLETED", cluster.output(job)
    assert "Traceback" not in cluster.output(job)
    assert weights(cluster, "requeued") == weights(cluster, "straight")


def test_a_job_that_is_signalled_before_its_limit_requeues_itself(cluster: Cluster) -> None:
    job = submitted(cluster, "signalled", "steps=60")
    await_step(cluster, job, "signalled", 5)

    # What Slurm does before the limit: the batch shell alone gets the signal.
    assert cluster.run("scancel", "--batch", "--signal=TERM", job).returncode == 0

    assert cluster.await_state(job, ENDED, 180) == "COMPLETED", cluster.output(job)
    assert f"Job {job} is requeued, 1 of at most 3 times" in cluster.output(job)
    assert "Traceback" not in cluster.output(job)


def test_tasks_that_are_neither_ranks_nor_nodes_are_refused_with_both_numbers(cluster: Cluster) -> None:
    values = ["launch.ranks=2", "launch.device=cpu", f"run.dir={cluster.base}", "run.name=refused"]

    answer = cluster.run("srun", "-N2", "-n3", "-K1", *HOLDFAST, "sft", str(EXAMPLE), *values)

    assert answer.returncode != 0
    assert answer.stderr.count("srun started 3 tasks on 2 nodes, and the run has 4 ranks") == 1, answer.stderr
    assert not (cluster.base / "refused").exists()


def test_a_mistaken_override_on_two_nodes_is_one_paragraph(cluster: Cluster) -> None:
    answer = cluster.run("srun", "-N2", "-K1", *HOLDFAST, "sft", str(EXAMPLE), "optim.learning=1")

    assert answer.returncode != 0
    assert answer.stderr.count("optim.learning: unknown key") == 1, answer.stderr
    assert "Traceback" not in answer.stderr


def test_as_many_tasks_as_ranks_are_one_rank_each(cluster: Cluster) -> None:
    values = [*SMALL, "launch.ranks=2", "launch.device=cpu", f"run.dir={cluster.base}", "run.name=tasks", "steps=4"]

    answer = cluster.run("srun", "-N2", "-n4", *HOLDFAST, "sft", str(EXAMPLE), *values, GLOO_SOCKET_IFNAME="lo")

    assert answer.returncode == 0, answer.stderr
    assert "done after step 4" in answer.stdout
    assert len(weights(cluster, "tasks")) > 0


def test_an_interface_that_does_not_exist_is_named(cluster: Cluster) -> None:
    answer = cluster.run("srun", "-N2", "-K1", *HOLDFAST, "sft", str(EXAMPLE), GLOO_SOCKET_IFNAME="ib9")

    assert answer.stderr.count("GLOO_SOCKET_IFNAME=ib9") == 1, answer.stderr


def test_more_nodes_or_gpus_than_there_are_is_refused_before_it_is_submitted(cluster: Cluster) -> None:
    asked = [*HOLDFAST, "launch", "slurm", str(EXAMPLE), "--submit", "--nodes"]

    many, gpus = cluster.run(*asked, "3"), cluster.run(*asked, "2", "--gpus-per-node", "8")

    assert (many.returncode, gpus.returncode) == (2, 2)
    assert "--nodes 3, but the partition p has 2" in many.stderr
    assert "--gpus-per-node 8, but no node of the partition p has GPUs" in gpus.stderr


def test_without_sbatch_nothing_is_submitted(cluster: Cluster) -> None:
    answer = cluster.run(*HOLDFAST, "launch", "slurm", str(EXAMPLE), "--submit", PATH=str(cluster.base))

    assert answer.returncode == 2
    assert "There is no sbatch on this machine" in answer.stderr
    assert shutil.which("sbatch") is not None


def test_as_many_tasks_as_nodes_are_one_launcher_each(cluster: Cluster) -> None:
    values = [*SMALL, "launch.ranks=2", "launch.device=cpu", f"run.dir={cluster.base}", "run.name=launchers", "steps=2"]

    answer = cluster.run("srun", "-N2", *HOLDFAST, "sft", str(EXAMPLE), *values, GLOO_SOCKET_IFNAME="lo")

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("done after step 2") == 1


def test_two_ranks_a_node_requeued_end_with_the_weights_of_a_straight_run(cluster: Cluster) -> None:
    straight = submitted(cluster, "straight-2x2", "steps=60", "launch.ranks=2")
    assert cluster.await_state(straight, ENDED, 120) == "COMPLETED", cluster.output(straight)

    job = submitted(cluster, "requeued-2x2", "steps=60", "launch.ranks=2")
    await_step(cluster, job, "requeued-2x2", 5)
    assert cluster.run("scontrol", "requeue", job).returncode == 0

    assert cluster.await_state(job, ENDED, 180) == "COMPLETED", cluster.output(job)
    assert "Traceback" not in cluster.output(job)
    assert weights(cluster, "requeued-2x2") == weights(cluster, "straight-2x2")


def test_a_run_that_dies_at_one_step_is_requeued_three_times_and_then_stops(cluster: Cluster) -> None:
    script = cluster.base / "dies.py"
    script.write_text(
        "import os, signal\n\n"
        "def observe(event):\n    if event.step == 3:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    job = submitted(cluster, "dies", "steps=60", "launch.ranks=2", f"observers=[{script}:observe]")

    assert cluster.await_state(job, ENDED, 400) == "FAILED", cluster.output(job)
    assert f"Job {job} is requeued, 3 of at most 3 times at this step" in cluster.output(job)
    assert "It was requeued 3 times at this step, so it is not again: the cause is not chance" in cluster.output(job)
    assert "Traceback" not in cluster.output(job)
    failed = [event for event in events(cluster, "dies") if event["event"] == "failed"]
    assert {(event["rank"], event["host"]) for event in failed} == {(0, "n1")}
    for rank in (1, 2, 3):
        log = (cluster.base / "dies" / "logs" / f"rank-{rank}.log").read_text()
        assert log.count("Rank 0 on n1 died without a word in phase") == 4, log


def test_a_time_limit_saves_before_it_and_requeues(cluster: Cluster) -> None:
    asked = ["steps=100000", "launch.ranks=2", "checkpoint.grace_seconds=5"]
    job = submitted(cluster, "limit", *asked, options=("--time", "0:02:10"))

    deadline = time.monotonic() + 180
    while f"Job {job} is requeued" not in cluster.output(job):
        assert time.monotonic() < deadline, cluster.output(job)
        time.sleep(0.5)

    cluster.await_state(job, {"PENDING", "REQUEUED", "RUNNING"}, 30)
    cluster.run("scancel", job)
    stops = [event for event in events(cluster, "limit") if event["event"] == "stop"]
    assert stops[0]["reason"] == "stopped by SIGTERM"
    assert saved_steps(cluster, "limit")[0] == stops[0]["step"]
    assert "Traceback" not in cluster.output(job)
    cluster.await_state(job, ENDED, 90)


def test_a_node_is_drained_and_the_job_comes_back_when_there_is_room(cluster: Cluster) -> None:
    job = submitted(cluster, "drained", "steps=60", "launch.ranks=2")
    await_step(cluster, job, "drained", 5)

    drain = cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    assert drain.returncode == 0, drain.stderr
    assert cluster.run("scontrol", "requeue", job).returncode == 0
    cluster.await_state(job, {"PENDING"}, 60)
    time.sleep(8)  # longer than cred_expire
    assert cluster.state(job) == "PENDING"
    cluster.run("scontrol", "update", "nodename=n2", "state=resume")

    assert cluster.await_state(job, ENDED, 180) == "COMPLETED", cluster.output(job)
    assert saved_steps(cluster, "drained")[0] >= 5
    assert "Traceback" not in cluster.output(job)


def test_a_last_save_of_45_seconds_survives(cluster: Cluster) -> None:
    with serving() as (variables, _), throttled(int(variables["AWS_ENDPOINT_URL"].rpartition(":")[2])) as line:
        keys = variables | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}"}
        values = [
            "steps=100000",
            "launch.ranks=2",
            "checkpoint.storage=s3://bucket/slow",
            "checkpoint.grace_seconds=60",
        ]
        job = submitted(cluster, "slow", *values, **keys)
        await_step(cluster, job, "slow", 3)

        signalled = time.time()
        assert cluster.run("scancel", "--batch", "--signal=TERM", job).returncode == 0
        line.stand_still(50)

        deadline = time.monotonic() + 240
        while f"Job {job} is requeued" not in cluster.output(job):
            assert time.monotonic() < deadline, cluster.output(job)
            time.sleep(0.5)
        cluster.run("scancel", job)
        by_name = {event["event"]: event for event in events(cluster, "slow")}
        assert by_name["requeue"]["time"] - signalled > 45
        assert by_name["checkpoint"]["saved"] == by_name["stop"]["step"]
        cluster.await_state(job, ENDED, 120)


def test_two_jobs_with_one_run_directory_are_told_apart(cluster: Cluster) -> None:
    first = submitted(cluster, "shared", "steps=100000", nodes=1)
    await_step(cluster, first, "shared", 2)

    second = submitted(cluster, "shared", "steps=100000", nodes=1)

    assert cluster.await_state(second, ENDED, 90) == "FAILED", cluster.output(second)
    assert cluster.output(second).count("is in use by another job (process") == 1
    assert "requeued" not in cluster.output(second)
    cluster.run("scancel", first)
    cluster.await_state(first, ENDED, 90)


def test_a_node_that_vanishes_is_named_and_the_job_goes_on_when_it_is_back(cluster: Cluster) -> None:
    job = submitted(cluster, "vanished", "steps=150", "launch.ranks=2")
    await_step(cluster, job, "vanished", 5)

    killed = cluster.kill_node("n2")

    deadline = time.monotonic() + 60
    while not any(event["event"] == "failed" for event in events(cluster, "vanished")):
        assert time.monotonic() < deadline, cluster.output(job)
        time.sleep(0.2)
    failed = next(event for event in events(cluster, "vanished") if event["event"] == "failed")
    assert failed["host"] == "n2"
    assert failed["time"] - killed < 15
    while "down" not in cluster.run("sinfo", "--noheader", "--nodes=n2", "--format=%T").stdout:
        assert time.monotonic() < deadline + 60
        time.sleep(0.5)
    cluster.start_node("n2")
    assert cluster.await_state(job, ENDED, 300) == "COMPLETED", cluster.output(job)
    assert "Traceback" not in cluster.output(job)


def test_the_first_node_vanishes_and_the_scheduler_starts_the_job_again(cluster: Cluster) -> None:
    job = submitted(cluster, "first-vanished", "steps=150", "launch.ranks=2")
    await_step(cluster, job, "first-vanished", 5)

    cluster.kill_node("n1")  # of the batch script, the rendezvous and rank 0

    deadline = time.monotonic() + 120
    while "down" not in cluster.run("sinfo", "--noheader", "--nodes=n1", "--format=%T").stdout:
        assert time.monotonic() < deadline, cluster.output(job)
        time.sleep(0.5)
    cluster.start_node("n1")
    assert cluster.await_state(job, ENDED, 300) == "COMPLETED", cluster.output(job)
    log = (cluster.base / "first-vanished" / "logs" / "rank-2.log").read_text()
    assert "n1" in log, log
    assert "Traceback" not in cluster.output(job) + log
    assert saved_steps(cluster, "first-vanished")[-1] == 150


def test_gpus_that_are_not_there_are_one_paragraph(cluster: Cluster) -> None:
    values = ["launch.ranks=2", "launch.device=cuda", f"run.dir={cluster.base}", "run.name=gpus"]

    answer = cluster.run("srun", "-N2", "-K1", *HOLDFAST, "sft", str(EXAMPLE), *values, GLOO_SOCKET_IFNAME="lo")

    assert answer.returncode != 0
    assert answer.stderr.count("launch.device: cuda, but torch finds no GPU here") == 1, answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (cluster.base / "gpus").exists()


def test_the_commands_of_the_page_run_as_they_stand(cluster: Cluster) -> None:
    values = [*SMALL, "launch.ranks=2", "launch.device=cpu", "steps=2", "run.dir=runs"]
    shell = {"GLOO_SOCKET_IFNAME": "lo", **WITH_PROGRAMS}
    for number, line in enumerate([*commands("A batch job"), *commands("Inside an allocation")]):
        folder = cluster.base / f"page{number}"
        write_run(folder, EXAMPLE, values)

        answer = cluster.run("bash", "-c", f"cd {folder} && {line}", timeout=300, **shell)

        assert answer.returncode == 0, answer.stderr
        if line.endswith("--submit"):
            job = answer.stdout.split()[-1]
            state = cluster.await_state(job, ENDED, 120)
            assert state == "COMPLETED", (folder / f"slurm-{job}.out").read_text()
        elif "holdfast launch" in line:
            assert answer.stdout.startswith("#!/bin/bash\n#SBATCH")
        else:
            assert answer.stdout.count("done after step 2") == 1
