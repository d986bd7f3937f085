"""From a request to a plan, in a process that has the guard."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import DynamicOutputShapeException

from holdfast.config.load import from_mapping
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.verbs.training import TrainingConfig
from holdfast.plan.devices import Device, device_named
from holdfast.plan.execute import execute
from holdfast.plan.formulas import by_formulas
from holdfast.plan.records import Execution, Place
from holdfast.plan.report import as_plain
from holdfast.plan.verdict import turns


def planned(request: dict[str, Any], no_guard: str = "") -> dict[str, Any]:
    """Return a plan, JSON-ready.

    Args:
        request: verb, config, base, ranks, device (a name of `plan/devices.py`, or cpu) and memory in bytes.
        no_guard: Why nothing can be executed; "" where it can.

    Raises:
        UserError: The run could not start.
    """
    warnings.simplefilter("ignore")  # other packages' talk of a machine that is not there
    config = from_mapping(request["config"], ROOTS[request["verb"]], "the run")
    on_cpu = request["device"] == "cpu"
    device = None if on_cpu else device_named(request["device"])
    place = Place(request["ranks"], 0, "cpu" if on_cpu else "cuda", request["memory"])
    base = Path(request["base"])
    plan = as_plain(_made(config, base, place, no_guard), device, request["memory"])
    if not plan["fits"]:
        plan["turns"] = list(_turns(config, base, place, device, no_guard))
    return plan


def _made(config: TrainingConfig, base: Path, place: Place, no_guard: str) -> Execution:
    if no_guard:
        return by_formulas(config, base, place, no_guard)
    try:
        return execute(config, base, place)
    except (
        RuntimeError,
        DynamicOutputShapeException,
    ) as error:  # what an architecture asks of numbers that are not there
        words = (str(error).strip() or "no reason given").splitlines()[0]
        return by_formulas(config, base, place, f"its step cannot be executed without numbers ({words[:160]})")


def _turns(
    config: TrainingConfig, base: Path, place: Place, device: Device | None, no_guard: str
) -> list[dict[str, Any]]:
    made = []
    for turn in turns(config, place.ranks):
        plan = as_plain(_made(turn.config, base, place, no_guard), device, place.memory)
        told = {"key": turn.key, "value": turn.value, "cost": turn.cost}
        made.append({**told, "peak_bytes": plan["peak_bytes"], "fits": plan["fits"]})
        if plan["fits"]:
            break
    return made
