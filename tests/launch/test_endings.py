"""What the launcher adds to events.jsonl at the end of a run, beside what the ranks recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.launch.directory import LaunchDirectory


@pytest.mark.parametrize(
    ("events", "stopped"),
    [
        ("", False),
        ('{"event": "stop", "step": 4}\n', True),
        ('{"event": "stop", "step": 4}\n{"event": "checkpoint", "saved": 4}\n', True),
        ('{"event": "stop", "step": 4}\n{"event": "start", "step": 4}\n', False),
        ('{"event": "checkpoint", "saved": 4}\n{"event": "stop", "step": 4}\n{"ev', True),
        ('{"event": "stop", "step": 4}\n[1]\n', True),
    ],
)
def test_ranks_that_recorded_their_stop_are_believed(tmp_path: Path, events: str, stopped: bool) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text(events)

    with LaunchDirectory(tmp_path / "run") as directory:
        assert directory.has_stopped() is stopped
