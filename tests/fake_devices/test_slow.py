"""What takes minutes: planted device bugs, runs as any rank, lines for GPUs alone, and memory of a run of gigabytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.yaml12 import to_yaml
from holdfast.features.plan.checks.measured import measured_peaks
from tests.fake_devices.cases import NOT_BY_PLACE, tree
from tests.fake_devices.conftest import ROOT, child, executed, needs_guard
from tests.fake_devices.lane import make_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def tool(*arguments: str) -> str:
    needs_guard()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_every_planted_device_bug_is_noticed() -> None:
    assert "20 of 20 noticed" in tool("tools/device_bugs.py", "planted")


def test_nine_of_ten_drawn_device_bugs_are_noticed() -> None:
    assert "of 10 noticed, at least 9" in tool("tools/device_bugs.py", "drawn", "--seed", "19", "--count", "10")


def test_lines_for_gpus_alone_are_executed_or_have_a_reason() -> None:
    assert "NO REASON GIVEN" not in tool("tools/cuda_lines.py", "run")


@pytest.mark.cases("all")
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_runs_that_differ_in_what_every_rank_does_alike_are_those_of_any_rank(ranks: int, tmp_path: Path) -> None:
    needs_guard()
    make_models(tmp_path)
    names = sorted(NOT_BY_PLACE)
    first, *others = [executed(tmp_path, ranks, rank, *names) for rank in sorted({0, ranks - 1})]

    for made in (first, *others):
        assert {name: said.get("error") for name, said in made.items()} == dict.fromkeys(names)
        for what in ("host_values", "messages"):
            assert {name: made[name][what] for name in names} == {name: first[name][what] for name in names}


WIDE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""235 million parameters, of sixteen bytes each; large matrices, since glibc keeps the memory of small ones."""


def test_resident_memory_above_the_start_is_within_fifteen_per_cent_of_the_plan(tmp_path: Path) -> None:
    values = tree(
        steps=3,
        model={"config": WIDE},
        data={"batch_size": 2, "max_length": 64, "tokens_per_micro_batch": 128},
        run={"dir": str(tmp_path), "name": "r"},
        launch={"device": "cpu", "ranks": 1},
        checkpoint={"at_end": False, "export_at_end": False, "rehearsal": False},
    )
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(values), encoding="utf-8")

    plan = json.loads(child("holdfast.cli.main", "plan", str(file), "--memory", "100GiB", "--json").stdout)
    done = child("holdfast.cli.main", "sft", str(file))

    assert done.returncode == 0, done.stderr[-2000:]
    device, measured = measured_peaks(tmp_path / "r")
    assert device == "cpu"
    planned = plan["clock_phases"]
    assert planned["optimizer"] > 3 * 2**30
    for phase in ("forward_backward", "optimizer"):
        assert measured[phase] == pytest.approx(planned[phase], rel=0.15), phase
