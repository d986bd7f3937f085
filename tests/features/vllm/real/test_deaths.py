"""Servers that die: their requests go elsewhere, they are started again and pushed to, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.features.vllm.processes import is_well
from holdfast.rollout.engine import generate
from tests.features.vllm.real.conftest import Fleet, Policy
from tests.features.vllm.real.test_pushes import requests


def test_a_server_that_dies_in_a_rollout_changes_no_sample_and_comes_back(
    policy_of: Callable[..., Policy], fleet: Fleet
) -> None:
    policy = policy_of(rollout={"engine": {"kind": "vllm", "url": fleet.urls, "start": True, "bucket_mib": 0.05}})
    policy.publish()
    asked, sampling = requests(40), SamplingConfig(max_new_tokens=150)
    undisturbed = generate(policy.engine, asked, sampling)
    leader = fleet.servers.processes[1]
    processes = [leader, *psutil.Process(leader.pid).children(recursive=True)]

    killer = threading.Timer(0.3, lambda: os.kill(leader.pid, signal.SIGKILL))
    killer.start()
    disturbed = generate(policy.engine, asked, sampling)
    killer.join()

    assert [each.tokens.tolist() for each in disturbed] == [each.tokens.tolist() for each in undisturbed]
    deadline = time.monotonic() + 300
    while not is_well(fleet.urls[1]) and time.monotonic() < deadline:
        time.sleep(0.5)
    gone = psutil.wait_procs([psutil.Process(each.pid) for each in processes if psutil.pid_exists(each.pid)], 5)[1]
    assert not [each for each in gone if each.status() != psutil.STATUS_ZOMBIE]
    policy.move(0.01)
    policy.publish()
    assert [proof.url for proof in policy.engine.proofs] == fleet.urls
    assert not list(Path("/dev/shm").glob("holdfast-*.safetensors"))  # noqa: S108 - what pushes must not leave
