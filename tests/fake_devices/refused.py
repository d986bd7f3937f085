"""A run whose blocks a compiler refuses, executed: python -m tests.fake_devices.refused RANKS."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(ranks: str) -> None:
    """Print a JSON line: the notes, how many blocks were compiled, and the activations of a forward pass."""
    from holdfast.features.plan.execution.process import load_guard

    load_guard()
    from holdfast.features.plan.execution import shapes
    from holdfast.features.plan.execution.execute import execute
    from holdfast.features.plan.records import RankSpec
    from tests.distributed.compile_cases import refused_by_its_machine
    from tests.fake_devices.cases import RUNS
    from tests.trees import run_from_mapping

    shapes.COMPILER = refused_by_its_machine
    made = execute(run_from_mapping(RUNS["sft"]), Path(), RankSpec(int(ranks), 0))
    kept = made.steady["forward", "cuda"].by_kind["activations"]
    print("refused " + json.dumps([made.notes, len(made.plan.compile_blocks), kept]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
