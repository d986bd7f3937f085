"""The request for a plan, the measurements of an execution, and their JSON form for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.features.plan.counting.kinds import KINDS, ORDER, PHASES, RESUME
from holdfast.features.plan.counting.memory import Peak
from holdfast.features.plan.devices import GIB
from holdfast.features.plan.formulas import ModelSize
from holdfast.parallel.plan import ShardPlan

PLAN_FORMAT = 1
CONTEXT, NCCL, FRAGMENTATION = 0.7 * GIB, 1.0 * GIB, 0.05
"""What no tensor holds: the context and workspaces of a process, buffers of collectives where there are several ranks,
and the share of the peak that the allocator cannot use. Stated, not measured."""


@dataclass(frozen=True)
class RankSpec:
    """The rank that is executed, the number of ranks, and the device."""

    ranks: int = 1
    rank: int = 0
    device: str = "cuda"
    memory: int = 80 * 2**30
    """Bytes of device memory, by which a run decides which of its tensors it offloads."""

    @property
    def torch_device(self) -> torch.device:
        """The device of this rank."""
        return torch.device("cpu") if self.device == "cpu" else torch.device("cuda", 0)


@dataclass(frozen=True)
class HostValue:
    """A transfer from a device to the host for which the host waited."""

    phase: str
    reason: str
    numbers: int
    """Number of elements that were copied."""


@dataclass
class Execution:
    """The measurements of two executed steps on one rank."""

    spec: RankSpec
    plan: ShardPlan
    size: ModelSize
    loaded: dict[tuple[str, str], Peak] = field(default_factory=dict)
    """(phase, device type) -> peak, until models and optimizers are built"""
    resumed: dict[tuple[str, str], Peak] = field(default_factory=dict)
    """(phase, device type) -> peak of the load of a checkpoint and the next step; empty if it holds weights alone."""
    steady: dict[tuple[str, str], Peak] = field(default_factory=dict)
    """(phase, device type) -> peak of a later step and of a save."""
    host_values: list[HostValue] = field(default_factory=list)
    """Transfers of the later step for which the host waited."""
    checkpoint_bytes: int = 0
    """Bytes that all ranks together write into the files of a checkpoint."""
    export_bytes: int = 0
    """Bytes of all files that are exported at the end of the run."""
    micro_batches: int = 1
    """Micro-batches of this rank in one update."""
    tokens: int = 0
    """Tokens in the largest micro-batch of this rank."""
    parameters: int = 0
    allocated: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """(phase, device type, dtype) -> bytes of all tensors that the later step made"""
    executed: bool = True
    """Whether these are numbers of an execution, and not of formulas."""
    uncounted: str = ""
    """A sentence on the parts of this run that the formulas do not count."""
    notes: list[str] = field(default_factory=list)


def allowance(peak: int, ranks: int) -> int:
    """Return the bytes to be left beside tensors."""
    return int(CONTEXT + (NCCL if ranks > 1 else 0) + FRAGMENTATION * peak)


def room_for_tensors(memory: int, ranks: int) -> int:
    """Return the largest peak that leaves its `allowance` of a device's memory; `ranks` is 0 on a CPU."""
    return memory if not ranks else int((memory - allowance(0, ranks)) / (1 + FRAGMENTATION))


def rows_of(peaks: Mapping[tuple[str, str], Peak], device: str) -> dict[str, Peak]:
    """Return the peak of each row of the table, on one type of device."""
    rows: dict[str, Peak] = {}
    for (phase, peak_device), peak in peaks.items():
        row = PHASES.get(phase, phase)
        if peak_device == device and (row not in rows or peak.total > rows[row].total):
            rows[row] = peak
    return {row: rows[row] for row in (*ORDER, *sorted(set(rows) - set(ORDER))) if row in rows}


def plain_plan(execution: Execution, device: str | None, memory: int) -> dict[str, Any]:
    """Return everything that a plan says, JSON-ready; bytes are of one rank."""
    phases = phases_of(execution)
    kind = execution.spec.device
    total = max((peak.total for peak in phases.values()), default=0)
    spare = allowance(total, execution.spec.ranks) if kind == "cuda" else 0
    host_rows = rows_of(execution.steady, "cpu") | _resume_row(execution, "cpu")
    return {
        "format": PLAN_FORMAT,
        "executed": execution.executed,
        "compiled_blocks": len(execution.plan.compile_blocks),
        "ranks": execution.spec.ranks,
        "rank": execution.spec.rank,
        "device": device,
        "memory_bytes": memory,
        "parameters": execution.parameters,
        "units": [
            {"name": unit.name, "bytes": unit.bytes_, "bytes_per_rank": -(-unit.bytes_ // execution.plan.shard)}
            for unit in execution.plan.units
        ],
        "micro_batches": execution.micro_batches,
        "tokens_per_micro_batch": execution.tokens,
        "phases": {row: _plain(peak) for row, peak in phases.items()},
        "clock_phases": clock_phases(execution),
        "host": {} if kind == "cpu" else {row: _plain(peak) for row, peak in host_rows.items()},
        "peak_bytes": total,
        "allowance_bytes": spare,
        "fits": total + spare <= memory and not execution.uncounted,
        "uncounted": execution.uncounted,
        "checkpoint_bytes": execution.checkpoint_bytes,
        "export_bytes": execution.export_bytes,
        "host_values": [vars(value) for value in execution.host_values],
        "notes": execution.notes,
    }


def phases_of(execution: Execution) -> dict[str, Peak]:
    """Return the rows of the table: a step that comes after others, loading, and a step after a resume."""
    kind = execution.spec.device
    steady, loaded = rows_of(execution.steady, kind), rows_of(execution.loaded, kind)
    phases = {"load": loaded["load"], **steady} if "load" in loaded else steady
    return phases | _resume_row(execution, kind)


def _resume_row(execution: Execution, device: str) -> dict[str, Peak]:
    """Return the largest peak of a resume on a type of device, as a row."""
    peaks = [peak for (_, peak_device), peak in execution.resumed.items() if peak_device == device]
    return {RESUME: max(peaks, key=lambda peak: peak.total)} if peaks else {}


def clock_phases(execution: Execution) -> dict[str, int]:
    """Return the peak of each phase under the name that a run's clock gives it: to it both passes are one phase."""
    peaks = {phase: peak.total for (phase, device), peak in execution.steady.items() if device == execution.spec.device}
    passes = [peaks.pop(name) for name in ("forward", "backward") if name in peaks]
    if loaded := execution.loaded.get(("load", execution.spec.device)):
        peaks["load"] = loaded.total
    return peaks | ({"forward_backward": max(passes)} if passes else {})


def _plain(peak: Peak) -> dict[str, Any]:
    return {"total": peak.total, "parts": {kind: peak.by_kind[kind] for kind in KINDS if peak.by_kind.get(kind)}}
