"""A run that breaks its model says so wherever it is looked at."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.sink import read_metrics
from tests.cli.fixtures import write_run
from tests.cli.in_process import cli_in_process
from tests.cli.screens import numbers
from tests.cli.warm import WarmPython
from tests.messages import Said


@pytest.mark.slow
def test_a_dead_model_is_told_on_the_screen_in_files_and_on_the_page(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any], said: Said
) -> None:
    dead = tree | {"steps": 14, "optim": {"lr": 1e5, "schedule": "constant"}, "metrics": {"log_every": 14}}
    write_run(tmp_path / "run.yaml", dead)

    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=tmp_path)
    watched = cli_in_process("watch", "runs/run", cwd=tmp_path)

    run = tmp_path / "runs" / "run"
    assert done.code == 0, done.err
    (line,) = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert line["nll"] == pytest.approx(math.log(64), rel=1e-6)
    assert line["mean_token_accuracy"] == pytest.approx(1 / 64)
    assert (line["health/no_gradient"], line["health/guessing"]) == (1.0, 1.0)  # of steps without a line of their own
    events = [json.loads(text) for text in (run / "events.jsonl").read_text().splitlines()]
    alarms = {event["alarm"]: event for event in events if event["event"] == "health"}
    assert {"no_gradient", "guessing"} <= alarms.keys()
    text = alarms["no_gradient"]["text"]
    said(text)
    first = text.partition(",")[0]
    assert "gradient" in first
    assert numbers(first) == [5]
    assert f"warning: {first}" in done.out
    assert first in watched.out
    assert first in (run / "report.html").read_text()
