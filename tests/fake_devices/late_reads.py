"""A process that starts two updates on a fake GPU before it reads one: python -m tests.fake_devices.late_reads RANKS.

It prints in which order updates were started, numbers asked for, and updates read, for each of its runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


def main(ranks: str) -> None:
    """Execute an update of several kinds of runs."""
    from holdfast.features.plan.execution.process import load_guard

    load_guard()
    from torch import Tensor

    from holdfast.features.plan.execution import steps
    from holdfast.features.plan.execution.execute import execute
    from holdfast.features.plan.records import RankSpec
    from holdfast.training.step import train_step
    from holdfast.types import host_values_from
    from tests.fake_devices.cases import RUNS, tree
    from tests.trees import run_from_mapping

    order: list[str] = []

    def answer(tensor: Tensor, reason: str) -> Any:
        if tensor.device.type != "cpu":  # what host memory has is not waited for
            order.append(reason)
        return np.ones(tuple(tensor.shape))

    def two_updates(*arguments: Any) -> Any:
        order.clear()
        with host_values_from(answer):
            started = []
            for _ in range(2):
                started.append(train_step(*arguments))
                order.append("started")
            for update in started:
                update.read()
                order.append("read")
        return SimpleNamespace(read=lambda: None)

    setattr(steps, "train_step", two_updates)  # noqa: B010 - the name that the module imported
    averaged = tree(optim={"lr": 1e-3, "schedule": "constant", "ema": {"decay": 0.9}})
    runs = {"sft": RUNS["sft"], "experts": RUNS["sft experts"], "averages": averaged, "8 bits": RUNS["sft adamw_8bit"]}
    for name, values in runs.items():
        execute(run_from_mapping(values), Path(), RankSpec(int(ranks), 0))
        print("order " + json.dumps([name, order]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
