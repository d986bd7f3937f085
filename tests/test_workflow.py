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


@pytest.mark.parametrize("name", ["test", "nightly", "release", "site"])
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


def test_every_room_and_every_folder_of_slow_tests_is_in_a_row_of_a_landing() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    rows = re.findall(r"^\d+ (\S+) +(tests/.*)$", text, re.MULTILINE)
    (everywhere,) = re.findall(r"^everywhere='(.+)'$", text, re.MULTILINE)
    named = {room for rooms, _ in rows for room in rooms.split("|")}
    folders = {Path(folder) for _, listed in rows for folder in listed.split()}
    suites = re.findall(r"--ignore=(\S+)", subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "test-slow"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout)  # fmt: skip

    rooms = [path for path in (ROOT / "src" / "holdfast").iterdir() if path.is_dir() or path.suffix == ".py"]
    tests = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    slow = [path for path in tests if re.search(r"mark\.slow|mark\.cases", (ROOT / path).read_text(encoding="utf-8"))]

    inside = {
        path.name
        for path in rooms
        if path.name != "__pycache__" and not re.search(everywhere, f"{path.relative_to(ROOT)}{'/x' * path.is_dir()}")
    }
    assert inside == named
    assert slow
    assert [path for path in slow if not {path, *path.parents} & {*folders, *map(Path, suites)}] == []


@pytest.mark.parametrize(
    ("changed", "selected"),
    [
        ("src/holdfast/rewards/shaping.py", "tests/rollout tests/environments tests/rewards tests/features/vllm"),
        ("tests/fake_devices/expected.json", "tests/fake_devices"),
        ("tests/launch/test_servers.py", "tests/failures tests/launch tests/parallel tests/test_orphans.py"),
        ("pyproject.toml", "tests/crash"),
        ("tests/tiny.py", "tests/cli"),
        ("src/holdfast/errors.py", "tests/checkpoint"),
        ("docs/index.md", ""),
        ("", ""),
    ],
)
def test_a_landing_runs_the_slow_tests_of_what_changed(tmp_path: Path, changed: str, selected: str) -> None:
    """The script as it is, with a `make` that does nothing and a `git` that tells one file."""
    for name, body in (("make", 'echo "make $*"'), ("git", f'test "$1" != diff || echo "{changed}"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOLDFAST_BASE": "base"}

    done = subprocess.run(["bash", ".ci/run"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)

    ran = [line.partition("TESTS=")[2] for line in done.stdout.splitlines() if "test-slow" in line]
    left = done.stdout.rpartition("left to the night:")[2].strip()
    assert selected in [*ran, *left.split(), "" if not ran and left == "none" else None]


def test_every_hook_before_a_commit_calls_what_is_there() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]

    for hook in hooks:
        for word in hook["entry"].split():
            assert not word.endswith(".py") or (ROOT / word).is_file(), hook
