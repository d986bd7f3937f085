"""The step counters of an optimizer's parameters, beside one another and beside the checkpoint's own step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping

from holdfast.checkpoint.foreign.record import DamagedFile, ForeignCheckpoint, counted

_LAYER = re.compile(r"^(.*\.\d+)\.")
"""Up to the last number in a name: its layer, or its expert."""


def compare_steps(checkpoint: ForeignCheckpoint) -> None:
    """Add what the step counters show: each is a scalar of its parameter, and all of one save agree.

    A layer, an expert or a kind of module that was trained later has fewer, as a whole; that is a note.
    """
    steps: dict[str, int] = {}
    for name, slots in checkpoint.states.items():
        stored = slots.get("step")
        if stored is None or stored.shape not in {(), (1,)}:
            continue
        try:
            steps[name] = counted(stored.read().item(), f"the optimizer's step of {name}")
        except DamagedFile as error:
            checkpoint.add("damage", f"{stored.pieces[0].file} {error}")
            return
        except OSError:
            return  # it is named when tensors are read
    if not steps:
        return
    fewest, most = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
    if checkpoint.step_is_updates and checkpoint.step not in {None, steps[most]}:
        words = f"the optimizer made {steps[most]} updates, the checkpoint is of step {checkpoint.step}"
        checkpoint.add("damage", f"{words}: they are of two saves")
    if steps[fewest] == steps[most]:
        return
    words = f"the optimizer made {steps[fewest]} updates of {fewest} and {steps[most]} of {most}"
    if _is_by(_layer, steps) or _is_by(_module_kind, steps):
        checkpoint.add("note", f"{words}: what was trained later has fewer")
    else:
        checkpoint.add("damage", f"{words}, and no layer or kind of module has one number: they are of two saves")


def _is_by(key: Callable[[str], str], steps: Mapping[str, int]) -> bool:
    """Return whether all parameters with one key have one number of steps."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name, step in steps.items():
        numbers[key(name)].add(step)
    return all(len(each) == 1 for each in numbers.values())


def _layer(name: str) -> str:
    match = _LAYER.match(name)
    return match[1] if match else name


def _module_kind(name: str) -> str:
    return re.sub(r"\d+", "#", name.rpartition(".")[0])
