"""The wheel, installed into an empty environment, does what the checkout does: the demo, its page, every example.

HOLDFAST_WHEEL_PYTHON names another interpreter, for `tools/test_versions.sh`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.test_examples import COMMAND, EXAMPLES, header

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[1]
PYTHON = os.environ.get("HOLDFAST_WHEEL_PYTHON", sys.executable)
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


JUNK = (
    ".env",
    ".ipynb_checkpoints/first_run-checkpoint.ipynb",
    "runs/sft_sort/model.safetensors",
    "runs/sft_sort/config.yaml",
    "__pycache__/guess.cpython-311.pyc",
    "rows.jsonl",
    "real/.env.yaml~",
)
BUILDERS = ("hatchling", "hatch-fancy-pypi-readme")
FURTHER = {"ppo_sort": ["critic.warmup_steps=0"]}
"""Keys without which three steps are refused."""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Return an empty directory on disk, where an environment of gigabytes has room, with the wheel in its `venv`."""
    with tempfile.TemporaryDirectory(prefix="holdfast-wheel-", dir="/var/tmp") as name:
        install(Path(name))
        yield Path(name)


def tracked(folder: str = ".") -> list[str]:
    """Return the files below a folder that git has."""
    command = ["git", "ls-files", folder]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def checkout(folder: Path) -> Path:
    """Write what git has here to a folder, and beside the examples what their use leaves."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in JUNK:
        (folder / "examples" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "examples" / name).write_text("none of the package's")
    return folder


def install(place: Path) -> None:
    run(PYTHON, "-m", "venv", place / "venv", cwd=place)
    pip = [place / "venv/bin/python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "install", *BUILDERS, cwd=place)
    run(place / "venv/bin/python", "-m", "hatchling", "build", "-d", place / "dist", cwd=checkout(place / "checkout"))
    run(*pip, "uninstall", "-y", *BUILDERS, cwd=place)
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    run(*pip, "install", torch, cwd=place)
    (wheel,) = (place / "dist").glob("*.whl")
    run(*pip, "install", "-c", ROOT / "constraints.txt", f"{wheel}[math,vlm]", cwd=place)


def test_the_archives_hold_the_examples_and_no_results(place: Path) -> None:
    (wheel,), (sources,) = (place / "dist").glob("*.whl"), (place / "dist").glob("*.tar.gz")

    names = set(zipfile.ZipFile(wheel).namelist())

    assert {name for name in names if "/examples/" in name} == {f"holdfast/{name}" for name in tracked("examples")}
    assert {name for name in names if name.endswith(".py") and "/examples/" not in name} == {
        name.removeprefix("src/") for name in tracked("src") if name.endswith(".py")
    }
    assert not any("__pycache__" in name or "/tests/" in name for name in names)
    with tarfile.open(sources) as archive:
        members = archive.getnames()
    assert any(name.endswith("/benchmarks/README.md") for name in members)
    assert not any("/benchmarks/results/" in name for name in members)


def test_the_page_of_the_package_index_has_whole_links_and_the_commands_of_pip(place: Path) -> None:
    (wheel,) = (place / "dist").glob("*.whl")

    page = zipfile.ZipFile(wheel).read("holdfast-0.1.0.dist-info/METADATA").decode().partition("\n\n")[2]

    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 20
    assert [link for link in links if not re.match(r"https://|#", link)] == []
    assert "pip install holdfast" in page
    assert "make demo" not in page


def test_the_demo_ends_with_its_page(place: Path) -> None:
    said = run(place / "venv/bin/holdfast", "demo", "--dir", "demo", cwd=place)

    summary = said.rpartition("=== 5/5  summary\n")[2]
    assert re.search(r"^killed and resumed .*all 80 steps are there$", summary, re.MULTILINE)
    assert "<svg" not in (page := (place / "demo/grpo/report.html").read_text())
    assert "Content-Security-Policy" in page


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_makes_three_steps(place: Path, example: Path, request: pytest.FixtureRequest) -> None:
    if "kind: vllm" in example.read_text(encoding="utf-8"):
        pytest.skip("needs a vLLM, which has an environment of its own")
    run(place / "venv/bin/holdfast", "examples", example.stem, cwd=place)

    for command in COMMAND.findall(header(example)):
        program, *words = shlex.split(command)
        if program == "python":
            more = [str(request.getfixturevalue("gsm8k"))] if "gsm8k" in words[0] else []
            run(place / "venv/bin/python", *words, *more, cwd=place)
        else:
            run(place / "venv/bin/holdfast", *words, "steps=3", *FURTHER.get(Path(words[1]).stem, []), cwd=place)

    assert (place / "runs" / example.stem / "report.html").exists()
