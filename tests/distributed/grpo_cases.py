"""What rank pools run: a policy's steps with a reward in this process, and what they did to a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.config.load import from_mapping
from holdfast.config.sections.rollout import SamplingConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import RunStopped
from holdfast.models.heads.policy import PolicyModel
from holdfast.parallel.activations import offload_of
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.recipes.grpo import grpo_step, next_rollout
from holdfast.rewards.base import Sample, Scored
from holdfast.rollout.engine import Request, generate
from holdfast.training.policy.build import build_policy_run
from holdfast.training.policy.experience import with_advantages
from holdfast.training.policy.metrics import rollout_metrics
from holdfast.training.policy.reward_columns import check_answers, check_columns
from holdfast.training.policy.rewards import open_rewards
from holdfast.training.rollout_memory import copy_bytes, layout_bytes
from holdfast.training.run import StepAbandoned
from holdfast.training.setup.begin import Live
from tests.memory import most_allocated


def prompts_of(count: int) -> list[dict[str, str]]:
    """Return prompts of uneven lengths."""
    return [{"prompt": "copy " + "abcdefghij"[: 1 + number * 7 % 9] + "=", "answer": "a"} for number in range(count)]


def settings(directory: str, **sections: Any) -> dict[str, Any]:
    """Return a small run's tree; sections are merged over the defaults."""
    tree: dict[str, Any] = {
        "steps": 3,
        "model": {"path": directory, "dtype": "float64"},
        "data": {"path": "rows", "batch_size": 4, "max_length": 48, "shuffle": False},
        "rollout": {"group_size": 4, "max_new_tokens": 10, "show": 0},
        "reward": "exact",
        "optim": {"kind": "sgd", "lr": 0.5, "schedule": "constant", "clip_norm": None},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values if isinstance(values, dict) else values
    return tree


def even_share(sample: Sample) -> float:
    """Return the share of even token ids: a reward that a policy can move, and that any completion has."""
    return sum(token % 2 == 0 for token in sample.completion_tokens) / len(sample.completion_tokens)


def flat(sample: Sample) -> float:  # noqa: ARG001 - a reward
    """Return 1 whatever was said."""
    return 1.0


def even_share_but_first(sample: Sample) -> float | None:
    """Return the same, and None for the first completion of a group."""
    return None if sample.sample_id % 2**20 == 0 else even_share(sample)


def flat_from_the_third_step(sample: Sample) -> float:
    """Return the same for prompts of the first two steps of four prompts each, then 1."""
    return even_share(sample) if sample.sample_id // 2**20 < 8 else 1.0


def even_share_of_one_prompt(sample: Sample) -> float:
    """Return the same for the first prompt, and 1 for all others."""
    return even_share(sample) if sample.sample_id // 2**20 == 0 else 1.0


def even_share_of_odd_prompts(sample: Sample) -> float:
    """Return the same for every second prompt, and 1 for the others."""
    return even_share(sample) if sample.sample_id // 2**20 % 2 else 1.0


REWARDS = {
    "even_share_of_odd_prompts": even_share_of_odd_prompts,
    "even_share_of_one_prompt": even_share_of_one_prompt,
    "flat_from_the_third_step": flat_from_the_third_step,
    "even_share": even_share,
    "flat": flat,
    "even_share_but_first": even_share_but_first,
}


def train(world: World, tree: dict[str, Any], rows: Any, steps: int = 3, reward: str = "even_share") -> dict[str, Any]:
    """Train and return metrics, final parameters, what was sampled, and how often models were called."""
    seen: list[list[tuple[int, tuple[int, ...], tuple[int, ...], str, float | None]]] = []

    def score(samples: Sequence[Sample]) -> list[Scored]:
        values = [REWARDS[reward](sample) for sample in samples]
        mine = [
            (sample.sample_id, tuple(sample.prompt_tokens), tuple(sample.completion_tokens), sample.finish, value)
            for sample, value in zip(samples, values, strict=True)
        ]
        seen.append(sorted(item for part in training.run.ranks.gather(mine) for item in part))
        return [Scored(value, {"exact": value}, drop="sample" if value is None else None) for value in values]

    training = build_policy_run(from_mapping(tree, GRPOConfig), Path.cwd(), world, score, Live(rows=rows))
    calls = {"policy": 0, "reference": 0}
    _count(training.model.module, calls, "policy")
    if isinstance(training.reference, PolicyModel):
        _count(training.reference, calls, "reference")
    lines, forwards = [], []
    for _ in range(steps):
        before = dict(calls)
        metrics = grpo_step(training)
        assert metrics is not None
        lines.append(metrics)
        forwards.append({name: calls[name] - before[name] for name in calls})
    final = {
        name: full_tensor(p).double().numpy().copy() for name, p in sharded_parameters(training.model.module).items()
    }
    return {
        "lines": lines,
        "parameters": final,
        "sampled": seen,
        "forwards": forwards,
        "state": training.model.state.as_plain(),
        "offloads": offload_of(training.model.module) is not None,
    }


def train_and_publish_averages(world: World, tree: dict[str, Any], rows: Any, *, between: bool) -> list[Any]:
    """Train, and between steps give the engine the averages, as an evaluation of them does; return what was sampled."""
    seen: list[Any] = []

    def score(samples: Sequence[Sample]) -> list[Scored]:
        seen.append([tuple(sample.completion_tokens) for sample in samples])
        return [Scored(value := even_share(sample), {"exact": value}) for sample in samples]

    training = build_policy_run(from_mapping(tree, GRPOConfig), Path.cwd(), world, score, Live(rows=rows))
    for _ in range(4):
        assert grpo_step(training) is not None
        if between:
            with training.model.averaged():
                training.evaluation.sampler.publish(training.model)
    return seen


def remax(world: World, tree: dict[str, Any], rows: Any, dropping: str | None) -> dict[str, Any]:
    """Sample and compare one step in which the greedy completion of the prompt with id 1 takes too long.

    Args:
        world: The ranks.
        tree: The run's.
        rows: Its prompts.
        dropping: What the declared policy drops for it; None: its reward is 0.
    """

    def score(samples: Sequence[Sample]) -> list[Scored]:
        prompts = [sample.sample_id // 2**20 for sample in samples]
        found = []
        for sample, prompt in zip(samples, prompts, strict=True):
            if prompt == 1 and prompts.count(prompt) == 1:  # greedy: one of its prompt
                found.append(Scored(None if dropping else 0.0, {}, fault="timeout", drop=dropping, message="too long"))
            else:
                found.append(Scored(even_share(sample), {"exact": even_share(sample)}))
        return found

    training = build_policy_run(from_mapping(tree, GRPOConfig), Path.cwd(), world, score, Live(rows=rows))
    sampled = next_rollout(training)
    assert sampled is not None
    rollout = with_advantages(training, sampled)
    return {
        "metrics": rollout_metrics(rollout, 1e-6),
        "said": training.run.log.messages,
        "greedy": {fact.prompt_id: fact.greedy for fact in rollout.facts},
        "advantages": {
            trajectory.sample_id: (trajectory.reward, float(trajectory.advantages[-1]))
            for group in rollout.groups
            for trajectory in group.trajectories
            if trajectory.advantages is not None
        },
    }


def sample_of_no_numbers(world: World, tree: dict[str, Any], rows: Any) -> str:
    """Put a NaN into one weight of the head, and return what sampling says."""
    training = build_policy_run(from_mapping(tree, GRPOConfig), Path.cwd(), world, lambda _: [], Live(rows=rows))
    with torch.no_grad():
        local_part(sharded_parameters(training.model.module)["model.norm.weight"])[:1] = math.nan
    with pytest.raises(RunStopped) as caught:
        next_rollout(training)
    return str(caught.value)


def leave_and_make_again(world: World, tree: dict[str, Any], rows: Any) -> dict[str, Any]:
    """Make a step, leave the next while it is sampled, make it again; return what was sampled and where it stood."""
    seen: list[Any] = []

    def score(samples: Sequence[Sample]) -> list[Scored]:
        mine = [(sample.sample_id, tuple(sample.completion_tokens)) for sample in samples]
        seen.append(sorted(item for part in training.run.ranks.gather(mine) for item in part))
        return [Scored(even_share(sample), {"exact": even_share(sample)}) for sample in samples]

    training = build_policy_run(from_mapping(tree, GRPOConfig), Path.cwd(), world, score, Live(rows=rows))
    grpo_step(training)
    before = training.stream.state()
    training.run.interrupted = lambda: world.rank == world.size - 1  # one rank alone hears of it
    left = False
    try:
        grpo_step(training)
    except StepAbandoned:
        left = True
    training.run.interrupted = lambda: False
    state = {
        "left": left,
        "stream": training.stream.state() == before,
        "step": training.model.state.step,
        "scored": len(seen),
    }
    grpo_step(training)
    return state | {"sampled": seen}


def _count(model: PolicyModel, calls: dict[str, int], name: str) -> None:
    def add(*_: Any) -> None:
        calls[name] += 1

    model.register_forward_pre_hook(add)


def by_hand(
    model: Any,
    sampled: list[list[Any]],
    lr: float,
    temperature: float = 1.0,
    shown: Callable[[int, Sequence[int]], dict[str, Any]] = lambda _, tokens: {"input_ids": torch.tensor([tokens])},
) -> dict[str, Any]:
    """Make the same updates with plain transformers: GRPO's loss at ratio 1, averaged over tokens.

    Args:
        model: A transformers model in float64.
        sampled: Of each step (sample id, prompt, completion, finish, reward), as `train` returns them.
        lr: Of plain gradient descent.
        temperature: That tokens were sampled at.
        shown: (prompt id, tokens) -> what the model is called with.
    """
    losses, norms = [], []
    for step in sampled:
        groups: dict[int, list[Any]] = {}
        for item in step:
            groups.setdefault(item[0] // 2**20, []).append(item)
        total: Any = 0.0
        tokens = sum(len(item[2]) for item in step)
        for members in groups.values():
            rewards = torch.tensor([item[4] for item in members], dtype=torch.float64)
            spread = rewards.std()
            for item, reward in zip(members, rewards, strict=True):
                advantage = 0.0 if spread == 0 else float((reward - rewards.mean()) / (spread + 1e-6))
                whole = torch.tensor([item[1] + item[2]])
                logits = model(**shown(item[0] // 2**20, item[1] + item[2])).logits[0, :-1] / temperature
                chosen = logits.log_softmax(-1).gather(1, whole[0, 1:, None]).squeeze(1)[len(item[1]) - 1 :]
                total = total - ((chosen - chosen.detach()).exp() * advantage).sum()
        loss = total / tokens
        model.zero_grad()
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        losses.append(float(loss.detach()))
        norms.append(float(torch.stack([(g**2).sum() for g in found.values()]).sum().sqrt()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in found:
                    parameter.sub_(lr * found[name])
    return {
        "losses": losses,
        "norms": norms,
        "parameters": {name: p.detach().numpy().copy() for name, p in model.named_parameters()},
    }


def memory_of_sampling(world: World, tree: dict[str, Any], rows: Any) -> tuple[int, int]:
    """Return the most bytes that refreshing and decoding took at once, and what the check before step 1 counts."""
    training = build_policy_run(from_mapping(tree, GRPOConfig), Path.cwd(), world, lambda _: [], Live(rows=rows))
    request = Request(0, np.arange(2, 10), (1,))

    def sample() -> None:
        training.evaluation.sampler.publish(training.model)
        generate(training.evaluation.sampler.engine, [request], SamplingConfig(max_new_tokens=4))
        training.evaluation.sampler.release(training.model)

    most = most_allocated(sample)
    return most, copy_bytes(training.model) + layout_bytes(training.model)


def columns_of_a_mixture(world: World, tree: dict[str, Any]) -> list[str]:
    """Look for the columns that a reward needs in the first batch; return what the run says."""
    training = build_policy_run(from_mapping(tree, GRPOConfig), Path.cwd(), world, lambda _: [], None)
    check_columns(training.evaluation, {"exact": ["answer"]})
    return [line for line in training.run.log.messages if "column" in line]


def answers_of_a_batch(world: World, tree: dict[str, Any]) -> list[str]:
    """Look at the answers of the first batch by the rewards of the configuration; return what the run says of them."""
    config = from_mapping(tree, GRPOConfig)
    with open_rewards(config, Path.cwd(), world) as rewards:
        training = build_policy_run(config, Path.cwd(), world, rewards.score, None)
        check_answers(training.evaluation, rewards.answers, rewards.unreadable)
    return [line for line in training.run.log.messages if "cannot read" in line]
