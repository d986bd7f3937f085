"""What rank pools run: adapters beside a frozen model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from holdfast.config.load import from_mapping
from holdfast.config.runs import SFTConfig
from holdfast.data.packing import pack
from holdfast.data.weights import Share
from holdfast.models.lora import adapters_off
from holdfast.parallel.materialise import sharded_parameters
from holdfast.parallel.mesh import World
from holdfast.parallel.stream import full_tensor, live_tensors
from holdfast.recipes.sft import sft, sft_step
from holdfast.training.build import Live, build_run
from holdfast.types import Example, Scores

PROBE = torch.arange(2, 40).numpy()


def run(world: World, values: dict[str, Any]) -> Any:
    """Run SFT and return its outcome."""
    return sft(from_mapping(values, SFTConfig), Path(), world)


def probe(policy: Any) -> torch.Tensor:
    """Return log-probabilities of one sequence."""
    example = Example(0, 0, PROBE, PROBE >= 3)
    with torch.no_grad():
        scores = policy(pack([example], [Share(1.0, 1.0)], padded=policy.padded, dtype=torch.float64))
    assert isinstance(scores, Scores)
    return scores.logprobs


def look(world: World, tree: dict[str, Any], rows: Any, steps: int) -> dict[str, Any]:
    """Train, and return what the model says with and without its adapters, and the matrices an engine would get."""
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows))
    before = probe(training.policy)
    for _ in range(steps):
        sft_step(training)
    after = probe(training.policy)
    with adapters_off(training.policy):
        off = probe(training.policy)
    parameters = sharded_parameters(training.policy)
    return {
        "before": before,
        "after": after,
        "off": off,
        "merged": {name: tensor.clone() for name, tensor in live_tensors(training.policy)},
        "parameters": {name: full_tensor(value).clone() for name, value in parameters.items()},
        "trained": {name: (str(value.dtype), value.requires_grad) for name, value in parameters.items()},
    }
