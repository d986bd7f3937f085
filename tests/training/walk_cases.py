"""What rank pools run for the tests of the walk before a policy's first step."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError
from holdfast.models.layers.attention import packed_attention
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.recipes.grpo import grpo_step, learn
from holdfast.rewards.base import Sample, Scored
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.training.policy.build import build_policy_run
from holdfast.training.policy.run import PolicyTraining
from holdfast.training.policy.walk import walk_a_step
from holdfast.training.setup.begin import Live
from tests.training.holdings import files, holdings


def built(
    world: World,
    tree: dict[str, Any],
    rows: Any,
    plant: Callable[[PolicyTraining], None] = lambda _: None,
    *,
    walks: bool = True,
) -> PolicyTraining:
    """Build a run, plant a fault in it, and walk through a step; its reward is the share of even tokens."""

    def score(samples: list[Sample]) -> list[Scored]:
        shares = [
            sum(token % 2 == 0 for token in each.completion_tokens) / len(each.completion_tokens) for each in samples
        ]
        return [Scored(share, {"exact": share}) for share in shares]

    training = build_policy_run(from_mapping(tree, GRPOConfig), Path.cwd(), world, score, Live(rows=rows))  # type: ignore[arg-type]
    plant(training)
    if walks:
        walk_a_step(training, learn)
    return training


def bits(training: PolicyTraining) -> dict[str, bytes]:
    """Return everything of a run, and of its critic, that a step changes."""
    found = {"draws": torch.get_rng_state().numpy().tobytes(), "state": repr(training.model.state.as_plain()).encode()}
    for name, each in {"": training.model, **training.companions}.items():
        for parameter, value in sharded_parameters(each.module).items():
            found[f"{name}/{parameter}"] = local_part(value.detach()).contiguous().view(torch.uint8).numpy().tobytes()
        for number, state in enumerate(each.optimizer.state.values()):
            for key, value in state.items():
                kept = local_part(value).contiguous() if isinstance(value, Tensor) else value
                found[f"{name}/{number}/{key}"] = repr(kept.tolist() if isinstance(kept, Tensor) else kept).encode()
        for parameter, average in ({} if each.averages is None else each.averages.tensors).items():
            found[f"{name}/average/{parameter}"] = repr(local_part(average).tolist()).encode()
    return found


NOT_OF_THE_RUN = (
    "run.evaluation.sampler.",  # the engine's copy of the weights, which the next rollout publishes anew
    "run.evaluation.model.run.log.peaks.",  # the most memory that was seen, and
    "run.evaluation.model.run.log.clock.",  # where time went
    "run.evaluation.model.run.world.failure.",  # the phase that this rank is in
    "run.companions.critic.run.log.peaks.",
    "run.companions.critic.run.log.clock.",
)


def first_step(world: World, tree: dict[str, Any], rows: Any, walks: int) -> dict[str, Any]:
    """Walk, and make the first step; return what changed in the walks, and what there was after the step.

    Args:
        world: Of this rank.
        tree, rows: Of the run.
        walks: How often to walk.
    """
    training = built(world, tree, rows, walks=False)
    before = holdings(training), files(Path(tree["run"]["dir"]))
    for _ in range(walks):
        walk_a_step(training, learn)
    walked = holdings(training), files(Path(tree["run"]["dir"]))
    metrics = grpo_step(training)
    assert metrics is not None
    return {
        "changed": [
            name
            for old, new in zip(before, walked, strict=True)
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name) and not name.startswith(NOT_OF_THE_RUN)
        ],
        "looked at": len(before[0]),
        "after": bits(training),
        "loss": (metrics["loss"], metrics["grad_norm"], metrics.get("kl")),
        "said": list(training.run.log.messages),
    }


def walked_with_long_prompts(world: World, tree: dict[str, Any], rows: Any, keeps: bool) -> dict[str, Any]:  # noqa: FBT001 - sent to ranks
    """Walk with a model that decodes long prompts, and make the first step; return what was found and printed.

    Args:
        world: Of this rank.
        tree, rows: Of the run.
        keeps: Rank 1's copy of the model keeps something between passes: the last token of the pass before.
    """

    def plant(training: PolicyTraining) -> None:
        engine = training.evaluation.sampler.engine
        assert isinstance(engine, InProcessEngine) and engine.in_pieces is None
        last: list[Tensor] = []

        def add_what_was_kept(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
            kept = last.pop() if last else 0
            last.append(embedded[:, -1:] if embedded.shape[1] == engine.piece else torch.zeros(()))
            return embedded + kept

        if keeps and world.rank == 1:
            engine._replica.model.get_input_embeddings().register_forward_hook(add_what_was_kept)

    printed = io.StringIO()
    with redirect_stdout(printed):
        training = built(world, tree, rows, plant)
    engine: Any = training.evaluation.sampler.engine
    found, walked = engine.in_pieces, bits(training)
    metrics = grpo_step(training)
    assert metrics is not None
    return {
        "in pieces": found,
        "still": engine.in_pieces,
        "said": [line for line in printed.getvalue().splitlines() if "long prompts" in line],
        "walked": walked,
        "loss": metrics["loss"],
    }


def fail(kind: str) -> None:
    """Fail as code that knows no branches does, as a machine without memory, or with words of our own."""
    if kind == "unknown":
        raise KeyError("branches")
    if kind == "memory":
        torch.empty(2**50)
    raise ConfigError("Branches are switched off.")


def without_branches(world: World, tree: dict[str, Any], rows: Any, kind: str) -> None:
    """Walk with a model whose attention fails where completions share their prompt."""
    training = built(world, tree, rows)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        if any(options["documents"].branches):
            fail(kind)
        return packed_attention(module, query, key, value, mask, **options)

    ALL_ATTENTION_FUNCTIONS.register("no_branches", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("no_branches", lambda *_, **__: None)
    model: Any = training.model.module.language_model
    model.set_attn_implementation("no_branches")
    walk_a_step(training, learn)
