"""More rows of faults.py: the other faults of a save's life that mean something to a saver other than ours."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from faults_lab import Found, Lab, Ranks, counted, damage, load_state, loaded, save_states, verdict
from faults_systems import SYSTEMS, System, local

HANG_SECONDS = 40.0
MEMORY = 8 << 30


def more_rows(lab: Lab, flips: int, kills: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield every fault and how to make it."""
    yield f"kill -9 of a rank in the first save ({kills} moments)", partial(killed_at_first, lab, kills)
    yield "a rank that is stopped (SIGSTOP) in a second save", partial(stopped, lab)
    yield "the file that describes the others is missing", partial(index_missing, lab)
    yield f"one bit flipped in that file ({flips} times, within 8 GiB)", partial(index_flipped, lab, flips)
    yield "a shard of an interrupted save of more ranks lies beside", partial(left_over, lab)
    yield "the same step saved again with other numbers", partial(saved_again, lab)
    yield "a second save in which every number is NaN", partial(not_finite, lab)
    yield "the directory was moved", partial(moved, lab)
    yield "loaded by one rank instead of two", partial(on_one_rank, lab)
    yield "AdamW when saved, SGD when loaded", partial(lab.changed, "optimizer")
    yield "a parameter of another shape", partial(lab.changed, "shape")
    yield "frozen when saved, trained when loaded", partial(thawed, lab)
    yield "optimizer state in bfloat16 beside float32 weights", partial(narrow_state, lab)
    yield "one rank's model has a layer that the other's has not", partial(at_odds, lab)
    yield "the target is no directory, but a file", partial(no_directory, lab)


def killed_at_first(lab: Lab, count: int) -> str:
    """Kill a rank at many moments of a run's first save, then load what there is: nothing, or all of it."""
    found: Found = Counter()
    lab.fresh([1.0])
    for number in range(count):
        place = str(lab.folder / f"first-{number}")
        ranks = Ranks(lab.name, save_states, place, [1.0])
        for pipe in ranks.pipes:
            pipe.recv()
        time.sleep(1.1 * lab.seconds * number / count)
        os.kill(ranks.processes[number % 2].pid or 0, signal.SIGKILL)
        ranks.results(20)
        found[lab.load(place)] += 1
    return counted(found)


def stopped(lab: Lab) -> str:
    """Stop a rank in the middle of a second save; say what the other one does, and what is loaded afterwards."""
    lab.fresh([1.0, 2.0])
    place = str(lab.folder / "stopped")
    ranks = Ranks(lab.name, save_states, place, [1.0, 2.0])
    for pipe in ranks.pipes:
        pipe.recv()
    time.sleep(0.3 * lab.seconds)
    os.kill(ranks.processes[1].pid or 0, signal.SIGSTOP)
    began = time.monotonic()
    ranks.pipes[0].poll(HANG_SECONDS)
    waited = time.monotonic() - began
    told = ranks.results(0.1)[0][0]
    heard = {"ok": "save ends", "raises": f"save raises within {10 * (int(waited / 10) + 1)} s"}.get(told, "save hangs")
    return f"{heard}, load {lab.load(place)}"


def index_missing(lab: Lab) -> str:
    """Delete what says where tensors are."""
    place = lab.fresh([1.0])
    found = SYSTEMS[lab.name](0).index_files(place)
    for file in found:
        file.unlink()
    return lab.load(place) if found else "no such file"


def index_flipped(lab: Lab, count: int) -> str:
    """Flip bits in it, one at a time."""
    place = lab.fresh([1.0])
    if not SYSTEMS[lab.name](0).index_files(place):
        return "no such file"
    results = Ranks(lab.name, load_flipped, place, count).results(600)
    return counted(results[0][1]) if results[0][0] == "ok" else f"{results[0][0]}: {results[0][1]}"


def load_flipped(system: System, _: Any, place: str, count: int) -> Found:
    """Flip, load, mend, again and again; rank 0 flips."""
    import random

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    chance, found = random.Random(13), Counter[str]()
    system.build()
    for _number in range(count):
        undo = damage(chance.choice(system.index_files(place)), "bit", chance) if system.rank == 0 else None
        system.barrier()
        found[loaded(system, place)] += 1
        if undo is not None:
            undo[0].write_bytes(undo[1])
        system.barrier()
    return found


