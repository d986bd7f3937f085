"""The built parts of a run, side by side. A record, not an actor: steps are functions that take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.optim import Optimizer

from holdfast.config.runs import SFTConfig
from holdfast.data.stream import SampleStream
from holdfast.metrics.clock import PhaseClock
from holdfast.metrics.throughput import ModelCost
from holdfast.models.build import Blueprint
from holdfast.models.policy import PolicyModel
from holdfast.objectives.base import Objective
from holdfast.parallel.collectives import ProcessExchange
from holdfast.parallel.mesh import World
from holdfast.parallel.plan import ShardPlan
from holdfast.training.evaluate import EvaluationSet
from holdfast.training.observe import Observer
from holdfast.training.state import TrainState


@dataclass
class Run:
    """Everything a step touches."""

    config: SFTConfig
    world: World
    exchange: ProcessExchange
    origin: Blueprint
    plan: ShardPlan
    policy: PolicyModel
    optimizer: Optimizer
    objective: Objective
    stream: SampleStream
    total_steps: int | None
    """Updates of the whole run; None if a clock or the data's end stops it."""
    cost: ModelCost
    peak_flops: float | None
    """Of one device."""
    directory: Path
    source_names: tuple[str, ...] = ()
    """Data sources that get a loss of their own in the metrics."""
    evaluation_sets: Sequence[EvaluationSet] = ()
    observers: Sequence[Observer] = ()
    state: TrainState = field(default_factory=TrainState)
    clock: PhaseClock = field(default_factory=PhaseClock)
