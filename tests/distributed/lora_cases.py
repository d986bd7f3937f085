"""What rank pools run: adapters beside a frozen model."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.packing import Share, pack
from holdfast.models.adapters.live import adapters_off
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.parallel.stream import full_tensor, live_tensors
from holdfast.recipes.sft import sft, sft_step
from holdfast.training.setup.begin import Live, build_run
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


def merged(training: Any) -> dict[str, torch.Tensor]:
    """Return the matrices that an engine gets."""
    return {name: tensor.clone() for name, tensor in live_tensors(training.model.module)}


def look(world: World, tree: dict[str, Any], rows: Any, steps: int) -> dict[str, Any]:
    """Train, and return what the model says with and without its adapters, and the matrices an engine would get."""
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows))
    before = probe(training.model.module)
    for _ in range(steps):
        sft_step(training)
    after = probe(training.model.module)
    with adapters_off(training.model.module):
        off = probe(training.model.module)
    parameters = sharded_parameters(training.model.module)
    return {
        "before": before,
        "after": after,
        "off": off,
        "merged": merged(training),
        "parameters": {name: full_tensor(value).clone() for name, value in parameters.items()},
        "trained": {name: (str(value.dtype), value.requires_grad) for name, value in parameters.items()},
    }


def told_by(world: World, tree: dict[str, Any], rows: Any) -> str:
    """Build a run, and return what was printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows))
    return said.getvalue()


def learn(world: World, tree: dict[str, Any], rows: Any, steps: int = 3) -> dict[str, Any]:
    """Train; return the parameters at both ends, the losses, and what an engine and the frozen model would compute."""
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows))

    def parameters() -> dict[str, Any]:
        found = sharded_parameters(training.model.module)
        return {name: full_tensor(value).clone().numpy() for name, value in found.items()}

    start, before = parameters(), probe(training.model.module)
    made = [sft_step(training) for _ in range(steps)]
    lines = [dict(update.read().metrics) for update in made if update is not None]
    after = probe(training.model.module)
    with adapters_off(training.model.module):
        off = probe(training.model.module)
    own = [local_part(value.data) for value in training.model.module.parameters()]
    return {
        "start": start,
        "parameters": parameters(),
        "losses": [line["loss"] for line in lines],
        "norms": [line["grad_norm"] for line in lines],
        "before": before,
        "after": after,
        "off": off,
        "merged": merged(training),
        "packed": sum(part.numel() for part in own if part.dtype == torch.uint8),
        "bytes": (sum(part.untyped_storage().nbytes() for part in own), training.model.plan.shard_bytes),
        "numbers": (training.model.plan.parameters, training.model.plan.trainable),
    }


def optimizer_bytes(world: World, tree: dict[str, Any], rows: Any) -> int:
    """Take a step, and return what this rank's optimizer keeps in tensors with a dimension: its parts of moments."""
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows))
    sft_step(training)
    kept = [value for state in training.model.optimizer.state.values() for value in state.values()]
    parts = [local_part(value) for value in kept if isinstance(value, torch.Tensor) and value.ndim]
    return sum(part.numel() * part.element_size() for part in parts)
