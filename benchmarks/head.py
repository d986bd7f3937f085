"""The head alone: log-probabilities, weight gradient included, against full logits.

    python benchmarks/head.py [--rounds 3] [--device cuda]

1,024 tokens, vocabulary 151,936, hidden size 256, float32, one thread; on a GPU 8,192 tokens, hidden size 1,024 and
bfloat16. Peak memory is counted above what was in use before the first call. `full` is `log_softmax` over all logits;
`one_pass` forms gradients in the forward pass, for losses that are sums over tokens; `recompute` serves all other
losses and computes each chunk twice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from measure import Meter, Verdicts, alternate, heading

VOCABULARY, CALLS, WARM_UP = 151_936, 5, 1
SIZES = {"cpu": (1024, 256, "float32"), "cuda": (8192, 1024, "bfloat16")}
"""Tokens, hidden size and dtype."""


def measure(form: str, device: str) -> None:
    import torch

    from holdfast.models.chunks.logits import HeadWeights
    from holdfast.models.layers.family import HeadSpec
    from holdfast.models.scores import score, separable_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens, size, name = SIZES[device]
    dtype = getattr(torch, name)
    hidden = torch.randn(tokens, size).to(device, dtype)
    weight = (torch.randn(VOCABULARY, size) * 0.02).to(device, dtype)
    targets = torch.randint(0, VOCABULARY, (tokens,)).to(device)
    meter = Meter(device)
    meter.begin_peak()
    times = []
    for _ in range(CALLS):
        states, head = hidden.clone().requires_grad_(), weight.detach().requires_grad_()
        start = meter.seconds()
        if form == "full":
            logprobs = (states @ head.t()).log_softmax(-1, dtype=torch.float32)
            loss = -logprobs.gather(1, targets[:, None]).mean()
            del logprobs
        elif form == "one_pass":
            loss, _ = separable_loss(
                states, HeadWeights(head, None), targets, lambda logprobs, *_: -logprobs / tokens, HeadSpec()
            )
        else:
            loss = -score(states, HeadWeights(head, None), targets, HeadSpec()).logprobs.mean()
        loss.backward()
        times.append(meter.seconds() - start)
        value = loss.item()
        del loss, states, head
    print(json.dumps({"seconds": statistics.median(times[WARM_UP:]), "peak_mib": meter.peak_mib(), "loss": value}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=["full", "one_pass", "recompute"])
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.arm:
        measure(options.arm, options.device)
        return
    tokens, size, dtype = SIZES[options.device]
    print(heading(device=options.device))
    print(
        f"{tokens:,} tokens, vocabulary {VOCABULARY:,}, hidden size {size}, {dtype}; median of {CALLS - WARM_UP} calls"
    )
    rounds = alternate(__file__, ("full", "one_pass", "recompute"), options.rounds, "--device", options.device)
    verdicts = Verdicts(rounds)
    for form, most_time in (("one_pass", 1.0), ("recompute", 1.5)):
        verdicts.at_most(0.30, f"extra peak memory, {form} over full logits", form, "full", "peak_mib")
        verdicts.at_most(most_time, f"time, {form} over full logits", form, "full", "seconds")
    sys.exit(verdicts.missed)


if __name__ == "__main__":
    main()
