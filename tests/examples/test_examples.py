"""Every example does what its header says: its commands, in the order they stand there, reach the numbers it names."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))
CLAIM = re.compile(r"(eval/\S+) (<=|>=) ([0-9.]+)")
COMMAND = re.compile(r"^#   ((?:holdfast|python) .+)$", re.MULTILINE)
PROOFS = [
    pytest.param(f"holdfast prove examples/{name}.yaml {options}", marks=pytest.mark.slow, id=name)
    for name, options in [("sft_sort", "--steps 12 --kill-at 7"), ("grpo_reverse", "--steps 8 --kill-at 5")]
]
"""As the pages and headers give them."""
RUNS = [pytest.param(example, marks=pytest.mark.slow, id=example.stem) for example in EXAMPLES]
VLLM_PYTHON = os.environ.get("HOLDFAST_VLLM_PYTHON")
"""That of an environment with vLLM, under `make test-vllm`."""


def header(example: Path) -> str:
    lines = example.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith("#"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory like a checkout's; a run that another example has made already has nothing left to do."""
    directory = tmp_path_factory.mktemp("checkout")
    (directory / "examples").symlink_to(FOLDER)
    return directory


def arguments(command: str, request: pytest.FixtureRequest) -> list[str]:
    """Return what a header's command runs here; without the hub, GSM8K is a file."""
    program, *rest = shlex.split(command)
    if program == "holdfast":
        return [sys.executable, "-m", "holdfast.cli.main", *rest]
    return [sys.executable, *rest, str(request.getfixturevalue("gsm8k"))]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_to_expect(example: Path) -> None:
    text = example.read_text(encoding="utf-8")

    assert len(text.splitlines()) <= 40
    assert f"examples/{example.name}" in COMMAND.findall(header(example))[-1]
    assert CLAIM.search(header(example))


@pytest.mark.parametrize("example", RUNS)
@pytest.mark.timeout(1800)
def test_an_example_reaches_the_numbers_in_its_header(
    example: Path, place: Path, request: pytest.FixtureRequest
) -> None:
    more = []
    if "kind: vllm" in example.read_text(encoding="utf-8"):
        if VLLM_PYTHON is None:
            pytest.skip("needs a vLLM; make test-vllm installs one")
        more = [f"rollout.engine.python={VLLM_PYTHON}"]
    for command in COMMAND.findall(header(example)):
        words = [*arguments(command, request), *more]
        done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0, f"{command}\n{done.stderr}"

    assert "done after step" in done.stdout
    found = {}
    for line in (place / "runs" / example.stem / "metrics.jsonl").read_text().splitlines():
        found |= json.loads(line)
    for name, relation, bound in CLAIM.findall(header(example)):
        assert found[name] <= float(bound) if relation == "<=" else found[name] >= float(bound), name


@pytest.mark.parametrize("command", PROOFS)
@pytest.mark.timeout(1800)
def test_a_proof_of_an_example_ends_with_identical(command: str, place: Path, request: pytest.FixtureRequest) -> None:
    """What must have run before it is what its header names before its own run."""
    *before, _ = COMMAND.findall(header(FOLDER / Path(shlex.split(command)[2]).name))

    for each in (*before, command):
        done = subprocess.run(
            arguments(each, request), cwd=place, capture_output=True, text=True, timeout=1200, check=False
        )
        assert done.returncode == 0, f"{each}\n{done.stdout}\n{done.stderr}"

    assert done.stdout.splitlines()[-1] == "identical"
    assert re.search(r"^killed: SIGKILL to rank \d in phase \w+ of step \d+$", done.stdout, re.M)
