"""Import paths of what features add to the core, so that the core never imports a feature.

Each value is `module:attribute`; `load` imports it when a run needs it. Commands are listed in `cli/main.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

ENGINES = {
    "vllm": "holdfast.features.vllm.publish:open_servers",
    "recorded": "holdfast.features.forensics.recorded:RecordedEngine",
}
"""Rollout engines outside `rollout/local`, by the kind of `rollout.engine`."""
SERVERS = "holdfast.features.vllm.serving:servers_of"
"""Context manager that starts and stops the inference servers of a run."""
SERVER_COMMANDS = "holdfast.features.vllm.serving:planned_commands"
"""Returns the command lines of the inference servers that a run would start."""
SERVERS_UNDER_TORCHRUN = "holdfast.features.vllm.serving:refuse_starting"
"""Refuses servers that a process started by torchrun cannot own."""
SRUN = "holdfast.features.cluster.slurm:join_step"
"""Makes a task of `srun` one rank, or torchrun on its node."""
STEP_RECORD = "holdfast.features.forensics.recorder:record"
"""Writes the inputs and results of a step, for `holdfast replay`."""
SANDBOX = "holdfast.features.sandboxes.recipes:Recipe"
"""Starts a program of an agent in a sandbox."""
TOOL_SERVERS = "holdfast.features.mcp.tools:servers_of"
"""Lists the tools of servers that speak the Model Context Protocol."""
CODE_REWARD = "holdfast.features.code.reward:of_section"
"""Makes a reward of a section of `kind: code`."""
SERVED_REFERENCE = "holdfast.features.served_models.served:open_reference"
"""Returns the reference policy behind an endpoint, compared with the policy."""
SERVED_TEACHER = "holdfast.features.served_models.served:open_teacher"
"""Returns the teacher behind an endpoint."""
SERVED_FORMAT = "holdfast.features.served_formats.exporting:export_served"
"""Exports a checkpoint in the format of a program that serves models, and proves it."""
SERVED_EXPORT = "holdfast.features.served_formats.exporting:ServedExport"
"""What such an export is made of."""
FILM = "holdfast.features.video.films:FilmFile"
"""Decodes films, of a path or bytes and a name for errors."""
OBJECT_STORE = "holdfast.features.object_store.storage:ObjectStorage"
"""Storage of checkpoints under a URL."""
TRACKERS = "holdfast.features.trackers.client:Trackers"
TRACKER_CHECK = "holdfast.features.trackers.client:check_trackers"
RUN_PAGE = "holdfast.features.report.run_page:write_at_end"
"""Writes the page that a run ends with."""
KEY_HINT = "holdfast.features.rescue.systems.table:describe_key"
"""Returns Holdfast's name for a configuration key of another training system."""
FOREIGN_CONFIGURATION = "holdfast.features.rescue.systems.table:system_of_keys"
"""Returns which other training system's configuration has these keys."""


def load(path: str) -> Any:
    """Import what a path of this registry names.

    Args:
        path: `module:attribute`.
    """
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
