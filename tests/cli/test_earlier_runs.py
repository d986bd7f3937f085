"""What a release wrote stays readable: its runs are converted, verified, exported and continued to its own numbers.

Each archive holds a run's directory as it was after step 2, and what the version in its name made of steps 3 and 4
(`tests/earlier/record.py`).
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
from tests.cli.in_process import cli_in_process
from tests.cli.screens import resumed_at
from tests.cli.warm import WarmPython
from tests.messages import lacks

HERE = Path(__file__).parents[1] / "earlier"
ARCHIVES = sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz"))
MASKED = ("timing/", "time", "throughput/", "memory/", "seconds")
"""Parts of the names of metrics that are other in every run."""


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ARCHIVES)
def test_what_a_release_wrote_is_converted_verified_exported_and_continued(
    warm: WarmPython, tmp_path: Path, name: str
) -> None:
    verb = name.partition("-")[0]
    for file in (f"{verb}.yaml", "digits.py"):
        shutil.copy(HERE / file, tmp_path)
    unpack(HERE / f"{name}.tar.xz", tmp_path / "unpacked")
    (tmp_path / "runs").mkdir()
    directory = (tmp_path / "unpacked" / "run").rename(tmp_path / "runs" / verb)
    expected = tmp_path / "unpacked" / "expected"
    saved = directory / "checkpoints" / "step-00000002"
    before_it = bytes_of(saved)
    refused = warm.run("-m", "holdfast.cli.main", verb, f"{verb}.yaml", cwd=tmp_path)
    assert refused.code == 2, refused.err
    assert lacks(refused.err, f"`holdfast checkpoint convert {saved.relative_to(tmp_path)}`") == []
    assert bytes_of(saved) == before_it
    converted = cli_in_process("checkpoint", "convert", f"runs/{verb}", cwd=tmp_path)
    assert converted.code == 0, converted.err
    assert verify(str(saved)).step == 2

    exported = warm.run("-m", "holdfast.cli.main", "checkpoint", "export", str(saved), "-o", "step-2", cwd=tmp_path)
    done = warm.run("-m", "holdfast.cli.main", verb, f"{verb}.yaml", cwd=tmp_path)

    assert (exported.code, done.code) == (0, 0), exported.err + done.err
    assert resumed_at(done.out) == 2
    lines, before = (numbers_of(folder / "metrics.jsonl") for folder in (directory, expected))
    assert sorted(lines) == [1, 2, 3, 4]
    for step in (3, 4):
        shared = lines[step].keys() & before[step].keys()
        assert {"loss", "grad_norm", "learning_rate", "num_tokens"} <= shared
        ours, theirs = ({key: numbers[step][key] for key in shared} for numbers in (lines, before))
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7)  # differences of log-probabilities are rounding alone
    for file in expected.glob("*.safetensors"):
        path = tmp_path / "step-2" if file.stem == "step-2" else directory / "exports" / file.stem
        weights, earlier_weights = load_file(path / "model.safetensors"), load_file(file)
        assert weights.keys() == earlier_weights.keys()
        # What was saved comes back bit for bit; two more steps round as the machine does.
        limits = {"rtol": 0.0, "atol": 0.0} if file.stem == "step-2" else {"rtol": 1e-6, "atol": 1e-7}
        for key, value in earlier_weights.items():
            torch.testing.assert_close(weights[key], value, **limits)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


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
