"""What CI sees of Slurm in less than a minute: a job on two nodes is requeued, goes on and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.features.cluster.jobs import ENDED, await_step, events, saved_steps, submitted, weights
from tests.features.cluster.slurm import missing_programs, slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_programs()), reason="Slurm is not installed here: tools/install_slurm.sh installs it"
    ),
]


def test_a_job_on_two_nodes_is_requeued_and_ends(tmp_path: Path) -> None:
    with slurm(tmp_path) as cluster:
        job = submitted(cluster, "brief", "steps=20")
        await_step(cluster, job, "brief", 3)
        assert cluster.run("scontrol", "requeue", job).returncode == 0

        assert cluster.await_state(job, ENDED, 120) == "COMPLETED", cluster.output(job)

        assert "Traceback" not in cluster.output(job)
        assert len(saved_steps(cluster, "brief")) == 2
        assert [event["ranks"] for event in events(cluster, "brief") if event["event"] == "start"] == [2, 2]
        assert len(weights(cluster, "brief")) > 0
