"""Shared by the benchmark scripts: arms as processes that alternate, process CPU seconds, peak memory, ratios.

An arm is this interpreter running a script with `--arm NAME`; it prints one JSON line. Arms take turns for several
rounds, so that a slow minute of the machine hits both; the ratio is formed within a round, and the worst round decides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    # Without it glibc keeps freed memory in its heap and a peak cannot be told from what was there before.
    "MALLOC_MMAP_THRESHOLD_": "262144",
}


def cpu_seconds() -> float:
    """Return CPU seconds of this process so far."""
    return time.process_time()


def reset_peak() -> None:
    """Forget the process's peak memory so far."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Return the peak resident memory since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return float("nan")


def resident_mib() -> float:
    """Return resident memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def run_arm(script: str, arm: str, *arguments: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run one arm in a process of its own and return what it printed last."""
    command = [sys.executable, script, "--arm", arm, *arguments]
    variables = {**os.environ, **ENVIRONMENT, **(environment or {})}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        sys.exit(f"arm {arm} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def alternate(script: str, arms: Sequence[tuple[str, ...]], rounds: int) -> list[dict[str, dict[str, Any]]]:
    """Run all arms in turn, `rounds` times; arms are (label, --arm name, more arguments)."""
    found = []
    for number in range(rounds):
        turn: dict[str, dict[str, Any]] = {}
        order = arms if number % 2 == 0 else list(reversed(arms))
        for label, *rest in order:
            turn[label] = run_arm(script, *rest)
        found.append(turn)
        print(f"round {number + 1}: " + ", ".join(f"{label} {_short(turn[label])}" for label, *_ in arms), flush=True)
    return found


def _short(result: dict[str, Any]) -> str:
    name, value = next(iter(result.items()))
    return f"{name}={value:.4g}"


def worst_ratio(
    rounds: Sequence[dict[str, dict[str, Any]]], over: str, under: str, key: str, *, at_least: bool
) -> tuple[float, list[float]]:
    """Return the ratio over/under of the least favourable round, and all of them."""
    ratios = [turn[over][key] / turn[under][key] for turn in rounds]
    return (min(ratios) if at_least else max(ratios)), ratios


def verdict(title: str, ratio: float, ratios: Sequence[float], target: float, *, at_least: bool) -> str:
    """Return one line of a table."""
    ok = ratio >= target if at_least else ratio <= target
    sign = ">=" if at_least else "<="
    every = " ".join(f"{value:.3f}" for value in ratios)
    return f"{'ok  ' if ok else 'MISS'}  {title}: worst {ratio:.3f} (target {sign} {target}; rounds {every})"
