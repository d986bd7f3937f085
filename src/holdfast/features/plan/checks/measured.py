"""Compares the plan saved in a run's directory with the memory that the run measured, phase by phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import UserError
from holdfast.features.plan.checks.findings import Finding, fail, ok, warn
from holdfast.files import read_json, size_words
from holdfast.training.directory import MEMORY, PLAN, events

_LEAST = {"cuda": 0, "cpu": 2**30}
"""Planned bytes from which on a phase is compared: resident memory of a CPU cannot tell less from allocators' own."""
_AMPLE = 8
"""How many times what formulas count is room enough for what they leave out: copies of the weights, and a cache."""
_MORE = 1.1
"""How many times as much as planned is told as more: what a plan cannot see is a part of it."""


@dataclass(frozen=True)
class SavedPlan:
    """The numbers of a saved plan that can be compared with measurements."""

    device: str
    """Device type of the ranks: cuda or cpu."""
    peaks: Mapping[str, int]
    """Phase of a run's clock -> bytes of tensors on rank 0's device."""

    @classmethod
    def of(cls, plan: Mapping[str, Any]) -> SavedPlan:
        """Return what counts of all that a plan says."""
        return cls("cpu" if plan["device"] is None else "cuda", plan["clock_phases"])

    @classmethod
    def read(cls, directory: Path) -> SavedPlan | None:
        """Return the plan in a run's directory; None if there is none.

        Raises:
            UserError: What is there is not a plan of this version.
        """
        if not (directory / PLAN).exists():
            return None
        try:
            return cls.of(read_json(directory / PLAN))
        except (KeyError, TypeError, ValueError) as error:
            message = f"{directory / PLAN} is not a plan of this version ({error}). Write it anew with --save."
            raise UserError(message) from error


@dataclass(frozen=True)
class PhasePeak:
    """The planned and the measured peak memory of one phase, in bytes."""

    phase: str
    planned: int
    measured: int

    @property
    def ratio(self) -> float:
        """The measured peak over the planned one."""
        return self.measured / max(self.planned, 1)

    def words(self) -> str:
        """Return the measured and the planned peak, as a clause."""
        return f"{self.phase} took {size_words(self.measured)} of {size_words(self.planned)} planned"


def measured_peaks(directory: Path) -> tuple[str, Mapping[str, int]]:
    """Return the device type that a run measured on and the last peaks it wrote; "" and nothing without a run.

    On a CPU, what was resident before the model is no part of them.
    """
    records = list(events(directory, MEMORY)) if directory.is_dir() else []
    if not records:
        return "", {}
    device, peaks = str(records[-1]["device"]), records[-1]["peaks"]
    start = records[-1].get("start", 0) if device == "cpu" else 0
    return device, {phase: max(0, peak - start) for phase, peak in peaks.items()}


def compared(plan: SavedPlan, device: str, measured: Mapping[str, int]) -> list[PhasePeak]:
    """Return the phases that both the plan and the measurement have, in the order in which the run entered them."""
    if device != plan.device:
        return []
    phases = [PhasePeak(phase, plan.peaks[phase], took) for phase, took in measured.items() if phase in plan.peaks]
    return [phase for phase in phases if phase.planned >= _LEAST[device]]


def measured_lines(plan: Mapping[str, Any], directory: Path) -> list[str]:
    """Return one line for each phase that compares a plan with what the run in a directory measured."""
    phases = compared(SavedPlan.of(plan), *measured_peaks(directory))
    return [f"measured in {directory}: {phase.words()} ({phase.ratio:.0%})" for phase in phases]


def look_at_plan(directory: Path) -> Iterator[Finding]:
    """Compare the plan in a run's directory with what the run measured."""
    plan = SavedPlan.read(directory)
    device, measured = measured_peaks(directory)
    if plan is None or not measured:
        return
    if device != plan.device:
        text = f"{directory / PLAN} is of {plan.device}, and the run measured on {device}: not compared by phase"
        yield ok("plan", text)
        return
    phases = compared(plan, device, measured)
    more = [phase for phase in phases if phase.ratio > _MORE]
    if more:
        text = "; ".join(phase.words() for phase in more)
        yield warn("plan", text, "Leave room for it, or plan anew with the run's own lengths.")
    elif phases:
        yield ok("plan", max(phases, key=lambda phase: phase.measured).words())


def plan_verdict(plan: Mapping[str, Any]) -> Finding:
    """Return what a new plan says of a run, and the first key to change where the run does not fit."""
    how = "executed" if plan["executed"] else "by formulas"
    needed = f"{size_words(plan['peak_bytes'])} of tensors and {size_words(plan['allowance_bytes'])} beside them"
    summary = f"{how}: {needed} of {size_words(plan['memory_bytes'])} per rank"
    if plan["fits"]:
        return ok("plan", summary)
    if plan["uncounted"] and "turns" not in plan:
        summary = f"{summary}, without {plan['uncounted']}, which formulas leave out"
        return (ok if plan["peak_bytes"] * _AMPLE <= plan["memory_bytes"] else warn)("plan", summary)
    enough = [turn for turn in plan.get("turns", []) if turn["fits"]]
    turned = plan["turns"][: plan["turns"].index(enough[0]) + 1] if enough else []
    fix = ", ".join(f"{turn['key']}: {turn['value']}" for turn in turned) or "Start more ranks, or a smaller model"
    return fail("plan", f"it does not fit: {summary}", f"{fix}. See `holdfast plan`.")
