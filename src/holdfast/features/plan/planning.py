"""`holdfast plan`: predicts whether a run fits its devices, and which keys to change if it does not."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from holdfast.config.load import LoadedConfig
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.verbs.roots import load_run
from holdfast.config.verbs.training import TrainingConfig, as_plain
from holdfast.errors import ConfigError, HoldfastError, UserError
from holdfast.features.plan.devices import DEVICES, bytes_of, device_named
from holdfast.training.directory import check_writable, run_directory, save_plan


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command, besides the run itself."""

    ranks: int | None = None
    device: str | None = None
    memory: str | None = None
    longest: bool = False
    """Whether the longest row is asked for, in the place of a plan."""


class NoPlan(UserError):
    """A plan could not be made; whether the run would fit remains unknown."""


def plan(path: Path, overrides: Sequence[str], options: PlanOptions, *, as_json: bool, save: bool) -> int:
    """Print a plan; return 0 if the run fits, else 1.

    Raises:
        UserError: The file is wrong, or the run could not start.
    """
    loaded = load_run(path, overrides)
    if options.longest:
        return _longest(loaded, options, as_json=as_json, save=save)
    directory = run_directory(loaded.config)
    if save:
        check_writable(directory)
    planned = planned_apart(loaded, options)
    if save:
        save_plan(directory, planned)
    if as_json:
        print(json.dumps(planned, indent=2), flush=True)
    else:
        from holdfast.features.plan.checks.measured import measured_lines
        from holdfast.features.plan.table import table

        print("\n".join([*table(planned), *measured_lines(planned, directory)]), flush=True)
    return 0 if planned["fits"] else 1


def _longest(loaded: LoadedConfig[TrainingConfig], options: PlanOptions, *, as_json: bool, save: bool) -> int:
    """Print the longest rows that fit.

    Raises:
        ConfigError: They are to be saved.
        HoldfastError: The run could not start, or no row fits.
    """
    from holdfast.features.plan.table import longest_lines

    if save:
        raise ConfigError("--save keeps the plan of one run, and --longest plans many. Leave one of the two out.")
    found = planned_apart(loaded, options)
    print(json.dumps(found, indent=2) if as_json else "\n".join(longest_lines(found)), flush=True)
    return 0


def options_here(launch: LaunchConfig, ranks: int) -> PlanOptions:
    """Return the plan options of this machine: its GPUs, or the CPU if the run computes on it."""
    import torch

    if launch.device == "cpu" or not torch.cuda.is_available():
        return PlanOptions(ranks, "cpu")
    device_name = torch.cuda.get_device_name(0).lower()
    name = next((name for name in DEVICES if name in device_name), None)
    return PlanOptions(ranks, name, f"{torch.cuda.mem_get_info(0)[1]}b")


def planned_apart(loaded: LoadedConfig[TrainingConfig], options: PlanOptions) -> dict[str, Any]:
    """Return a plan, made by a process of its own.

    Raises:
        UserError: The run could not start.
        NoPlan: The process ended without an answer.
    """
    request = _request(loaded, options)
    with tempfile.TemporaryDirectory(prefix="holdfast-plan-") as folder:
        output = Path(folder) / "plan.json"
        message_text = json.dumps({**request, "output": str(output)})
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.features.plan.execution.process"],
            input=message_text,
            capture_output=True,
            text=True,
            check=False,
        )
        if not output.exists():
            reason = (done.stderr.strip() or "it says nothing").splitlines()[-1]
            message = f"No plan could be made: the process that executes it ended with code {done.returncode}: {reason}"
            raise NoPlan(message)
        answer: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    if "error" in answer:
        error = HoldfastError(answer["error"])
        error.exit_code = answer["exit_code"]
        raise error
    plan_made: dict[str, Any] = answer["plan"]
    if options.device is None and request["device"] != "cpu":
        plan_made["notes"].insert(
            0,
            f"device: nothing names one, so {request['device']} is planned, whatever this machine has; --device names "
            "another, and --device cpu, or launch.device: cpu, plans for this machine's CPU",
        )
    return plan_made


def _request(loaded: LoadedConfig[TrainingConfig], options: PlanOptions) -> dict[str, Any]:
    """Return what the process is asked, but for where it leaves its answer.

    Raises:
        ConfigError: The device or its memory is none.
    """
    config = loaded.config
    ranks = options.ranks or (config.launch.ranks if isinstance(config.launch.ranks, int) else 1)
    name = (options.device or "").lower() or ("cpu" if config.launch.device == "cpu" else "h100")
    memory = None if options.memory is None else bytes_of(options.memory)
    room = psutil.virtual_memory().total // ranks if name == "cpu" else device_named(name).memory
    return {
        "verb": config.verb,
        "config": as_plain(config),
        "base": str(loaded.base),
        "ranks": ranks,
        "device": name,
        "memory": memory or room,
        "longest": options.longest,
    }
