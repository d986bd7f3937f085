"""Keep what a step was made of, so that one process can make it again, and show some of it to people.

rollouts/step-N.jsonl.gz holds a line about the step and one for each of its groups: everything between sampling and
the update, and nothing that follows from the weights. samples.jsonl holds the completions of some steps as text, and
the tokens of a few of them.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError
from holdfast.features.forensics.record_files import DAMAGES, check_recorded, record_lines, record_path
from holdfast.training.policy.groups import CompletionSummary, GroupFact
from holdfast.training.policy.rollouts import Rollout
from holdfast.training.policy.run import PolicyTraining
from holdfast.types import EpisodeSummary, Finish, Group, Prompt, Trajectory

REPLAYED_METRICS = ("loss", "grad_norm")
"""What a replay must reproduce."""


@dataclass(frozen=True)
class Record:
    """Everything between sampling and the update of one step, from which the step can be repeated."""

    step: int
    """Counted from 1, as in metrics.jsonl."""
    base: Path
    """Directory of the run's YAML."""
    metrics: Mapping[str, float]
    rollout: Rollout
    compute_dtype: str
    """Dtype in which the run computed."""


def record(training: PolicyTraining, rollout: Rollout, metrics: Mapping[str, float]) -> None:
    """Write the step that was just made; all ranks call this together."""
    left_out = [group_line(group) | {"left_out": True} for group in rollout.left_out]
    everyone = training.run.ranks.gather_to_first([*(group_line(group) for group in rollout.groups), *left_out])
    if not training.run.world.is_first:
        return
    lines = {line["prompt_id"]: line for rank_lines in everyone for line in rank_lines}
    head = {
        "step": training.model.state.step,
        "base": str(training.run.base),
        "metrics": {name: metrics[name] for name in REPLAYED_METRICS},
        "compute_dtype": training.model.plan.compute_dtype,
    }
    path = record_path(training.run.directory, training.model.state.step)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=3) as file:
        file.write(json.dumps(head) + "\n")
        for fact in rollout.facts:
            file.write(json.dumps(lines[fact.prompt_id] | {"facts": _fact_lines(fact)}) + "\n")
        for line in lines.values():
            if "left_out" in line:
                file.write(json.dumps(line) + "\n")
    temporary.replace(path)


def group_line(group: Group) -> dict[str, Any]:
    """Return what is kept of a group, but for its rewards."""
    return {
        "prompt_id": group.prompt.prompt_id,
        "prompt": group.prompt.tokens.tolist(),
        "source": group.prompt.source,
        "completions": [
            {
                "sample_id": trajectory.sample_id,
                "seed": trajectory.seed,
                "temperature": trajectory.temperature,
                "tokens": trajectory.tokens[group.prompt.tokens.size :].tolist(),
                "trained": bool(trajectory.loss_mask.any()),
                "sampler_logprobs": [float(value) for value in trajectory.sampler_logprobs[group.prompt.tokens.size :]],
                "finish": trajectory.finish.value,
                "versions": _segments(trajectory.weights_versions[group.prompt.tokens.size :]),
                "text": trajectory.completion,
                **({} if trajectory.episode is None else {"episode": asdict(trajectory.episode)}),
            }
            for trajectory in group.trajectories
        ],
    }


def _segments(versions: NDArray[np.int32]) -> list[list[int]]:
    """Return [first token, weights version] of each part of a completion; -1 where the policy did not choose."""
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()] if versions.size else []
    return [[start, int(versions[start])] for start in starts]


def _fact_lines(fact: GroupFact) -> dict[str, Any]:
    return {
        "greedy": None if math.isnan(fact.greedy) else fact.greedy,
        "completions": [
            {
                "reward": None if math.isnan(completion.reward) else completion.reward,
                "parts": dict(completion.parts),
                "finish": completion.finish.value,
            }
            for completion in fact.completions
        ],
    }


