"""Optimizers in whole runs: what the metrics tell of them, and that a stopped run goes on as if it had not stopped."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.keep import find
from holdfast.metrics.sink import read_metrics
from holdfast.parallel.mesh import World
from tests.crash.runs import log_of, state_differences, values_of
from tests.training.cases import run

GROUPS = {"attention": {"match": "self_attn", "lr": 5e-4}, "embed": {"match": "embed", "weight_decay": 0.1}}


def optim(**values: Any) -> dict[str, Any]:
    return {"lr": 2e-3, "schedule": {"kind": "linear", "warmup_steps": 2}} | values


def test_metrics_show_the_rate_of_every_group(pools: Any, tmp_path: Path) -> None:
    pools(2).run(run, values_of(tmp_path, steps=4, optim=optim(groups=GROUPS)))

    lines = [line for line in read_metrics(tmp_path / "r" / "metrics.jsonl") if "learning_rate" in line]
    factors = [0.5, 1.0, 1.0, 0.0]  # two steps of warm-up, then a line that is 0 at the last step
    assert [line["learning_rate"] for line in lines] == pytest.approx([2e-3 * factor for factor in factors])
    assert [line["learning_rate/attention"] for line in lines] == pytest.approx([5e-4 * factor for factor in factors])
    assert [line["learning_rate/embed"] for line in lines] == [line["learning_rate"] for line in lines]


def test_a_pattern_without_a_parameter_is_refused_on_all_ranks_and_leaves_nothing(pools: Any, tmp_path: Path) -> None:
    values = values_of(tmp_path, steps=4, optim=optim(groups={"heads": {"match": "attn_proj", "lr": 1e-3}}))

    errors = pools(2).errors(run, values)

    assert [kind for kind, _ in errors] == ["ConfigError"] * 2
    assert len({message for _, message in errors}) == 1
    assert "optim.groups.heads.match='attn_proj' matches no parameter" in errors[0][1]
    assert not (tmp_path / "r").exists()


def told_by(world: World, values: dict[str, Any]) -> str:
    """Run, and return what was printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run(world, values)
    return said.getvalue()


@pytest.mark.slow
def test_a_run_with_groups_goes_on_bit_for_bit_and_says_when_groups_changed(pools: Any, tmp_path: Path) -> None:
    constant = optim(schedule="constant", groups=GROUPS)
    for name, stops in {"straight": [6], "resumed": [3, 6]}.items():
        for steps in stops:
            pools(2).run(run, values_of(tmp_path / name, steps=steps, optim=constant))
    assert log_of(tmp_path / "resumed") == log_of(tmp_path / "straight")
    assert state_differences(tmp_path / "resumed", tmp_path / "straight") == []

    changed = optim(schedule="constant", weight_decay=0.5, groups={"embed": {"match": "embed", "lr": 1e-3}})
    told = pools(2).run(told_by, values_of(tmp_path / "resumed", steps=8, optim=changed))[0]

    assert "optimizer: weight_decay: 0.1 in the checkpoint, 0.5 now (for model.embed_tokens.weight" in told
    assert "optim.groups.attention.lr 0.0005 -> None" in told
    last = list(read_metrics(tmp_path / "resumed" / "r" / "metrics.jsonl"))[-1]
    assert last["learning_rate/embed"] == 1e-3
    assert "learning_rate/attention" not in last


@pytest.mark.slow
def test_muon_trains_saves_and_goes_on_bit_for_bit_and_leaves_the_vocabulary_to_adamw(
    pools: Any, tmp_path: Path
) -> None:
    muon = optim(kind="muon", schedule="constant", adamw_lr=1e-3)
    for name, stops in {"straight": [6], "resumed": [3, 6]}.items():
        for steps in stops:
            pools(2).run(run, values_of(tmp_path / name, steps=steps, optim=muon))
    pools(1).run(run, values_of(tmp_path / "resumed", steps=7, optim=muon))

    first = log_of(tmp_path / "straight")
    assert log_of(tmp_path / "resumed")[:6] == first
    saved = find.one(str(tmp_path / "straight" / "r"))
    keys = {key for key in saved.manifest.tensors if key.startswith("optim.")}
    buffers = {key.removeprefix("optim.").removesuffix(".momentum_buffer") for key in keys if "momentum" in key}
    assert buffers == {name for name in buffers if "layers." in name and name.endswith("proj.weight")}
    assert len(buffers) == 14
    assert "optim.model.embed_tokens.weight.exp_avg" in keys
    lines = list(read_metrics(tmp_path / "straight" / "r" / "metrics.jsonl"))
    assert {line["learning_rate/adamw"] for line in lines if "learning_rate" in line} == {1e-3}
