"""What rank pools run: a policy's steps on episodes, and the same updates by plain transformers."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import RunStopped
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.recipes.grpo import grpo_step, learn, next_rollout
from holdfast.rewards.base import Sample, Scored
from holdfast.training.policy.build import build_policy_run
from holdfast.training.policy.episodes import check_environments, open_environments
from holdfast.training.policy.experience import samples_of
from holdfast.training.setup.begin import Live

Row = tuple[int, list[int], list[bool], float, int]
"""Sample id, tokens and mask of an episode, or of a sample of it, as one row; its reward, its turns."""


def train_on_episodes(world: World, tree: dict[str, Any], rows: Any, base: str, steps: int) -> dict[str, Any]:
    """Train and return metrics, final parameters, and the rows of all ranks' episodes, step by step."""
    config = from_mapping(tree, GRPOConfig)
    lines: list[dict[str, float]] = []
    episodes: list[list[Row]] = []
    with open_environments(config, Path(base), world) as environments:
        training = build_policy_run(config, Path(base), world, _score, Live(rows=rows), environments=environments)
        for _ in range(steps):
            sampled = next_rollout(training)
            assert sampled is not None
            rollout, metrics = learn(training, sampled)
            lines.append(metrics)
            episodes.append(sorted(row for part in training.run.ranks.gather(_rows(rollout.groups)) for row in part))
    final = {
        name: full_tensor(p).double().numpy().copy() for name, p in sharded_parameters(training.model.module).items()
    }
    return {"lines": lines, "parameters": final, "episodes": episodes}


def told_in_steps(world: World, tree: dict[str, Any], rows: Any, base: str, steps: int) -> list[list[str]]:
    """Return the messages that a run has for the screen after each step."""
    config = from_mapping(tree, GRPOConfig)
    told = []
    with open_environments(config, Path(base), world) as environments:
        training = build_policy_run(config, Path(base), world, _score, Live(rows=rows), environments=environments)
        for _ in range(steps):
            training.run.log.messages.clear()
            assert grpo_step(training) is not None
            told.append(list(training.run.log.messages))
    return told


def try_rows(world: World, tree: dict[str, Any], rows: Any, base: str, is_stopped: bool) -> float:
    """Begin environments with rows of the first batch, as before step 1, and return the seconds that it took."""
    config = from_mapping(tree, GRPOConfig)
    with open_environments(config, Path(base), world) as environments:
        training = build_policy_run(config, Path(base), world, _score, Live(rows=rows), environments=environments)
        training.run.interrupted = lambda: is_stopped
        began = time.monotonic()
        check_environments(training.evaluation)
        return time.monotonic() - began


def sample_with_nan(world: World, tree: dict[str, Any], rows: Any, base: str) -> str:
    """Sample episodes from a policy whose weights are NaN, and return what the run says."""
    config = from_mapping(tree, GRPOConfig)
    with open_environments(config, Path(base), world) as environments:
        training = build_policy_run(config, Path(base), world, _score, Live(rows=rows), environments=environments)
        with torch.no_grad():
            for parameter in training.model.module.parameters():
                parameter.fill_(float("nan"))
        with pytest.raises(RunStopped) as error:
            next_rollout(training)
    return str(error.value)


def _score(samples: Sequence[Sample]) -> list[Scored]:
    """Score by the share of even tokens, which any policy can move."""
    shares = [sum(token % 2 == 0 for token in s.completion_tokens) / len(s.completion_tokens) for s in samples]
    return [Scored(share, {"exact": share}) for share in shares]


def _rows(groups: Sequence[Any]) -> list[Row]:
    return [
        (t.sample_id, s.tokens.tolist(), s.loss_mask.tolist(), float(t.reward), t.episode.turns)
        for group in groups
        for t in group.trajectories
        if t.reward is not None  # of an environment that failed
        for s in samples_of(t)
    ]


def update_by_hand(
    model: Any, episodes: list[list[Row]], lr: float, *, kl: float = 0.0, entropy: float = 0.0
) -> dict[str, Any]:
    """Make the same updates with a plain transformers model in float64, each episode a row of its own.

    Args:
        model: Before the first update, which is the reference too.
        episodes: By step.
        lr: Of plain gradient descent.
        kl: Weight of the estimator k3 in the loss.
        entropy: Weight of the entropy in the loss.
    """
    reference = copy.deepcopy(model)
    losses, norms, means = [], [], []
    for step in episodes:
        total: Any = 0.0
        chosen_means: Any = torch.zeros(3, dtype=torch.float64)
        for sample_id, tokens, mask, reward, _ in step:
            rewards = {row[0]: row[3] for row in step if row[0] // 2**20 == sample_id // 2**20}
            group = torch.tensor(list(rewards.values()), dtype=torch.float64)
            is_flat = len(set(rewards.values())) == 1
            advantage = 0.0 if is_flat else float((reward - group.mean()) / (group.std() + 1e-6))
            row, is_chosen = torch.tensor([tokens]), torch.tensor(mask[1:])
            distribution = model(input_ids=row).logits[0, :-1].log_softmax(-1)
            chosen = distribution.gather(1, row[0, 1:, None]).squeeze(1)
            with torch.no_grad():
                before = reference(input_ids=row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None]).squeeze(1)
            ratio = (chosen - chosen.detach()).exp()
            k3 = (before - chosen).exp() - (before - chosen) - 1
            entropies = -(distribution.exp() * distribution).sum(-1)
            total = total + (kl * k3 - entropy * entropies - ratio * advantage)[is_chosen].sum()
            chosen_means += torch.stack([values[is_chosen].sum() for values in (entropies, k3, -chosen)]).detach()
        count = sum(sum(row[2]) for row in step)
        if not count:  # nothing is trained, and nothing moves
            losses.append(0.0)
            norms.append(0.0)
            continue
        means.append((chosen_means / count).tolist())
        loss = total / count
        model.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack([(gradient**2).sum() for gradient in gradients]).sum().sqrt()))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(lr * parameter.grad)
    final = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "means": means, "parameters": final}


AGENT = """
import json, urllib.request
def agent(row, base_url, api_key):
    def ask(*contents):
        messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": c} for n, c in enumerate(contents)]
        request = urllib.request.Request(base_url + "/chat/completions", json.dumps({"messages": messages}).encode())
        request.add_header("Authorization", f"Bearer {api_key}")
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    opening = row["prompt"][0]["content"]
"""
"""The beginning of an agent: `ask` says the messages so far and returns the answer; `opening` is the prompt."""
