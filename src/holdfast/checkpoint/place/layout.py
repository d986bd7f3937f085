"""Names of a run's checkpoints.

checkpoints/step-00000040/   manifest.json dcp/ rank/ trainer.json assets/
checkpoints/.staging-...     being written; .quarantine-... damaged; .trash-... being deleted; .later-... left behind
                             by a run that went back to an earlier step
checkpoints/pins.json        steps the user keeps
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

_AXIS = re.compile(r"^\w+$", flags=re.ASCII)
STEP = re.compile(r"^step-(\d{8,})$")
FOLDER = "checkpoints"
DCP, RANK, ASSETS = "dcp", "rank", "assets"
METADATA = ".metadata"
"""What torch calls the list of a DCP directory's contents."""
TRAINER, PINS, LEASE = "trainer.json", "pins.json", ".lease.json"
STAGING, QUARANTINE, TRASH, REHEARSAL = ".staging-", ".quarantine-", ".trash-", ".rehearsal-"
LATER = ".later-"
"""Of a checkpoint behind the step that a run went back to; under its own name it is one of the run's again."""
NOT_FINITE = f"{QUARANTINE}not-finite-"


def step_name(step: int) -> str:
    """Return the directory of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a directory, or None for other names: one step has one name."""
    match = STEP.match(name)
    step = int(match.group(1)) if match else None
    return step if step is not None and step_name(step) == name else None


def renamed(name: str) -> bool:
    """Return whether a name is one that people give to a checkpoint, and none that is looked for: step-12."""
    return name.startswith("step-") and step_of(name) is None


def fresh(prefix: str, name: str) -> str:
    """Return a name that nobody has used."""
    return f"{prefix}{name}-{uuid.uuid4().hex[:8]}"


def rank_file(rank: int) -> str:
    """Return the file of one rank's own state where no mesh tells ranks apart, and everywhere in format 1."""
    return f"{RANK}/rank-{rank:05d}.json"


def place_file(mesh: Mapping[str, int], coordinate: Mapping[str, int]) -> str | None:
    """Return the file of the own state of the rank at a coordinate, such as rank/replicate-0.shard-1.json.

    Args:
        mesh: Axis name to size, as the manifest has it.
        coordinate: Of the rank; an axis of one rank may be left out.

    Returns:
        None where the mesh has no axis, or one whose name is not a word.
    """
    if not mesh or not all(_AXIS.match(axis) for axis in mesh):
        return None
    return f"{RANK}/" + ".".join(f"{axis}-{coordinate.get(axis, 0)}" for axis in sorted(mesh)) + ".json"
