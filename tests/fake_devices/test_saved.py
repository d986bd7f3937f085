"""Bytes that a plan says a run writes, against the files that the run has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.format.shards import shard_file
from holdfast.features.plan.counting.kinds import CHECKPOINT
from holdfast.features.plan.execution.execute import execute
from holdfast.features.plan.records import Execution, RankSpec
from tests.training.cases import run, tree
from tests.trees import run_from_mapping

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__), pytest.mark.timeout(900)]

WITHIN = 0.01
MODEL = tree("")["model"]["config"] | {"hidden_size": 256, "intermediate_size": 512}
OPTIMIZER = """
import torch

class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter]["momentum"] = torch.zeros_like(parameter)
                    momentum = self.state[parameter]["momentum"]
                    momentum.mul_(0.9).add_(parameter.grad)
                    parameter.add_(momentum.sign(), alpha=-group["lr"])
"""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "adamw"},
    "adamw_bf16": {"kind": "adamw_bf16"},
    "adamw_8bit": {"kind": "adamw_8bit"},
    "sgd": {"kind": "sgd", "momentum": 0.9},
    "muon": {"kind": "muon"},
    "user's": {"kind": "path", "path": "signs.py:Signs"},
    "averages": {"kind": "adamw", "ema": {"decay": 0.9}},
}
MODELS: dict[str, dict[str, Any]] = {"whole": {}, "LoRA": {"lora": {"rank": 64}}}


def of_files(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def values_of(folder: Path, optimizer: str, model: str, **sections: Any) -> dict[str, Any]:
    (folder / "signs.py").write_text(OPTIMIZER)
    dtype = "bfloat16" if optimizer == "adamw_bf16" else "float32"
    section = {"config": MODEL, "dtype": dtype, **MODELS[model]}
    return tree(str(folder), steps=1, model=section, optim=OPTIMIZERS[optimizer], **sections)


def planned(folder: Path, values: dict[str, Any], ranks: int = 1) -> Execution:
    return execute(run_from_mapping(values), folder, RankSpec(ranks=ranks, device="cpu"))


@pytest.mark.cases("all")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_checkpoints_host_copies_and_exports_take_what_is_planned(
    pools: Any, tmp_path: Path, optimizer: str, model: str
) -> None:
    values = values_of(tmp_path, optimizer, model)

    made = planned(tmp_path, values)
    pools(1).run(run, values, str(tmp_path))

    checkpoint = tmp_path / "r/checkpoints/step-00000001"
    assert made.checkpoint_bytes == pytest.approx(of_files(checkpoint), rel=WITHIN)
    copied = made.steady["save", "cpu"].by_kind[CHECKPOINT]
    assert copied == pytest.approx((checkpoint / shard_file(0)).stat().st_size, rel=5 * WITHIN)
    assert made.export_bytes == pytest.approx(of_files(tmp_path / "r/exports"), rel=WITHIN)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_ranks_together_write_what_is_planned(pools: Any, tmp_path: Path, optimizer: str) -> None:
    values = values_of(tmp_path, optimizer, "whole", launch={"device": "cpu", "ranks": 2})

    made = planned(tmp_path, values, ranks=2)
    pools(2).run(run, values, str(tmp_path))

    assert made.checkpoint_bytes == pytest.approx(of_files(tmp_path / "r/checkpoints/step-00000001"), rel=WITHIN)


@pytest.mark.cases("all")
@pytest.mark.parametrize(
    ("section", "lacks"), [({"frozen": "skip"}, "frozen weights"), ({"contents": "weights"}, "states")]
)
def test_what_a_checkpoint_leaves_out_is_not_planned(
    pools: Any, tmp_path: Path, section: dict[str, Any], lacks: str
) -> None:
    values = values_of(tmp_path, "adamw", "LoRA")
    values["checkpoint"] = {**values["checkpoint"], **section}

    made = planned(tmp_path, values)
    pools(1).run(run, values, str(tmp_path))

    written = of_files(tmp_path / "r/checkpoints/step-00000001")
    assert made.checkpoint_bytes == pytest.approx(written, rel=WITHIN), lacks
