"""How much of a step `rollout.max_staleness` hides: step times with it and without, both halves paced.

A loss sleeps for 1.2 s, and a server on the loopback takes its time for each completion, however many there are: two
seconds for all alike (staleness 1), or 0.4 s, and three seconds for one of a step (staleness 3). Without overlap a step
takes the sum; hidden is what is saved of the shorter half, which with several steps on their way may be more than all
of it. Both arms run in turn; the median of the rounds is compared with the targets, 80 % and 90 %: neighbours on a
machine add to either.

    python benchmarks/staleness.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from holdfast.config.load import from_mapping
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.metrics.sink import METRICS, read_metrics
from holdfast.parallel.mesh import joined_world
from holdfast.recipes.grpo import grpo

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the server that the tests ask too

from tests.features.vllm.served import REWARD, ServedModel, served_tree, serving  # noqa: E402

UPDATE_SECONDS, STEPS, ROUNDS = 1.2, 9, 3
OF_A_STEP = 8
"""Completions."""
LOSS = f"""
import time

from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.surrogates import Reinforce


class Paced(PolicyGradient):
    def token_terms(self, logprobs, entropy, tokens):
        time.sleep({UPDATE_SECONDS})
        return super().token_terms(logprobs, entropy, tokens)


def paced():
    return Paced(Reinforce())
"""


@dataclass(frozen=True)
class Pace:
    """How long completions take, and how far ahead they may be sampled."""

    staleness: int
    seconds: float
    longest: float
    """Of one completion in each step."""
    target: float


PACES = (Pace(1, 2.0, 2.0, 0.8), Pace(3, 0.4, 3.0, 0.9))


def step_seconds(pace: Pace, staleness: int) -> float:
    """Return the median time of a step, the first ones and the last left out."""
    served = ServedModel(
        seconds=pace.seconds, slow=lambda _: 0.0 if served.count % OF_A_STEP else pace.longest - pace.seconds
    )
    with tempfile.TemporaryDirectory() as folder, serving(served) as url:
        (Path(folder) / "reward.py").write_text(REWARD)
        (Path(folder) / "paced.py").write_text(LOSS)
        tree = served_tree([url], folder, steps=STEPS, objective={"kind": "path", "path": "paced.py:paced"})
        tree["rollout"]["max_staleness"] = staleness
        tree["checkpoint"]["every_steps"] = STEPS
        with joined_world(LaunchConfig(device="cpu")) as world:
            grpo(from_mapping(tree, GRPOConfig), Path(folder), world)
        times = [line["step_time"] for line in read_metrics(Path(folder) / "r" / METRICS) if "loss" in line]
    return statistics.median(times[3:-1])


def main() -> int:
    """Print every round; 1 if less than a target is hidden."""
    missed = False
    for pace in PACES:
        shares = []
        for _ in range(ROUNDS):
            apart, together = step_seconds(pace, 0), step_seconds(pace, pace.staleness)
            shares.append((apart - together) / min(pace.longest, UPDATE_SECONDS))
            told = f"a step takes {apart:.2f} s, with max_staleness {pace.staleness} {together:.2f} s"
            print(f"{told}: {shares[-1]:.0%} of the shorter half hidden", flush=True)
        print(f"in the median {statistics.median(shares):.0%}, at least {pace.target:.0%}")
        missed |= statistics.median(shares) < pace.target
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
