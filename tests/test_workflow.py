"""What a code host and a developer's git read is valid, and calls what the Makefile has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"


def test_the_workflow_is_what_its_schema_says() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]

    checked = subprocess.run([*command, str(WORKFLOW)], capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_workflow_calls_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

    (job,) = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"].values()

    assert {"setup", *job["strategy"]["matrix"]["target"]} <= targets


def test_every_hook_before_a_commit_calls_what_is_there() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]

    for hook in hooks:
        for word in hook["entry"].split():
            assert not word.endswith(".py") or (ROOT / word).is_file(), hook
