"""What rank pools run: reward models in shards over gloo ranks, asked by ranks that hold unequal numbers of texts."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.config.load import from_mapping
from holdfast.config.sections.reward import ModelRewardConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.recipes.evaluation import evaluate_run
from holdfast.recipes.grpo import grpo, grpo_step
from holdfast.rewards.base import Sample, Scored
from holdfast.training.policy.build import build_policy_run
from holdfast.training.policy.reward_model import ShardedRewardModel, open_reward_model
from holdfast.training.policy.rewards import open_rewards
from holdfast.training.run import Run, StepAbandoned
from holdfast.training.setup.begin import Live


def score(world: World, tree: dict[str, Any], calls: Sequence[Sequence[Sequence[Sample]]]) -> list[list[Scored]]:
    """Score each call's samples, of which every rank has its own; return what this rank was told."""
    config = from_mapping(tree, GRPOConfig)
    with open_rewards(config, Path.cwd(), world) as rewards:
        return [rewards.score(of_ranks[world.rank]) for of_ranks in calls]


def look(world: World, tree: dict[str, Any], of_ranks: Sequence[int]) -> dict[str, Any]:
    """Score as many texts as each rank has; return the bytes it held before and after, passes made, lines printed."""
    config, said = from_mapping(tree, GRPOConfig), io.StringIO()
    (section,) = config.reward
    assert isinstance(section, ModelRewardConfig)
    with contextlib.redirect_stdout(said):
        model = open_reward_model(section, Run.of(config, Path.cwd(), world))
    assert isinstance(model, ShardedRewardModel)
    parts = [local_part(value.detach()) for value in sharded_parameters(model.model).values()]
    passes: list[None] = []
    model.model.register_forward_pre_hook(lambda *_: passes.append(None))
    numbers = model.scores([model.reading.tokens("ab" * (1 + place)) for place in range(of_ranks[world.rank])])
    after = [local_part(value.detach()) for _, value in model.model.named_parameters()]
    return {
        "held": sum(part.untyped_storage().nbytes() for part in parts),
        "left": sum(part.untyped_storage().nbytes() for part in after),
        "devices": {part.device.type for part in parts},
        "trained": model.model.training or any(value.requires_grad for value in model.model.parameters()),
        "passes": len(passes),
        "numbers": len(numbers),
        "padded": model.model.padded,
        "said": said.getvalue().splitlines(),
    }


def run(world: World, tree: dict[str, Any], rows: Any) -> str:
    """Train as the configuration says and return the run's directory."""
    return str(grpo(from_mapping(tree, GRPOConfig), Path.cwd(), world, Live(rows=rows)).directory)


def evaluated(world: World, tree: dict[str, Any]) -> dict[str, float]:
    """Return what `holdfast eval` measures."""
    return evaluate_run(from_mapping(tree, GRPOConfig), Path.cwd(), world)


def leave_and_make_again(world: World, tree: dict[str, Any], rows: Any) -> list[dict[str, float] | None]:
    """Make a step, leave the next for one rank's sake while it is sampled, make it again; return the steps' metrics."""
    config = from_mapping(tree, GRPOConfig)
    with open_rewards(config, Path.cwd(), world) as rewards:
        training = build_policy_run(config, Path.cwd(), world, rewards.score, Live(rows=rows))
        lines = [grpo_step(training)]
        training.run.interrupted = lambda: world.rank == world.size - 1
        with contextlib.suppress(StepAbandoned):
            lines.append(grpo_step(training))
        training.run.interrupted = lambda: False
        lines.append(grpo_step(training))
    return lines
