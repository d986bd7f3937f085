"""What sharding and the trainer cost: CPU seconds per rank on 2 gloo ranks and in one process.

    python benchmarks/fsdp.py [--rounds 3]

`holdfast_2` and `bare_2` run the same model, kernels, packs and grouping on 2 ranks, one with our trainer, one in a
plain FSDP2 loop; `holdfast_1` and `bare_1` are one process with the work of one rank. 34M parameters, 4,096 tokens per
rank and step; of several ranks the mean counts. Every arm makes the same number of forward passes of the backbone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import Meter, Verdicts, alternate, heading

STEPS, WARM_UP, TOKENS, LONGEST = 4, 1, 4096, 256
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


def texts(ranks: int) -> list[str]:
    """Return rows that make every batch exactly TOKENS tokens per rank."""
    generator = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    rows = TOKENS // LONGEST * ranks * STEPS
    return ["".join(generator.choice(letters, LONGEST - 1)) for _ in range(rows)]


def holdfast() -> None:
    from holdfast.config.load import from_mapping
    from holdfast.config.runs import SFTConfig
    from holdfast.parallel.mesh import joined
    from holdfast.recipes.sft import sft_step
    from holdfast.training.build import Live, build_run

    ranks = int(os.environ["WORLD_SIZE"])
    tree = {
        "steps": STEPS,
        "model": {"config": MODEL, "tokenizer": "builtin:characters"},
        "data": {
            "path": "rows",
            "batch_size": TOKENS // LONGEST * ranks,
            "max_length": LONGEST,
            "tokens_per_micro_batch": TOKENS,
        },
        "optim": {"lr": 1e-5, "schedule": "constant"},
        "run": {"dir": tempfile.mkdtemp()},
    }
    settings = from_mapping(tree, SFTConfig)
    with joined(settings.launch) as world:
        run = build_run(settings, Path.cwd(), world, Live(rows=[{"text": text} for text in texts(ranks)]))
        report(lambda: sft_step(run), run.policy, world.is_first)


def bare() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from holdfast.data.characters import character_tokenizer
    from holdfast.data.packing import pack
    from holdfast.data.weights import Share
    from holdfast.models.attention import PACKED, register
    from holdfast.models.family import family_of
    from holdfast.models.policy import PolicyModel
    from holdfast.objectives.supervised import NegativeLogLikelihood
    from holdfast.types import Example

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    register()
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

    report(step, policy, rank == 0)
    dist.destroy_process_group()


def report(step: Callable[[], object], policy: Any, first: bool) -> None:
    import torch
    import torch.distributed as dist

    meter, times, calls = Meter(), [], []
    policy.language_model.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    meter.begin_peak()
    for _ in range(STEPS):
        start = meter.seconds()
        step()
        times.append(meter.seconds() - start)
    found = torch.tensor([statistics.median(times[WARM_UP:]), meter.peak_mib()], dtype=torch.float64)
    dist.all_reduce(found)
    seconds, peak = (found / dist.get_world_size()).tolist()
    parameters = sum(value.numel() for value in policy.parameters())
    if first:
        result = {"seconds": seconds, "peak_mib": peak, "forwards_per_step": len(calls) / STEPS}
        print(json.dumps(result | {"parameters": parameters}), flush=True)


def spawn(arm: str, ranks: int) -> None:
    """Start the ranks of an arm and pass on what the first prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    members = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank-of", arm],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    codes = [member.wait() for member in members]  # all of them, whatever the first says
    if any(codes):
        sys.exit(1)


ARMS = {"holdfast_2": ("holdfast", 2), "bare_2": ("bare", 2), "holdfast_1": ("holdfast", 1), "bare_1": ("bare", 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=list(ARMS))
    parser.add_argument("--rank-of", choices=["holdfast", "bare"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.rank_of:
        holdfast() if options.rank_of == "holdfast" else bare()
        return
    if options.arm:
        spawn(*ARMS[options.arm])
        return
    print(heading("transformers"))
    verdicts = Verdicts(alternate(__file__, list(ARMS), options.rounds))
    verdicts.at_most(1.03, "2 ranks, Holdfast over a bare FSDP2 loop", "holdfast_2", "bare_2", "seconds")
    verdicts.at_most(1.15, "Holdfast, each of 2 ranks over one process", "holdfast_2", "holdfast_1", "seconds")
    verdicts.at_most(1.03, "one process, Holdfast over a bare loop", "holdfast_1", "bare_1", "seconds")
    sys.exit(verdicts.missed)


if __name__ == "__main__":
    main()
