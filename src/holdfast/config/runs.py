"""One root per verb, and the rules that join sections. Rules never assign."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, model_validator

from holdfast.config.algorithm import NLLConfig, SupervisedObjective
from holdfast.config.base import Count, FunctionPath, Positive, PositiveInt, Section
from holdfast.config.checkpoint import CheckpointConfig
from holdfast.config.data import DataConfig
from holdfast.config.launch import LaunchConfig
from holdfast.config.metrics import EvaluationConfig, MetricsConfig
from holdfast.config.model import ModelConfig
from holdfast.config.optim import AdamWConfig, OptimConfig
from holdfast.config.parallel import ParallelConfig


class RunConfig(Section):
    """Where a run lives: everything it writes stands under dir/name."""

    dir: str = "runs"
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Default on the command line: the YAML's file name."""


class _Root(Section):
    run: RunConfig = RunConfig()
    seed: int = 0
    """Seed of everything random: initial weights, order, dropout."""
    steps: PositiveInt | None = None
    """Optimizer updates."""
    epochs: Positive | None = None
    """Passes over the data, instead of or together with steps: whichever ends first."""
    min_steps: Count = 0
    """Updates before an observer or max_minutes may stop the run."""
    max_minutes: Positive | None = None
    """Wall-clock limit of this start of the run."""
    limit_batches: PositiveInt | None = None
    """Batches per epoch, for short runs over large data."""
    overfit_batches: PositiveInt | None = None
    """Use only the first batches, again and again."""
    dry_run: bool = False
    """Two steps of everything: training, evaluation, export; nothing is kept."""
    determinism: bool = False
    """torch.use_deterministic_algorithms: an operation without a deterministic form raises."""
    observers: list[FunctionPath] = Field(default_factory=list)
    """Functions event -> None | 'stop' | 'save' | 'evaluate', called on rank 0 after every step."""
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = AdamWConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    launch: LaunchConfig = LaunchConfig()


class SFTConfig(_Root):
    """Supervised fine-tuning."""

    model: ModelConfig
    data: DataConfig
    objective: SupervisedObjective = NLLConfig()

    @model_validator(mode="after")
    def _length(self) -> SFTConfig:
        if self.steps is None and self.epochs is None and self.max_minutes is None and not self.dry_run:
            raise ValueError("the run has no end: set steps, epochs or max_minutes")
        if self.steps is not None and self.min_steps > self.steps:
            raise ValueError(f"min_steps={self.min_steps} is above steps={self.steps}")
        return self

    @model_validator(mode="after")
    def _storage(self) -> SFTConfig:
        if self.model.dtype == "bfloat16" and self.optim.kind != "adamw_bf16":
            raise ValueError(
                f"model.dtype: bfloat16 with optim.kind: {self.optim.kind} loses updates smaller than 1/256 of a "
                "weight. Use optim.kind: adamw_bf16, or model.dtype: float32 (compute stays bfloat16 on a GPU)"
            )
        if self.optim.kind == "adamw_bf16" and self.model.dtype != "bfloat16":
            raise ValueError(f"optim.kind: adamw_bf16 needs model.dtype: bfloat16, not {self.model.dtype}")
        if self.model.dtype == "float64" and self.parallel.compute_dtype not in {"auto"}:
            raise ValueError("model.dtype: float64 computes in float64; leave parallel.compute_dtype at auto")
        return self

    @model_validator(mode="after")
    def _schedule_needs_end(self) -> SFTConfig:
        needs_end = self.optim.schedule.kind != "constant" or self.optim.schedule.warmup_ratio > 0
        if needs_end and self.steps is None and self.epochs is None and not self.dry_run:
            raise ValueError(
                f"optim.schedule {self.optim.schedule.kind} needs to know the last step: set steps or epochs, "
                "or use schedule: {kind: constant}"
            )
        return self


ROOTS: dict[str, type[_Root]] = {"sft": SFTConfig}
"""Verb to root."""


def planned_steps(config: _Root, steps_per_epoch: int | None) -> int | None:
    """Return the number of updates a run makes, or None when only a clock or the data's end stops it.

    Args:
        config: The root.
        steps_per_epoch: Batches in one pass, None for a stream of unknown length.
    """
    if config.dry_run:
        return 2
    limits = [config.steps] if config.steps is not None else []
    if config.epochs is not None and steps_per_epoch is not None:
        limits.append(max(1, math.ceil(config.epochs * steps_per_epoch)))
    return min(limits) if limits else None


def as_plain(config: Section) -> dict[str, Any]:
    """Return the tree as JSON-ready values, defaults included."""
    return config.model_dump(mode="json")
