"""Twenty steps of SFT and ten of GRPO on a pretrained model, beside what they were when `losses.json` was written.

The file is looked at whenever a part of training is rewritten: HOLDFAST_WRITE_LOSSES=1 writes it anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.real.conftest import done, steps, write_run

FILE = Path(__file__).parent / "losses.json"
COLUMNS = {"sft": ("loss", "grad_norm"), "grpo": ("loss", "reward", "grad_norm")}


def made(room: Path) -> dict[str, dict[str, list[float]]]:
    """Return the columns of both runs by step."""
    runs = {}
    for verb, count in (("sft", 20), ("grpo", 10)):
        (room / verb).mkdir()
        file = write_run(room / verb, verb, steps=count, checkpoint={"at_end": False, "export_at_end": False})
        done(verb, file, cwd=room)
        lines = steps(room / verb / "runs" / "run")
        runs[verb] = {name: [line[name] for line in lines] for name in COLUMNS[verb]}
    return runs


def test_losses_and_rewards_are_those_that_were_written_down(room: Path) -> None:
    runs = made(room)
    if os.environ.get("HOLDFAST_WRITE_LOSSES"):
        FILE.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    written = json.loads(FILE.read_text(encoding="utf-8"))

    for name in COLUMNS["sft"]:
        assert runs["sft"][name] == pytest.approx(written["sft"][name], rel=1e-3), name
    # A build that rounds otherwise may sample another token, after which its steps are others.
    assert runs["grpo"]["reward"][0] == written["grpo"]["reward"][0]
    assert sum(runs["grpo"]["reward"]) == pytest.approx(sum(written["grpo"]["reward"]), abs=1.0)
