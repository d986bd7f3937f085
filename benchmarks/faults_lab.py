"""Two ranks that save, die, damage and load: what faults.py makes its rows of."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import shutil
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults_systems import SYSTEMS, System, ranks_environment

Found = Counter[str]
PAGE = 4096


def state_of(values: list[float]) -> str:
    """Return which state these distinct values are."""
    return {1.0: "first", 2.0: "second"}.get(values[0], "neither") if len(values) == 1 else "neither"


def rank_main(pipe: Any, environ: dict[str, str], system: str, function: Callable[..., Any], arguments: Any) -> None:
    """Run a function on one rank and send what came of it."""
    import torch

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(environ)
    rank = int(environ["RANK"])
    try:
        result = ("ok", function(SYSTEMS[system](rank), pipe, *arguments))
    except BaseException as error:  # noqa: BLE001 - which one it is, is the question; DCP's is no Exception
        result = ("raises", f"{type(error).__name__}: {str(error)[:200]}")
    pipe.send(result)
    os._exit(0)


class Ranks:
    """Forked ranks that run one function."""

    def __init__(self, system: str, function: Callable[..., Any], *arguments: Any, size: int = 2) -> None:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            environ = ranks_environment(rank, port, size)
            process = context.Process(target=rank_main, args=(theirs, environ, system, function, arguments))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def results(self, timeout: float = 60.0) -> list[tuple[str, Any]]:
        """Return ("ok", value), ("raises", error), ("killed", "") or ("hangs", "") of each rank."""
        deadline = time.monotonic() + timeout
        found = []
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            try:
                answered = pipe.poll(max(0.0, deadline - time.monotonic()))
                found.append(pipe.recv() if answered else ("hangs", ""))
            except EOFError:
                found.append(("killed", ""))
            process.kill()
            process.join()
        return found


def verdict(results: list[tuple[str, Any]]) -> str:
    """Return one word for what a load came to."""
    kinds = {kind for kind, _ in results}
    if kinds != {"ok"}:
        return "raises" if "raises" in kinds else "hangs"
    states = {state_of(value) for _, value in results}
    return "survives" if states in ({"first"}, {"second"}) else "silent"


def save_states(system: System, pipe: Any, place: str, values: list[float], as_step: int | None = None) -> float:
    """Save one state after the other; send when the last save begins, and return how long it took.

    They go into one directory, or step by step where the system never overwrites; `as_step`: all as this step.
    """
    began = 0.0
    system.build()
    for step, value in enumerate(values, start=1):
        system.fill(value)
        if step == len(values):
            system.barrier()
            pipe.send("begins")
            began = time.monotonic()
        system.save(place, step=as_step or (step if math.isnan(value) else int(value)))
    return time.monotonic() - began


def load_state(system: System, _: Any, place: str, change: str = "") -> list[float]:
    """Load and return the distinct values of every tensor on this rank."""
    system.build(change)
    system.fill(0.0)
    system.load(place)
    return system.values()


def load_many(system: System, _: Any, place: str, kind: str, count: int) -> Found:
    """Damage one file, load, mend it, again and again; rank 0 damages."""
    chance = random.Random(7)
    system.build()
    files = system.data_files(place)
    found: Found = Counter()
    for _number in range(count):
        undo = None
        if system.rank == 0:
            undo = damage(chance.choice(files), kind, chance)
        system.barrier()
        found[loaded(system, place)] += 1
        if undo is not None:
            undo[0].write_bytes(undo[1])
        system.barrier()
    return found


def loaded(system: System, place: str) -> str:
    """Load what may be damaged; return what came of it, on the rank that fared worst."""
    system.fill(0.0)
    try:
        system.load(place)
        outcome = "survives" if state_of(system.values()) != "neither" else "silent"
    except BaseException:  # noqa: BLE001 - DCP's is no Exception
        outcome = "raises"
    told = system.gather(outcome)
    return next(word for word in ("silent", "raises", "survives") if word in told)


def damage(file: Path, kind: str, chance: random.Random) -> tuple[Path, bytes]:
    """Flip a bit or zero a page; return the file and its bytes before."""
    before = file.read_bytes()
    data = bytearray(before)
    if kind == "bit":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    else:
        start = chance.randrange((len(data) + PAGE - 1) // PAGE) * PAGE
        data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    file.write_bytes(data)
    return file, before


class Lab:
    """One system's checkpoints, damaged in every way."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.number = 0
        self.seconds = 0.0
        """Of the last save by `fresh`."""

    def fresh(self, values: list[float]) -> str:
        """Save states and return where."""
        self.number += 1
        place = str(self.folder / f"run-{self.number}")
        results = Ranks(self.name, save_states, place, values)
        for pipe in results.pipes:
            pipe.recv()
        outcome = results.results()
        assert {kind for kind, _ in outcome} == {"ok"}, outcome
        self.seconds = max(value for _, value in outcome)
        return place

    def files(self, place: str) -> list[Path]:
        """Return the files that hold tensors."""
        return SYSTEMS[self.name](0).data_files(place)

    def load(self, place: str, change: str = "") -> str:
        """Load and judge."""
        return verdict(Ranks(self.name, load_state, place, change).results())

    def many(self, kind: str, count: int) -> str:
        """Load after each of many damages."""
        results = Ranks(self.name, load_many, self.fresh([1.0]), kind, count).results(600)
        if results[0][0] != "ok":
            return f"{results[0][0]}: {results[0][1]}"
        return counted(results[0][1])

    def truncated(self) -> str:
        """Cut a file in the middle."""
        place = self.fresh([1.0])
        file = self.files(place)[-1]
        os.truncate(file, file.stat().st_size // 2)
        return self.load(place)

    def missing(self) -> str:
        """Delete a file."""
        place = self.fresh([1.0])
        self.files(place)[-1].unlink()
        return self.load(place)

    def swapped(self) -> str:
        """Take one file from another step."""
        first, second = self.fresh([1.0]), self.fresh([2.0])
        shutil.copyfile(self.files(second)[-1], self.files(first)[-1])
        return self.load(first)

    def changed(self, change: str) -> str:
        """Load into another model; a state of the same values in all tensors that are left counts as silent."""
        if change in SYSTEMS[self.name].without:
            return "not offered"
        found = self.load(self.fresh([1.0]), change)
        return "silent" if found == "survives" and change != "gradients" else found

    def killed(self, count: int) -> str:
        """Kill a rank at many moments of a second save, then load what the system finds."""
        found: Found = Counter()
        self.fresh([1.0, 2.0])
        seconds = 1.1 * self.seconds
        for number in range(count):
            place = str(self.folder / f"killed-{number}")
            ranks = Ranks(self.name, save_states, place, [1.0, 2.0])
            for pipe in ranks.pipes:
                pipe.recv()
            time.sleep(seconds * number / count)
            os.kill(ranks.processes[number % 2].pid or 0, signal.SIGKILL)
            ranks.results(20)
            found[self.load(place)] += 1
        return counted(found)

    def two_jobs(self, count: int = 4) -> str:
        """Let two jobs save the same step into one directory at once."""
        found: Found = Counter()
        for number in range(count):
            place = str(self.folder / f"shared-{number}")
            jobs = [Ranks(self.name, save_states, place, [value], 1) for value in (1.0, 2.0)]
            for job in jobs:
                for pipe in job.pipes:
                    pipe.recv()
            for job in jobs:
                job.results()
            found[self.load(place)] += 1
        return counted(found)

    def limited(self) -> str:
        """Let the kernel cut the second save's files short (RLIMIT_FSIZE); load what is there."""
        place = str(self.folder / "limited")
        results = Ranks(self.name, save_within_limit, place).results()
        heard = "save raises" if any(kind != "ok" for kind, _ in results) else "save silent"
        return f"{heard}, load {self.load(place)}"

    def hostile(self) -> str:
        """Put a pickle that creates a file in the place of any pickle the system reads."""
        place, target = self.fresh([1.0]), self.folder / "executed"
        pickles = SYSTEMS[self.name](0).pickles(place)
        if not pickles:
            return "no pickle"
        import pickle

        for file in pickles:
            file.write_bytes(pickle.dumps(Touch(target)))
        found = self.load(place)
        return f"executes it, then {found}" if target.exists() else found


class Touch:
    """Unpickles by creating a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        """Return what the unpickler calls."""
        return (Path.touch, (self.target,))


def save_within_limit(system: System, _: Any, place: str) -> None:
    """Save a state, then another of which no file may be longer than 20 kB."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    system.build()
    system.fill(1.0)
    system.save(place, step=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    system.fill(2.0)
    system.save(place, step=2)


def per_rank_state(system: System, _: Any, place: str) -> str:
    """Save the number of the rank under one key on both ranks, and look whether each gets its own back."""
    system.build()
    system.fill(1.0)
    system.save(place, step=1, own={"position": 1000 + system.rank})
    own = system.load(place, own=True)
    return "survives" if own == {"position": 1000 + system.rank} else "silent"


def first_step_save(system: System, _: Any, place: str) -> bool:
    """Return whether training after a save before the first step is what it is without it."""
    return system.trains_alike(place)


def counted(found: Found) -> str:
    """Return counts in order of badness."""
    total = found.total()
    words = [f"{word} {found[word]}" for word in ("silent", "hangs", "raises", "survives") if found[word]]
    return words[0].split()[0] if len(words) == 1 else f"{', '.join(words)} of {total}"
