"""Sequences that are longer than a model has positions for, known before the first row is read."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.config.distill import DistillConfig
from holdfast.config.grpo import GRPOConfig
from holdfast.config.runs import TrainingConfig
from holdfast.errors import ConfigError
from holdfast.models.build import Blueprint
from holdfast.models.positions import positions_of
from holdfast.models.rotary import AngleChange, angle_changes


def check_positions(config: TrainingConfig, origin: Blueprint, *, reads_only: bool = False) -> str:
    """Return what a user should know of sequences that go beyond the model's positions; "" if none does.

    Args:
        config: The run.
        origin: The model.
        reads_only: Whether it samples nothing though the run does.

    Raises:
        ConfigError: There is nothing beyond: the positions are rows of a table, or completions are sampled, for which
            decoding and training would differ there, or which would cross to other rotary angles.
    """
    positions = positions_of(origin.skeleton)
    key, tokens = _longest(config)
    name, samples = origin.family.name, _samples(config) and not reads_only
    changes = angle_changes(origin.skeleton.config)
    if samples:
        _refuse_crossing(key, tokens, name, changes)
    if positions is None or tokens <= positions.count:
        return ""
    if any(change.by_length for change in changes):
        return (
            f"note: {key} allows sequences of {tokens} tokens. Those beyond {positions.count} "
            f"(max_position_embeddings) follow rotary angles of their own length, each by {name}'s dynamic scaling."
        )
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


def _refuse_crossing(key: str, tokens: int, name: str, changes: Sequence[AngleChange]) -> None:
    """Refuse a policy whose completions may cross to other rotary angles, with its two ways out."""
    change = next((change for change in changes if change.length < tokens), None)
    if change is None:
        return
    if change.by_length:
        rule = "every longer text has angles of its own (dynamic scaling)"
        override, result = f"{{max_position_embeddings: {tokens}}}", "those of short ones"
    else:
        rule = "all longer texts follow a second set of factors (LongRoPE)"
        override = "{rope_parameters: {short_factor: [...]}} with the numbers of its long_factor"
        result = "those of long ones"
    raise ConfigError(
        f"{key} allows sequences of {tokens} tokens, and {name} changes its rotary angles beyond {change.length}: "
        f"{rule}. A completion that crosses that length would be sampled under some angles and trained under others. "
        f"Lower data.max_length or max_new_tokens until no sequence is longer than {change.length}, or give texts of "
        f"all lengths the same angles, {result}, by model.config_override: {override}."
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
