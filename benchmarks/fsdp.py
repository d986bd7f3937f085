"""What sharding and the trainer cost: CPU seconds per rank on 2 gloo ranks and in one process.

    python benchmarks/fsdp.py [--rounds 3] [--part overhead|sharding|context]

`holdfast_2` and `bare_2` run the same model, kernels, packs and grouping on 2 ranks, one with our trainer, one in a
plain FSDP2 loop; `holdfast_1` and `bare_1` are one process with the work of one rank. Trainer and loop live in the same
processes and take turns step by step, so that a busy minute of the machine hits both. 34M parameters. What the trainer
adds is taken at 1,024 tokens per rank and step, where it weighs more than in longer steps.

What sharding costs is taken at 4,096 tokens, since communication does not grow with tokens, and with our trainer in
both arms: `long_2` is 2 ranks, `long_1` is 2 processes that know nothing of each other, so that both cores and the
memory are as busy in either. The four processes stay and take turns update by update.

What sharing rows costs (`parallel.context`) is taken in the same way: both arms are 2 ranks that shard parameters and
compute 4,096 tokens each of the same rows. In `context_2` these are halves of one row of 8,192, in `long_2` a row each.

Of several ranks the mean counts, and of several updates the median of the ratios of neighbours. Every arm makes the
same number of forward passes of the backbone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import Meter, Ranks, Round, alternate, heading, mean_of_ranks, run_ranks, show_round, take_turn
from verdicts import Verdicts

STEPS, WARM_UP, TOKENS, LONGEST = 25, 1, 1024, 256
LONG_STEPS, LONG_TOKENS = 9, 4096
MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def texts(ranks: int, tokens: int = TOKENS, steps: int = STEPS) -> list[str]:
    """Return rows that make every batch exactly so many tokens per rank."""
    generator = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    rows = tokens // LONGEST * ranks * steps
    return ["".join(generator.choice(letters, LONGEST - 1)) for _ in range(rows)]


def settings(ranks: int, tokens: int = TOKENS, steps: int = STEPS, context: int = 1) -> Any:
    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.training import SFTConfig

    tree = {
        "steps": steps,
        "model": {"config": MODEL, "tokenizer": "builtin:characters"},
        "data": {
            "path": "rows",
            "batch_size": tokens // LONGEST * ranks,
            "max_length": LONGEST,
            "tokens_per_micro_batch": tokens,
        },
        "optim": {"lr": 1e-5, "schedule": "constant"},
        "parallel": {"context": context},
        "run": {"dir": tempfile.mkdtemp()},
    }
    return from_mapping(tree, SFTConfig)


def holdfast(config: Any, world: Any) -> tuple[Callable[[], object], Any]:
    """Return our step and the policy it trains."""
    from holdfast.recipes.sft import sft_step
    from holdfast.training.setup.begin import Live, build_run

    rows = texts(world.size, config.data.tokens_per_micro_batch, config.steps)
    training = build_run(config, Path.cwd(), world, Live(rows=[{"text": text} for text in rows]))
    return lambda: sft_step(training), training.model.module


def bare(world: Any) -> tuple[Callable[[], object], Any]:
    """Return the step of a plain loop and the policy it trains."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from holdfast.data.batches.packing import Share, pack
    from holdfast.data.tasks.synthetic import character_tokenizer
    from holdfast.models.heads.policy import PolicyModel
    from holdfast.models.layers.attention import PACKED, register_attention
    from holdfast.models.layers.family import family_of
    from holdfast.objectives.supervised import NegativeLogLikelihood
    from holdfast.types import Example

    rank, ranks = world.rank, world.size
    register_attention()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL), attn_implementation=PACKED).float()
    family = family_of(model)
    policy = PolicyModel(model, family, family.head_spec(float32_product=False, chunk_tokens=None))
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(policy, mesh=mesh)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)
    tokenizer = character_tokenizer()
    rows = [np.array([*tokenizer(text)["input_ids"], 1]) for text in texts(ranks)[rank::ranks]]
    size = TOKENS // LONGEST
    batches = []
    for start in range(0, len(rows), size):
        members = [Example(i, i, ids, np.arange(ids.size) > 0) for i, ids in enumerate(rows[start : start + size])]
        batches.append(pack(members, [Share(1.0, float(e.trained_tokens)) for e in members]))
    todo = iter(batches)

    def step() -> None:
        batch = next(todo)
        (policy(batch, NegativeLogLikelihood()).loss / batch.count).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, policy


