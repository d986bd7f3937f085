"""This checkout against an earlier one: the same updates, rollouts, heads and packs.

    git worktree add ../before COMMIT
    python benchmarks/against.py ../before [--rounds 2] [--only sft grpo-64+64]

The arms are those of Holdfast in the scripts named below, as each checkout has them, in the same environment.
Updates and decoding's rollouts are made in turn, one each. A GRPO arm makes its steps in one go, as the head's and the
packing's do, and the arms change places every other round: give them more rounds. A ratio is this checkout's CPU
seconds, or memory, over the other's; what stands to TRL, or to a bare loop, is unchanged where it is 1. Target: the
median of all pairs within 1.03, and memory, where an arm prints its peak, within 1.05.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from measure import Round, Verdicts, alternate, heading

HERE = Path(__file__).resolve().parents[1]
WORK = {
    "sft": ("sft_vs_trl.py", "holdfast", "seconds"),
    "grpo-64+64": ("grpo_vs_trl.py", "holdfast 64+64", "step_seconds"),
    "grpo-256+32": ("grpo_vs_trl.py", "holdfast 256+32", "step_seconds"),
    "decode": ("decode.py", "holdfast", "speeds"),
    "mixture": ("kinds.py", "holdfast_mixture", "seconds"),
    "vision": ("kinds.py", "holdfast_vision", "seconds"),
    "long": ("fsdp.py", "long_1", "updates"),
    "head": ("head.py", "one_pass", "seconds"),
    "packing": ("packing.py", "best_fit, median 300", "us_per_token"),
}
"""By name: the script, its arm, and what the arm prints of each update, or of all of them."""


def be_arm(name: str, checkout: Path) -> None:
    """Become an arm of a checkout."""
    script, arm, _ = WORK[name]
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, "-W", "ignore", str(checkout / "benchmarks" / script), "--arm", arm]
    os.execve(sys.executable, command, environment)


def main() -> None:
    """Run both checkouts, and print what this one takes for each second and byte of the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(WORK), default=list(WORK))
    parser.add_argument("--arm", help="what, and the checkout: be an arm")
    options = parser.parse_args()
    if options.arm:
        name, _, checkout = options.arm.partition(" ")
        be_arm(name, Path(checkout))
    if options.checkout is None:
        parser.error("name the other checkout")
    print(heading("transformers"))
    missed = False
    for name in options.only:
        print(name)
        arms = {"now": HERE, "before": options.checkout.resolve()}
        rounds = alternate(__file__, [f"{name} {checkout}" for checkout in arms.values()], options.rounds)
        missed = compare(name, [dict(zip(arms, turn.values(), strict=True)) for turn in rounds]) or missed
    sys.exit(missed)


def compare(name: str, rounds: list[Round]) -> bool:
    """Print the ratios of one kind of work; return whether one misses its target."""
    key = WORK[name][2]
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
