"""`holdfast checkpoint export --format gguf | compressed-tensors`: exit codes, what lies in the directory, the push."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.in_process import cli_in_process
from tests.features.served_formats.directories import model_directory
from tests.training.cases import run, tree

FORMS = [("gguf", "f16"), ("gguf", "q8_0"), ("compressed-tensors", "fp8"), ("compressed-tensors", "int8")]


@pytest.fixture(scope="module")
def trained(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of two steps on conversations, with rows that it held out."""
    return run_from(pools, tmp_path_factory.mktemp("trained"), scale=1)


def run_from(pools: Any, place: Path, scale: float) -> Path:
    """Train from a model whose head is scaled."""
    model = model_directory(place / "model", "llama:3.1")
    weights = load_file(model / "model.safetensors")
    scaled = {name: scale * value if "lm_head" in name else value for name, value in weights.items()}
    save_file(scaled, model / "model.safetensors", {"format": "pt"})
    rows = [{"messages": [{"role": "user", "content": "the sea"}, {"role": "assistant", "content": "was calm"}]}] * 8
    for name in ("rows", "held_out"):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = tree(str(place), steps=2)
    values["model"] = {"path": str(model)}
    values["data"] = {"path": str(place / "rows.jsonl"), "batch_size": 4, "max_length": 64}
    values["evaluation"] = {"sets": {"held": {"path": str(place / "held_out.jsonl")}}}
    pools(1).run(run, values)
    return place


def exported(trained: Path, target: Path, form: str, tensor_type: str, *options: object) -> Any:
    words = ("checkpoint", "export", trained / "r", "--format", form, "--type", tensor_type, "-o", target, *options)
    return cli_in_process(*words, cwd=trained)


@pytest.mark.parametrize(("form", "tensor_type"), FORMS)
def test_an_export_is_proved_and_says_so_in_its_card(
    trained: Path, tmp_path: Path, form: str, tensor_type: str
) -> None:
    done = exported(trained, tmp_path / "out", form, tensor_type)

    assert done.code == 0, done.out + done.err
    about = json.loads((tmp_path / "out" / "holdfast_export.json").read_text())
    assert about["step"] == 2
    proof = about["proof"]
    assert (proof["is_within"], proof["faults"], proof["type"]) == (True, [], tensor_type)
    assert 0 < proof["largest"] <= proof["largest_limit"]
    assert f"{proof['largest']:.4g} (limit {proof['largest_limit']:g})" in (tmp_path / "out" / "README.md").read_text()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_an_export_outside_its_limits_ends_with_1_and_is_not_pushed(pools: Any, tmp_path: Path) -> None:
    wild, out = run_from(pools, tmp_path, scale=300), tmp_path / "out"

    done = exported(wild, out, "gguf", "q8_0")
    pushed = cli_in_process("push", out, "me/name", cwd=tmp_path)

    assert done.code == 1, done.out + done.err
    proof = json.loads((out / "holdfast_export.json").read_text())["proof"]
    assert not proof["is_within"]
    assert proof["mean"] > proof["mean_limit"]
    assert pushed.code == 2
    assert f"the mean difference is {proof['mean']:.4g}" in pushed.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--format", "gguf", "--type", "fp8"), "--type"),
        (("--format", "compressed-tensors", "--type", "q8_0"), "--type"),
        (("--type", "f16"), "--format"),
        (("--format", "gguf", "--adapter"), "--adapter"),
        (("--format", "gguf", "--dtype", "bfloat16"), "--dtype"),
        (("--format", "gguf", "--reader", "nowhere/python"), "nowhere/python"),
        (("--format", "gguf", "--proof-rows", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_options_that_do_not_fit_are_refused_and_nothing_is_written(
    trained: Path, tmp_path: Path, options: tuple[str, ...], named: str
) -> None:
    done = cli_in_process("checkpoint", "export", trained / "r", "-o", tmp_path / "out", *options, cwd=trained)

    assert done.code == 2
    assert named in done.err
    assert list(tmp_path.iterdir()) == []
