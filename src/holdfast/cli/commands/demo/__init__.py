"""`holdfast demo`: the main job from nothing, on two ranks, with a rank killed on the way."""

# As cli/main.py, without `from __future__ import annotations`.
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast import patience
from holdfast.errors import RunStopped, UserError
from holdfast.files import python_module
from holdfast.processor import usable_cores

if TYPE_CHECKING:
    import psutil

_RANKS = 2
KILL_AT = 34
"""Step of the second run at which a rank is killed: some steps after a checkpoint."""

_ACCURACY = "eval/held_out/accuracy"


def run_demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where everything is written.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of both runs.")] = 0,
) -> None:
    """Show the main job on two ranks: SFT, GRPO, a rank killed on the way, resume, verification, export."""
    raise typer.Exit(demo(directory, seed))


def device_for(gpus: int) -> tuple[str, str]:
    """Return `launch.device` of two ranks on a machine with so many GPUs, and a phrase that says where they compute.

    Each rank needs a GPU of its own, and the demo needs a rank that survives the other: with one GPU both compute on
    the CPU.
    """
    if gpus < _RANKS:
        return "cpu", "the CPU" + (f", since {gpus} GPU is too few for {_RANKS} ranks" if gpus else "")
    return "auto", f"{_RANKS} of {gpus} GPUs"


def demo(directory: Path, seed: int, *overrides: str, kill_at: int = KILL_AT) -> int:
    """Train on wrong demonstrations, then by rewards, kill a rank, verify, export, and say what came of it.

    Args:
        directory: Everything is written below it; what an earlier demo left there is removed.
        seed: Of both runs.
        overrides: Further keys of both runs.
        kill_at: Step of the second run at which a rank is killed.

    Raises:
        RunStopped: A part of it failed; its own words were printed.
        UserError: The directory cannot be made, or a run was refused.
    """
    from holdfast.launch.environment import cuda_devices

    began = time.monotonic()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{directory} cannot be a directory: {error.strerror or error}. Name another place by --dir."
        ) from error
    for name in ("sft", "grpo"):
        if (directory / name / "run.json").exists():
            shutil.rmtree(directory / name)
        (directory / f"{name}.yaml").write_text(
            files("holdfast.cli.commands.demo").joinpath(f"demo_{name}.yaml").read_text()
        )
    device, device_note = device_for(cuda_devices())
    common = (f"run.dir={directory}", f"seed={seed}", f"launch.device={device}", *overrides)
    print(f"{_RANKS} ranks on {device_note}")
    _say("1/5  SFT on 2 FSDP ranks: demonstrations of sorted digits, 70% of them wrong")
    _run("sft", str(directory / "sft.yaml"), *common)
    _say(f"2/5  GRPO from there, rewarded by a verifier; a rank gets SIGKILL at step {kill_at}")
    killed = _run_and_kill(kill_at, "grpo", str(directory / "grpo.yaml"), *common)
    run = directory / "grpo"
    _say("3/5  every byte of the newest checkpoint, checked again")
    _run("checkpoint", "verify", str(run))
    _say("4/5  the export, loaded by plain transformers")
    accuracy = _accuracy_of(run / "exports" / "final", directory / "questions.jsonl")
    print(f"right answers to 100 new questions: {accuracy:.3f}")
    _say("5/5  summary")
    for line in _summary(run, f"{killed}) at step {kill_at}", accuracy, time.monotonic() - began):
        print(line)
    return 0


def _say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def _command(*arguments: str) -> list[str]:
    return [*python_module("holdfast.cli.main"), *arguments]


def _run(*arguments: str) -> None:
    _check_exit(subprocess.run(_command(*arguments), check=False).returncode, arguments)


def _check_exit(code: int, arguments: Sequence[str]) -> None:
    if code:
        error = UserError if code == UserError.exit_code else RunStopped
        raise error(f"`holdfast {' '.join(arguments)}` ended with exit code {code}.")


def _accuracy_of(export: Path, questions: Path) -> float:
    """Return the share of right answers to 100 generated questions, completed by `holdfast generate`."""
    from holdfast.config.sections.data import SyntheticConfig
    from holdfast.data.tasks.synthetic import SyntheticSource, check_answer

    source = SyntheticSource(SyntheticConfig(task="sort", rows=100, seed=3))
    rows = [source.row(index) for index in range(100)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("generate", str(export), "--rows", str(questions), "--max-new-tokens", "8", "--json")
    done = subprocess.run(_command(*asked), check=False, stdout=subprocess.PIPE, text=True)
    _check_exit(done.returncode, asked)
    answers = [each["completion"] for each in json.loads(done.stdout)["completions"]]
    return sum(map(check_answer, rows, answers)) / len(rows)


def _run_and_kill(kill_at: int, *arguments: str) -> int:
    """Run a command, kill one of its ranks when it reaches a step, and return the rank's process id."""
    metrics = Path(arguments[2].removeprefix("run.dir=")) / arguments[0] / "metrics.jsonl"
    process = subprocess.Popen(_command(*arguments))
    killed = 0
    try:
        while process.poll() is None:
            if not killed and metrics.exists() and metrics.read_bytes().count(b'"loss"') >= kill_at:
                victim = _ranks(process.pid)[-1]
                print(f"\nkill -9 {victim.pid}: rank 1 is gone", flush=True)
                victim.send_signal(signal.SIGKILL)
                killed = victim.pid
            time.sleep(patience.current.demo_look_seconds)
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    _check_exit(process.returncode, arguments)
    if not killed:
        raise RunStopped(f"The run ended before a rank could be killed at step {kill_at}.")
    return killed


def _ranks(launcher: int) -> list["psutil.Process"]:
    """Return the ranks below a launcher, by rank: they are started in order."""
    import psutil

    children = psutil.Process(launcher).children(recursive=True)
    ranks = [child for child in children if "holdfast.launch.rank" in child.cmdline()]
    return sorted(ranks, key=lambda child: int(child.environ().get("RANK", "0")))


def _summary(run: Path, killed: str, plain: float, seconds: float) -> Sequence[str]:
    from holdfast.metrics.sink import METRICS, read_metrics
    from holdfast.training.directory import PAGE

    lines = read_metrics(run / METRICS)
    steps = [line for line in lines if "reward" in line]
    held_out = [line[_ACCURACY] for line in lines if _ACCURACY in line]
    first, last = _mean(steps[:1]), _mean(steps[-5:])
    return [
        f"sampled reward       {first:.2f} at the first step -> {last:.2f} over the last five",
        f"held-out accuracy    {held_out[0]:.3f} after SFT -> {held_out[-1]:.3f} after GRPO "
        f"({plain:.2f} by plain transformers on other questions)",
        f"killed and resumed   rank 1 (process {killed}; all {len(steps)} steps are there",
        f"the run              {run}",
        f"the model            {run / 'exports' / 'final'}",
        f"time                 {seconds:.0f} s on {usable_cores()} cores",
        *([f"what happened        {run / PAGE}"] if (run / PAGE).exists() else []),
    ]


def _mean(lines: Sequence[dict[str, Any]]) -> float:
    return sum(float(line["reward"]) for line in lines) / max(1, len(lines))
