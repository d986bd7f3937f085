"""What rank pools run: a policy's steps with a critic; and the same with plain transformers, a sequence at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.checkpoint.keep import find
from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.models.heads.policy import PolicyModel
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.recipes.grpo import grpo, grpo_step
from holdfast.rewards.base import Sample, Scored
from holdfast.training.policy.build import build_policy_run
from holdfast.training.setup.begin import Live
from tests.distributed.grpo_cases import even_share
from tests.oracle import critic as oracle

GAMMA, LAM, CLIP, LOW, HIGH, BETA = 0.97, 0.8, 0.02, 0.05, 0.05, 0.3


def whole(model: PolicyModel) -> dict[str, Any]:
    return {name: full_tensor(p).double().numpy().copy() for name, p in sharded_parameters(model).items()}


def train(world: World, tree: dict[str, Any], rows: Any, steps: int) -> dict[str, Any]:
    """Train and return metrics, what was sampled, and the parameters of policy and critic, at start and after steps."""
    sampled: list[list[Any]] = []

    def score(samples: Sequence[Sample]) -> list[Scored]:
        mine = [(each.sample_id, tuple(each.prompt_tokens), tuple(each.completion_tokens)) for each in samples]
        values = [even_share(each) for each in samples]
        told = [(*each, value) for each, value in zip(mine, values, strict=True)]
        sampled.append(sorted(item for part in training.run.ranks.gather(told) for item in part))
        return [Scored(value, {"exact": value}) for value in values]

    training = build_policy_run(from_mapping(tree, GRPOConfig), Path.cwd(), world, score, Live(rows=rows))
    assert training.critic is not None
    lines, policies, critics = [], [whole(training.model.module)], [whole(training.critic.module)]
    for _ in range(steps):
        line = grpo_step(training)
        assert line is not None
        assert training.is_whole
        lines.append(line)
        policies.append(whole(training.model.module))
        critics.append(whole(training.critic.module))
    return {
        "lines": lines,
        "sampled": sampled,
        "policies": policies,
        "critics": critics,
        "state": training.model.state.as_plain(),
    }


def live_run(world: World, tree: dict[str, Any], rows: Any) -> str:
    """Run to the end with a reward in this process, and return the directory."""
    live = Live(rows=rows, rewards={"even": even_reward})
    return str(grpo(from_mapping(tree, GRPOConfig), Path.cwd(), world, live).directory)


def even_reward(completion_ids: list[int]) -> float:
    """Return the share of even token ids."""
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)


def saved(directory: str) -> dict[str, Any]:
    """Return every tensor of a run's newest checkpoint."""
    checkpoint = find.one(directory)
    return {key: checkpoint.read(key).double().numpy() for key in checkpoint.manifest.tensors}


def _logprobs(model: Any, item: Any) -> Tensor:
    """Return the log-probabilities of a completion's tokens."""
    tokens = torch.tensor([item[1] + item[2]])
    logits = model(input_ids=tokens).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)[len(item[1]) - 1 :]


def _values(model: Any, item: Any) -> Tensor:
    """Return the critic's number for what stands before each of a completion's tokens."""
    hidden = model.model(input_ids=torch.tensor([item[1] + item[2]])).last_hidden_state[0]
    return (hidden @ model.score.weight.T).squeeze(1)[len(item[1]) - 1 : -1]


def _descend(model: Any, loss: Tensor, lr: float) -> float:
    model.zero_grad()
    loss.backward()
    found = [p for p in model.parameters() if p.grad is not None]
    norm = float(torch.stack([p.grad.square().sum() for p in found]).sum().sqrt())
    with torch.no_grad():
        for parameter in found:
            parameter.sub_(lr * parameter.grad)
    return norm


def by_hand(policy: Any, critic: Any, sampled: list[list[Any]], rates: tuple[float, float]) -> dict[str, Any]:
    """Make PPO's updates: two mini-batches, two passes, the KL (k1) in the reward, advantages whitened over a step."""
    reference = copy.deepcopy(policy)
    value_losses, explained, norms = [], [], []
    for step in sampled:
        with torch.no_grad():
            before = [_logprobs(policy, item) for item in step]
            drift = [old - _logprobs(reference, item) for old, item in zip(before, step, strict=True)]
            values = [_values(critic, item).tolist() for item in step]
        rewards = [(-BETA * kl).tolist() for kl in drift]
        for each, item in zip(rewards, step, strict=True):
            each[-1] += item[3]
        raw = [oracle.gae(r, v, GAMMA, LAM) for r, v in zip(rewards, values, strict=True)]
        returns = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(raw, values, strict=True)]
        advantages = oracle.whiten(raw, 1e-8)
        explained.append(oracle.explained_variance(sum(returns, []), sum(values, [])))
        prompts = sorted({item[0] // 2**20 for item in step})
        halves = [prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]] * 2
        total, count, seen = 0.0, 0, []
        for half in halves:
            members = [n for n, item in enumerate(step) if item[0] // 2**20 in half]
            tokens = sum(len(step[n][2]) for n in members)
            errors = torch.stack([_value_error(critic, step[n], values[n], returns[n]) for n in members]).sum()
            surrogate = torch.stack([_surrogate(policy, step[n], before[n], advantages[n]) for n in members]).sum()
            total, count = total + float(errors.detach()), count + tokens
            seen.append((_descend(critic, errors / tokens, rates[1]), _descend(policy, surrogate / tokens, rates[0])))
        value_losses.append(total / count)
        norms.append(np.mean(seen, axis=0))
    return {
        "value_losses": value_losses,
        "explained": explained,
        "norms": norms,
        "policy": {name: p.detach().numpy().copy() for name, p in policy.named_parameters()},
        "critic": {name: p.detach().numpy().copy() for name, p in critic.named_parameters()},
    }


def _value_error(critic: Any, item: Any, before: list[float], returns: list[float]) -> Tensor:
    old, target = (torch.tensor(each, dtype=torch.float64) for each in (before, returns))
    values = _values(critic, item)
    bounded = torch.minimum(torch.maximum(values, old - CLIP), old + CLIP)
    return torch.maximum((values - target) ** 2, (bounded - target) ** 2).sum() / 2


def _surrogate(policy: Any, item: Any, before: Tensor, advantages: list[float]) -> Tensor:
    ratio, weight = (_logprobs(policy, item) - before).exp(), torch.tensor(advantages, dtype=torch.float64)
    return -torch.minimum(ratio * weight, ratio.clamp(1 - LOW, 1 + HIGH) * weight).sum()
