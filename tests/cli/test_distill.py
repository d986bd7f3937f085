"""`holdfast distill` as a user meets it: killed and continued it is the run that was not; its export is evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.sink import read_metrics
from tests.cli.fixtures import TINY, write_run
from tests.cli.test_refusals import everything_in
from tests.cli.warm import Done, WarmPython
from tests.messages import Said, lacks
from tests.tiny import tiny_directory


@pytest.fixture
def taught(tmp_path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Return a distillation on two ranks, half of whose steps the student writes itself."""
    tiny_directory(tmp_path / "teacher", "llama", vocab_size=64)
    return tree | {
        "model": {"config": TINY | {"attention_dropout": 0.3}, "tokenizer": "builtin:characters", "dropout": True},
        "teacher": {"path": "teacher"},
        "rollout": {"share": 0.5, "max_new_tokens": 6, "show_every": 1},
        "optim": {"lr": 0.01},
        "evaluation": {"sets": {"held": {"synthetic": {"task": "sort", "rows": 6}}}},
    }


def call(warm: WarmPython, place: Path, tree: dict[str, Any], verb: str, *options: str) -> Done:
    write_run(place / "run.yaml", tree)
    return warm.run("-m", "holdfast.cli.main", verb, "run.yaml", *options, cwd=place)


@pytest.mark.slow
def test_a_killed_run_that_goes_on_is_identical(warm: WarmPython, tmp_path: Path, taught: dict[str, Any]) -> None:
    done = call(warm, tmp_path, taught, "prove", "--steps", "6", "--kill-at", "5")

    assert done.code == 0, done.out + done.err
    assert done.out.splitlines()[-1] == "identical"


def test_a_run_writes_what_the_student_said_and_its_export_is_evaluated_alike(
    warm: WarmPython, tmp_path: Path, taught: dict[str, Any]
) -> None:
    done = call(warm, tmp_path, taught | {"steps": 4}, "distill")
    assert done.code == 0, done.out + done.err
    evaluated = warm.run("-m", "holdfast.cli.main", "eval", "runs/run/exports/final", cwd=tmp_path)

    found: dict[str, Any] = {}
    written = set()
    for line in read_metrics(tmp_path / "runs/run/metrics.jsonl"):
        found |= line
        written |= {line["step"]} if "completions/mean_length" in line else set()
    samples = [json.loads(line) for line in (tmp_path / "runs/run/samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == written != set()
    assert all(sample["prompt"].startswith("add ") for sample in samples)
    assert evaluated.code == 0, evaluated.out + evaluated.err
    told = dict(line.split() for line in evaluated.out.splitlines() if line.startswith("eval/"))
    assert {"eval/held/divergence", "eval/held/nll"} <= told.keys()
    for name, value in told.items():
        assert float(value) == pytest.approx(found[name], rel=1e-4, abs=1e-6), name


ASKED: dict[str, Any] = {
    "teacher": {"kind": "server", "url": "http://127.0.0.1:9/v1", "attempts": 1},
    "distill": {"loss": "sampled_reverse_kl"},
    "rollout": {"max_new_tokens": 6},
}
AT_ANOTHER_TEMPERATURE = {
    "distill": {"loss": "sampled_reverse_kl", "temperature": 0.8},
    "rollout": {"max_new_tokens": 6, "temperature": 0.8},
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"teacher": {"path": "nowhere"}}, "teacher.path nowhere"),
        (ASKED, "teacher.url http://127.0.0.1:9/v1"),
        (ASKED | {"distill": {"loss": "jsd"}}, "distill.loss jsd"),
        (ASKED | AT_ANOTHER_TEMPERATURE, "teacher.kind server 1"),
    ],
    ids=["no files", "no server", "a server for whole distributions", "a server at another temperature"],
)
def test_a_refused_teacher_leaves_nothing(
    warm: WarmPython, tmp_path: Path, taught: dict[str, Any], change: dict[str, Any], named: str, said: Said
) -> None:
    write_run(tmp_path / "run.yaml", taught | change)
    before = everything_in(tmp_path)

    done = warm.run("-m", "holdfast.cli.main", "distill", "run.yaml", cwd=tmp_path)

    assert done.code == 2
    assert lacks(done.err, named) == []
    said(done.err.strip().partition(" hub ")[0])  # then come its own words
    assert "Traceback" not in done.err
    assert everything_in(tmp_path) == before
