"""What a plan is asked for, what an execution says, and the same as numbers for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.features.plan.devices import GIB, Device
from holdfast.features.plan.kinds import KINDS, ORDER, PHASES, RESUME
from holdfast.features.plan.memory import Peak
from holdfast.parallel.plan import ShardPlan

PLAN_FORMAT = 1
CONTEXT, NCCL, FRAGMENTATION = 0.7 * GIB, 1.0 * GIB, 0.05
"""What no tensor holds: the context and workspaces of a process, buffers of collectives where there are several ranks,
and the share of the peak that the allocator cannot use. Stated, since no GPU of ours has measured them."""


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
    loaded: dict[tuple[str, str], Peak] = field(default_factory=dict)
    """(phase, device type) -> peak, until models and optimizers are built"""
    resumed: dict[tuple[str, str], Peak] = field(default_factory=dict)
    """Likewise of the load of a checkpoint and the first step after it; empty where checkpoints hold weights alone."""
    steady: dict[tuple[str, str], Peak] = field(default_factory=dict)
    """Likewise of a step that comes after others, and of a save."""
    host_values: list[HostValue] = field(default_factory=list)
    """Of the later step."""
    messages: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """(phase, kind) -> number and bytes that this rank sends, of the later step"""
    flops: dict[str, float] = field(default_factory=dict)
    checkpoint_bytes: int = 0
    """Of all ranks together, in the files of a checkpoint."""
    export_bytes: int = 0
    """In the files of everything that is written at the end of the run."""
    micro_batches: int = 1
    """Of this rank, in one update."""
    tokens: int = 0
    """Of this rank, in its largest micro-batch."""
    parameters: int = 0
    read: dict[str, float] = field(default_factory=dict)
    """Phase -> bytes that it reads and writes at least"""
    made: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """(phase, device type, dtype) -> bytes of all tensors that the later step made"""
    executed: bool = True
    """Whether these are numbers of an execution, and not of formulas."""
    uncounted: str = ""
    """What formulas leave out of this run."""
    notes: list[str] = field(default_factory=list)


def allowance(peak: int, ranks: int) -> int:
    """Return the bytes to be left beside tensors."""
    return int(CONTEXT + (NCCL if ranks > 1 else 0) + FRAGMENTATION * peak)


def rows_of(peaks: Mapping[tuple[str, str], Peak], device: str) -> dict[str, Peak]:
    """Return the peak of each row of the table, on one type of device."""
    rows: dict[str, Peak] = {}
    for (phase, place), peak in peaks.items():
        row = PHASES.get(phase, phase)
        if place == device and (row not in rows or peak.total > rows[row].total):
            rows[row] = peak
    return {row: rows[row] for row in (*ORDER, *sorted(set(rows) - set(ORDER))) if row in rows}


def plain_plan(made: Execution, device: Device | None, memory: int) -> dict[str, Any]:
    """Return everything that a plan says, JSON-ready; bytes and floating-point operations are of one rank."""
    phases = phases_of(made)
    kind = made.place.device
    total = max((peak.total for peak in phases.values()), default=0)
    spare = allowance(total, made.place.ranks) if kind == "cuda" else 0
    return {
        "format": PLAN_FORMAT,
        "executed": made.executed,
        "ranks": made.place.ranks,
        "rank": made.place.rank,
        "device": None if device is None else device.name,
        "memory_bytes": memory,
        "parameters": made.parameters,
        "units": _units(made),
        "micro_batches": made.micro_batches,
        "tokens_per_micro_batch": made.tokens,
        "phases": {row: _plain(peak) for row, peak in phases.items()},
        "clock_phases": clock_phases(made),
        "host": {row: _plain(peak) for row, peak in _host_rows(made).items()} if kind != "cpu" else {},
        "peak_bytes": total,
        "allowance_bytes": spare,
        "fits": total + spare <= memory and not made.uncounted,
        "uncounted": made.uncounted,
        "checkpoint_bytes": made.checkpoint_bytes,
        "export_bytes": made.export_bytes,
        "flops": _summed(made.flops),
        "messages": _messages(made),
        "host_values": [vars(value) for value in made.host_values],
        "bounds_seconds": {} if device is None else bounds(made, device),
        "notes": made.notes,
    }


def phases_of(made: Execution) -> dict[str, Peak]:
    """Return the rows of the table: a step that comes after others, loading, and a step after a resume."""
    kind = made.place.device
    steady, loaded = rows_of(made.steady, kind), rows_of(made.loaded, kind)
    phases = {"load": loaded["load"], **steady} if "load" in loaded else steady
    return phases | _resume_row(made, kind)


def _host_rows(made: Execution) -> dict[str, Peak]:
    return rows_of(made.steady, "cpu") | _resume_row(made, "cpu")


def _resume_row(made: Execution, device: str) -> dict[str, Peak]:
    """Return the largest peak of a resume on a type of device, as a row."""
    peaks = [peak for (_, place), peak in made.resumed.items() if place == device]
    return {RESUME: max(peaks, key=lambda peak: peak.total)} if peaks else {}


def _units(made: Execution) -> list[dict[str, Any]]:
    return [
        {"name": unit.name, "bytes": unit.bytes_, "bytes_per_rank": -(-unit.bytes_ // made.plan.shard)}
        for unit in made.plan.units
    ]


def _messages(made: Execution) -> list[dict[str, Any]]:
    return [
        {"phase": phase, "kind": name, "count": count, "bytes": sent}
        for (phase, name), (count, sent) in sorted(made.messages.items())
    ]


def clock_phases(made: Execution) -> dict[str, int]:
    """Return the peak of each phase under the name that a run's clock gives it: to it both passes are one phase."""
    peaks = {phase: peak.total for (phase, place), peak in made.steady.items() if place == made.place.device}
    passes = [peaks.pop(name) for name in ("forward", "backward") if name in peaks]
    if loaded := made.loaded.get(("load", made.place.device)):
        peaks["load"] = loaded.total
    return peaks | ({"forward_backward": max(passes)} if passes else {})


def _plain(peak: Peak) -> dict[str, Any]:
    return {"total": peak.total, "parts": {kind: peak.parts[kind] for kind in KINDS if peak.parts.get(kind)}}


def _summed(values: Mapping[str, float]) -> dict[str, float]:
    rows: dict[str, float] = {}
    for phase, value in values.items():
        row = PHASES.get(phase, phase)
        rows[row] = rows.get(row, 0.0) + value
    return rows


def bounds(made: Execution, device: Device) -> dict[str, float]:
    """Return seconds that each row takes at least: by products, messages or reads of memory, the longest of them."""
    flops = _summed(made.flops)
    wire: dict[str, float] = {}
    for (phase, _), (_, sent) in made.messages.items():
        row = PHASES.get(phase, phase)
        wire[row] = wire.get(row, 0.0) + sent
    result = {}
    for row in dict.fromkeys((*flops, *wire, *_summed(made.read))):
        products = flops.get(row, 0.0) / device.flops
        messages = wire.get(row, 0.0) / device.wire(made.place.ranks)
        reading = _summed(made.read).get(row, 0.0) / device.bytes_per_second
        if longest := max(products, messages, reading):
            result[row] = longest
    return result
