"""Completions on their way from an engine to training: one sequence with its prompt, and what its tokens carry."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.data.tokens.vision import going_on
from holdfast.models.layers.expert_choices import CHOICES_COLUMN
from holdfast.rollout.engine import Sampled
from holdfast.types import Example, Prompt, Trajectory


def trajectory_of(prompt: Prompt, sampled: Sampled, seed: int, sampling: SamplingConfig, tokenizer: Any) -> Trajectory:
    """Return a prompt and its completion as one sequence."""
    size, chosen = prompt.tokens.size, sampled.tokens.size
    logprobs = np.concatenate([np.zeros(size, np.float32), sampled.logprobs])
    versions = np.concatenate([np.full(size, -1, np.int32), np.full(chosen, sampled.weights_version, np.int32)])
    return Trajectory(
        prompt_id=prompt.prompt_id,
        sample_id=prompt.prompt_id * 2**20 + sampled.place,
        seed=seed,
        temperature=sampling.temperature,
        tokens=np.concatenate([prompt.tokens, sampled.tokens]),
        loss_mask=np.arange(size + chosen) >= size,
        sampler_logprobs=logprobs,
        weights_versions=versions,
        finish=sampled.finish,
        completion=tokenizer.decode(sampled.tokens.tolist(), skip_special_tokens=True),
        per_token={} if sampled.expert_choices is None else {CHOICES_COLUMN: sampled.expert_choices},
        model_inputs=prompt.model_inputs,
    )


def example_of_trajectory(
    prompt: Prompt,
    trajectory: Trajectory,
    *,
    tokens: NDArray[np.int64] | None = None,
    per_token: Mapping[str, NDArray[Any]] = MappingProxyType({}),
) -> Example:
    """Return a completion as a sequence to train on.

    Args:
        prompt: Of the completion.
        trajectory: The completion.
        tokens: [L] in the place of its own.
        per_token: [L, ...] what its tokens carry besides what they do already.
    """
    chosen = trajectory.tokens.size - prompt.tokens.size
    return Example(
        sample_id=trajectory.sample_id,
        prompt_id=trajectory.prompt_id,
        tokens=trajectory.tokens if tokens is None else tokens,
        loss_mask=trajectory.loss_mask,
        source=prompt.source,
        per_token={**per_token, **trajectory.per_token},
        model_inputs=trajectory.model_inputs,
        positions=None if prompt.positions is None else going_on(prompt.positions, chosen),
    )
