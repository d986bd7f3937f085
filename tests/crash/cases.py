"""What ranks run around a fault: train, save, die; and afterwards choose, load and compare."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.checkpoint.format.snapshot import set_random_state, take
from holdfast.checkpoint.format.verification import verify_checkpoint
from holdfast.checkpoint.keep.retention import Retention, remove_leftovers, steps
from holdfast.checkpoint.loading import reader
from holdfast.checkpoint.place.storage import LocalStorage, Storage
from holdfast.checkpoint.session import Session
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, contents, newest_whole, optimizer_of
from tests.crash.faulty import KillingStorage, die
from tests.crash.processes import acknowledge
from tests.distributed.toys import Toy

STEPS = 3
"""Of a run that dies in the save of the last one."""
ALL_STEPS = 6
"""Of a run that goes on after that, or that nothing happened to."""


def noisy_step(world: World, toy: Toy, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Make an update that random state decides too, this rank's own, and return the loss of all ranks."""
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(number)) + torch.rand(6, 5)
    loss = toy(inputs).square().mean() / world.size
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return float(whole)


def straight(world: World) -> tuple[dict[int, dict[str, Any]], dict[int, float]]:
    """Return what the model and the optimizer hold after each step, and the losses, where nothing happens."""
    torch.manual_seed(world.rank)
    toy = build(world)
    optimizer = optimizer_of(toy)
    found, losses = {}, {}
    for number in range(1, ALL_STEPS + 1):
        losses[number] = noisy_step(world, toy, optimizer, number)
        found[number] = contents(toy, optimizer)
    return found, losses


def session_of(storage: Storage, world: World, *, seconds: float = 30.0, **options: Any) -> Session:
    """Return a session that keeps two checkpoints."""
    ranks = RankGroup(seconds / 60)
    return Session(storage, ranks, "run", Retention(last=2), **options)


def train_and_save(world: World, session: Session, directory: Path, *, first: int = 1) -> None:
    """Make steps, save each, and note each that was committed; a save in the background meets the next step."""
    torch.manual_seed(world.rank)
    toy = build(world)
    optimizer = optimizer_of(toy)
    for number in range(1, STEPS + 1):
        noisy_step(world, toy, optimizer, number)
        if number < first:
            continue
        if session.collect() is not None and world.is_first:
            acknowledge(directory, number - 1)
        session.save(take(toy, optimizer, shared={"step": number}), number)
    if session.collect() is not None and world.is_first:
        acknowledge(directory, STEPS)


def die_in_phase(world: World, directory: Path, victim: int, phase: str, background: bool) -> None:
    """Kill a rank when the save of the last step, which deletes the first, reaches a phase."""
    counted = 0

    def reached(name: str) -> None:
        nonlocal counted
        counted += name == phase
        if world.rank == victim and counted == STEPS:
            die()

    session = session_of(LocalStorage(directory), world, background=background, reached=reached)
    train_and_save(world, session, directory)


def die_in_storage(world: World, directory: Path, victim: int, place: str) -> None:
    """Kill a rank at a place between two calls of the file system, in the save of the last step."""
    storage = KillingStorage(directory, place)

    def reached(name: str) -> None:
        storage.armed = storage.armed or (name == "begin" and world.rank == victim and len(steps(storage)) == STEPS - 1)

    train_and_save(world, session_of(storage, world, background=False, reached=reached), directory)
    time.sleep(5)  # files are deleted on a thread of their own, which is where one of the kills is


def go_on(world: World, toy: Toy, optimizer: torch.optim.Optimizer, done: int) -> dict[int, float]:
    """Make the steps that are left, and return their losses."""
    return {number: noisy_step(world, toy, optimizer, number) for number in range(done + 1, ALL_STEPS + 1)}


def look_after(world: World, directories: Sequence[Path]) -> list[dict[str, Any]]:
    """Choose and load as a new start does, in each directory, and go on; return what was found and the losses."""
    found = []
    ranks = RankGroup(1)
    for directory in directories:
        storage = LocalStorage(directory)
        toy = build(world, seed=1)
        optimizer = optimizer_of(toy)
        if world.is_first:
            remove_leftovers(storage)
        choice = newest_whole(storage, ranks)
        chosen = None
        if choice is not None:
            loaded = reader.load_state(storage, choice.name, toy, optimizer, ranks, manifest=choice.manifest)
            chosen = choice.manifest.step
            if loaded.rank_state is not None:
                set_random_state(loaded.rank_state["random"])
        whole = [verify_checkpoint(storage, name).step for name in steps(storage).values()]
        words = "" if choice is None else choice.message
        held = contents(toy, optimizer)
        losses = {} if chosen is None else go_on(world, toy, optimizer, chosen)
        found.append({"chosen": chosen, "words": words, "whole": whole, "contents": held, "losses": losses})
    return found
