"""kill -9 of the real command in each named phase of saves and exports: the same command goes on bit for bit.

The sweep beside this file draws its kills; here none is left to chance.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.export.write import EXPORT_PHASES
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.checkpoint.saving.writer import SAVE_PHASES
from holdfast.parallel.collectives import RankGroup
from tests.checkpoint.cases import newest_whole
from tests.cli.warm import WarmPython
from tests.crash.killed import confirmed, start
from tests.crash.runs import log_of, state_differences

EXPORTING = ("checkpoint.export_every=4", "checkpoint.background=false")
OF_RANK_0 = {"manifest", "sync", "publish"}
OF_A_SAVE = [*SAVE_PHASES, "read back", "retention"]
FAST = {(0, f"export: {EXPORT_PHASES[-1]}"), (1, "export")}
"""Each case starts the command twice."""
SAVES = [
    pytest.param(rank, phase, mode, marks=[pytest.mark.slow], id=f"rank {rank} in {phase!r}, {mode}")
    for mode in ("waiting", "in the background")
    for rank in (0, 1)
    for phase in OF_A_SAVE
    if rank == 0 or phase not in OF_RANK_0
]
ADAPTED = (*EXPORTING, "model.lora.rank=2")
EXPORTS = [
    pytest.param(rank, phase, marks=[] if (rank, phase) in FAST else [pytest.mark.slow], id=f"rank {rank} in {phase!r}")
    for rank, phase in [*((0, f"export: {phase}") for phase in EXPORT_PHASES), (0, "export"), (1, "export")]
]


@pytest.fixture(scope="module")
def straight(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("straight")
    code, said = start(warm, place, None, *EXPORTING)
    assert code == 0, said
    return place


def kill_and_go_on(warm: WarmPython, straight: Path, place: Path, kill: str, *overrides: str) -> None:
    """Kill, look at what is there, start the same command again, and compare the whole run with the straight one."""
    code, said = start(warm, place, kill, *overrides)
    known = confirmed(place)
    choice = newest_whole(LocalStorage(place / "r" / "checkpoints"), RankGroup(), quarantine=False)

    assert code == 3, said
    assert f"Rank {kill[0]} was killed by SIGKILL" in said
    assert choice is not None
    assert choice.manifest.step >= known > 0
    assert "skipped" not in choice.message
    absent_or_whole(place, straight)
    code, said = start(warm, place, None, *overrides)
    assert code == 0, said
    assert f"resuming from step {choice.manifest.step}," in said
    assert log_of(place) == log_of(straight)
    assert state_differences(place, straight) == []


@pytest.mark.parametrize(("rank", "phase", "mode"), SAVES)
def test_a_run_killed_in_any_phase_of_a_save_goes_on_bit_for_bit(
    warm: WarmPython, straight: Path, tmp_path: Path, rank: int, phase: str, mode: str
) -> None:
    """Step 6: two checkpoints are there, and this save's retention deletes the older one."""
    background = f"checkpoint.background={str(mode != 'waiting').lower()}"

    kill_and_go_on(warm, straight, tmp_path, f"{rank}:6:save: {phase}", background, *EXPORTING)


def files_of(place: Path) -> dict[str, bytes]:
    """Return an export's files but the one about itself, which names the run, and its card without that name."""
    files = {file.name: file.read_bytes() for file in place.iterdir() if file.name != "holdfast_export.json"}
    naming = (b"| run |", b"<!-- written by holdfast, ")
    files["README.md"] = b"\n".join(line for line in files["README.md"].split(b"\n") if not line.startswith(naming))
    return files


def absent_or_whole(place: Path, straight: Path) -> None:
    """Look at what a kill left in the place of exports: each is there with every byte, or not at all."""
    exports = place / "r" / "exports"
    for export in [path for path in exports.glob("*") if not path.name.startswith(".")] if exports.exists() else []:
        assert files_of(export) == files_of(straight / "r" / "exports" / export.name)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("rank", "phase"), EXPORTS)
def test_a_run_killed_in_any_phase_of_an_export_goes_on_bit_for_bit_and_exports_the_same(
    warm: WarmPython, straight: Path, tmp_path: Path, rank: int, phase: str
) -> None:
    kill_and_go_on(warm, straight, tmp_path, f"{rank}:4:{phase}", *EXPORTING)

    exports = [place / "r" / "exports" for place in (tmp_path, straight)]
    assert files_of(exports[0] / "step-00000008") == files_of(exports[1] / "step-00000008")
    assert list(exports[0].glob(".*")) == []


@pytest.fixture(scope="module")
def adapted(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("adapted")
    code, said = start(warm, place, None, *ADAPTED)
    assert code == 0, said
    return place


@pytest.mark.slow
@pytest.mark.parametrize("phase", EXPORT_PHASES)
def test_a_run_killed_in_any_phase_of_an_export_of_adapters_goes_on_and_exports_the_same(
    warm: WarmPython, adapted: Path, tmp_path: Path, phase: str
) -> None:
    kill_and_go_on(warm, adapted, tmp_path, f"0:4:adapter export: {phase}", *ADAPTED)

    exports = [place / "r" / "exports" for place in (tmp_path, adapted)]
    for name in ("step-00000008", "step-00000008-adapter"):
        assert files_of(exports[0] / name) == files_of(exports[1] / name)
    assert list(exports[0].glob(".*")) == []
