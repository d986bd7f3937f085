"""`holdfast doctor`: everything that can be known before a run waits in a queue, each with what mends it.

Nothing is left behind: what is tried in the place of a run is removed, and no run directory is made.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.plan.findings import RANKS, Check, Finding
from holdfast.plan.inputs import (
    Looked,
    bytes_of_checkpoints,
    look_at_endpoints,
    look_at_resume,
    look_at_rewards,
    look_at_rows,
    look_at_tokenizer,
)
from holdfast.plan.machine import (
    look_at_devices,
    look_at_place,
    look_at_ranks,
    look_at_versions,
    storage_of_run,
)
from holdfast.plan.measured import look_at_plan


def checks_of_machine(launch: LaunchConfig) -> list[Check]:
    """Return what is looked at without a run."""
    return [
        Check("versions", look_at_versions),
        Check("devices", lambda: look_at_devices(launch)),
        Check(RANKS, lambda: look_at_ranks(launch, None)),
    ]


def checks_of_run(run: Looked) -> list[Check]:
    """Return what is looked at of a run, in the order in which it would be met."""
    launch = run.config.launch

    def place() -> Iterator[Finding]:
        yield from look_at_place(storage_of_run(run.place), bytes_of_checkpoints(run))

    checks = [
        Check("versions", look_at_versions),
        Check("devices", lambda: look_at_devices(launch)),
        Check("place", place),
        Check(RANKS, lambda: look_at_ranks(launch, storage_of_run(run.place))),
        Check("tokenizer", lambda: look_at_tokenizer(run)),
        Check("rows", lambda: look_at_rows(run)),
    ]
    if isinstance(run.config, GRPOConfig):
        checks.append(Check("rewards", lambda: look_at_rewards(run)))
    return [
        *checks,
        Check("endpoints", lambda: look_at_endpoints(run)),
        Check("resume", lambda: look_at_resume(run)),
        Check("plan", lambda: look_at_plan(run.directory)),
    ]
