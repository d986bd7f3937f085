"""Which verb a run's file is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.config.load import LoadedConfig, from_mapping, load_config, split_overrides
from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.dpo import BradleyTerryConfig, DPOConfig, ScorerConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import SFTConfig, TrainingConfig
from holdfast.config.yaml12 import parse_file

ROOTS: dict[str, type[TrainingConfig]] = {
    root.verb: root for root in (SFTConfig, DPOConfig, ScorerConfig, GRPOConfig, DistillConfig)
}
"""Verb to root."""

_OF_ROLLOUTS = {"rollout", "reward", "advantage"}
_OF_PREFERENCES = {"preference"}
_OF_DISTILLATIONS = {"teacher", "distill"}
_OF_SCORERS = str(BradleyTerryConfig.model_fields["kind"].default)


def verb_of(values: Mapping[str, Any]) -> str:
    """Return the verb whose tree this is: a teacher makes it a distillation, rewards or rollouts a policy's.

    Preferences make it DPO's or a scorer's.
    """
    if _OF_DISTILLATIONS & set(values):
        return DistillConfig.verb
    if _OF_PREFERENCES & set(values):
        return ScorerConfig.verb if _OF_SCORERS in str(values["preference"]) else DPOConfig.verb
    return GRPOConfig.verb if _OF_ROLLOUTS & set(values) else SFTConfig.verb


def load_run(path: Path, overrides: Sequence[str]) -> LoadedConfig[TrainingConfig]:
    """Read a run's file under the verb it is for.

    Raises:
        ConfigError: As `load`.
    """
    return load_config(path, overrides, ROOTS[verb_of(sections_of(path, overrides))])


def sections_of(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the outermost keys of a run's files and overrides.

    The value of each is that in the last file that has it; else the override.

    Raises:
        ConfigError: A file cannot be read.
    """
    files, values = split_overrides(overrides)
    keys = {override.partition(".")[0].partition("=")[0]: override for override in values}
    return keys | {key: value for file in (path, *files) for key, value in parse_file(file).values.items()}


def engine_of(config: TrainingConfig) -> VLLMEngineConfig | None:
    """Return the section of the inference servers that a run samples from; None of a run without."""
    if not isinstance(config, GRPOConfig | DistillConfig) or config.rollout is None:
        return None
    engine = config.rollout.engine
    return engine if isinstance(engine, VLLMEngineConfig) else None


def run_from_mapping(values: Mapping[str, Any]) -> TrainingConfig:
    """Check a tree given as nested mappings, under the verb it is for.

    Raises:
        ConfigError: As `from_mapping`.
    """
    return from_mapping(values, ROOTS[verb_of(values)])
