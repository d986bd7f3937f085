"""A kill while the exports of an earlier end are renamed to their step, since the run goes on beyond it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.parallel.mesh import World
from tests.crash.faulty import die
from tests.crash.processes import run_doomed
from tests.crash.runs import values_of
from tests.training.cases import run


def values(place: Path, steps: int, every: int | None) -> dict[str, Any]:
    """Return a run that exports its weights and their averages when it ends, and perhaps every so many steps."""
    optim = {"lr": 2e-3, "schedule": "constant", "ema": {"decay": 0.75}}
    return values_of(place, steps=steps, optim=optim, checkpoint={"export_at_end": True, "export_every": every})


def go_on_and_die(world: World, tree: dict[str, Any], victim: str) -> None:
    """Go on, and die as an export is about to lose its name, or one that lost it is about to be deleted."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in {"os.rename", "shutil.rmtree"} and re.fullmatch(victim, Path(arguments[0]).name):
            die()

    if world.is_first:
        sys.addaudithook(watch)
    run(world, tree)


def exports_of(place: Path) -> dict[str, dict[str, bytes]]:
    """Return the bytes of every file, by export."""
    return {
        export.name: {file.name: file.read_bytes() for file in export.iterdir()}
        for export in (place / "r" / "exports").iterdir()
    }


@pytest.mark.cases("all")
@pytest.mark.parametrize(
    ("every", "victim", "renamed"),
    [
        pytest.param(None, "final-ema", 0, id="before both renames"),
        pytest.param(None, "final", 1, id="between two renames"),
        pytest.param(2, "final", 1, id="between two, beside exports of the same step"),
        pytest.param(2, r"\.trash-final-ema-\w+", 1, id="before the first is deleted, beside one of the same step"),
    ],
)
def test_a_kill_among_the_renames_of_stale_exports_loses_none_and_the_same_command_ends_with_newer_ones(
    pools: Any, tmp_path: Path, every: int | None, victim: str, renamed: int
) -> None:
    from transformers import AutoModelForCausalLM

    pools(1).run(run, values(tmp_path, 2, every))
    before = exports_of(tmp_path)
    stale = {"step-00000002": before["final"], "step-00000002-ema": before["final-ema"]}

    (ended,) = run_doomed(go_on_and_die, 1, values(tmp_path, 4, every), victim)

    assert ended.was_killed, ended
    assert sum(name not in exports_of(tmp_path) for name in ("final-ema", "final")) == renamed
    pools(1).run(run, values(tmp_path, 4, every))
    after = exports_of(tmp_path)
    newer = {"step-00000004", "step-00000004-ema"} if every else set()
    assert set(after) == {"final", "final-ema", *stale, *newer}
    assert {name: after[name] for name in stale} == stale
    for name, step in {"final": 4, "final-ema": 4, "step-00000002": 2, "step-00000002-ema": 2}.items():
        assert json.loads(after[name]["holdfast_export.json"])["step"] == step
        AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "exports" / name)
