"""A disk that is full when a step is written: one paragraph, no traceback, and the run goes on once there is room."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from holdfast.metrics.sink import read_metrics
from tests.cli.commands import LiveRun
from tests.cli.fixtures import write_run
from tests.cli.warm import WarmPython
from tests.crash.disks import Remount, disk
from tests.messages import Said, lacks

__all__ = ["disk"]


def test_a_full_disk_under_metrics_is_one_paragraph(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any], disk: tuple[Path, Remount], said: Said
) -> None:
    place, _ = disk
    tree |= {"steps": 100_000, "run": {"dir": str(place)}, "launch": {"ranks": 1, "device": "cpu"}}
    write_run(tmp_path / "run.yaml", tree)
    run = LiveRun(tmp_path, warm=warm)
    run.directory = place / "run"
    run.wait_for_step(3)
    fill(place / "filler")

    done, _ = run.end()

    assert done.code == 3
    assert "Traceback" not in done.out + done.err
    assert done.err.count("[Errno 28]") == 1, done.err
    assert lacks(done.err, f"OSError '{run.directory}/metrics.jsonl'") == []
    said(re.sub(r"\bstep \d+", "step N", done.err.strip()))
    lines = [line["step"] for line in read_metrics(run.directory / "metrics.jsonl") if "loss" in line]
    assert lines == list(range(1, len(lines) + 1))
    assert run.processes() == {}


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as opened:
        try:
            while True:
                opened.write(bytes(4096))
        except OSError:
            return
