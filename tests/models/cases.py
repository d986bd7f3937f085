"""What rank pools run for the tests of the models layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.export.write import export
from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.packing import Share, pack
from holdfast.models.check.forward import check_forward
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.names import tied_names
from holdfast.models.setup.model import Blueprint, blueprint
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.training.setup.model import build_policy
from holdfast.types import Example, Scores
from tests.models.sides import sides_of
from tests.settings import plain_setting


def build(world: World, model: dict[str, Any], seed: int = 0, **sections: Any) -> tuple[PolicyModel, Blueprint]:
    """Plan, shard and fill a policy, as a run does."""
    tree = {"steps": 1, "seed": seed, "model": model, "data": {"path": "rows", "batch_size": 4}}
    config = from_mapping(tree | sections, SFTConfig)
    origin = blueprint(config.model, Path.cwd(), seed=config.seed)
    setting = plain_setting(config, world)
    policy = build_policy(setting, origin).module
    return policy, origin


def import_and_export(
    world: World, source: str, target: str, largest_file_bytes: int, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Fill a sharded model from a directory and write it out again; say what this rank held."""
    policy, origin = build(world, {"path": source} | (options or {}))
    held = sum(local_part(value).nbytes for value in sharded_parameters(policy).values())
    whole = sum(value.numel() * value.element_size() for value in sharded_parameters(policy).values())
    export(policy, origin, Path(target), RankGroup(), largest_file_bytes=largest_file_bytes)
    return {"held": held, "whole": whole}


def whole_parameters(
    world: World, model: dict[str, Any], seed: int = 0
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, tuple[str, ...]]]:
    """Return the whole parameters of a sharded model and its ties."""
    policy, _ = build(world, model, seed)
    parameters = sharded_parameters(policy)
    return {
        name: full_tensor(value).detach().to(torch.float64).numpy() for name, value in parameters.items()
    }, tied_names(policy)


def checked(world: World, model: dict[str, Any], parallel: dict[str, Any]) -> dict[str, Any]:
    """Build a policy, which checks it, check it once more and score two documents with it."""
    policy, origin = build(world, model, parallel=parallel)
    dtype = getattr(torch, parallel.get("compute_dtype", "float32"))
    result, _ = check_forward(sides_of(policy, dtype, origin.original_config), may_fall_back=False)
    documents = [np.arange(2, 22), np.arange(30, 43)]
    examples = [Example(index, index, tokens, np.arange(tokens.size) > 0) for index, tokens in enumerate(documents)]
    batch = pack(examples, [Share(1.0, 1.0)] * 2, padded=policy.padded)
    with torch.no_grad():
        scores = policy(batch)
    assert isinstance(scores, Scores)
    found = {"padded": policy.padded, "difference": result.difference, "leak": result.leak}
    return found | {"logprobs": scores.logprobs.double().numpy()}