def read_record(directory: Path, step: int) -> Record:
    """Read what `record` wrote.

    Raises:
        ConfigError: The step was not kept, and the message names those that were; or what was kept is damaged.
    """
    check_recorded(directory, step)
    path = record_path(directory, step)
    try:
        head, *lines = record_lines(path)
        trained = [_group(line) for line in lines if "left_out" not in line]
        groups, facts = zip(*trained, strict=True) if trained else ((), ())
        rollout = Rollout(groups, facts, facts, {}, ())
        return Record(step, Path(head["base"]), head["metrics"], rollout, head["compute_dtype"])
    except DAMAGES as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {error}), so step {step} cannot be made again."
        ) from error


def _group(line: Mapping[str, Any]) -> tuple[Group, GroupFact]:
    tokens = np.asarray(line["prompt"], np.int64)
    prompt = Prompt(line["prompt_id"], tokens, "", {}, line["source"])
    facts = line["facts"]["completions"]
    trajectories = tuple(
        _scored_trajectory(prompt, completion, fact)
        for completion, fact in zip(line["completions"], facts, strict=True)
    )
    completions = tuple(
        CompletionSummary(
            _number(fact["reward"]),
            fact["parts"],
            trajectory.completion_length,
            trajectory.tokens.size,
            Finish(fact["finish"]),
            None,
            None,
            episode=trajectory.episode,
        )
        for trajectory, fact in zip(trajectories, facts, strict=True)
    )
    fact = GroupFact(
        prompt.prompt_id, 0, completions, _number(line["facts"]["greedy"]), prompt_tokens=prompt.tokens.size
    )
    return Group(prompt, trajectories), fact


def _scored_trajectory(prompt: Prompt, completion: Mapping[str, Any], fact: Mapping[str, Any]) -> Trajectory:
    trajectory = trajectory_of_record(prompt, {**completion, "finish": fact["finish"]})
    return replace(
        trajectory,
        loss_mask=trajectory.loss_mask & completion["trained"],
        reward=fact["reward"],
        rewards=fact["parts"],
    )


def trajectory_of_record(prompt: Prompt, completion: Mapping[str, Any]) -> Trajectory:
    """Return a recorded completion, or a recorded episode, as it was before it had a reward.

    Args:
        prompt: What all completions of its group begin with, as it was recorded.
        completion: Of a group's line.

    Raises:
        ValueError: A column has another length than its tokens; or, like LookupError and TypeError, something else is
            not as `record` writes it.
    """
    size, chosen = prompt.tokens.size, np.asarray(completion["tokens"], np.int64)
    versions = np.full(size + chosen.size, -1, np.int32)
    for start, version in completion["versions"]:
        versions[size + start :] = version
    logprobs = np.asarray(completion["sampler_logprobs"], np.float32)
    if logprobs.shape != chosen.shape:
        raise ValueError(f"{chosen.size} tokens have {logprobs.size} log-probabilities")
    episode = None if "episode" not in completion else _episode(completion["episode"])
    is_sampled = np.arange(versions.size) >= size if episode is None else versions >= 0
    return Trajectory(
        prompt_id=prompt.prompt_id,
        sample_id=completion["sample_id"],
        seed=completion["seed"],
        temperature=completion["temperature"],
        tokens=np.concatenate([prompt.tokens, chosen]),
        loss_mask=is_sampled,
        sampler_logprobs=np.concatenate([np.zeros(size, np.float32), logprobs]),
        weights_versions=versions,
        finish=Finish(completion["finish"]),
        completion=completion["text"],
        episode=episode,
    )


def _episode(written: Mapping[str, Any]) -> EpisodeSummary:
    """Return what an episode came to; JSON has lists where it has tuples."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in written.items()}
    return EpisodeSummary(**values | {"samples": tuple(tuple(sizes) for sizes in written["samples"])})


def _number(value: float | None) -> float:
    return math.nan if value is None else value
