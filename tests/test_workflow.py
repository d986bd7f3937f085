"""What a code host and a developer's git read is valid, and calls what the Makefile has."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
OWN = {"test-browser", "test-slurm", "test-ray", "test-vllm", "test-verifiers", "test-kernels", "test-real"}


@pytest.mark.parametrize("name", ["test", "nightly"])
def test_a_workflow_is_what_its_schema_says(name: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]

    checked = subprocess.run([*command, str(WORKFLOWS / f"{name}.yml")], capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stdout + checked.stderr


def targets_of_a_night() -> list[str]:
    (job,) = yaml.safe_load((WORKFLOWS / "nightly.yml").read_text(encoding="utf-8"))["jobs"].values()
    return list(job["strategy"]["matrix"]["target"])


def test_a_night_calls_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

    assert {target.partition(" ")[0] for target in targets_of_a_night()} <= targets


def test_every_night_runs_every_suite() -> None:
    quarters = {f"test-slow PART={part}/4" for part in (1, 2, 3, 4)}

    assert {*targets_of_a_night()} >= {"test", *quarters, *OWN}


def selected(part: str) -> set[str]:
    """Return the folders and files that `make test-slow PART=...` gives to pytest."""
    command = ["make", "--dry-run", "--no-print-directory", "test-slow", f"PART={part}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r" (tests/\S+)", printed.partition(' -m "slow and not gpu"')[2]))


def test_the_four_parts_have_every_test_file_once_but_those_of_suites_with_targets_of_their_own() -> None:
    own = set(re.findall(r"--ignore=(\S+)", subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "test-slow"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout))  # fmt: skip
    parts = [place for part in (1, 2, 3, 4) for place in sorted(selected(f"{part}/4"))]

    def of(file: Path, places: Iterable[str]) -> list[str]:
        return [place for place in places if file.is_relative_to(place)]

    for file in (path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")):
        assert len(of(file, parts)) == 1 or of(file, own), file


def test_all_tests_together_have_the_suite_with_a_real_model() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    (recipe,) = re.findall(r"^test-all:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)

    assert "test-real" in recipe.split()


def test_the_night_installs_a_vllm_for_the_real_model_where_its_lane_looks_for_one() -> None:
    (job,) = yaml.safe_load((WORKFLOWS / "nightly.yml").read_text(encoding="utf-8"))["jobs"].values()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    (directory,) = re.findall(r"^VLLM_VENV \?= (\S+)$", makefile, re.MULTILINE)

    installs = [step["run"] for step in job["steps"] if step.get("if") == "matrix.target == 'test-real'"]
    assert installs == [f"tools/install_vllm.sh {directory}"]


def test_a_change_runs_what_a_landing_runs() -> None:
    (job,) = yaml.safe_load((WORKFLOWS / "test.yml").read_text(encoding="utf-8"))["jobs"].values()

    assert job["steps"][-1]["run"] == ".ci/run"


def test_every_row_of_a_landing_names_folders_of_tests_and_of_the_package() -> None:
    rows = re.findall(r"^(\d+) (\S+) +(tests/.*)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)

    assert 0 < len(rows) <= 15
    for _, rooms, folders in rows:
        assert all((ROOT / folder).exists() for folder in folders.split()), folders
        for room in rooms.split("|"):
            assert any((ROOT / "src" / "holdfast" / name).exists() for name in (room, f"{room}.py")), room


def test_every_hook_before_a_commit_calls_what_is_there() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]

    for hook in hooks:
        for word in hook["entry"].split():
            assert not word.endswith(".py") or (ROOT / word).is_file(), hook
