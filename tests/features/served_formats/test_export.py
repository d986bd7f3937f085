"""`holdfast checkpoint export --format gguf | compressed-tensors` of a run: exit codes, card, push, full disk."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from holdfast.checkpoint.export.about import read_about
from holdfast.checkpoint.export.card import CARD, is_own
from holdfast.cli.commands.push import outgoing_files
from tests.cli.fixtures import HOLDFAST, write_rows
from tests.cli.in_process import cli_in_process
from tests.features.served_formats.directories import model_directory

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("served formats")]
LIAR = """#!{python}
import json, sys
rows = json.load(sys.stdin)["rows"]
answers = [
    {{"ids": row["ids"], "prompt_ids": row["prompt_ids"], "greedy": [1], "logprobs": [-9.0] * (len(row["ids"]) - 1)}}
    for row in rows
]
json.dump({{"program": "a reader that is wrong", "rows": answers}}, open(sys.argv[3], "w"))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the run of two steps `runs/r`, which trained adapters beside bfloat16 weights."""
    place = tmp_path_factory.mktemp("served")
    model_directory(place / "model", "llama", padding=3)
    questions = [f"what is {number} + 25?" for number in range(12)]
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "it's 42"}]}
        for question in questions
    ]
    write_rows(place / "rows.jsonl", rows)
    write_rows(place / "held_out.jsonl", rows[:5])
    tree = {
        "steps": 2,
        "run": {"name": "r"},
        "model": {"path": "model", "lora": {"rank": 2}, "dtype": "bfloat16"},
        "optim": {"kind": "adamw_bf16"},
        "data": {"path": "rows.jsonl", "batch_size": 4, "max_length": 64},
        "evaluation": {"sets": {"held_out": {"path": "held_out.jsonl"}}},
        "launch": {"ranks": 1, "device": "cpu"},
        "checkpoint": {"export_at_end": False},
    }
    (place / "run.yaml").write_text(yaml.safe_dump(tree))
    done = command(place, "sft", "run.yaml")
    assert done.returncode == 0, done.stderr
    return place


def command(place: Path, *arguments: str, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HOLDFAST, *arguments], cwd=place, capture_output=True, text=True, timeout=500, check=False, preexec_fn=before,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def export(place: Path, *options: str, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return command(place, "checkpoint", "export", "runs/r", *options, before=before)


@pytest.mark.parametrize(
    ("form", "tensor_type", "file"),
    [("gguf", "q8_0", "out-Q8_0.gguf"), ("compressed-tensors", "int8", "model.safetensors")],
)
def test_merged_weights_are_proved_on_held_out_rows(
    place: Path, tmp_path: Path, form: str, tensor_type: str, file: str
) -> None:
    out = tmp_path / "out"

    done = export(place, "-o", str(out), "--format", form, "--type", tensor_type)

    assert done.returncode == 0, done.stdout + done.stderr
    about = read_about(out)
    assert about is not None and about.proof is not None
    assert about.proof["is_within"] is True
    assert about.proof["rows"] == "5 held-out rows of the run and 15 fixed prompts"
    assert list(about.files) == [file]
    card = (out / CARD).read_text()
    assert is_own(card)
    assert f"{about.proof['largest']:.4g}" in card and f"{about.proof['mean']:.4g}" in card
    files, left_out = outgoing_files(out)
    assert {file, CARD, "holdfast_export.json", "holdfast.yaml"} <= set(files)
    assert left_out == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_not_proved_says_so_and_is_not_pushed(place: Path, tmp_path: Path) -> None:
    liar = tmp_path / "liar"
    liar.write_text(LIAR.format(python=sys.executable))
    liar.chmod(0o755)
    out = tmp_path / "out"

    done = export(place, "-o", str(out), "--format", "gguf", "--reader", str(liar))
    pushed = command(place, "push", str(out), "me/model")

    assert done.returncode == 1
    assert "NOT proved by a reader that is wrong" in done.stdout
    assert "NOT proved" in (out / CARD).read_text()
    assert json.loads((out / "holdfast_export.json").read_text())["proof"]["is_within"] is False
    assert pushed.returncode == 2
    assert "is not proved" in pushed.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--format", "gguf", "--adapter"],
        ["--format", "gguf", "--type", "fp8"],
        ["--format", "gguf", "--reader", "/absent/python"],
        ["--format", "gguf", "--reader", "/bin/false"],
        ["--format", "gguf", "--dtype", "float32"],
        ["--format", "hf", "--type", "f16"],
    ],
)
def test_bad_input_is_one_paragraph_and_leaves_nothing(place: Path, tmp_path: Path, options: list[str]) -> None:
    done = cli_in_process("checkpoint", "export", "runs/r", "-o", str(tmp_path / "out"), *options, cwd=place)

    assert done.code == 2, done.out + done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_a_disk_that_fills_in_the_middle_leaves_nothing(place: Path, tmp_path: Path, share: float) -> None:
    whole = export(place, "-o", str(tmp_path / "whole"), "--format", "gguf")
    limit = int(share * (tmp_path / "whole" / "whole-F16.gguf").stat().st_size)

    done = export(
        place, "-o", str(tmp_path / "out"), "--format", "gguf",
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip

    assert whole.returncode == 0
    assert done.returncode == 2, done.stdout + done.stderr
    assert "could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
