"""What a code host and a developer's git read is valid, and calls what the Makefile has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
LANES = {
    "test",
    "test-deep",
    "test-devices",
    "test-slow",
    "test-browser",
    "test-slurm",
    "test-ray",
    "test-vllm",
    "test-verifiers",
    "test-kernels",
    "test-real",
}


@pytest.mark.parametrize("name", ["test", "nightly"])
def test_a_workflow_is_what_its_schema_says(name: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]

    checked = subprocess.run([*command, str(WORKFLOWS / f"{name}.yml")], capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stdout + checked.stderr


def targets_of(name: str) -> set[str]:
    (job,) = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8"))["jobs"].values()
    return set(job["strategy"]["matrix"]["target"])


@pytest.mark.parametrize("name", ["test", "nightly"])
def test_a_workflow_calls_targets_of_the_makefile(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

    assert {"setup", *targets_of(name)} <= targets


def test_every_night_runs_every_lane() -> None:
    assert targets_of("nightly") >= LANES


def test_all_lanes_together_have_the_one_with_a_real_model() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    (recipe,) = re.findall(r"^test-all:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)

    assert "test-real" in recipe.split()


def test_the_night_installs_a_vllm_for_the_real_model_where_its_lane_looks_for_one() -> None:
    (job,) = yaml.safe_load((WORKFLOWS / "nightly.yml").read_text(encoding="utf-8"))["jobs"].values()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    (directory,) = re.findall(r"^VLLM_VENV \?= (\S+)$", makefile, re.MULTILINE)

    installs = [step["run"] for step in job["steps"] if step.get("if") == "matrix.target == 'test-real'"]
    assert installs == [f"tools/install_vllm.sh {directory}"]


def test_a_change_runs_the_lanes_at_hand_and_the_documentation() -> None:
    assert {"test", "test-deep", "test-devices", "test-browser", "docs"} == targets_of("test")


def test_every_hook_before_a_commit_calls_what_is_there() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]

    for hook in hooks:
        for word in hook["entry"].split():
            assert not word.endswith(".py") or (ROOT / word).is_file(), hook
