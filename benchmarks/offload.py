"""What `parallel.offload` costs and saves: seconds of an update and peak memory, with it over without it.

    python benchmarks/offload.py [--device cuda] [--rounds 3]

One row of 16,384 tokens an update on a GPU: twelve layers of a 7B's widths with LoRA, blocks compiled, nothing
recomputed, so that activations are most of the memory; two further arms make the step of AdamW on a smaller model,
all of which is trained, beside its parameters and in host memory. On a CPU a tiny model runs the same code with
nothing won, and only that losses are equal to the bit is judged. Arms take turns update by update.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from measure import FAILED, Meter, alternate, heading, take_turn
from verdicts import Verdicts, show

WARM_UP, UPDATES = 2, 6
SLOWER, PEAK = 1.08, 0.70
ARMS: dict[str, tuple[str, list[str]]] = {
    "activations_stay": ("adapters", []),
    "activations_offloaded": ("adapters", ["activations"]),
    "optimizer_stays": ("all", []),
    "optimizer_offloaded": ("all", ["optimizer"]),
}
"""Name -> what is trained, and what is offloaded."""
WIDTHS: dict[str, dict[str, int]] = {
    "cuda": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
    "cpu": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
}
LAYERS = {("cuda", "adapters"): 12, ("cuda", "all"): 4, ("cpu", "adapters"): 4, ("cpu", "all"): 4}
VOCABULARY, TOKENS = {"cuda": 151_936, "cpu": 512}, {"cuda": 16_384, "cpu": 512}


def settings(device: str, trained: str, offload: list[str]) -> Any:
    """Return the run of an arm."""
    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.training import SFTConfig

    tokens = TOKENS[device]
    config = WIDTHS[device] | {
        "model_type": "qwen2",
        "vocab_size": VOCABULARY[device],
        "num_hidden_layers": LAYERS[device, trained],
        "max_position_embeddings": tokens,
        "tie_word_embeddings": False,
    }
    adapters = {"lora": {"rank": 16}, "frozen_dtype": "bfloat16"} if trained == "adapters" else {}
    tree = {
        "steps": WARM_UP + UPDATES,
        "run": {"dir": tempfile.mkdtemp()},
        "launch": {"device": device},
        "model": {"config": config, "tokenizer": "builtin:characters", **adapters},
        "data": {"path": "rows", "batch_size": 1, "max_length": tokens, "tokens_per_micro_batch": tokens},
        "optim": {"lr": 1e-5, "schedule": "constant"},
        "parallel": {"offload": offload},
        "checkpoint": {"rehearsal": False, "at_end": False, "export_at_end": False},
        "metrics": {"progress": "off"},
    }
    return from_mapping(tree, SFTConfig)


def run_arm(arm: str, device: str) -> None:
    """Make updates in turn with the other arms, and print what they took."""
    from holdfast.parallel.activations import offload_of
    from holdfast.parallel.mesh import joined_world
    from holdfast.recipes.sft import sft_step
    from holdfast.training.setup.begin import Live, build_run

    config = settings(device, *ARMS[arm])
    length = TOKENS[device] - 1
    rows = [
        {"text": "".join(chr(97 + (7 * row + index) % 26) for index in range(length))} for row in range(config.steps)
    ]
    seconds, losses = [], []
    with joined_world(config.launch) as world:
        meter = Meter(device)
        training = build_run(config, Path.cwd(), world, Live(rows=rows))
        offload = offload_of(training.model.module)
        for update in range(config.steps):
            take_turn()
            if update == WARM_UP:
                meter.begin_peak(whole=device == "cuda")
            copied, began = offload.copied_bytes if offload else 0, meter.seconds()
            made = sft_step(training)
            assert made is not None
            metrics = made.read().metrics
            if update >= WARM_UP:
                seconds.append(meter.seconds() - began)
            losses.append(metrics["loss"])
    peak = meter.peak_mib() / 1024
    copied = offload.copied_bytes - copied if offload else 0
    print(json.dumps({"seconds": seconds, "losses": losses, "peak_gib": peak, "copied_gib": copied / 2**30}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", choices=ARMS)
    options = parser.parse_args()
    if options.arm:
        run_arm(options.arm, options.device)
        return
    print(heading("transformers", device=options.device))
    missed = False
    for stays, offloaded in (("activations_stay", "activations_offloaded"), ("optimizer_stays", "optimizer_offloaded")):
        on_card = options.device == "cuda"
        rounds = alternate(__file__, [stays, offloaded], options.rounds, "--device", options.device, alone=on_card)
        whole = [turn for turn in rounds if not any(FAILED in turn[arm] for arm in (stays, offloaded))]
        same = all(turn[stays]["losses"] == turn[offloaded]["losses"] for turn in whole)
        # On a GPU the step in host memory and the backward pass of attention may round otherwise.
        show(f"{offloaded}: losses equal to the bit", "yes" if same else "no", met=None if on_card else same)
        verdicts = Verdicts(rounds)
        if options.device == "cuda":
            limit = SLOWER if stays == "activations_stay" else None
            verdicts.at_most(limit, f"{offloaded}, seconds of an update", offloaded, stays, "seconds")
            verdicts.at_most(PEAK, f"{offloaded}, peak memory", offloaded, stays, "peak_gib")
        missed |= verdicts.missed or (options.device == "cpu" and not same)
    raise SystemExit(missed)


if __name__ == "__main__":
    main()