def rank_of_a_pair() -> None:
    """Take turns between trainer and loop on this rank; the first rank prints the means."""
    from holdfast.parallel.mesh import joined_world

    ranks = int(os.environ["WORLD_SIZE"])
    config = settings(ranks)
    with joined_world(config.launch) as world:
        pair = {"holdfast": holdfast(config, world), "bare": bare(world)}
        calls = {arm: count_forwards(policy) for arm, (_, policy) in pair.items()}
        times: dict[str, list[float]] = {arm: [] for arm in pair}
        meter = Meter()
        for number in range(STEPS):
            for arm in pair if number % 2 == 0 else reversed(pair):
                start = meter.seconds()
                pair[arm][0]()
                times[arm].append(meter.seconds() - start)
        told = {arm: [mean_of_ranks(value) for value in values[WARM_UP:]] for arm, values in times.items()}
        if world.is_first:
            for arm, updates in told.items():
                seconds = statistics.median(updates)
                result = {"seconds": seconds, "updates": updates, "forwards_per_step": len(calls[arm]) / STEPS}
                print(json.dumps({"arm": f"{arm}_{ranks}"} | result), flush=True)


def long_updates(context: int) -> None:
    """Make long updates in turn with the other arms, and say what each cost this process."""
    from holdfast.parallel.mesh import joined_world

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = settings(ranks, LONG_TOKENS, LONG_STEPS, context)
    with joined_world(config.launch) as world:
        step, policy = holdfast(config, world)
        calls, meter, times = count_forwards(policy), Meter(), []
        for _ in range(LONG_STEPS):
            take_turn()
            start = meter.seconds()
            step()
            times.append(meter.seconds() - start)
    updates = times[WARM_UP:]
    seconds = statistics.median(updates)
    print(json.dumps({"seconds": seconds, "updates": updates, "forwards_per_step": len(calls) / LONG_STEPS}))


def count_forwards(policy: Any) -> list[int]:
    calls: list[int] = []
    policy.language_model.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def overhead(rounds: int) -> bool:
    """Print what the trainer adds to a bare loop; return whether that is too much."""
    found: list[Round] = []
    for number in range(rounds):
        found.append(run_ranks(__file__, 2, "--pair") | run_ranks(__file__, 1, "--pair"))
        show_round(number, found[-1])
    verdicts = Verdicts(found)
    verdicts.at_most_over_all(1.03, "2 ranks, Holdfast over a bare FSDP2 loop", "holdfast_2", "bare_2", "updates")
    verdicts.at_most_over_all(1.03, "one process, Holdfast over a bare loop", "holdfast_1", "bare_1", "updates")
    return verdicts.missed


def sharding(rounds: int) -> bool:
    """Print what sharding adds to one process; return whether that is too much."""
    arms = {"long_2": Ranks(2), "long_1": Ranks(2, connected=False)}
    verdicts = Verdicts(alternate(__file__, list(arms), rounds, ranks=arms))
    verdicts.at_most_over_all(1.15, "Holdfast, each of 2 ranks over one process", "long_2", "long_1", "updates")
    return verdicts.missed


def context(rounds: int) -> bool:
    """Print what sharing rows adds to sharding alone; return whether that is too much."""
    arms = {"context_2": Ranks(2), "long_2": Ranks(2)}
    verdicts = Verdicts(alternate(__file__, list(arms), rounds, ranks=arms))
    title = "2 ranks that share rows over 2 ranks with a row each"
    verdicts.at_most_over_all(1.15, title, "context_2", "long_2", "updates")
    return verdicts.missed


PARTS = {"overhead": overhead, "sharding": sharding, "context": context}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=["long_2", "long_1", "context_2"], help="make long updates")
    parser.add_argument("--pair", action="store_true", help="be one rank of a pair")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=list(PARTS))
    options = parser.parse_args()
    if options.pair or options.arm:
        rank_of_a_pair() if options.pair else long_updates(2 if options.arm == "context_2" else 1)
        return
    print(heading("transformers"))
    missed = [part(options.rounds) for name, part in PARTS.items() if options.part in (None, name)]
    sys.exit(any(missed))


if __name__ == "__main__":
    main()
