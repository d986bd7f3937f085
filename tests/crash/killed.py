"""The real command on two ranks, killed where a test wants it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.cli.fixtures import TINY, write_rows, write_run
from tests.cli.warm import WarmPython

STEPS = 8


def command(place: Path, *overrides: str) -> list[str]:
    """Write a run with dropout, saves in the background and retention, and return the command that starts it."""
    write_rows(place / "rows.jsonl", [{"prompt": f"add {n}=", "completion": str(n)} for n in range(12)])
    tree = {
        "steps": STEPS,
        "run": {"dir": ".", "name": "r"},
        "model": {
            "config": TINY | {"attention_dropout": 0.3},
            "tokenizer": "builtin:characters",
            "dropout": True,
        },
        "data": {"path": "rows.jsonl", "batch_size": 4, "max_length": 32, "tokens_per_micro_batch": 64},
        "optim": {"lr": 0.01},
        "checkpoint": {"every_steps": 2, "keep": {"last": 2}, "export_at_end": False, "rehearsal": False},
        "metrics": {"progress": "off"},
        "launch": {"ranks": 2, "device": "cpu"},
    }
    write_run(place / "run.yaml", tree)
    return ["-m", "holdfast.cli.main", "sft", "run.yaml", *overrides]


def start(warm: WarmPython, place: Path, kill: str | None = None, *overrides: str) -> tuple[int, str]:
    """Run the command to its end; return its exit code and what it said."""
    variables = {} if kill is None else {"HOLDFAST_PROVE_KILL": kill}
    done = subprocess.run(
        [warm.program, *command(place, *overrides)],
        cwd=place,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def confirmed(place: Path) -> int:
    """Return the last step that the run said is on disk, 0 if none."""
    file = place / "r" / "events.jsonl"
    events: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return max((event["saved"] for event in events if event["event"] == "checkpoint"), default=0)
