"""Saves in the background of a loop of one's own: what was copied is what is written, and no failure is lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast import checkpoint
from holdfast.checkpoint.api import PendingSave
from holdfast.errors import HoldfastError
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, contents, load_into_other, optimizer_of, save_after, step, zero_everything


def overwrite_after_the_call(world: World, path: str) -> dict[str, Any]:
    """Save in the background and zero everything at once; return what was there before, and what is written."""
    toy = build(world)
    optimizer = optimizer_of(toy)
    step(world, toy, optimizer, 1)
    before = contents(toy, optimizer)
    saving = checkpoint.save_in_background(path, toy, optimizer, extra={"steps": 1}, rank_extra=("rank", world.rank))
    zero_everything(toy, optimizer)
    manifest = saving.result()
    return {"before": before, "manifest": manifest.hash, "done": saving.done, "again": saving.result().hash}


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_written_is_what_was_there_when_the_save_was_called(pools: Any, tmp_path: Path, ranks: int) -> None:
    path = str(tmp_path / "step-00000001")

    found = pools(ranks).run(overwrite_after_the_call, path)

    written = checkpoint.verify(path)
    for rank in found:
        assert (rank["manifest"], rank["done"], rank["again"]) == (written.hash, True, written.hash)
    there = pools(ranks).run(load_into_other, path)
    assert {name: value for name, value in there[0].items() if "extra" not in name} == found[0]["before"]
    assert (there[0]["extra"], there[-1]["rank_extra"]) == ({"steps": 1}, ("rank", ranks - 1))


def save_three_and_load_meanwhile(world: World, place: str) -> tuple[list[int], float, bool]:
    """Save thrice without asking, load the first one and train while the third is in flight."""
    toy = build(world)
    optimizer = optimizer_of(toy)
    savings: list[PendingSave] = []
    for number in (1, 2, 3):
        step(world, toy, optimizer, number)
        savings.append(checkpoint.save_in_background(f"{place}/step-{number:08d}", toy, optimizer))
    before = savings[0].done and savings[1].done
    other = build(world, seed=1)
    checkpoint.load(f"{place}/step-00000001", other, optimizer_of(other))
    total = torch.ones(1)
    dist.all_reduce(total)
    return [saving.result().step for saving in savings], float(total), before


def test_one_save_is_in_flight_and_other_calls_go_on_beside_it(pools: Any, tmp_path: Path) -> None:
    found = pools(2).run(save_three_and_load_meanwhile, str(tmp_path))

    assert found == [([1, 2, 3], 2.0, True)] * 2
    for number in (1, 2, 3):
        assert checkpoint.verify(str(tmp_path / f"step-{number:08d}")).step == number


def fail_and_go_on(world: World, place: str, *, ask: bool) -> list[str]:
    """Save under a name that is taken, and then under a free one; return the errors, and where they came."""
    toy = build(world)
    told = []
    taken = checkpoint.save_in_background(f"{place}/step-00000001", toy)
    if ask:
        try:
            taken.result()
        except HoldfastError as error:
            told.append(f"result: {error}")
    for _ in range(2):
        try:
            checkpoint.save_in_background(f"{place}/step-00000002", toy).result()
        except HoldfastError as error:
            told.append(f"next: {error}")
        else:
            break
    return told


@pytest.mark.parametrize("ask", [True, False])
def test_a_failure_is_told_on_all_ranks_once_by_the_result_or_by_the_next_save(
    pools: Any, tmp_path: Path, ask: bool
) -> None:
    pools(2).run(save_after, str(tmp_path / "step-00000001"), 1)

    one, two = pools(2).run(partial(fail_and_go_on, ask=ask), str(tmp_path))

    assert one == two
    assert len(one) == 1
    assert one[0].startswith("result: " if ask else "next: ")
    assert "a checkpoint is never overwritten" in one[0]
    assert checkpoint.verify(str(tmp_path / "step-00000002")).step == 2


def test_a_misspelt_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="rank_extras"):
        checkpoint.save_in_background(str(tmp_path / "step-00000001"), torch.nn.Linear(2, 2), rank_extras=1)

    assert list(tmp_path.iterdir()) == []
