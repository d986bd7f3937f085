"""Evaluate a policy by the rewards of its completions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.rollout.sampling import mixed
from holdfast.training.evaluate import keep_completions
from holdfast.training.policy.groups import rewards_of, share_facts
from holdfast.training.policy.metrics import episode_metrics, fault_metrics, length_metrics, reward_metrics
from holdfast.training.policy.rollouts import sample
from holdfast.training.policy.run import PolicyEvaluation, PromptSet
from holdfast.training.policy.scoring import score_groups
from holdfast.training.run import StepAbandoned
from holdfast.types import Group


def evaluate_policy(
    policy: PolicyEvaluation, label: str | None = None, interrupted: Callable[[], bool] = lambda: False
) -> dict[str, float]:
    """Return eval/<set>/<metric> for every evaluation set; all ranks call this together.

    Completions are written to completions/<label>.<set>.jsonl; the label is the step by default. `interrupted` is asked
    before every set, the same on all ranks; only finished sets are returned.
    """
    label = label or f"step-{policy.model.state.step:08d}"
    metrics: dict[str, float] = {}
    for prompts in policy.prompt_sets:
        if interrupted():
            break
        try:
            with policy.run.phase("evaluation"):
                set_metrics, groups = _evaluate_set(policy, prompts)
                everyone = policy.run.ranks.gather_to_first([_without_tensors(group) for group in groups])
        except StepAbandoned:
            break
        flat = sorted(
            (group for rank_groups in everyone for group in rank_groups), key=lambda group: group.prompt.prompt_id
        )
        keep_completions(policy.run, label, prompts.name, partial(write_groups, flat))
        metrics |= {f"eval/{prompts.name}/{name}": value for name, value in set_metrics.items()}
    policy.sampler.release(policy.model)
    return metrics


def evaluation_sampling(policy: PolicyEvaluation) -> SamplingConfig:
    """Return how evaluations sample."""
    section = policy.config.evaluation.sampling
    values = section.model_dump()
    if section.max_new_tokens is None:
        values["max_new_tokens"] = policy.config.rollout.max_new_tokens
    return SamplingConfig(**values)


def _evaluate_set(policy: PolicyEvaluation, prompts: PromptSet) -> tuple[dict[str, float], list[Group]]:
    options = policy.config.evaluation
    own_prompts = prompts.prompts
    seeds = {
        prompt.prompt_id: tuple(
            mixed(policy.config.seed, -1, prompt.prompt_id, index) for index in range(options.per_prompt)
        )
        for prompt in own_prompts
    }
    groups = sample(policy, own_prompts, evaluation_sampling(policy), seeds)
    groups, scored = score_groups(policy, groups)
    facts = share_facts(policy.run.ranks, groups, scored)
    faults = fault_metrics(facts)
    reasons = policy.run.ranks.gather(next((item.message for item in scored if item.message), ""))
    if any(faults.values()):
        policy.run.log.messages.append(
            _failed(prompts.name, faults, sum(len(fact.completions) for fact in facts), reasons)
        )
    solved = solved_metrics(rewards_of(facts), options.success)
    metrics = {**reward_metrics(facts), **length_metrics(facts), **episode_metrics(facts), **faults, **solved}
    return metrics, groups


def _failed(name: str, faults: Mapping[str, float], completions: int, reasons: Sequence[str]) -> str:
    """Say how many completions of a set could not be scored, and why the first one could not."""
    counts = ", ".join(f"{kind.removeprefix('reward/')} {count:g}" for kind, count in faults.items() if count)
    return (
        f"warning: evaluation set {name}: scoring failed for {sum(faults.values()):g} of {completions} completions "
        f"({counts}); the first: {next(filter(None, reasons))}"
    )


def solved_metrics(rewards: NDArray[np.float64], success: float) -> dict[str, float]:
    """Return accuracy, avg@k and pass@k of scored completions; what none of them tells is left out.

    A completion that was not scored is neither right nor wrong. A prompt with fewer than k scored completions says
    nothing of pass@k.

    Args:
        rewards: [P, G]; NaN where a completion was not scored.
        success: Reward from which a completion is right.
    """
    scored = np.isfinite(rewards)
    if not scored.any():
        return {}
    counts, right = scored.sum(axis=1), (scored & (np.where(scored, rewards, -math.inf) >= success)).sum(axis=1)
    metrics = {"accuracy": float(right.sum() / counts.sum())}
    size = rewards.shape[1]
    if size == 1:
        return metrics
    metrics[f"avg@{size}"] = float(rewards[scored].mean())
    for k in _powers_of_two(size):
        able = counts >= k
        if able.any():
            metrics[f"pass@{k}"] = pass_at(right[able], counts[able], k)
    return metrics


def _without_tensors(group: Group) -> Group:
    """Return what is written of a group: texts and rewards, and no images."""
    trajectories = tuple(replace(trajectory, model_inputs={}) for trajectory in group.trajectories)
    return Group(replace(group.prompt, row={}, model_inputs={}, positions=None, images=None), trajectories)


def pass_at(right: NDArray[np.int64], counts: NDArray[np.int64], k: int) -> float:
    """Estimate without bias the probability that at least one of k completions solves a prompt.

    Chen et al., "Evaluating large language models trained on code" (arXiv:2107.03374), eq. 1.

    Args:
        right: [P] completions that solve the prompt.
        counts: [P] completions.
        k: At most the least of the counts.
    """
    pairs = zip(right.tolist(), counts.tolist(), strict=True)
    return 1.0 - float(np.mean([math.comb(total - solved, k) / math.comb(total, k) for solved, total in pairs]))


def _powers_of_two(largest: int) -> list[int]:
    return sorted({2**power for power in range(largest.bit_length()) if 2**power <= largest} | {largest})


def write_groups(groups: Sequence[Group], path: Path) -> None:
    """Write one JSON object per completion."""
    # Half an emoji, which UTF-8 cannot hold, is written as JSON's own escape of it.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for group in groups:
            for trajectory in group.trajectories:
                line = {
                    "sample_id": trajectory.sample_id,
                    "prompt": group.prompt.text,
                    "completion": trajectory.completion,
                    "reward": trajectory.reward,
                    "rewards": dict(trajectory.rewards),
                    "finish": trajectory.finish.value,
                }
                if trajectory.episode is not None:
                    line |= {"messages": list(trajectory.episode.messages), "tools": list(trajectory.episode.tools)}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
