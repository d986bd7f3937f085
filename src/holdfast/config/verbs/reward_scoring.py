"""The tree that a sharded reward model is built by: the run's own, with the reward model in the policy's place."""

from __future__ import annotations

from typing import Any

from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.parallel import NoRecompute
from holdfast.config.sections.reward import ModelRewardConfig
from holdfast.config.verbs.training import TrainingConfig


class RewardScoring(TrainingConfig):
    """How a model scores texts that is nobody's policy and is never trained.

    It is derived from a tree whose rules were kept, and never read from a file.
    """

    verb = "grpo"
    scores = True


def reward_scoring(config: TrainingConfig, section: ModelRewardConfig) -> RewardScoring:
    """Return the tree that a sharded reward model is built by: over the policy's ranks, in a layout of its own."""
    values: dict[str, Any] = {name: getattr(config, name) for name in RewardScoring.model_fields}
    changed = {
        "model": ModelConfig(path=section.path, dtype=section.dtype),
        "data": config.data.model_copy(update={"packing": "best_fit"}),
        "parallel": config.parallel.model_copy(
            update={
                "cpu_offload": config.parallel.cpu_offload or section.place == "offloaded",
                "compute_dtype": section.dtype,
                "units": [],  # names of the policy's modules
                "reshard": True,  # no backward pass asks for what was gathered
                "recompute": NoRecompute(),
                "compile": "off",
            }
        ),
    }
    return RewardScoring.model_construct(**values | changed)
