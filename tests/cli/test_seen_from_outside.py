"""What sees a run's steps from outside: profiles, and the batch of a spike."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.cli.fixtures import write_run
from tests.cli.screens import numbers
from tests.cli.warm import WarmPython


def test_the_steps_that_are_named_are_profiled_on_every_rank(
    warm: WarmPython, tmp_path: Path, tree: dict[str, Any]
) -> None:
    write_run(tmp_path / "run.yaml", tree | {"steps": 5, "profile": [2, 3]})

    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=tmp_path)

    assert done.code == 0, done.err
    (told,) = [line for line in done.out.splitlines() if "runs/run/profile" in line]
    assert numbers(told) == [2, 3]
    ranks = int(tree["launch"]["ranks"])
    for rank in range(ranks):
        with gzip.open(tmp_path / f"runs/run/profile/rank-{rank}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        backward = [event for event in events if "backward" in str(event.get("name")).lower()]
        assert backward, "a trace without a backward pass saw no step"


def test_the_batch_of_a_spike_is_recorded(warm: WarmPython, tmp_path: Path, tree: dict[str, Any]) -> None:
    rows = [{"prompt": f"add {n}=", "completion": "1"} for n in range(200)]
    rows[117] = {"prompt": "odd=", "completion": "zqxjkvbpyg wvut srq"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = tree["data"] | {"shuffle": False, "batch_size": 4, "path": "rows.jsonl"}
    write_run(tmp_path / "run.yaml", tree | {"steps": 40, "data": data, "optim": {"kind": "sgd", "lr": 0.5}})

    done = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=tmp_path)

    assert done.code == 0, done.err
    events = [json.loads(line) for line in (tmp_path / "runs/run/events.jsonl").read_text().splitlines()]
    spikes = {event["step"]: event for event in events if event.get("alarm") in {"loss_spike", "gradient_spike"}}
    assert 30 in spikes, "row 117 is in the thirtieth batch of four"
    files = sorted((tmp_path / "runs/run/spikes").glob("step-00000030.rank-*.jsonl"))
    assert len(files) == tree["launch"]["ranks"]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(lines) == 4
    assert any("odd=" in line["begins"] for line in lines)
    assert f" {spikes[30]['batch']}." in spikes[30]["text"]
