"""`holdfast demo`: the main job from nothing, on the CPU, with a rank killed on the way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil

from holdfast import patience
from holdfast.errors import RunStopped

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT, _MARGIN = 720, 360, 48
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700")


def line_plot(title: str, curves: Mapping[str, Points], *, horizontal: str, low: float = 0.0, high: float = 1.0) -> str:
    """Return an SVG document with one line per named curve.

    Args:
        title: Above the plot.
        curves: Points from left to right; at least one curve has two.
        horizontal: Name of the horizontal axis, which starts at 0.
        low, high: Ends of the vertical axis.
    """
    longest = max((x for points in curves.values() for x, _ in points), default=1.0) or 1.0

    def place(x: float, y: float) -> str:
        across = _MARGIN + x / longest * (_WIDTH - 2 * _MARGIN)
        up = _HEIGHT - _MARGIN - (min(max(y, low), high) - low) / (high - low) * (_HEIGHT - 2 * _MARGIN)
        return f"{across:.1f},{up:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_MARGIN}" y="24" font-size="16">{escape(title)}</text>',
        f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 8}">{escape(horizontal)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = low + share * (high - low)
        start, end = place(0, value), place(longest, value)
        parts.append(f'<polyline points="{start} {end}" stroke="#d0d7de" fill="none"/>')
        parts.append(f'<text x="8" y="{float(start.split(",")[1]) + 4:.1f}">{value:g}</text>')
    for number, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        joined = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{joined}" stroke="{colour}" stroke-width="2" fill="none"/>')
        below = 40 + 16 * number
        parts.append(f'<text x="{_WIDTH - 200}" y="{below}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


KILL_AT = 34
"""Step of the second run at which a rank is killed: some steps after a checkpoint."""

_ACCURACY = "eval/held_out/accuracy"


def demo(directory: Path, seed: int, *overrides: str, kill_at: int = KILL_AT) -> int:
    """Train on wrong demonstrations, then by rewards, kill a rank, verify, export, and say what came of it.

    Args:
        directory: Everything is written below it; what an earlier demo left there is removed.
        seed: Of both runs.
        overrides: Further keys of both runs.
        kill_at: Step of the second run at which a rank is killed.

    Raises:
        RunStopped: A part of it failed; its own words were printed.
    """
    began = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("sft", "grpo"):
        if (directory / name / "run.json").exists():
            shutil.rmtree(directory / name)
        (directory / f"{name}.yaml").write_text(files("holdfast.cli").joinpath(f"demo_{name}.yaml").read_text())
    common = (f"run.dir={directory}", f"seed={seed}", *overrides)
    _say("1/5  SFT on 2 FSDP ranks: demonstrations of sorted digits, 70% of them wrong")
    _run("sft", str(directory / "sft.yaml"), *common)
    _say(f"2/5  GRPO from there, rewarded by a verifier; a rank gets SIGKILL at step {kill_at}")
    killed = _run_and_kill(kill_at, "grpo", str(directory / "grpo.yaml"), *common)
    run = directory / "grpo"
    _say("3/5  every byte of the newest checkpoint, checked again")
    _run("checkpoint", "verify", str(run))
    _say("4/5  the export, loaded by plain transformers")
    export = run / "exports" / "final"
    accuracy = _output("-m", "holdfast.cli.plain_completion", str(export), "100").split()[-1]
    print(f"right answers to 100 new questions: {accuracy}")
    _say("5/5  summary")
    for line in _summary(run, f"{killed}) at step {kill_at}", float(accuracy), time.monotonic() - began):
        print(line)
    return 0


def _say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "holdfast.cli.main", *arguments]


def _run(*arguments: str) -> None:
    code = subprocess.run(_command(*arguments), check=False).returncode
    if code:
        raise RunStopped(f"`holdfast {' '.join(arguments)}` ended with exit code {code}.")


def _output(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RunStopped(f"`python {' '.join(arguments)}` ended with exit code {done.returncode}.")
    return done.stdout


def _run_and_kill(kill_at: int, *arguments: str) -> int:
    """Run a command, kill one of its ranks when it reaches a step, and return the rank's process id."""
    metrics = Path(arguments[2].removeprefix("run.dir=")) / arguments[0] / "metrics.jsonl"
    process = subprocess.Popen(_command(*arguments))
    killed = 0
    try:
        while process.poll() is None:
            if not killed and _steps(metrics) >= kill_at:
                victim = _ranks(process.pid)[-1]
                print(f"\nkill -9 {victim.pid}: rank 1 is gone", flush=True)
                victim.send_signal(signal.SIGKILL)
                killed = victim.pid
            time.sleep(patience.current.demo_look_seconds)
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if process.returncode:
        raise RunStopped(f"`holdfast {' '.join(arguments)}` ended with exit code {process.returncode}.")
    if not killed:
        raise RunStopped(f"The run ended before a rank could be killed at step {kill_at}.")
    return killed


def _ranks(launcher: int) -> list[psutil.Process]:
    """Return the ranks below a launcher, by rank: they are started in order."""
    children = psutil.Process(launcher).children(recursive=True)
    ranks = [child for child in children if "holdfast.cli.worker" in child.cmdline()]
    return sorted(ranks, key=lambda child: int(child.environ().get("RANK", "0")))


def _steps(metrics: Path) -> int:
    return metrics.read_bytes().count(b'"loss"') if metrics.exists() else 0


def _summary(run: Path, killed: str, plain: float, seconds: float) -> Sequence[str]:
    from holdfast.cli.demo import line_plot
    from holdfast.metrics.sink import METRICS, read_metrics

    lines = read_metrics(run / METRICS)
    steps = [line for line in lines if "reward" in line]
    held_out = [(float(line["step"]), line[_ACCURACY]) for line in lines if _ACCURACY in line]
    rewards = [(float(line["step"]), line["reward"]) for line in steps]
    plot = run / "reward.svg"
    curves = {"reward, sampled": rewards, "accuracy, held out": held_out}
    plot.write_text(line_plot("GRPO after wrong demonstrations", curves, horizontal="step"), encoding="utf-8")
    first, last = _mean(steps[:1]), _mean(steps[-5:])
    return [
        f"sampled reward       {first:.2f} at the first step -> {last:.2f} over the last five",
        f"held-out accuracy    {held_out[0][1]:.3f} after SFT -> {held_out[-1][1]:.3f} after GRPO "
        f"({plain:.2f} by plain transformers on other questions)",
        f"killed and resumed   rank 1 (process {killed}; all {len(steps)} steps are there",
        f"the run              {run}",
        f"the model            {run / 'exports' / 'final'}",
        f"the plot             {plot}",
        f"time                 {seconds:.0f} s on {os.cpu_count()} cores",
    ]


def _mean(lines: Sequence[dict[str, Any]]) -> float:
    return sum(float(line["reward"]) for line in lines) / max(1, len(lines))
