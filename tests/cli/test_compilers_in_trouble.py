"""Runs whose compiler is killed with its rank, or has no room for what it writes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import LiveRun
from tests.cli.fixtures import write_run
from tests.crash.disks import Remount, disk
from tests.distributed.cases import rows_of, settings, train
from tests.distributed.test_compile import train_with_a_broken_compiler
from tests.tiny import tiny_directory

__all__ = ["disk"]

pytestmark = pytest.mark.slow


def compiles(run: LiveRun, rank: int) -> bool:
    """Whether a compiler of C++ works for a rank."""
    for pid, environ in run.processes().items():
        if f"RANK={rank}".encode() in environ and b"cc1plus" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return True
    return False


def test_a_rank_that_is_killed_while_it_compiles_ends_the_run_and_the_next_start_compiles(
    tmp_path: Path, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "programs"))
    write_run(tmp_path / "run.yaml", tree | {"parallel": {"compile": "blocks"}, "steps": 1})
    run = LiveRun(tmp_path)
    try:
        run.wait_for(lambda: compiles(run, 1), 120)

        os.kill(run.rank(1), signal.SIGKILL)
        done, seconds = run.end()

        assert done.code == 3
        assert "Rank 1 was killed by SIGKILL" in done.err
        assert seconds < 15
        assert run.processes() == {}
    finally:
        run.close()
    again = LiveRun(tmp_path)
    try:
        done, _ = again.end(240)
    finally:
        again.close()
    assert done.code == 0, done.err
    assert "blocks: compiled in " in done.out
    assert [line["step"] for line in again.lines()] == [1]


def test_a_rank_whose_compiler_has_no_room_for_what_it_writes_runs_uncompiled_with_the_others(
    pools: Any, tmp_path: Path, disk: tuple[Path, Remount]
) -> None:
    place, remount = disk
    remount("size=8k")
    (place / "full").write_bytes(b"x" * 8192)
    trees = [settings(str(tiny_directory(tmp_path, "llama")), parallel={"compile": it}) for it in ("off", "blocks")]

    eager = pools(2).run(train, trees[0], rows_of(24))[0]
    found = pools(2).run(train_with_a_broken_compiler, trees[1], rows_of(24), 1, str(tmp_path), str(place))[0]

    assert found["losses"] == eager["losses"]
    assert found["printed"][-1].startswith("blocks: not compiled, ")
    assert "No space left on device" in found["printed"][-1]
