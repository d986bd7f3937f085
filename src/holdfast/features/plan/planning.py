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
from holdfast.features.plan.devices import DEVICES, GIB, bytes_of, memory_of
from holdfast.features.plan.execution.process import NEWS
from holdfast.features.plan.formulas import known_size, parts_by_formulas, uncounted
from holdfast.files import python_module
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
    """Return a plan, made by a process of its own; what that does is told on standard error meanwhile.

    Raises:
        UserError: The run could not start.
        NoPlan: The process ended without an answer.
    """
    request = _request(loaded, options)
    if not options.longest:
        _tell_formulas(loaded.config, loaded.base, request)
    with tempfile.TemporaryDirectory(prefix="holdfast-plan-") as folder:
        output = Path(folder) / "plan.json"
        request["output"] = str(output)
        code, complaints = _executed(request, Path(folder))
        if not output.exists():
            reason = (complaints.strip() or "it says nothing").splitlines()[-1]
            message = f"No plan could be made: the process that executes it ended with code {code}: {reason}"
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


def _tell(text: str) -> None:
    print(f"{NEWS}{text}", file=sys.stderr, flush=True)


def _tell_formulas(config: TrainingConfig, base: Path, request: dict[str, Any]) -> None:
    """Tell what formulas say, which takes a moment where an execution takes a minute."""
    size = known_size(config, base)
    if size is None:
        return
    by_kind = parts_by_formulas(config, size, request["ranks"], "cpu" if request["device"] == "cpu" else "cuda")
    left_out = uncounted(config)
    rest = f", without {left_out}" if left_out else ""
    _tell(f"by formulas {sum(by_kind.values()) / GIB:.2f} of {request['memory'] / GIB:.2f} GiB at the peak{rest}")


def _executed(request: dict[str, Any], folder: Path) -> tuple[int, str]:
    """Let a process answer a request, pass its news on, and return its exit code and what it complained of."""
    ranks = f"{request['ranks']} rank{'s' if request['ranks'] > 1 else ''} of {request['device']}"
    what = "steps of rows of many lengths are" if request["longest"] else "a step is"
    _tell(f"{what} executed for {ranks}, on devices that compute nothing")
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    errors = folder / "errors.txt"
    with (folder / "request.json").open(encoding="utf-8") as asked, errors.open("wb") as complaints:
        command = python_module("holdfast.features.plan.execution.process")
        with subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE, stderr=complaints, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(NEWS):
                    print(line, end="", file=sys.stderr, flush=True)
    return process.returncode, errors.read_text(encoding="utf-8", errors="replace")


def _request(loaded: LoadedConfig[TrainingConfig], options: PlanOptions) -> dict[str, Any]:
    """Return what the process is asked, but for where it leaves its answer.

    Raises:
        ConfigError: The device or its memory is none.
    """
    config = loaded.config
    ranks = options.ranks or (config.launch.ranks if isinstance(config.launch.ranks, int) else 1)
    name = (options.device or "").lower() or ("cpu" if config.launch.device == "cpu" else "h100")
    memory = None if options.memory is None else bytes_of(options.memory)
    room = psutil.virtual_memory().total // ranks if name == "cpu" else memory_of(name)
    return {
        "verb": config.verb,
        "config": as_plain(config),
        "base": str(loaded.base),
        "ranks": ranks,
        "device": name,
        "memory": memory or room,
        "longest": options.longest,
    }
