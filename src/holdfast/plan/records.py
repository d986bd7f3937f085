"""What a plan is asked for, and what an execution says."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from holdfast.parallel.plan import ShardPlan
from holdfast.plan.memory import Peak


@dataclass(frozen=True)
class Place:
    """Which rank of how many is executed, and on what."""

    ranks: int = 1
    rank: int = 0
    device: str = "cuda"
    memory: int = 80 * 2**30
    """Bytes of a device, from which a run that may choose decides what rests where."""

    @property
    def torch_device(self) -> torch.device:
        """The device of this rank."""
        return torch.device("cpu") if self.device == "cpu" else torch.device("cuda", 0)


@dataclass(frozen=True)
class HostValue:
    """A value that the host waited for."""

    phase: str
    reason: str
    numbers: int
    """How many it has."""


@dataclass
class Execution:
    """What two steps took on one rank."""

    place: Place
    plan: ShardPlan
    first: dict[tuple[str, str], Peak] = field(default_factory=dict)
    """(phase, device type) -> peak, from loading to the end of the first step of a new run"""
    steady: dict[tuple[str, str], Peak] = field(default_factory=dict)
    """Likewise of a step that comes after others, and of a save; a step after a resume is one."""
    host_values: list[HostValue] = field(default_factory=list)
    """Of the later step."""
    messages: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """(phase, kind) -> number and bytes that this rank sends, of the later step"""
    flops: dict[str, float] = field(default_factory=dict)
    checkpoint_bytes: int = 0
    """Of all ranks together, in a checkpoint."""
    micro_batches: int = 1
    """Of this rank, in one update."""
    tokens: int = 0
    """Of this rank, in its largest micro-batch."""
    parameters: int = 0
    read: dict[str, float] = field(default_factory=dict)
    """Phase -> bytes that it reads and writes at least"""
    executed: bool = True
    """Whether these are numbers of an execution, and not of formulas."""
    notes: list[str] = field(default_factory=list)
