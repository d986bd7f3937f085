"""Ranks raise, or one hangs or is stopped: what was saved counts, and the rank is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from holdfast.checkpoint.inspect.compare import first_different_value
from holdfast.checkpoint.keep import find

TREE: dict[str, Any] = {
    "steps": 8,
    "launch": {"ranks": 2, "device": "cpu"},
    "model": {
        "tokenizer": "builtin:characters",
        "dropout": True,
        "config": {
            "model_type": "gpt2",
            "vocab_size": 64,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 64,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
    },
    "data": {"synthetic": {"task": "sort", "rows": 64}, "batch_size": 8, "max_length": 32},
    "objective": {"kind": "path", "path": "loss.py:make"},
    "checkpoint": {"export_at_end": False},
}
LOSS = """
import os, time
from pathlib import Path
from holdfast.objectives.supervised import NegativeLogLikelihood

class Loss(NegativeLogLikelihood):
    calls = 0
    def token_terms(self, logprobs, entropy, part):
        Loss.calls += 1
        armed = Path("armed-" + os.environ["RANK"])
        if Loss.calls == 6 and armed.exists():
            armed.unlink()
            ACTION
        return super().token_terms(logprobs, entropy, part)

def make():
    return Loss()
"""


def command(folder: Path, action: str, *arguments: str) -> list[str]:
    (folder / "loss.py").write_text(LOSS.replace("ACTION", action))
    (folder / "run.yaml").write_text(yaml.safe_dump(TREE))
    return [sys.executable, "-m", "holdfast.cli.main", "sft", "run.yaml", *arguments]


def run(folder: Path, action: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, action, *arguments), cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all raise", "one raises"])
def test_a_run_that_ended_with_an_error_continues_bit_for_bit(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """Where all ranks raise, the last whole step is saved; where one does, the others cannot take part in a save."""
    action = 'raise ValueError("a bug of the user\'s")'
    for rank in ranks:
        (tmp_path / f"armed-{rank}").touch()

    failed = run(tmp_path, action, "checkpoint.every_steps=2")
    saved = find.one(str(tmp_path / "runs" / "run")).manifest.step
    again = run(tmp_path, action)
    straight = run(tmp_path, action, "run.name=straight")

    assert (failed.returncode, again.returncode, straight.returncode) == (3, 0, 0), failed.stderr + again.stderr
    assert re.search(r"Rank \d failed in phase 'forward_backward' at step", failed.stderr)
    assert "ValueError: a bug of the user's" in failed.stderr
    assert saved % 2 == (len(ranks) == 2)  # the error lies between two saves
    assert f"resuming from step {saved}" in again.stdout
    ends = [find.one(str(tmp_path / "runs" / name)) for name in ("run", "straight")]
    assert [end.manifest.step for end in ends] == [8, 8]
    assert first_different_value(*ends) is None


@pytest.mark.slow
def test_a_stopped_rank_is_named_with_its_phase_when_the_others_time_out(tmp_path: Path) -> None:
    (tmp_path / "armed-1").touch()
    action = "(Path('pid').write_text(str(os.getpid())), time.sleep(600))"
    process = subprocess.Popen(
        command(tmp_path, action, "launch.timeout_minutes=0.25", "checkpoint.rehearsal=false"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(4.0)  # its heartbeat tells the phase, and comes late on a busy machine
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGSTOP)

    output, _ = process.communicate(timeout=120)

    assert process.returncode == 3
    assert "Rank 1 hangs in phase 'forward_backward'" in output
    assert "rank 1 has stopped answering" in output
    assert not [one for one in psutil.process_iter() if one.pid == int((tmp_path / "pid").read_text())]
