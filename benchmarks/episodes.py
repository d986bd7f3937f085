"""What turns cost: the loop per turn, and a step of episodes over one of single answers.

    python benchmarks/episodes.py [--rounds 9]

One process. Environments are real processes, whose CPU is not counted. `loop`: CPU of handing out and taking back turns
that cost nothing to sample. `step`: a step of episodes of 4 turns over a step of single answers that has as many
tokens, of which as many are trained; steps alternate, and the median of the rounds' ratios is compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from measure import heading

LOOP_LIMIT, STEP_LIMIT = 2.0, 1.15
"""Milliseconds of CPU per turn; ratio of CPU seconds."""
TURNS, TURN_TOKENS = 4, 16
WORLD = """
from holdfast.environments.base import Observation
class World:
    replayable = True
    def begin(self, row):
        self.lasts = row["turns"]
    def step(self, turn):
        return Observation("again", 0.1, turn.number + 1 >= self.lasts)
"""
MODEL = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip


class Talker:
    """An engine whose turns cost nothing; it counts what the loop costs."""

    def __init__(self) -> None:
        self.seconds, self.turns = 0.0, 0

    def update_weights(self, tensors: Any, version: int) -> None: ...

    def sleep(self) -> bool:
        return False

    def close(self) -> None: ...

    def converse(self, source: Any, sampling: Any, interrupted: Any = None) -> None:  # noqa: ARG002 - the protocol's
        from holdfast.rollout.engine import Sampled
        from holdfast.types import Finish

        said, logprobs = np.array([9] * TURN_TOKENS, np.int64), np.full(TURN_TOKENS, -1.0, np.float32)
        while True:
            began = time.process_time()
            requests = source.ready(wait=True)
            self.seconds += time.process_time() - began
            if not requests:
                return
            sampled = [
                Sampled(request.request_id, place, said, logprobs, Finish.LENGTH, 0)
                for request in requests
                for place in range(len(request.seeds))
            ]
            self.turns += len(sampled)
            began = time.process_time()
            source.finished(sampled)
            self.seconds += time.process_time() - began


def opened(
    stack: ExitStack,
    world: Any,
    folder: Path,
    turns: Sequence[int],
    *,
    prompt: str = "say=",
    **sections: Any,
) -> Any:
    """Return a policy's run; with turns, its rows are episodes of so many, as long as may be."""
    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.grpo import GRPOConfig
    from holdfast.rewards.base import Scored
    from holdfast.rollout.sampling import Stops
    from holdfast.training.policy.build import build_policy_run
    from holdfast.training.policy.episodes import open_environments
    from holdfast.training.setup.begin import Live

    (folder / "world.py").write_text(WORLD)
    tree: dict[str, Any] = {
        "steps": 1000,
        "run": {"dir": tempfile.mkdtemp()},
        "model": {"config": MODEL, "tokenizer": "builtin:characters"},
        "data": {"path": "rows", "batch_size": 8, "max_length": 1000},
        "rollout": {"group_size": 8, "max_new_tokens": TURN_TOKENS, "rows": 64},
        "groups": {"truncated": "keep"},
        "reward": "exact",
        "launch": {"device": "cpu"},
        "metrics": {"progress": "off"},
    }
    if turns:
        tree["environment"] = {"path": "world.py:World", "max_turns": max(turns), "on_cut": "continue"}
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    rows = [{"prompt": prompt, "answer": "a", "turns": count} for count in turns or [1]] * 64
    config = from_mapping(tree, GRPOConfig)

    def score(samples: Sequence[Any]) -> list[Scored]:
        return [Scored(float(index % 2), {"exact": float(index % 2)}) for index, _ in enumerate(samples)]

    environments = stack.enter_context(open_environments(config, folder, world))
    run = build_policy_run(config, folder, world, score, Live(rows=rows), environments=environments)
    engine: Any = run.evaluation.sampler.engine
    engine._stops = Stops(frozenset())
    return run


def loop(world: Any, folder: Path) -> float:
    """Return milliseconds of CPU per turn."""
    from holdfast.recipes.grpo import next_rollout

    with ExitStack() as stack:
        run = opened(stack, world, folder, [8])
        run.evaluation.sampler.engine = talker = Talker()
        next_rollout(run)
        talker.seconds, talker.turns = 0.0, 0
        for _ in range(3):
            next_rollout(run)
        assert talker.turns == 3 * 64 * 8
        return 1000 * talker.seconds / talker.turns


def step(world: Any, folder: Path, rounds: int) -> list[float]:
    """Return the ratios of steps of episodes to steps of single answers."""
    with ExitStack() as stack:
        episodes = opened(stack, world, folder, [TURNS])
        _, size, trained = one(episodes)
        longer = {"max_new_tokens": TURNS * TURN_TOKENS}
        single = opened(stack, world, folder, [], prompt="a" * (round(size) - trained - 2), rollout=longer)
        ratios = []
        for number in range(rounds + 1):
            (first, *tokens), (second, *likewise) = one(episodes), one(single)
            assert trained == tokens[1] == likewise[1]
            assert abs(tokens[0] - likewise[0]) <= 2, (tokens, likewise)
            if number:  # the first warms up
                ratios.append(first / second)
    return ratios


def one(run: Any) -> tuple[float, float, int]:
    """Make a step; return its CPU seconds, the mean of tokens of a sequence, and the trained tokens of each.

    A turn is cut, so the template ends it, unless its last token happened to be the end: sizes differ by some tokens.
    """
    from holdfast.recipes.grpo import learn, next_rollout

    began = time.process_time()
    rollout = next_rollout(run)
    assert rollout is not None
    learn(run, rollout)
    seconds = time.process_time() - began
    trajectories = [trajectory for group in rollout.groups for trajectory in group.trajectories]
    (trained,) = {int(trajectory.loss_mask.sum()) for trajectory in trajectories}
    return seconds, statistics.mean(trajectory.tokens.size for trajectory in trajectories), trained


def main() -> None:
    import torch

    from holdfast.config.sections.launch import LaunchConfig
    from holdfast.parallel.mesh import joined_world

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with joined_world(LaunchConfig(device="cpu")) as world, tempfile.TemporaryDirectory() as name:
        milliseconds = loop(world, Path(name))
        ratios = step(world, Path(name), rounds)
    print(heading("transformers"))
    found = (
        (milliseconds <= LOOP_LIMIT, f"loop: {milliseconds:.3f} ms of CPU per turn (target <= {LOOP_LIMIT:g})"),
        (
            statistics.median(ratios) <= STEP_LIMIT,
            f"step: {statistics.median(ratios):.3f} of a step of single answers, median of {len(ratios)} rounds from "
            f"{min(ratios):.3f} to {max(ratios):.3f} (target <= {STEP_LIMIT:g})",
        ),
    )
    for holds, line in found:
        print(f"{'ok  ' if holds else 'MISS'}  {line}")
    sys.exit(not all(holds for holds, _ in found))


if __name__ == "__main__":
    main()
