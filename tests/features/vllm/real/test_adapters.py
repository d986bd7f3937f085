"""Adapters: merged into the weights that are pushed, for as many steps as a run has."""

from __future__ import annotations

from collections.abc import Callable

import psutil

from tests.features.vllm.real.conftest import Fleet, Policy

PUSHES = 60
GROWTH_MIB = 64


def test_sixty_pushes_of_adapters_are_proved_and_take_no_more_memory(
    policy_of: Callable[..., Policy], fleet: Fleet
) -> None:
    policy = policy_of(model={"lora": {"rank": 4}})
    policy.publish()
    policy.move(0.3)
    policy.publish()
    before = _resident_mib(fleet)

    for number in range(PUSHES):
        policy.move(0.05, number)
        policy.publish()
        assert max(proof.difference for proof in policy.engine.proofs) <= 1e-4
        assert min(proof.from_before for proof in policy.engine.proofs) > 1e-4  # the push changed something

    assert _resident_mib(fleet) - before < GROWTH_MIB


def _resident_mib(fleet: Fleet) -> float:
    leaders = [psutil.Process(process.pid) for process in fleet.servers.processes]
    everyone = [each for leader in leaders for each in (leader, *leader.children(recursive=True))]
    return sum(each.memory_info().rss for each in everyone) / 2**20
