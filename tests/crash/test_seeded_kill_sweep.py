"""Random kills of the real command: whatever rank dies in whatever phase, the same command goes on bit for bit.

Three seeds in the fast suite; `HOLDFAST_SEEDS` of them, 200 by default, in the slow one.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.choose import newest_verified
from holdfast.checkpoint.storage import LocalStorage
from holdfast.checkpoint.writer import PHASES
from holdfast.parallel.collectives import ProcessExchange
from tests.cli.conftest import TINY, write_rows, write_run
from tests.cli.warm import WarmPython
from tests.crash.runs import log_of, state_differences

STEPS, FAST = 8, 3
SLOW = int(os.environ.get("HOLDFAST_SEEDS", "200"))
OF_A_STEP = ["data", "forward_backward", "optimizer"]
OF_A_SAVE = [*PHASES, "read back", "retention"]
OF_RANK_0 = {"manifest", "sync", "publish"}


def command(place: Path) -> list[str]:
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
        "checkpoint": {"every_steps": 2, "keep": {"last": 2}, "export_at_end": False},
        "metrics": {"progress": "off"},
        "launch": {"ranks": 2, "device": "cpu"},
    }
    write_run(place / "run.yaml", tree)
    return ["-m", "holdfast.cli.main", "sft", "run.yaml"]


def start(warm: WarmPython, place: Path, kill: str | None = None) -> tuple[int, str]:
    """Run the command to its end; return its exit code and what it said."""
    variables = {} if kill is None else {"HOLDFAST_PROVE_KILL": kill}
    done = subprocess.run(
        [warm.program, *command(place)],
        cwd=place,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def straight(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("straight")
    code, said = start(warm, place)
    assert code == 0, said
    return place


def drawn(seed: int) -> str:
    """Draw rank, step and phase of a kill, only such as that rank reaches."""
    chance = random.Random(seed)
    rank, step = chance.randrange(2), chance.randrange(1, STEPS + 1)
    phases = OF_A_STEP + [f"save: {phase}" for phase in OF_A_SAVE if rank == 0 or phase not in OF_RANK_0]
    return f"{rank}:{step}:{chance.choice(phases)}"


def confirmed(place: Path) -> int:
    """Return the last step that the run said is on disk, 0 if none."""
    file = place / "r" / "events.jsonl"
    events: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return max((event["saved"] for event in events if event["event"] == "checkpoint"), default=0)


@pytest.mark.parametrize(
    "seed", [*range(FAST), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FAST, SLOW))], ids=drawn
)
def test_a_run_that_was_killed_anywhere_goes_on_bit_for_bit(
    warm: WarmPython, straight: Path, tmp_path: Path, seed: int
) -> None:
    code, said = start(warm, tmp_path, drawn(seed))
    known = confirmed(tmp_path)
    choice = newest_verified(LocalStorage(tmp_path / "r" / "checkpoints"), ProcessExchange(), quarantine=False)
    found = 0 if choice is None else choice.manifest.step

    assert code == 3, said
    assert "was killed by SIGKILL" in said
    assert found >= known
    assert choice is None or "skipped" not in choice.words
    code, said = start(warm, tmp_path)
    assert code == 0, said
    assert f"resuming from step {found}," in said or found == 0
    assert log_of(tmp_path) == log_of(straight)
    assert state_differences(tmp_path, straight) == []
