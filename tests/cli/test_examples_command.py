"""`holdfast examples` copies what comes with the package, and replaces nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.in_process import cli_in_process
from tests.messages import lacks

ROOT = Path(__file__).parents[2] / "examples"


def files_below(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_all_of_them_are_copied_and_a_second_call_writes_nothing(tmp_path: Path) -> None:
    first = cli_in_process("examples", cwd=tmp_path)
    copied = files_below(tmp_path / "examples")
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    second = cli_in_process("examples", cwd=tmp_path)

    assert (first.code, second.code, first.err) == (0, 0, "")
    assert copied == files_below(ROOT)
    assert first.out == second.out
    listed = {line.split()[0] for line in first.out.splitlines()[:-1]}
    assert listed == {name.removesuffix(".yaml") for name in copied if name.endswith(".yaml")}
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("sft_sort", {"sft_sort.yaml"}),
        ("grpo_sort", {"grpo_sort.yaml", "sft_sort.yaml"}),
        (
            "examples/grpo_calculator.yaml",
            {"grpo_calculator.yaml", "calculator.py", "calculator_start.py", "sft_calculator.yaml"},
        ),
        (
            "agents/grpo_verifiers",
            {
                f"agents/{name}"
                for name in ("grpo_verifiers.yaml", "letters.jsonl", "turns.jinja", "verifiers_guess.py")
            },
        ),
        ("grpo_vllm", {"grpo_vllm.yaml", "rewards/digits.py"}),
    ],
)
def test_one_of_them_comes_with_the_files_that_it_needs(tmp_path: Path, name: str, files: set[str]) -> None:
    done = cli_in_process("examples", name, cwd=tmp_path)

    assert done.code == 0
    assert set(files_below(tmp_path / "examples")) == files
    last = done.out.splitlines()[-1].strip()
    assert last.startswith("holdfast ")
    assert name.removeprefix("examples/").removesuffix(".yaml") in last


MADE = re.compile(r"runs/(\w+)")


@pytest.mark.parametrize("path", sorted((ROOT / "real").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_commands_of_a_real_example_make_all_that_it_starts_from(tmp_path: Path, path: Path) -> None:
    done = cli_in_process("examples", f"real/{path.stem}", cwd=tmp_path)

    commands = [line.strip() for line in done.out.partition("To run it:")[2].splitlines() if line.strip()]
    made = {Path(command.split()[-1]).stem for command in commands if command.startswith("holdfast ")}
    made |= {name for command in commands if command.startswith("python ") for name in MADE.findall(command)}
    made |= {"real_rows"} if any("rows.py" in command for command in commands) else set()
    read = {
        name
        for file in (tmp_path / "examples").rglob("*.yaml")
        if any(file.name in command for command in commands)
        for line in file.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
        for name in MADE.findall(line)
    }
    assert read <= made
    assert commands[-1].endswith(path.name)


def test_no_file_of_the_users_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/sft_sort.yaml").write_text("steps: 1\n")

    done = cli_in_process("examples", cwd=tmp_path)

    assert (done.code, lacks(done.err, "examples/sft_sort.yaml")) == (2, [])
    assert files_below(tmp_path) == {"examples/sft_sort.yaml": b"steps: 1\n"}


def test_a_name_that_is_none_and_a_place_that_takes_no_files_are_refused(tmp_path: Path) -> None:
    unknown = cli_in_process("examples", "grpo_srt", cwd=tmp_path)
    (tmp_path / "examples").write_text("a file")
    blocked = cli_in_process("examples", "sft_sort", cwd=tmp_path)

    assert (unknown.code, lacks(unknown.err, "grpo_srt grpo_sort")) == (2, [])
    assert (blocked.code, lacks(blocked.err, "examples")) == (2, [])
    assert files_below(tmp_path) == {"examples": b"a file"}


def test_a_demo_where_a_file_stands_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")

    done = cli_in_process("demo", "--dir", "taken", cwd=tmp_path)

    assert (done.code, lacks(done.err, "taken --dir")) == (2, [])
    assert files_below(tmp_path) == {"taken": b"a file"}
