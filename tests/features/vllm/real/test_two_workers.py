"""A server whose model two workers share: pushes reach both halves, and no tensor is named that is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.errors import RunStopped
from holdfast.parallel.mesh import World
from holdfast.rollout.engine import generate
from tests.features.vllm.real.conftest import Fleet, policy_for, serving, tree_of
from tests.features.vllm.real.test_pushes import requests, scored


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Fleet]:
    with serving(tree_of, tmp_path, workers=2) as fleet:
        yield fleet


def test_weights_of_two_workers_are_pushed_and_a_fault_is_found_without_naming_another(
    world: World, shared: Fleet
) -> None:
    policy = policy_for(tree_of(shared.urls), world)
    try:
        sampling, asked = SamplingConfig(max_new_tokens=24), requests(4)
        policy.publish()
        policy.move(0.3)
        policy.publish()
        assert scored(policy, asked, generate(policy.engine, asked, sampling), sampling) <= 1e-4

        shared.plant("gate_as_up")
        policy.move(0.3)
        with pytest.raises(RunStopped, match="say other log-probabilities than the trainer") as caught:
            policy.publish()
        assert "which tensor it is cannot be told" in str(caught.value)
        assert "these tensors are not what was sent" not in str(caught.value)

        shared.plant("norm_not_sent")  # whole in each worker, which can say
        policy.move(0.3)
        with pytest.raises(RunStopped, match=r"these tensors are not what was sent: model\.norm\.weight"):
            policy.publish()
    finally:
        policy.engine.close()
