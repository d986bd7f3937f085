"""kill -9 of a rank while its episodes are between two turns: the same command makes the step again, bit for bit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fixtures import TINY, write_rows, write_run
from tests.cli.warm import WarmPython
from tests.crash.runs import log_of, state_differences
from tests.rewards.conftest import is_alive, wait_for

WORLD = '''
import os
import time
from pathlib import Path
from holdfast.environments.base import Observation

def claimed():
    """Say whether this is the first episode that asks: of several at once, one may kill."""
    try:
        os.close(os.open("killed", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

class World:
    """Kills its rank in the second turn of a row that asks for it, once step 2 is saved, and but once."""

    replayable = True

    def begin(self, row):
        self.kills = row["kills"]
        with open("pids", "a") as file:
            file.write(f"{os.getpid()}\\n")

    def step(self, turn):
        if self.kills and turn.number == 1 and claimed():
            last = time.monotonic() + 90
            while not Path("r/checkpoints/step-00000002/manifest.json").exists() and time.monotonic() < last:
                time.sleep(0.01)
            supervisor = Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(supervisor.rpartition(")")[2].split()[1]), 9)
        reward = sum(ord(character) % 2 for character in turn.text) / 8
        return Observation(f"turn {turn.number}: {len(turn.text)}", reward, turn.number == 2)
'''


def start(warm: WarmPython, place: Path) -> tuple[int, str]:
    """Run four steps of which the third kills its rank; return the exit code and what was said."""
    (place / "world.py").write_text(WORLD)
    rows = [{"prompt": f"say {n}=", "kills": n == 9} for n in range(16)]
    write_rows(place / "rows.jsonl", rows)
    tree: dict[str, Any] = {
        "steps": 4,
        "run": {"dir": ".", "name": "r"},
        "model": {"config": TINY | {"max_position_embeddings": 160}, "tokenizer": "builtin:characters"},
        "data": {"path": "rows.jsonl", "batch_size": 4, "max_length": 160, "shuffle": False},
        "environment": {"path": "world.py:World", "max_turns": 3, "on_cut": "continue", "timeout_seconds": 120},
        "rollout": {"group_size": 4, "max_new_tokens": 8, "show": 0},
        "reward": "environment",
        "groups": {"truncated": "keep"},
        "checkpoint": {"every_steps": 1, "export_at_end": False, "rehearsal": False},
        "metrics": {"progress": "off"},
        "launch": {"ranks": 2, "device": "cpu"},
    }
    write_run(place / "run.yaml", tree)
    command: list[str | Path] = [warm.program, "-m", "holdfast.cli.main", "grpo", "run.yaml"]
    done = subprocess.run(
        command, cwd=place, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=240
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_step_that_is_left_between_two_turns_is_made_again_bit_for_bit(
    warm: WarmPython, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Starts the command three times."""
    straight, broken = tmp_path_factory.mktemp("straight"), tmp_path_factory.mktemp("broken")
    (straight / "killed").touch()

    code, said = start(warm, straight)
    assert code == 0, said
    code, said = start(warm, broken)
    assert code == 3, said
    assert "was killed by SIGKILL" in said
    pids = [int(pid) for pid in (broken / "pids").read_text().split()]
    assert wait_for(lambda: not any(map(is_alive, pids)), 60), "environments die with their rank"
    code, said = start(warm, broken)

    assert code == 0, said
    assert "resuming from step 2," in said
    assert log_of(broken) == log_of(straight)
    assert state_differences(broken, straight) == []
