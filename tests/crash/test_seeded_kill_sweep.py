"""Random kills of the real command: whatever rank dies in whatever phase, the same command goes on bit for bit.

Three seeds in the fast suite; `HOLDFAST_SEEDS` of them, 200 by default, in the slow one.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.checkpoint.saving.writer import SAVE_PHASES
from holdfast.parallel.collectives import RankGroup
from tests.checkpoint.cases import newest_whole
from tests.cli.warm import WarmPython
from tests.crash.killed import STEPS, confirmed, start
from tests.crash.runs import log_of, state_differences

FAST = 3
SLOW = int(os.environ.get("HOLDFAST_SEEDS", "200"))
OF_A_STEP = ["data", "forward_backward", "optimizer"]
OF_A_SAVE = [*SAVE_PHASES, "read back", "retention"]
OF_RANK_0 = {"manifest", "sync", "publish"}


@pytest.fixture(scope="module")
def straight(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("straight")
    code, said = start(warm, place)
    assert code == 0, said
    return place


def drawn(seed: int) -> str:
    """Draw rank, step and phase of a kill, only such as that rank reaches."""
    chance = random.Random(seed)
    rank, step = chance.randrange(2), chance.randrange(1, STEPS + 1)
    phases = OF_A_STEP + [f"save: {phase}" for phase in OF_A_SAVE if rank == 0 or phase not in OF_RANK_0]
    return f"{rank}:{step}:{chance.choice(phases)}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(FAST), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FAST, SLOW))], ids=drawn
)
def test_a_run_that_was_killed_anywhere_goes_on_bit_for_bit(
    warm: WarmPython, straight: Path, tmp_path: Path, seed: int
) -> None:
    code, said = start(warm, tmp_path, drawn(seed))
    known = confirmed(tmp_path)
    choice = newest_whole(LocalStorage(tmp_path / "r" / "checkpoints"), RankGroup(), quarantine=False)
    found = 0 if choice is None else choice.manifest.step

    assert code == 3, said
    assert "was killed by SIGKILL" in said
    assert found >= known
    assert choice is None or "skipped" not in choice.message
    code, said = start(warm, tmp_path)
    assert code == 0, said
    assert f"resuming from step {found}," in said or found == 0
    assert log_of(tmp_path) == log_of(straight)
    assert state_differences(tmp_path, straight) == []
