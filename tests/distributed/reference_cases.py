"""What rank pools run: steps beside a reference that follows, and what policy and reference held after each."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.models.heads.policy import PolicyModel
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.recipes.grpo import grpo_step
from holdfast.rewards.base import Sample, Scored
from holdfast.training.policy.build import build_policy_run
from holdfast.training.setup.begin import Live
from tests.distributed.critic_cases import whole
from tests.distributed.grpo_cases import even_share


def _score(samples: Sequence[Sample]) -> list[Scored]:
    return [Scored(value, {"exact": value}) for value in map(even_share, samples)]


def follow(world: World, tree: dict[str, Any], rows: Any, steps: int) -> dict[str, Any]:
    """Train and return metrics, and the whole tensors of policy and reference at start and after each step."""
    training = build_policy_run(from_mapping(tree, GRPOConfig), Path.cwd(), world, _score, Live(rows=rows))
    assert isinstance(training.reference, PolicyModel)
    lines, policies, references = [], [whole(training.model.module)], [whole(training.reference)]
    for _ in range(steps):
        lines.append(grpo_step(training))
        policies.append(whole(training.model.module))
        references.append(whole(training.reference))
    kinds = {str(parameter.dtype) for parameter in training.reference.parameters()}
    return {"lines": lines, "policies": policies, "references": references, "dtypes": kinds}


def said_of_the_choice(world: World, tree: dict[str, Any], rows: Any) -> tuple[list[str], int | None]:
    """Return what building printed of the reference, and the bytes of it that this rank holds; None without any."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        training = build_policy_run(from_mapping(tree, GRPOConfig), Path.cwd(), world, _score, Live(rows=rows))
    lines = [line for line in said.getvalue().splitlines() if line.startswith("reference: ")]
    if not isinstance(training.reference, PolicyModel):
        return lines, None
    parts = [local_part(value.detach()) for value in sharded_parameters(training.reference).values()]
    return lines, sum(part.untyped_storage().nbytes() for part in parts)
