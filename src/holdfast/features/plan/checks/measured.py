"""Compares a plan with the memory that a run measured, phase by phase, and grades it for `holdfast doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.features.plan.checks.findings import Finding, fail, ok, warn
from holdfast.files import size_words
from holdfast.training.directory import MEMORY, events

_LEAST = {"cuda": 0, "cpu": 2**30}
"""Planned bytes from which on a phase is compared: resident memory of a CPU cannot tell less from allocators' own."""
_AMPLE = 8
"""How many times what formulas count is room enough for what they leave out: copies of the weights, and a cache."""


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


def measured_lines(plan: Mapping[str, Any], directory: Path) -> list[str]:
    """Return one line for each phase that compares a plan with what the run in a directory measured."""
    device, measured = measured_peaks(directory)
    if device != ("cpu" if plan["device"] is None else "cuda"):
        return []
    planned = {phase: peak for phase, peak in plan["clock_phases"].items() if peak >= _LEAST[device]}
    return [
        f"measured in {directory}: {phase} took {size_words(took)} of {size_words(planned[phase])} planned "
        f"({took / max(planned[phase], 1):.0%})"
        for phase, took in measured.items()
        if phase in planned
    ]


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
