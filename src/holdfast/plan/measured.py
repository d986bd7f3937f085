"""A plan that was left in a run's directory, beside what the run measured: the same phases, under the same names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.errors import UserError
from holdfast.files import read_json, size_words
from holdfast.plan.findings import Finding, ok, warn
from holdfast.training.directory import events
from holdfast.training.peaks import MEMORY

PLAN = "plan.json"
_PARTS = {"forward_backward": ("forward", "backward")}
"""Phases of a run that a plan tells apart."""
_MORE = 1.1
"""How many times as much as planned is told as more: what a plan cannot see is a part of it."""


@dataclass(frozen=True)
class SavedPlan:
    """What `holdfast plan --save` leaves in a run's directory."""

    device: str
    """Of the ranks: cuda or cpu."""
    ranks: int
    memory: int
    """Bytes of one device."""
    peaks: Mapping[str, int]
    """Phase -> bytes of rank 0's device; phases are those of events.jsonl, and forward and backward by themselves."""
    checkpoint_bytes: int

    def write(self, directory: Path) -> None:
        """Leave it in a run's directory."""
        temporary = directory / f".{PLAN}"
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        temporary.replace(directory / PLAN)

    @classmethod
    def read(cls, directory: Path) -> SavedPlan | None:
        """Return what was left; None if nothing was.

        Raises:
            UserError: What is there is not a plan of this version.
        """
        if not (directory / PLAN).exists():
            return None
        try:
            return cls(**read_json(directory / PLAN))
        except (TypeError, ValueError) as error:
            message = f"{directory / PLAN} is not a plan of this version ({error}). Write it anew with --save."
            raise UserError(message) from error


@dataclass(frozen=True)
class PhasePeak:
    """What a phase was to take, and took."""

    phase: str
    planned: int
    measured: int

    @property
    def ratio(self) -> float:
        """Measured over planned."""
        return self.measured / max(self.planned, 1)

    def words(self) -> str:
        """Return both, as a clause."""
        return f"{self.phase} took {size_words(self.measured)} of {size_words(self.planned)} planned"


def measured_peaks(directory: Path) -> tuple[str, Mapping[str, int]]:
    """Return the device type that a run measured on and the last peaks it wrote; "" and nothing without a run."""
    records = list(events(directory, MEMORY)) if directory.is_dir() else []
    return (str(records[-1]["device"]), records[-1]["peaks"]) if records else ("", {})


def compared(planned: Mapping[str, int], measured: Mapping[str, int]) -> Iterator[PhasePeak]:
    """Yield the phases that both know, in the order in which the run met them."""
    for phase, took in measured.items():
        parts = [planned[part] for part in _PARTS.get(phase, (phase,)) if part in planned]
        if parts:
            yield PhasePeak(phase, max(parts), took)


def look_at_plan(directory: Path) -> Iterator[Finding]:
    """Compare the plan in a run's directory with what the run measured."""
    plan = SavedPlan.read(directory)
    device, measured = measured_peaks(directory)
    if plan is None or not measured:
        return
    if device != plan.device:
        yield ok("plan", f"{directory / PLAN} is of {plan.device}, and the run measured on {device}: not compared")
        return
    phases = list(compared(plan.peaks, measured))
    more = [phase for phase in phases if phase.ratio > _MORE]
    if more:
        words = "; ".join(phase.words() for phase in more)
        yield warn("plan", words, "Leave room for it, or plan anew with the run's own lengths.")
    elif phases:
        yield ok("plan", max(phases, key=lambda phase: phase.measured).words())
