"""256 requests of mixed lengths through our own engine, against the engine of another checkout.

    python benchmarks/continuous.py --other /path/to/another/checkout [--rounds 3]

The model is `endless` of grpo_vs_trl.py with two in a hundred tokens that end a text; 32 groups of 8, prompts of 16 to
199 tokens, at most 256 new tokens, at most 32 rows together. Both arms draw by the same seeds; the number of tokens is
printed for both. CPU seconds of the process count, without its start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

GROUP, REQUESTS, ROWS = 8, 32, 32
ENDS = 0.02
"""Share of the vocabulary that ends a text."""


def sample() -> None:
    """Complete all requests and print what it took."""
    import numpy as np
    import torch
    from grpo_vs_trl import SHAPES, endless

    from holdfast.config.sections.model import ModelConfig
    from holdfast.config.sections.rollout import SamplingConfig
    from holdfast.data.tasks.synthetic import character_tokenizer
    from holdfast.models.names import named_parameters
    from holdfast.models.setup.model import blueprint
    from holdfast.rollout.engine import Request, generate
    from holdfast.rollout.local.inprocess import InProcessEngine
    from holdfast.rollout.sampling import Stops, mixed

    torch.set_num_threads(1)
    language_model, random = endless(SHAPES["64+64"]), np.random.default_rng(0)
    size = language_model.config.vocab_size
    stops = Stops(frozenset(random.choice(size, int(size * ENDS), replace=False).tolist()))
    section = ModelConfig(path="given", tokenizer="builtin:characters")
    origin = blueprint(section, Path(), seed=0, live=language_model, tokenizer=character_tokenizer())
    engine = InProcessEngine(origin, torch.device("cpu"), torch.float32, stops, rows=ROWS)
    engine.update_weights(named_parameters(language_model).items(), 0)
    requests = []
    for number in range(REQUESTS):
        prompt = random.integers(2, 90, int(random.integers(16, 200)))
        requests.append(Request(number, prompt, tuple(mixed(number, index) for index in range(GROUP))))
    start = time.process_time()
    found = generate(engine, requests, SamplingConfig(max_new_tokens=256))
    seconds = time.process_time() - start
    print(json.dumps({"seconds": seconds, "tokens": sum(sampled.tokens.size for sampled in found)}))


def arm(checkout: Path) -> dict[str, float]:
    """Run one arm with the sources of a checkout."""
    paths = os.pathsep.join([str(checkout / "src"), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--arm"], env=environment, capture_output=True, text=True, check=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", action="store_true")
    parser.add_argument("--other", type=Path, default=Path())
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.arm:
        sample()
        return
    ratios = []
    for number in range(options.rounds):
        sides = [options.other, Path(__file__).parents[1]]
        taken = {side: arm(side.resolve()) for side in (sides if number % 2 else reversed(sides))}
        other, own = (taken[side] for side in sides)
        ratios.append(other["seconds"] / own["seconds"])
        print(f"other {other}, this {own}: {ratios[-1]:.3f} times its CPU seconds", flush=True)
    median, worst = statistics.median(ratios), min(ratios)
    print(f"CPU seconds, the other checkout's over this one's: median {median:.3f}, worst {worst:.3f}")


if __name__ == "__main__":
    main()
