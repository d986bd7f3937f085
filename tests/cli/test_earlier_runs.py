"""A run that an earlier commit began is continued, and its last steps are those that the earlier commit made.

Each archive holds the run's directory as it was after step 2, and what the commit in its name made of steps 3 and 4.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast.checkpoint import verify
from tests.archives import unpack
from tests.cli.warm import WarmPython

HERE = Path(__file__).parents[1] / "earlier"
ARCHIVES = sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz"))
MASKED = ("timing/", "time", "throughput/", "memory/", "seconds")
"""Parts of the names of metrics that are other in every run."""


@pytest.mark.cases("all")
@pytest.mark.parametrize("name", ARCHIVES)
def test_a_run_of_an_earlier_commit_goes_on_to_the_same_numbers(warm: WarmPython, tmp_path: Path, name: str) -> None:
    verb = name.partition("-")[0]
    for file in (f"{verb}.yaml", "digits.py"):
        shutil.copy(HERE / file, tmp_path)
    unpack(HERE / f"{name}.tar.xz", tmp_path / "unpacked")
    (tmp_path / "runs").mkdir()
    directory = (tmp_path / "unpacked" / "run").rename(tmp_path / "runs" / verb)
    expected = tmp_path / "unpacked" / "expected"
    assert verify(str(directory / "checkpoints" / "step-00000002")).step == 2

    done = warm.run("-m", "holdfast.cli.main", verb, f"{verb}.yaml", cwd=tmp_path)

    assert done.code == 0, done.err
    lines, before = (numbers_of(folder / "metrics.jsonl") for folder in (directory, expected))
    assert sorted(lines) == [1, 2, 3, 4]
    for step in (3, 4):
        shared = lines[step].keys() & before[step].keys()
        assert {"loss", "grad_norm", "learning_rate", "num_tokens"} <= shared
        ours, theirs = ({key: numbers[step][key] for key in shared} for numbers in (lines, before))
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7)  # differences of log-probabilities are rounding alone
    for file, export in {"model": "final", "ema": "final-ema"}.items():
        if (expected / f"{file}.safetensors").exists():
            exported, earlier = (
                load_file(directory / "exports" / export / "model.safetensors"),
                load_file(expected / f"{file}.safetensors"),
            )
            assert exported.keys() == earlier.keys()
            for key, value in earlier.items():
                torch.testing.assert_close(exported[key], value, rtol=1e-6, atol=1e-7)


def numbers_of(path: Path) -> dict[int, dict[str, float]]:
    """Return the numbers of each step that do not depend on the clock."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        line["step"]: {
            key: value
            for key, value in line.items()
            if isinstance(value, int | float) and not any(part in key for part in MASKED)
        }
        for line in lines
        if "loss" in line
    }
