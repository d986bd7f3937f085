"""A run whose checkpoints hold adapters alone, on a command line: its base moves, changes or goes, and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.keep import find
from holdfast.models.files.origin import files_fingerprint
from tests.cli.fixtures import write_rows, write_run
from tests.cli.warm import WarmPython
from tests.tiny import tiny_directory


def tree_of(steps: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "model": {"path": "base", "lora": {"rank": 2}},
        "data": {"path": "rows.jsonl", "batch_size": 4, "max_length": 32, "tokens_per_micro_batch": 64},
        "optim": {"lr": 0.01, "schedule": "constant"},
        "checkpoint": {"rehearsal": {"enabled": False}},
        "launch": {"ranks": 2, "device": "cpu"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("change", ["absent", "others"])
def test_a_run_without_its_base_is_refused_by_code_2_and_goes_on_when_it_is_back(
    warm: WarmPython, tmp_path: Path, change: str
) -> None:
    def sft(steps: int) -> Any:
        write_run(tmp_path / "run.yaml", tree_of(steps))
        return warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=tmp_path)

    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"add {n}=", "completion": str(n)} for n in range(12)])
    base = tiny_directory(tmp_path / "base", "llama")
    assert sft(1).code == 0
    saved = files_fingerprint(base).rpartition("-")[2]
    base.rename(tmp_path / "kept")
    here = "absent"
    if change == "others":
        here = files_fingerprint(tiny_directory(tmp_path / "base", "llama", seed=5)).rpartition("-")[2]

    refused = sft(2)

    assert refused.code == 2
    assert all(word in refused.err for word in (saved, here, "model.path", "checkpoint.frozen: save"))
    assert refused.err.strip().count("\n") == 0
    if change == "others":
        base.rename(tmp_path / "other")
    (tmp_path / "kept").rename(base)
    resumed = sft(2)
    assert resumed.code == 0, resumed.err
    newest = find.one(str(tmp_path / "runs/run"))
    assert (newest.manifest.step, newest.manifest.contents[0]) == (2, "trained parameters")