def left_over(lab: Lab) -> str:
    """Lay a shard of a rank that does not exist beside the others."""
    place = lab.fresh([1.0])
    file = lab.files(place)[-1]
    name = {".distcp": "__7_0.distcp", ".safetensors": "model-00009-of-00009.safetensors"}.get(
        file.suffix, "rank_7.bin"
    )
    shutil.copyfile(file, file.with_name(name))
    return lab.load(place)


def saved_again(lab: Lab) -> str:
    """Save one step twice."""
    place = str(lab.folder / "again")
    results = Ranks(lab.name, save_one_step, place).results()
    heard = "save raises" if any(kind != "ok" for kind, _ in results) else "replaced"
    return f"{heard}, load {lab.load(place)}"


def save_one_step(system: System, _: Any, place: str) -> None:
    """Save two states under the name of one step."""
    system.build()
    for value in (1.0, 2.0):
        system.fill(value)
        system.save(place, step=1)


def not_finite(lab: Lab) -> str:
    """Save a good state, then one of NaN; loading the good one is what a run can go on from."""
    return lab.load(lab.fresh([1.0, float("nan")]))


def moved(lab: Lab) -> str:
    """Move the directory to another name."""
    place = lab.fresh([1.0])
    return lab.load(shutil.move(place, f"{place} moved"))


def on_one_rank(lab: Lab) -> str:
    """Load what two ranks saved on one."""
    return verdict(Ranks(lab.name, load_state, lab.fresh([1.0]), size=1).results())


def thawed(lab: Lab) -> str:
    """Freeze a layer, save, load into the model that trains it; its optimizer state then comes from nowhere."""
    if "frozen" in SYSTEMS[lab.name].without:
        return "not offered"
    place = str(lab.folder / "thawed")
    Ranks(lab.name, save_frozen, place).results()
    return lab.load(place)


def save_frozen(system: System, _: Any, place: str) -> None:
    """Save a model of which one layer is frozen."""
    system.build("frozen")
    system.fill(1.0)
    system.save(place, step=1)


def narrow_state(lab: Lab) -> str:
    """Save moments in bfloat16; loaded, they must still be bfloat16."""
    if "optimizer" in SYSTEMS[lab.name].without:
        return "not offered"
    place = str(lab.folder / "narrow")
    results = Ranks(lab.name, save_and_load_narrow, place).results()
    if {kind for kind, _ in results} != {"ok"}:
        return "raises"
    dtypes = {word for _, words in results for word in words}
    return "survives" if dtypes == {"torch.bfloat16"} else f"silent: {', '.join(sorted(dtypes))}"


def save_and_load_narrow(system: System, _: Any, place: str) -> list[str]:
    """Return the dtypes of the first moments after a load into a new optimizer."""
    import torch

    system.build()
    for state in system.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)
    system.save(place, step=1)
    for state in system.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to(torch.float32)
    system.load(place)
    return [str(local(state["exp_avg"]).dtype) for state in system.optimizer.state.values()]


def at_odds(lab: Lab) -> str:
    """Save when rank 1 holds something that rank 0 does not."""
    if "own" in SYSTEMS[lab.name].without:
        return "not offered"
    place = str(lab.folder / "odds")
    results = Ranks(lab.name, save_at_odds, place).results()
    kinds = {kind for kind, _ in results}
    return "save silent" if kinds == {"ok"} else "save hangs" if "hangs" in kinds else "save raises"


def save_at_odds(system: System, _: Any, place: str) -> None:
    """Give one rank another buffer."""
    import torch

    system.build()
    if system.rank == 1:
        next(module for module in system.model.modules() if not list(module.children())).register_buffer(
            "odd", torch.ones(3)
        )
    system.save(place, step=1)


def no_directory(lab: Lab) -> str:
    """Save where a file has the name."""
    place = lab.folder / "a file"
    place.write_text("here")
    ranks = Ranks(lab.name, save_states, str(place), [1.0])
    for pipe in ranks.pipes:
        pipe.recv()
    results = ranks.results()
    whole = Path(place).is_file() and place.read_text() == "here"
    return ("save raises" if {kind for kind, _ in results} != {"ok"} else "save silent") + (
        "" if whole else ", file lost"
    )
