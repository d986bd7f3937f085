"""Sections that follow a metric: which number, which way is better, and how long it may stand still."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast.config.base import NonNegative, PositiveInt, PublicStr, Section


class MetricConfig(Section):
    """What is better than what."""

    metric: PublicStr = Field(min_length=1)
    """Name of the metric in metrics.jsonl, such as eval/validation/loss."""
    mode: Literal["max", "min"]
    """Whether a larger (`max`) or a smaller (`min`) value is better."""


class PatienceConfig(MetricConfig):
    """How long a metric may go without an improvement."""

    patience: PositiveInt = 3
    """Number of measurements in a row that may bring no improvement."""
    min_delta: NonNegative = 0.0
    """An improvement is by more than this over the best value so far."""
