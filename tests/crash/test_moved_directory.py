"""A run directory that is moved, copied or replaced while its run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import verify
from tests.crash.runs import log_of, saved_steps, state_differences, values_of
from tests.training.cases import run

MOVES = """
import shutil
from pathlib import Path

def at_three(event):
    place = Path({place!r})
    if event.step == 3:
        if {how!r} == "copied":
            shutil.copytree(place, place.with_name("elsewhere"))
        else:
            place.rename(place.with_name("elsewhere"))
        if {how!r} == "replaced":
            shutil.copytree(place.with_name("elsewhere"), place)
"""

WITHOUT_OBSERVER = {"resume": {"changed": ["files"]}}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_a_run_whose_directory_is_gone_stops_by_name_and_goes_on_when_it_is_back(
    pools: Any, tmp_path: Path, how: str
) -> None:
    place, straight = tmp_path / "r", tmp_path / "straight run \u00fc"
    (tmp_path / "watch.py").write_text(MOVES.format(place=str(place), how=how))
    saves = {"background": how == "moved"}  # then the save of step 2 may be in flight
    values = values_of(tmp_path, steps=6, observers=["watch.py:at_three"], checkpoint=saves)

    errors = pools(2).errors(run, values, str(tmp_path))

    assert errors[0] == errors[1]
    assert errors[0][0] == "SaveFailed"
    assert f"{place} was moved, deleted or replaced while its run goes on" in errors[0][1]
    if how == "moved":
        assert not place.exists()
        (tmp_path / "elsewhere").rename(place)
    assert saved_steps(tmp_path) in ([2], [] if how == "moved" else [2])
    pools(2).run(run, values_of(tmp_path, steps=6, checkpoint=WITHOUT_OBSERVER))
    pools(2).run(run, values_of(straight, steps=6))
    assert log_of(tmp_path) == log_of(straight)
    others = [line for line in state_differences(tmp_path, straight) if "state.observers" not in line]
    assert others == []


def test_a_run_whose_place_of_checkpoints_is_replaced_stops_by_name(pools: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    (tmp_path / "watch.py").write_text(MOVES.format(place=str(store), how="replaced"))
    saves = {"background": False, "storage": str(store)}
    values = values_of(tmp_path, steps=6, observers=["watch.py:at_three"], checkpoint=saves)

    errors = pools(2).errors(run, values, str(tmp_path))

    assert errors[0] == errors[1]
    assert errors[0][0] == "SaveFailed"
    assert f"{store} was moved, deleted or replaced while its run goes on" in errors[0][1]
    assert sorted(path.name for path in store.glob("step-*")) == ["step-00000002"]


@pytest.mark.slow
def test_a_copy_of_a_run_that_goes_on_is_a_run_of_its_own(pools: Any, tmp_path: Path) -> None:
    place = tmp_path / "r"
    (tmp_path / "watch.py").write_text(MOVES.format(place=str(place), how="copied"))

    pools(2).run(run, values_of(tmp_path, steps=6, observers=["watch.py:at_three"]), str(tmp_path))

    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "elsewhere").rename(other / "r")
    pools(2).run(run, values_of(other, steps=6, checkpoint=WITHOUT_OBSERVER))
    assert log_of(other) == log_of(tmp_path)
    for step in saved_steps(other):
        verify(str(other / "r" / "checkpoints" / f"step-{step:08d}"))
