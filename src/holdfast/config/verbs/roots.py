"""Which verb a run's file is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.config.base import kinds_of
from holdfast.config.load import LoadedConfig, load_config, read_draft
from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.dpo import BradleyTerryConfig, DPOConfig, ScorerConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import SFTConfig, TrainingConfig

ROOTS: dict[str, type[TrainingConfig]] = {
    root.verb: root for root in (SFTConfig, DPOConfig, ScorerConfig, GRPOConfig, DistillConfig)
}
"""Verb to root."""

_OF_ROLLOUTS = {"rollout", "reward", "advantage"}
_OF_DISTILLATIONS = {"teacher", "distill"}


def verb_of(values: Mapping[str, Any]) -> str:
    """Return the verb whose tree this is, by the section that no other verb has.

    Of the two with preferences, `reward` has a loss of its own, `bradley_terry`.
    """
    if _OF_DISTILLATIONS & set(values):
        return DistillConfig.verb
    if "preference" in values:
        scores = _kind_of_loss(values["preference"]) in kinds_of(BradleyTerryConfig)
        return ScorerConfig.verb if scores else DPOConfig.verb
    return GRPOConfig.verb if _OF_ROLLOUTS & set(values) else SFTConfig.verb


def _kind_of_loss(preference: Any) -> Any:
    loss = preference.get("loss") if isinstance(preference, Mapping) else None
    first = loss[0] if isinstance(loss, list) and loss else loss
    return first.get("kind") if isinstance(first, Mapping) else first


def verb_of_file(path: Path, overrides: Sequence[str]) -> str:
    """Return the verb that a run's file is for, with its overrides.

    Raises:
        ConfigError: A file cannot be read.
    """
    return verb_of(read_draft(path, overrides, DPOConfig).document.values)


def load_run(path: Path, overrides: Sequence[str]) -> LoadedConfig[TrainingConfig]:
    """Read a run's file under the verb that it is for; nobody else says which.

    Raises:
        ConfigError: As `load`.
    """
    return load_config(path, overrides, ROOTS[verb_of_file(path, overrides)])


def engine_of(config: TrainingConfig) -> VLLMEngineConfig | None:
    """Return the section of the inference servers that a run samples from; None of a run without."""
    if not isinstance(config, GRPOConfig | DistillConfig) or config.rollout is None:
        return None
    engine = config.rollout.engine
    return engine if isinstance(engine, VLLMEngineConfig) else None
