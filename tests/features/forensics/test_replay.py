"""A run that is rebuilt for a replay takes over a checkpoint by one read of its files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from holdfast.checkpoint.place.layout import step_name
from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.features.forensics.replay import _Rebuilt
from holdfast.parallel.mesh import World
from holdfast.training.setup.begin import build_run
from tests.checkpoint.test_used_bytes import CountingStorage
from tests.crash.runs import values_of
from tests.training.cases import run


def gone_back(world: World, place: str) -> tuple[Counter[str], int, dict[str, int]]:
    """Return the bytes that going back reads of each file, the step then, and the sizes of the files."""
    values = values_of(Path(place), steps=3)
    run(world, values)
    built = build_run(from_mapping(values, SFTConfig), Path(place), world)
    checkpoints = Path(place) / "r" / "checkpoints"
    storage = CountingStorage(checkpoints)
    _Rebuilt(built, storage).go_to(3)  # type: ignore[arg-type]
    sizes = {path.name: path.stat().st_size for path in (checkpoints / step_name(3)).rglob("*") if path.is_file()}
    return storage.counts, built.model.state.step, sizes


def test_a_checkpoint_is_read_once(pools: Any, tmp_path: Path) -> None:
    read, step, sizes = pools(1).run(gone_back, str(tmp_path))[0]

    assert step == 3
    shards = {name: count for name, count in read.items() if name.endswith(".safetensors")}
    assert shards
    assert all(count <= 1.5 * sizes[Path(name).name] for name, count in shards.items()), (shards, sizes)
