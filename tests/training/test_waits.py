"""When the host asks for numbers of an update: behind the optimizer's step, where the optimizer decides by tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part
from holdfast.training.setup.begin import build_run
from holdfast.training.step import train_step
from holdfast.types import host_values_from
from tests.training.cases import tree


def steps_at_the_wait(world: World, values: dict[str, Any]) -> dict[str, Any]:
    """Make three updates, the second without numbers; return how many the optimizer had made at each wait."""
    training = build_run(from_mapping(values, SFTConfig), Path.cwd(), world)
    optimizer, made = training.model.optimizer, []

    def answer(tensor: Tensor, reason: str) -> Any:
        if reason == "sums and gradient norm of an update":
            made.append(sum(float(state["step"]) for state in optimizer.state.values()) / max(1, len(optimizer.state)))
        return tensor.detach().numpy().copy()

    norms, skipped = [], []
    with host_values_from(answer):
        for step in range(3):
            mini_batch = training.stream.next(step)
            assert mini_batch is not None
            if step == 1:
                for batch in mini_batch.micro_batches:
                    batch.weights.fill_(float("nan"))
            update = train_step(training.model, mini_batch, training.evaluation.objective).read()
            norms.append(update.metrics["grad_norm"])
            skipped.append(update.metrics["optim/skipped_steps"])
    weights = [local_part(value.detach()).double().sum().item() for value in training.model.parameters.values()]
    return {"made": made, "norms": norms, "skipped": skipped, "weights": weights, "step": training.model.state.step}


@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_adamw_has_made_its_step_before_the_host_learns_the_norm(pools: Any, tmp_path: Path, ranks: int) -> None:
    values = tree(str(tmp_path), optim={"kind": "adamw", "clip_norm": 0.5})

    for found in pools(ranks).run(steps_at_the_wait, values):
        assert found["made"] == [1, 1, 2], "the second update is skipped, and no step of the optimizer is counted"
        assert found["skipped"] == [0, 1, 1]
        assert found["norms"][0] > 0.5, "the case must clip"
        assert np.isfinite(found["weights"]).all()
        assert found["step"] == 3


def test_other_optimizers_learn_the_norm_first(pools: Any, tmp_path: Path) -> None:
    values = tree(str(tmp_path), optim={"kind": "adamw_bf16", "clip_norm": 0.5}, model={"dtype": "bfloat16"})

    (found,) = pools(1).run(steps_at_the_wait, values)

    assert found["made"] == [0, 1, 1]
    assert found["skipped"] == [0, 1, 1]
