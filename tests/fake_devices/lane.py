"""A process that executes the lane's runs: python -m tests.fake_devices.lane FOLDER RANKS RANK [NAME...]

It prints a JSON line for each run. The guard must be there before torch, so no process that has torch can do it.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any


def make_models(folder: Path) -> None:
    """Write a teacher's configuration, and a small model that sees with its files."""
    from tests.fake_devices.cases import DENSE
    from tests.vision import vision_directory

    teacher = folder / "teacher"
    teacher.mkdir(exist_ok=True)
    (teacher / "config.json").write_text(json.dumps(DENSE), encoding="utf-8")
    if not (folder / "llava").exists():
        vision_directory(folder / "llava", "llava", vocab_size=512)


def run(values: dict[str, Any], folder: Path, ranks: int, rank: int) -> dict[str, Any]:
    """Return what an execution said, JSON-ready."""
    from holdfast.features.plan.execution.execute import execute
    from holdfast.features.plan.records import RankSpec
    from holdfast.rollout.local import graphs
    from holdfast.training import engines
    from tests.trees import run_from_mapping

    recorders: list[object] = []

    class CountedRecorder(graphs.CudaRecorder):
        def __init__(self, device: Any) -> None:
            super().__init__(device)
            recorders.append(self)

    setattr(engines, "CudaRecorder", CountedRecorder)  # noqa: B010 - the name that the module imported
    made = execute(run_from_mapping(values), folder, RankSpec(ranks, rank))
    return {
        "peaks": {f"{phase} {device}": [peak.total, peak.by_kind] for (phase, device), peak in made.steady.items()},
        "resumed": {f"{phase} {device}": [peak.total, peak.by_kind] for (phase, device), peak in made.resumed.items()},
        "host_values": [[value.phase, value.reason] for value in made.host_values],
        "made": {" ".join(key): size for key, size in made.allocated.items() if key[1] == "cuda"},
        "micro_batches": made.micro_batches,
        "notes": made.notes,
        "recorders": len(recorders),
        "compiled_blocks": len(made.plan.compile_blocks),
    }


def main(folder: str, ranks: str, rank: str, *names: str) -> None:
    """Execute the runs, or some of them; as rank of 0 ranks the shapes whose parts are summed by hand."""
    from holdfast.features.plan.execution.process import load_guard

    load_guard()
    warnings.simplefilter("error", ResourceWarning)
    from tests.fake_devices.cases import RUNS, is_made
    from tests.fake_devices.parts import SHAPES

    place = int(ranks), int(rank)
    runs = {name: (values, int(ranks)) for name, values in RUNS.items() if name in names or is_made(name, place)}
    if ranks == "0":
        runs = {name: (shape.run(), shape.ranks) for name, shape in SHAPES.items()}
    for name, (values, size) in runs.items():
        if names and name not in names:
            continue
        started = time.process_time()
        try:
            said = run(values, Path(folder), size, int(rank))
        except Exception:  # noqa: BLE001 - a test says it
            said = {"error": traceback.format_exc()}
        said |= {"run": name, "ranks": int(ranks), "rank": int(rank), "seconds": time.process_time() - started}
        print("lane " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
