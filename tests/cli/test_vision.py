"""A model that sees, from a random start: trained by command on drawn pictures, and its export evaluated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from holdfast.config.sections.data import SyntheticConfig
from holdfast.data.tasks.synthetic import SyntheticSource
from holdfast.models.files.vision import FREEZE_PRESETS
from tests.cli.fixtures import write_run
from tests.cli.warm import WarmPython
from tests.vision import PROCESSORS, config_values


@pytest.mark.slow
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


SHAPES = {"task": "shapes", "min_length": 1, "max_length": 2}
MODEL: dict[str, Any] = {
    "config": config_values("qwen2_5_vl"),
    "tokenizer": "builtin:pictures",
    "image_processor": PROCESSORS["qwen2_5_vl"],
    "freeze": ["vision_tower"],
}


def policy_tree(**sections: Any) -> dict[str, Any]:
    return {
        "steps": 4,
        "launch": {"ranks": 2},
        "model": MODEL | {"dtype": "float64"},
        "data": {"synthetic": SHAPES | {"rows": 64}, "batch_size": 4, "max_length": 64},
        "rollout": {"group_size": 4, "max_new_tokens": 12},
        "reward": {"kind": "length", "target": 6},
        "optim": {"lr": 0.01, "schedule": "constant"},
        "checkpoint": {"every_steps": 2},
        "evaluation": {"sets": {"held": {"synthetic": SHAPES | {"rows": 6, "seed": 1}}}},
    } | sections


def of_steps(folder: Path) -> dict[int, tuple[float, float]]:
    lines = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["reward"], line["grad_norm"]) for line in lines if "grad_norm" in line}


@pytest.mark.slow
def test_a_policy_that_sees_goes_on_on_one_rank_as_it_would_have_on_two(warm: WarmPython, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    for folder in (straight, broken):
        folder.mkdir()
        write_run(folder / "run.yaml", policy_tree())

    whole = warm.run("-m", "holdfast.cli.main", "grpo", "run.yaml", cwd=straight)
    first = warm.run("-m", "holdfast.cli.main", "grpo", "run.yaml", "steps=2", cwd=broken)
    rest = warm.run("-m", "holdfast.cli.main", "grpo", "run.yaml", "launch.ranks=1", cwd=broken)

    assert (whole.code, first.code, rest.code) == (0, 0, 0), (whole.err, first.err, rest.err)
    expected, found = of_steps(straight), of_steps(broken)
    assert sorted(found) == [1, 2, 3, 4]
    for step, numbers in expected.items():
        assert found[step] == pytest.approx(numbers, rel=1e-7), step
    samples = [json.loads(line) for line in (straight / "runs/run/samples.jsonl").read_text().splitlines()]
    for name in {sample["images"] for sample in samples}:
        with Image.open(straight / "runs/run/sample_images" / name) as image:
            assert (image.format, image.height) == ("JPEG", 16)
    assert len({sample["images"] for sample in samples}) > 1
    completions = json.loads((straight / "runs/run/completions/step-00000004.held.jsonl").read_text().splitlines()[0])
    assert completions["prompt"].count("<|image_pad|>") == 1
    assert (straight / "runs/run/exports/final/preprocessor_config.json").exists()


@pytest.mark.slow
def test_a_policy_in_bfloat16_beside_a_frozen_tower_goes_on_on_one_rank(warm: WarmPython, tmp_path: Path) -> None:
    optim = {"kind": "adamw_bf16", "lr": 0.01, "weight_decay": 0, "schedule": "constant"}
    write_run(tmp_path / "run.yaml", policy_tree(model=MODEL | {"dtype": "bfloat16"}, optim=optim))

    first = warm.run("-m", "holdfast.cli.main", "grpo", "run.yaml", "steps=2", cwd=tmp_path)
    before = weights_in(tmp_path)
    rest = warm.run("-m", "holdfast.cli.main", "grpo", "run.yaml", "launch.ranks=1", cwd=tmp_path)

    assert (first.code, rest.code) == (0, 0), (first.err, rest.err)
    found = of_steps(tmp_path)
    assert sorted(found) == [1, 2, 3, 4]
    assert all(0 < norm < 1e3 for _, norm in found.values())
    tower = re.compile(FREEZE_PRESETS["vision_tower"])
    for name, value in weights_in(tmp_path).items():
        assert torch.equal(value, before[name]) or not tower.search(name), name
    assert any(not torch.equal(value, before[name]) for name, value in weights_in(tmp_path).items())


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "runs/run/exports/final/model.safetensors")


@pytest.mark.slow
def test_prompts_and_pairs_with_images_are_shown(warm: WarmPython, tmp_path: Path) -> None:
    write_run(tmp_path / "grpo.yaml", policy_tree())
    pairs = {name: policy_tree()[name] for name in ("steps", "model", "data")}
    write_run(tmp_path / "dpo.yaml", pairs | {"preference": {"loss": "dpo"}})

    policy, pair = (
        warm.run("-m", "holdfast.cli.main", "data", "preview", f"{verb}.yaml", cwd=tmp_path) for verb in ("grpo", "dpo")
    )

    assert (policy.code, policy.err, pair.code, pair.err) == (0, "", 0, "")
    image, asked, tokens, columns = policy.out.splitlines()
    assert asked.count("<|image_pad|>") == 1
    assert asked.endswith("shapes:")
    # Pictures are 16 pixels high, and a token stands for 8 x 8 of them; two more tokens stand around an image.
    width = 16 * len(SyntheticSource(SyntheticConfig.model_validate(SHAPES | {"rows": 64})).row(0)["shapes"])
    assert tokens.startswith(f"{len('shapes:') + 2 + 2 * width // 8} tokens;")
    assert "images" in columns
    assert image.endswith(f" row 0, image 0: {width}x16 pixels, {2 * width // 8} tokens")
    assert [line.count("<|image_pad|>") for line in pair.out.splitlines()] == [0, *[2 * width // 8, 0] * 2]
