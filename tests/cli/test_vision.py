"""A model that sees, from a random start: trained by command on drawn pictures, and its export evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.conftest import write_run
from tests.cli.warm import WarmPython
from tests.vision import PROCESSORS, config_values


def test_the_export_of_a_random_start_brings_its_image_processor(warm: WarmPython, tmp_path: Path) -> None:
    shapes = {"task": "shapes", "min_length": 1, "max_length": 2}
    tree: dict[str, Any] = {
        "steps": 2,
        "launch": {"ranks": 2},
        "model": {
            "config": config_values("qwen2_5_vl"),
            "tokenizer": "builtin:pictures",
            "image_processor": PROCESSORS["qwen2_5_vl"],
            "freeze": ["vision_tower"],
        },
        "data": {"synthetic": shapes | {"rows": 64}, "batch_size": 8, "max_length": 96},
        "evaluation": {"sets": {"held": {"synthetic": shapes | {"rows": 9, "seed": 1}}}},
    }
    write_run(tmp_path / "run.yaml", tree)

    trained = warm.run("-m", "holdfast.cli.main", "sft", "run.yaml", cwd=tmp_path)
    export = tmp_path / "runs/run/exports/final"
    evaluated = warm.run("-m", "holdfast.cli.main", "eval", str(export), "launch.ranks=1", cwd=tmp_path)

    assert (trained.code, evaluated.code) == (0, 0), (trained.err, evaluated.err)
    settings = json.loads((export / "preprocessor_config.json").read_text())
    assert {name: settings[name] for name in ("patch_size", "merge_size")} == {"patch_size": 4, "merge_size": 2}
    last = json.loads((tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()[-1])
    printed = dict(line.split(" ") for line in evaluated.out.splitlines() if line.startswith("eval/"))
    assert abs(float(printed["eval/held/loss"]) - last["eval/held/loss"]) < 1e-5
