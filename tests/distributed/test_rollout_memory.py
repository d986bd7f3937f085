"""How many blocks of keys and values a run has follows from its first start, and is kept."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.errors import ConfigError
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part
from holdfast.recipes.grpo import grpo_step, learn
from holdfast.rollout.engine import Request
from holdfast.training.policy.walk import walk_a_step
from holdfast.training.rollout_memory import _expected_bytes, block_bytes, cache_blocks, refuse_no_room
from holdfast.training.run import TrainState
from tests.distributed.grpo_cases import prompts_of, settings
from tests.tiny import tiny_directory
from tests.training.walk_cases import built


def counted(world: World, tree: dict[str, Any], rows: Any) -> dict[str, Any]:
    """Return what a block takes as counted and as tensors have it, and the blocks that some memory has room for."""
    training = built(world, tree, rows)
    engine: Any = training.evaluation.sampler.engine
    training.continued()
    training.evaluation.sampler.publish(training.model)
    engine.submit([], SamplingConfig(max_new_tokens=4))
    with torch.no_grad(), engine.decoding(None) as decoding:
        decoding.submit([Request(0, np.arange(2, 10), (1,))])
        decoding.advance()
        cache = decoding.on_device.cache
        taken = sum(tensor[0].nbytes for pair in cache.pairs.values() for tensor in pair)
    one = block_bytes(training.model)

    def blocks(free: int) -> int | str:
        try:
            refuse_no_room(training.model, 48, free)
            return cache_blocks(training.model, 50, 48, free)
        except ConfigError as error:
            return str(error)

    return {"counted": one, "taken": taken, "at the start": training.model.state.cache_blocks,
            "free": [blocks(2 * one * count) for count in (10**6, 100, 5, 4, 2, -1)]}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mixtral"])
def test_blocks_are_those_of_all_rows_at_their_longest_or_half_of_what_is_free(
    kind: str, pools: Any, tmp_path: Path
) -> None:
    # 38 tokens before a completion, 10 of it, and two by which steps run ahead fill four blocks; one more is a copy.
    tree = settings(str(tiny_directory(tmp_path, kind)), rollout={"rows": 50})

    (found,) = pools(1).run(counted, tree, prompts_of(8))

    assert found["counted"] == found["taken"]
    assert found["at the start"] == 5 * 50
    assert found["free"][:4] == [5 * 50, 100, 5, 5], "one row may take more than half"
    for refused, has in zip(found["free"][4:], ("has", "lacks"), strict=True):
        assert refused.startswith("rollout: keys and values of one completion take ")
        assert f"have 48 tokens (data.max_length), and rank 0 {has} " in refused


def expected(world: World, tree: dict[str, Any], rows: Any) -> dict[str, int]:
    """Return what is counted on beside what is there: of a training run, of a policy alone, of a run with state."""
    training = built(world, tree, rows)
    model = training.model
    before = {"trains": _expected_bytes(model, trains=True)}
    before["alone"] = _expected_bytes(model, trains=False)
    assert grpo_step(training) is not None
    state = [value for values in model.optimizer.state.values() for value in values.values() if value.ndim]
    return before | {
        "has state": _expected_bytes(model, trains=True),
        "state": sum(local_part(value).nbytes for value in state),
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_state_of_an_optimizer_is_counted_on_where_there_will_be_one_and_is_none(
    ranks: int, pools: Any, tmp_path: Path
) -> None:
    tree = settings(str(tiny_directory(tmp_path, "llama")))
    tree["optim"] = {"kind": "adamw", "lr": 1e-3}

    for found in pools(ranks).run(expected, tree, prompts_of(8)):
        assert found["trains"] - found["alone"] == found["state"] > 0
        assert found["has state"] == found["alone"]


CRITIC = {"advantage": {"kind": "gae"}, "critic": {"optim": {"kind": "adamw", "lr": 1e-2}}}


def places_of_a_run(world: World, tree: dict[str, Any], rows: Any) -> dict[str, Any]:
    """Return in which order models get their places and rollouts their room, and what else is counted on."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        training = built(world, tree, rows, walks=False)
    lines = [line.partition(":")[0] for line in printed.getvalue().splitlines()]
    model, critic = training.model, training.critic
    assert critic is not None
    counted = [_expected_bytes(model, trains=True, others=others) for others in ([critic], [])]
    walk_a_step(training, learn)
    assert grpo_step(training) is not None
    state = [value for values in critic.optimizer.state.values() for value in values.values() if value.ndim]
    return {
        "order": [line for line in lines if line in {"reference policy", "critic", "rollouts"}],
        "critic": counted[0] - counted[1],
        "state": sum(local_part(value).nbytes for value in state),
    }


def test_rollouts_get_their_room_when_all_models_of_a_run_are_in_their_places(pools: Any, tmp_path: Path) -> None:
    tree = settings(str(tiny_directory(tmp_path, "llama")), kl={"coefficient": 0.1}, **CRITIC)

    first, other = pools(2).run(places_of_a_run, tree, prompts_of(8))

    assert first["order"] == ["reference policy", "critic", "rollouts"]
    for found in (first, other):
        assert found["critic"] == found["state"] > 0


def continued(world: World, tree: dict[str, Any], rows: Any, saved: int, room: int | None) -> tuple[int, int, str]:
    """Return the blocks of a run that is continued with so many: of its engine, of its state, and what is said of it.

    Args:
        world, tree, rows: Of a run.
        saved: Blocks that its checkpoint has.
        room: Blocks that there is memory for; None for what there is here.
    """
    training = built(world, tree, rows)
    training.model.state = TrainState(cache_blocks=saved)
    training.evaluation.sampler.published = None
    engine: Any = training.evaluation.sampler.engine
    engine.block_room = room or engine.block_room
    printed = io.StringIO()
    with redirect_stdout(printed):
        training.continued()  # as `fit` does once it has a checkpoint's counters
        assert grpo_step(training) is not None
    said = [line for line in printed.getvalue().splitlines() if "blocks of keys" in line or "have room for" in line]
    return engine.block_limit, training.model.state.cache_blocks, "\n".join(said)


@pytest.mark.parametrize(
    ("saved", "room", "blocks", "said"),
    [
        (37, None, 37, "rollouts: the run keeps the 37 blocks of keys and values that it began with, though it could "
                       "have 250 now"),
        (0, None, 250, ""),
        (300, None, 300, ""),
        (300, 270, 270, "rollouts: the run had 300 blocks of keys and values, and there is room for 270 now"),
    ],
    ids=["saved", "of a version that saved none", "of more rows", "more than there is room for"],
)  # fmt: skip
def test_a_run_that_is_continued_has_as_many_blocks_as_before_if_there_is_room(
    saved: int, room: int | None, blocks: int, said: str, pools: Any, tmp_path: Path
) -> None:
    tree = settings(str(tiny_directory(tmp_path, "llama")), rollout={"rows": 50})

    found = pools(2).run(continued, tree, prompts_of(8), saved, room)

    assert [limits for *limits, _ in found] == [[blocks, blocks]] * 2
    assert found[0][2].startswith(said) and bool(found[0][2]) == bool(said)
    assert not found[1][2], "the first rank speaks for all"
