"""How much of a step `rollout.max_staleness: 1` hides: step times with it and without, both halves paced.

A server on the loopback takes two seconds for each completion, however many there are, and a loss sleeps for 1.2 s.
Without overlap a step takes the sum; hidden is what is saved of the shorter half. Both arms run in turn; the median of
the rounds is compared with the target, 80 %, since neighbours on a machine add to either.

    python benchmarks/staleness.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from holdfast.config.load import from_mapping
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.metrics.sink import METRICS, read_metrics
from holdfast.parallel.mesh import joined_world
from holdfast.recipes.grpo import grpo

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the server that the tests ask too

from tests.features.vllm.served import REWARD, ServedModel, served_tree, serving  # noqa: E402

ROLLOUT_SECONDS, UPDATE_SECONDS, STEPS, ROUNDS = 2.0, 1.2, 5, 5
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


def step_seconds(staleness: int) -> float:
    """Return the median time of a step, the first and the last left out."""
    with tempfile.TemporaryDirectory() as folder, serving(ServedModel(seconds=ROLLOUT_SECONDS)) as url:
        (Path(folder) / "reward.py").write_text(REWARD)
        (Path(folder) / "paced.py").write_text(LOSS)
        tree = served_tree([url], folder, steps=STEPS, objective={"kind": "path", "path": "paced.py:paced"})
        tree["rollout"]["max_staleness"] = staleness
        tree["checkpoint"]["every_steps"] = STEPS
        with joined_world(LaunchConfig(device="cpu")) as world:
            grpo(from_mapping(tree, GRPOConfig), Path(folder), world)
        times = [line["step_time"] for line in read_metrics(Path(folder) / "r" / METRICS) if "loss" in line]
    return statistics.median(times[1:-1])


def main() -> int:
    """Print every round; 1 if less than the target is hidden."""
    shares = []
    for _ in range(ROUNDS):
        apart, together = step_seconds(0), step_seconds(1)
        shares.append((apart - together) / min(ROLLOUT_SECONDS, UPDATE_SECONDS))
        print(f"a step takes {apart:.2f} s, with max_staleness 1 {together:.2f} s: {shares[-1]:.0%} hidden", flush=True)
    print(f"in the median {statistics.median(shares):.0%} of the shorter half are hidden")
    return int(statistics.median(shares) < 0.8)


if __name__ == "__main__":
    sys.exit(main())
