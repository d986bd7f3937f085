"""Names of a run's checkpoints.

checkpoints/step-00000040/   manifest.json tensors/ rank/ trainer.json assets/
checkpoints/.staging-...     being written; .quarantine-... damaged; .trash-... being deleted; .later-... left behind
                             by a run that went back to an earlier step
checkpoints/pins.json        steps the user keeps
checkpoints/.lease-00000001.json               the job that holds the place
checkpoints/.lease-step-00000040.00000001.json a save of own code that is under way
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping

_AXIS = re.compile(r"^\w+$", flags=re.ASCII)
STEP = re.compile(r"^step-(\d{8,})$")
FOLDER = "checkpoints"
TENSORS, RANK, ASSETS = "tensors", "rank", "assets"
TRAINER, PINS = "trainer.json", "pins.json"
STAGING, QUARANTINE, TRASH, REHEARSAL = ".staging-", ".quarantine-", ".trash-", ".rehearsal-"
LATER = ".later-"
"""Prefix of checkpoints of later steps after a run went back to an earlier one; renamed back, they count again."""
_LEASE = re.compile(r"^\.lease-(?:(.+)\.)?(\d{8})\.json$", flags=re.ASCII)
_STAGED = re.compile(rf"^{re.escape(STAGING)}(.+)-[0-9a-f]{{8}}$", flags=re.ASCII)
NOT_FINITE = f"{QUARANTINE}not-finite-"


def step_name(step: int) -> str:
    """Return the directory name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a directory name; None for other names, such as those with another number of zeros."""
    match = STEP.match(name)
    step = int(match.group(1)) if match else None
    return step if step is not None and step_name(step) == name else None


def renamed(name: str) -> bool:
    """Return whether a name looks like a checkpoint's but is not the exact name of a step, such as step-12."""
    return name.startswith("step-") and step_of(name) is None


def fresh(prefix: str, name: str) -> str:
    """Return a new unique name."""
    return f"{prefix}{name}-{uuid.uuid4().hex[:8]}"


def lease_name(turn: int, of: str = "") -> str:
    """Return the file name of the lease of a turn, of the place or of one checkpoint in it."""
    return f".lease-{of}.{turn:08d}.json" if of else f".lease-{turn:08d}.json"


def lease_turns(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the turns of the leases among the names in a place, by what they hold; "" is the place."""
    turns: dict[str, list[int]] = {}
    for name in names:
        if match := _LEASE.match(name):
            turns.setdefault(match[1] or "", []).append(int(match[2]))
    return turns


def staged_name(name: str) -> str | None:
    """Return the name of the checkpoint that a staging directory becomes; None for another name."""
    match = _STAGED.match(name)
    return match[1] if match else None


def rank_file(rank: int) -> str:
    """Return the file for one rank's state where there is no mesh."""
    return f"{RANK}/rank-{rank:05d}.json"


def place_file(mesh: Mapping[str, int], coordinate: Mapping[str, int]) -> str | None:
    """Return the file for the state of the rank at a mesh coordinate, such as rank/replicate-0.shard-1.json.

    Args:
        mesh: Sizes by name of the axis, from the manifest.
        coordinate: Coordinate of the rank by axis; axes of size 1 may be left out.

    Returns:
        The file; None if the mesh has no axis, or one whose name is not a plain word.
    """
    if not mesh or not all(_AXIS.match(axis) for axis in mesh):
        return None
    return f"{RANK}/" + ".".join(f"{axis}-{coordinate.get(axis, 0)}" for axis in sorted(mesh)) + ".json"
