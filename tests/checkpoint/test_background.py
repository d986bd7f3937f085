"""Saves in the background: nothing waits for them but the end, nothing changes them, and their failures are heard."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.checkpoint.background import BackgroundSaver
from holdfast.checkpoint.errors import SaveFailed
from holdfast.checkpoint.format.shards import shard_file
from holdfast.checkpoint.format.snapshot import Snapshot, staged, take
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.features.plan.execution.fake_devices import fake_devices
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, contents, load_into_other, optimizer_of, step, zero_everything
from tests.crash.cases import session_of
from tests.crash.faulty import FullStorage, SlowStorage
from tests.crash.processes import run_doomed

FIRST = "step-00000001"


def mutate_after_the_copy(world: World, directory: Path) -> dict[str, Any]:
    """Start a slow save, then overwrite everything it saves; return what was there before."""
    toy = build(world)
    optimizer = optimizer_of(toy)
    step(world, toy, optimizer, 1)
    before = contents(toy, optimizer)
    session = session_of(SlowStorage(directory, 0.3), world)
    session.save(take(toy, optimizer), 1)
    zero_everything(toy, optimizer)
    assert session.status == "running"
    session.collect()
    return before


@pytest.mark.parametrize("ranks", [pytest.param(2, id="27-in-place mutation after the copy")])
def test_tensors_that_are_overwritten_after_the_copy_are_saved_as_they_were(
    pools: Any, tmp_path: Path, ranks: int
) -> None:
    expected = pools(ranks).run(mutate_after_the_copy, tmp_path)[0]

    found = pools(ranks).run(load_into_other, str(tmp_path / FIRST))[0]

    assert {name: value for name, value in found.items() if "extra" not in name} == expected


def test_memory_of_names_that_are_saved_no_more_is_given_back() -> None:
    buffers: dict[str, torch.Tensor] = {}
    staged(take(torch.nn.ModuleDict({"before": torch.nn.Linear(3, 2), "both": torch.nn.Linear(2, 2)})), buffers)

    later = staged(take(torch.nn.ModuleDict({"both": torch.nn.Linear(2, 2), "after": torch.nn.Linear(3, 3)})), buffers)

    assert set(buffers) == set(later.tensors)
    assert not any("before" in name for name in buffers)


def test_later_saves_copy_into_the_memory_of_the_first() -> None:
    model, buffers = torch.nn.Linear(3, 2), {}
    first = staged(take(model), buffers).tensors
    torch.nn.init.constant_(model.weight, 4.0)

    later = staged(take(model), buffers).tensors

    assert [tensor.data_ptr() for tensor in later.values()] == [tensor.data_ptr() for tensor in first.values()]
    assert later["model.weight"].tolist() == [[4.0] * 3] * 2


def overlap(world: World, directory: Path) -> tuple[list[float], list[float], int]:
    """Train with and without a save in flight; return both losses, and how many steps met the save."""
    losses: list[list[float]] = []
    met = 0
    for saving in (False, True):
        toy = build(world)
        optimizer = optimizer_of(toy)
        session = session_of(SlowStorage(directory, 1.5), world)
        losses.append([])
        for number in range(1, 40):
            losses[-1].append(step(world, toy, optimizer, number))
            if saving and number == 1:
                session.save(take(toy, optimizer), 1)
            met += session.status == "running"
        session.collect()
    return losses[0], losses[1], met


@pytest.mark.parametrize("ranks", [pytest.param(2, id="26-save overlaps the training's collectives")])
def test_collectives_of_a_save_and_of_training_do_not_mix(pools: Any, tmp_path: Path, ranks: int) -> None:
    for without, with_a_save, met in pools(ranks).run(overlap, tmp_path):
        assert with_a_save == without
        assert met > 3
    assert checkpoint.verify(str(tmp_path / FIRST)).step == 1


def fail_in_the_background(world: World, directory: Path) -> tuple[str, str, list[str]]:
    toy = build(world)
    optimizer = optimizer_of(toy)
    step(world, toy, optimizer, 1)
    session = session_of(FullStorage(directory, shard_file(1)), world)
    session.save(take(toy, optimizer), 1)
    deadline = time.monotonic() + 20
    while session.status == "running" and time.monotonic() < deadline:
        time.sleep(0.01)
    status = session.status
    try:
        session.collect()
    except SaveFailed as error:
        message = str(error)
    session.storage = LocalStorage(directory)
    session.save(take(toy, optimizer), 2)
    session.collect()
    return status, message, session.storage.names()


@pytest.mark.parametrize("ranks", [pytest.param(2, id="25-background save that fails")])
def test_a_failure_in_the_background_is_raised_on_all_ranks_and_the_next_save_works(
    pools: Any, tmp_path: Path, ranks: int
) -> None:
    found = pools(ranks).run(fail_in_the_background, tmp_path)

    assert found[0] == found[1]
    assert found[0][0] == "failed"
    assert "rank 1 could not save in phase 'shards': No space left on device" in found[0][1]
    assert found[0][2] == ["step-00000002"]


def return_at_once(world: World, directory: Path) -> str:
    toy = build(world)
    optimizer = optimizer_of(toy)
    step(world, toy, optimizer, 1)
    session = session_of(SlowStorage(directory, 1.0), world)
    session.save(take(toy, optimizer), 1)
    return session.status


@pytest.mark.parametrize("ranks", [pytest.param(2, id="24-main returns with a save in flight")])
def test_a_process_that_ends_finishes_its_save_first(tmp_path: Path, ranks: int) -> None:
    ended = run_doomed(return_at_once, ranks, tmp_path)

    assert [(end.code, end.value) for end in ended] == [(0, "running")] * ranks
    assert checkpoint.verify(str(tmp_path / FIRST)).step == 1


def terminate_oneself(world: World, directory: Path, started: Path) -> None:
    toy = build(world)
    optimizer = optimizer_of(toy)
    for number in (1, 2):
        step(world, toy, optimizer, number)
        session = session_of(SlowStorage(directory, 3.0 * (number - 1), started if number == 2 else None), world)
        session.save(take(toy, optimizer), number)
        if number == 2:
            while not started.exists():
                time.sleep(0.01)
            signal.raise_signal(signal.SIGTERM)
        session.collect()


@pytest.mark.parametrize("ranks", [pytest.param(2, id="23-SIGTERM without a handler while a save is in flight")])
def test_a_loop_that_does_not_catch_sigterm_loses_only_the_save_in_flight(
    pools: Any, tmp_path: Path, ranks: int
) -> None:
    from tests.crash.cases import look_after

    directory = tmp_path / "checkpoints"

    ended = run_doomed(terminate_oneself, ranks, directory, tmp_path / "started")

    assert [end.code for end in ended] == [-signal.SIGTERM] * ranks
    assert pools(ranks).run(look_after, [directory])[0][0]["chosen"] == 1


SCRIPT = """
import os, sys
from pathlib import Path
import torch
from holdfast.checkpoint.keep.retention import Retention
from holdfast.checkpoint.session import Session
from holdfast.checkpoint.format.snapshot import staged, take
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.parallel.collectives import RankGroup
print("started", os.getpid())
model = torch.nn.Linear(3, 3)
session = Session(LocalStorage(Path(sys.argv[1])), RankGroup(), "run", Retention(), background=True)
session.save(take(model), 1)
print("saved", session.collect().manifest.step)
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(1, id="47-script without a main guard")])
def test_a_script_without_a_main_guard_runs_once(tmp_path: Path, step: int) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)

    done = subprocess.run(
        [sys.executable, "loop.py", "run"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["started", "saved"]
    assert checkpoint.verify(str(tmp_path / "run" / FIRST)).step == step


def alternate(world: World, directory: Path) -> list[bool]:
    """Save two models in turn with one session; return whether each checkpoint holds its model."""
    session = session_of(LocalStorage(directory), world)
    session.retention = type(session.retention)(last=9)
    models = [build(world, seed=seed, blocks=blocks) for seed, blocks in ((1, 2), (2, 3))]
    optimizers = [optimizer_of(model) for model in models]
    expected = []
    for number, which in enumerate((0, 0, 1, 0, 1), start=1):
        step(world, models[which], optimizers[which], number)
        expected.append((which, contents(models[which], optimizers[which])))
        session.collect()
        session.save(take(models[which], optimizers[which]), number)
    session.collect()
    same = []
    for number, (which, saved) in enumerate(expected, start=1):
        toy = build(world, seed=9, blocks=2 + which)
        optimizer = optimizer_of(toy)
        checkpoint.load(str(directory / f"step-{number:08d}"), toy, optimizer)
        same.append(contents(toy, optimizer) == saved)
    return same


@pytest.mark.parametrize("ranks", [pytest.param(2, id="48-alternating states")])
def test_states_that_alternate_are_each_saved_as_they_are(pools: Any, tmp_path: Path, ranks: int) -> None:
    assert pools(ranks).run(alternate, tmp_path) == [[True] * 5] * ranks


def leave(_: Any) -> Any:
    raise SystemExit(3)


def test_what_is_raised_beside_exceptions_is_a_failed_save_too() -> None:
    saver = BackgroundSaver()
    saver.start(take(torch.nn.Linear(2, 2)), leave)

    with pytest.raises(SaveFailed, match="the save in the background failed: SystemExit: 3"):
        saver.collect()


def of_buffer(values: torch.Tensor) -> Snapshot:
    model = torch.nn.Module()
    model.register_buffer("values", values)
    return take(model)


def read_on_the_thread(snapshot: Snapshot) -> tuple[int, float]:
    return torch.cuda.current_device(), float(snapshot.tensors["model.values"].cpu().min())


@pytest.mark.gpu
def test_a_save_without_a_copy_waits_for_what_the_callers_stream_still_computes() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    values, stream = torch.zeros(1 << 20, device=device), torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    saver = BackgroundSaver[tuple[int, float]]()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        values.fill_(1.0)
        saver.start(of_buffer(values), read_on_the_thread, copy=False)

    assert saver.collect() == (device.index, 1.0)


@pytest.mark.slow
def test_a_save_without_a_copy_hands_tensors_of_a_device_to_its_thread() -> None:
    import torch._dynamo  # it looks at torch's functions, and must not meet the stand-ins

    saver, taken = BackgroundSaver[str](), take(torch.nn.Linear(1, 1))
    with fake_devices() as mode, mode:
        on_device = replace(taken, tensors={"model.weight": torch.empty(2, device="cuda:1")})
        saver.start(on_device, lambda snapshot: str(snapshot.tensors["model.weight"].device), copy=False)

        assert saver.collect() == "cuda:1"
