"""Every command once as a process of its own, in which nothing is imported yet: its exit code, and no traceback.

Commands whose success costs seconds are refused, by code that runs after the imports of the command.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.cli.main import COMMANDS
from tests.cli.fixtures import of_step
from tests.cli.warm import run


class Call(NamedTuple):
    """Arguments of a command beside the run of `trained`, and the exit code."""

    words: str
    code: int = 0


RUN, STEP, EXPORT = "runs/run", of_step(3), "runs/run/exports/final"
NO_ROWS = "run.yaml data.path=gone.jsonl"
CALLS = {
    "init": Call("--model gone --data gone.jsonl --output new.yaml", 2),
    "sft": Call(NO_ROWS, 2),
    "dpo": Call(f"{NO_ROWS} preference.loss=dpo", 2),
    "reward": Call(f"{NO_ROWS} preference.loss=bradley_terry", 2),
    "grpo": Call(f"{NO_ROWS} reward=exact rollout.max_new_tokens=4", 2),
    "distill": Call(f"{NO_ROWS} teacher.path=gone", 2),
    "eval": Call("run.yaml --data rows.jsonl", 2),
    "generate": Call(f"{RUN} --prompt add --rows rows.jsonl", 2),
    "demo": Call(f"--seed {2**64}", 2),
    "examples": Call("sft_sort"),
    "doctor": Call("--only versions"),
    "plan": Call("run.yaml --device none", 2),
    "env": Call(""),
    "prove": Call("run.yaml --kill-at 9 --steps 4", 2),
    "replay": Call(f"{RUN} --step 1", 2),
    "explain-mismatch": Call(f"{RUN} --step 1", 2),
    "report": Call(RUN),
    "watch": Call(RUN),
    "serve": Call("run.yaml", 2),
    "push": Call(f"{EXPORT} none", 2),
    "version": Call(""),
    "checkpoint ls": Call(RUN),
    "checkpoint path": Call(RUN),
    "checkpoint show": Call(STEP),
    "checkpoint verify": Call(STEP),
    "checkpoint diff": Call(f"{STEP} {STEP}"),
    "checkpoint export": Call(f"{STEP} -o out"),
    "checkpoint check": Call(EXPORT),
    "checkpoint import": Call(EXPORT, 2),
    "checkpoint convert": Call(STEP),
    "checkpoint average": Call(f"{STEP} {of_step(4)} -o out"),
    "checkpoint prune": Call(f"{RUN} --keep-last 2"),
    "checkpoint pin": Call(f"{RUN} 3"),
    "config show": Call("run.yaml"),
    "config schema": Call(""),
    "config diff": Call("run.yaml run.yaml"),
    "config import": Call("theirs.yaml --from trl"),
    "data preview": Call("run.yaml"),
    "data check": Call("run.yaml"),
    "launch slurm": Call("run.yaml"),
    "launch ray": Call(f"{NO_ROWS} --ranks 2", 2),
    "model parameters": Call("run.yaml"),
    "model check": Call(EXPORT),
    "runs ls": Call(""),
    "runs compare": Call(f"{RUN} {RUN}"),
}
SLOW = {
    "checkpoint average", "checkpoint check", "checkpoint export", "data check", "data preview", "doctor",
    "model check", "model parameters",
}  # fmt: skip
"""Commands whose imports alone take more than three seconds."""


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in COMMANDS]
)
def test_every_command_runs_in_a_process_of_its_own(place: Path, command: str) -> None:
    (place / "theirs.yaml").write_text("model_name_or_path: m\ndataset_name: d\nassistant_only_loss: true\n")
    call = CALLS[command]

    done = run([sys.executable, "-m", "holdfast.cli.main", *command.split(), *call.words.split()], cwd=place)

    assert "Traceback" not in done.out + done.err
    assert done.code == call.code, done.err
