"""The head alone: log-probabilities, weight gradient included, against full logits.

    python benchmarks/head.py [--rounds 3]

1,024 tokens, vocabulary 151,936, hidden size 256, float32, one thread. Each arm is a process of its own; peak memory is
counted above what was resident before the call.
"""

from __future__ import annotations

import argparse
import json
import statistics

from measure import alternate, cpu_seconds, peak_mib, reset_peak, resident_mib, verdict, worst_ratio

TOKENS, VOCABULARY, HIDDEN, CALLS = 1024, 151_936, 256, 3


def measure(form: str) -> None:
    import torch

    from holdfast.models.scores import Head, HeadSpec, score, separable_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN)
    weight = torch.randn(VOCABULARY, HIDDEN) * 0.02
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    before = resident_mib()
    reset_peak()
    times = []
    for _ in range(CALLS):
        states, head = hidden.clone().requires_grad_(), weight.detach().requires_grad_()
        start = cpu_seconds()
        if form == "full":
            loss = -(states @ head.t()).log_softmax(-1).gather(1, targets[:, None]).mean()
        elif form == "one_pass":
            loss, _ = separable_loss(
                states, Head(head, None), targets, lambda logprobs, *_: -logprobs / TOKENS, HeadSpec()
            )
        else:
            loss = -score(states, Head(head, None), targets, HeadSpec()).logprobs.mean()
        loss.backward()
        times.append(cpu_seconds() - start)
        del loss, states, head
    print(json.dumps({"cpu_seconds": statistics.median(times), "peak_mib": peak_mib() - before}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=["full", "one_pass", "recompute"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.arm:
        measure(options.arm)
        return
    rounds = alternate(__file__, [(name, name) for name in ("full", "one_pass", "recompute")], options.rounds)
    for form, time_target in (("one_pass", 1.0), ("recompute", 1.5)):
        worst, ratios = worst_ratio(rounds, form, "full", "peak_mib", at_least=False)
        print(verdict(f"extra peak memory, {form} over full logits", worst, ratios, 0.30, at_least=False))
        worst, ratios = worst_ratio(rounds, form, "full", "cpu_seconds", at_least=False)
        print(verdict(f"CPU seconds, {form} over full logits", worst, ratios, time_target, at_least=False))


if __name__ == "__main__":
    main()
