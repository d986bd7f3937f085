"""256 requests of mixed lengths through our own engine, against the engine of another checkout or `generate`.

    python benchmarks/continuous.py --other /path/to/another/checkout [--rounds 3]
    python benchmarks/continuous.py --recurrent [--rounds 3]

The second form compares our own engine with transformers' `generate` on an LFM2 of eight layers, six of them
convolutions, 256 wide; the first one on `endless` of grpo_vs_trl.py. Of both vocabularies two in a hundred tokens end a
text; 32 groups of 8, prompts of 16 to 199 tokens, at most 256 new tokens, at most 32 rows together. Both arms draw by
the same seeds; the number of tokens is printed for both. CPU seconds of the process count, without its start.
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
from typing import Any

GROUP, REQUESTS, ROWS = 8, 32, 32
ENDS = 0.02
"""Share of the vocabulary that ends a text."""


def recurrent_model() -> Any:
    """Return an LFM2 of random weights."""
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    kinds = ["conv", "conv", "full_attention", "conv"] * 2
    config = Lfm2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=len(kinds),
        num_attention_heads=8,
        num_key_value_heads=2,
        layer_types=kinds,
    )
    torch.manual_seed(0)
    return Lfm2ForCausalLM(config).eval()


def sample(name: str) -> None:
    """Complete all requests and print what it took.

    Args:
        name: `own` for our own engine on a model with attention alone, else which engine samples from an LFM2.
    """
    import numpy as np
    import torch
    from grpo_vs_trl import SHAPES, endless

    from holdfast.config.sections.model import ModelConfig
    from holdfast.config.sections.rollout import SamplingConfig
    from holdfast.data.tasks.synthetic import character_tokenizer
    from holdfast.models.names import named_parameters
    from holdfast.models.setup.model import blueprint
    from holdfast.rollout.engine import Request, generate
    from holdfast.rollout.local.generation import TransformersEngine
    from holdfast.rollout.local.inprocess import InProcessEngine
    from holdfast.rollout.sampling import Stops, mixed

    torch.set_num_threads(1)
    language_model = endless(SHAPES["64+64"]) if name == "own" else recurrent_model()
    random = np.random.default_rng(0)
    size = language_model.config.vocab_size
    stops = Stops(frozenset(random.choice(size, int(size * ENDS), replace=False).tolist()))
    section = ModelConfig(path="given", tokenizer="builtin:characters")
    origin = blueprint(section, Path(), seed=0, live=language_model, tokenizer=character_tokenizer())
    cpu = torch.device("cpu")
    engine: TransformersEngine | InProcessEngine = (
        TransformersEngine(origin, cpu, torch.float32, stops, 0, rows=ROWS)
        if name == "generate"
        else InProcessEngine(origin, cpu, torch.float32, stops, rows=ROWS)
    )
    engine.update_weights(named_parameters(language_model).items(), 0)
    requests = []
    for number in range(REQUESTS):
        prompt = random.integers(2, 90, int(random.integers(16, 200)))
        requests.append(Request(number, prompt, tuple(mixed(number, index) for index in range(GROUP))))
    start = time.process_time()
    found = generate(engine, requests, SamplingConfig(max_new_tokens=256))
    seconds = time.process_time() - start
    print(json.dumps({"seconds": seconds, "tokens": sum(sampled.tokens.size for sampled in found)}))


def arm(checkout: Path, name: str) -> dict[str, float]:
    """Run one arm with the sources of a checkout; see `sample`."""
    paths = os.pathsep.join([str(checkout / "src"), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--arm", name], env=environment, capture_output=True, text=True, check=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=["own", "recurrent", "generate"])
    parser.add_argument("--other", type=Path, default=Path())
    parser.add_argument("--recurrent", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.arm:
        sample(options.arm)
        return
    ratios, this = [], Path(__file__).parents[1]
    sides = [(this, "generate"), (this, "recurrent")] if options.recurrent else [(options.other, "own"), (this, "own")]
    for number in range(options.rounds):
        taken = {side: arm(side[0].resolve(), side[1]) for side in (sides if number % 2 else reversed(sides))}
        other, own = (taken[side] for side in sides)
        ratios.append(other["seconds"] / own["seconds"])
        print(f"other {other}, this {own}: {ratios[-1]:.3f} times its CPU seconds", flush=True)
    median, worst = statistics.median(ratios), min(ratios)
    print(f"CPU seconds, the other's over this one's: median {median:.3f}, worst {worst:.3f}")


if __name__ == "__main__":
    main()
