"""Names of a run's checkpoints.

checkpoints/step-00000040/   manifest.json dcp/ rank/ trainer.json assets/
checkpoints/.staging-...     being written; .quarantine-... damaged; .trash-... being deleted
checkpoints/pins.json        steps the user keeps
"""

from __future__ import annotations

import re
import uuid

STEP = re.compile(r"^step-(\d{8,})$")
FOLDER = "checkpoints"
DCP, RANK, ASSETS = "dcp", "rank", "assets"
TRAINER, PINS, LEASE = "trainer.json", "pins.json", ".lease.json"
STAGING, QUARANTINE, TRASH, REHEARSAL = ".staging-", ".quarantine-", ".trash-", ".rehearsal-"
NOT_FINITE = f"{QUARANTINE}not-finite-"


def step_name(step: int) -> str:
    """Return the directory of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a directory, or None for other names: one step has one name."""
    match = STEP.match(name)
    step = int(match.group(1)) if match else None
    return step if step is not None and step_name(step) == name else None


def fresh(prefix: str, name: str) -> str:
    """Return a name that nobody has used."""
    return f"{prefix}{name}-{uuid.uuid4().hex[:8]}"


def rank_file(rank: int) -> str:
    """Return the file of one rank's own state."""
    return f"{RANK}/rank-{rank:05d}.json"
