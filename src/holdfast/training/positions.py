"""Sequences that are longer than a model has positions for, known before the first row is read."""

from __future__ import annotations

from holdfast.config.distill import DistillConfig
from holdfast.config.grpo import GRPOConfig
from holdfast.config.runs import TrainingConfig
from holdfast.errors import ConfigError
from holdfast.models.build import Blueprint
from holdfast.models.positions import positions_of


def check_positions(config: TrainingConfig, origin: Blueprint) -> str:
    """Return what a user should know of sequences that go beyond the model's positions; "" if none does.

    Raises:
        ConfigError: There is nothing beyond: the positions are rows of a table, or completions are sampled, for which
            decoding and training would differ there.
    """
    positions = positions_of(origin.skeleton)
    key, tokens = _longest(config)
    if positions is None or tokens <= positions.count:
        return ""
    name, samples = origin.family.name, _samples(config)
    if samples or positions.in_a_table:
        fix = "data.max_length or max_new_tokens" if samples else "data.max_length"
        override = "" if positions.in_a_table else ", or set model.config_override.max_position_embeddings"
        raise ConfigError(
            f"{key} allows sequences of {tokens} tokens, and {name} has {positions.count} positions "
            f"(max_position_embeddings). Lower {fix}{override}."
        )
    return (
        f"note: {key} allows sequences of {tokens} tokens, and {name} has {positions.count} positions "
        "(max_position_embeddings): longer ones take it where it was never trained. If that is meant, say so in "
        "model.config_override (max_position_embeddings, rope_scaling); else lower data.max_length."
    )


def _samples(config: TrainingConfig) -> bool:
    return isinstance(config, GRPOConfig) or (isinstance(config, DistillConfig) and config.rollout is not None)


def _longest(config: TrainingConfig) -> tuple[str, int]:
    """Return the longest sequence that is allowed, and the key that allows it."""
    needed = {"data.max_length": config.data.max_length}
    if isinstance(config, GRPOConfig) and (config.evaluation.sets or config.data.validation_split > 0):
        prompt = config.data.max_length - config.rollout.max_new_tokens
        sampled = config.evaluation.sampling.max_new_tokens or 0
        needed["evaluation.sampling.max_new_tokens"] = prompt + sampled
    key = max(needed, key=lambda name: needed[name])
    return key, needed[key]
