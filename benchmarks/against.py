"""This checkout against an earlier one: the same updates, rollouts, heads, saves and loads.

    git worktree add ../before COMMIT
    python benchmarks/against.py ../before [--rounds 2] [--only sft grpo-64+64]

The arms are those of Holdfast in the scripts named below, as each checkout has them, in the same environment.
Updates, decoding's rollouts, and saves and loads of two ranks, are made in turn, one each. A GRPO arm makes its steps
in one go, as the head's do, and the arms change places every other round: give them more rounds. A
ratio is this checkout's CPU seconds, or memory, over the other's; what stands to TRL, or to a bare loop, is unchanged
where it is 1. Target: the median of all pairs within 1.03, and memory, where an arm prints its peak, within 1.05.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Ranks, Round, alternate, heading, take_turn
from verdicts import Verdicts

HERE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Work:
    """What both checkouts do: a script, its arm, what the arm prints of each update or of all, and its ranks."""

    script: str
    arm: str
    key: str
    ranks: int = 1


WORK = {
    "sft": Work("sft_vs_trl.py", "holdfast", "seconds"),
    "grpo-64+64": Work("grpo_vs_trl.py", "holdfast 64+64", "step_seconds"),
    "grpo-256+32": Work("grpo_vs_trl.py", "holdfast 256+32", "step_seconds"),
    "decode": Work("decode.py", "holdfast", "speeds"),
    "head": Work("head.py", "one_pass", "seconds"),
    "save": Work("checkpoint.py", "our_save", "seconds", ranks=2),
    "load": Work("checkpoint.py", "our_load", "seconds", ranks=2),
}
PAIRS = 16
"""Saves or loads of one round."""


def be_arm(name: str, checkout: Path) -> None:
    """Become an arm of a checkout."""
    work = WORK[name]
    if work.script == "checkpoint.py":
        save_or_load(work.arm, checkout)
        sys.exit()
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, "-W", "ignore", str(checkout / "benchmarks" / work.script), "--arm", work.arm]
    os.execve(sys.executable, command, environment)


def save_or_load(arm: str, checkout: Path) -> None:
    """Save or load in memory, as one rank, what the `checkpoint.py` of a checkout saves; its script has no such arm."""
    import torch
    import torch.distributed as dist

    sys.path[:0] = [str(checkout / "src"), str(checkout / "benchmarks")]
    script: Any = importlib.import_module("checkpoint")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = [tempfile.mkdtemp(prefix="holdfast-bench-", dir="/dev/shm") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(place)
    try:
        seconds = _timed_arm(script, arm, Path(place[0]))
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(place[0])
    print(json.dumps({"seconds": seconds}), flush=True)
    dist.destroy_process_group()


def _timed_arm(script: Any, arm: str, place: Path) -> list[float]:
    """Return the CPU seconds of each save or load, without those of the first: it pays for imports."""
    arms = script.Arms(place)
    saved = place / "saved"
    arms.our_save(saved)
    seconds = []
    for _ in range(PAIRS + 1):
        take_turn()
        folder = saved if arm == "our_load" else arms.fresh("save")
        seconds.append(script.timed(lambda folder=folder: getattr(arms, arm)(folder), time.process_time))
        arms.forget()
    return seconds[1:]


def main() -> None:
    """Run both checkouts, and print what this one takes for each second and byte of the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path, help="the other one")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(WORK), default=list(WORK))
    parser.add_argument("--arm", help="what, and `now` or `before`: be an arm")
    options = parser.parse_args()
    if options.arm:
        name, _, which = options.arm.partition(" ")
        be_arm(name, HERE if which == "now" else options.checkout.resolve())
    print(heading("transformers"))
    missed = False
    for name in options.only:
        print(name)
        ranks = dict.fromkeys(names := [f"{name} now", f"{name} before"], Ranks(WORK[name].ranks))
        rounds = alternate(__file__, names, options.rounds, str(options.checkout), ranks=ranks)
        missed = compare(name, [dict(zip(("now", "before"), turn.values(), strict=True)) for turn in rounds]) or missed
    sys.exit(missed)


def compare(name: str, rounds: list[Round]) -> bool:
    """Print the ratios of one kind of work; return whether one misses its target."""
    key = WORK[name].key
    listed = [{arm: said | {key: _as_list(said[key])} for arm, said in turn.items()} for turn in rounds]
    verdicts = Verdicts(listed)
    over, under = ("before", "now") if key == "speeds" else ("now", "before")  # a speed is the inverse of seconds
    verdicts.at_most_over_all(1.03, f"{name}: CPU seconds, now over before", over, under, key)
    if "peak_mib" in rounds[0]["now"]:
        verdicts.at_most(1.05, f"{name}: peak memory, now over before", "now", "before", "peak_mib")
    return verdicts.missed


def _as_list(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


if __name__ == "__main__":
    main()
