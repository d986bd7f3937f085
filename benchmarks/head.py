"""The head alone: log-probabilities, weight gradient included, against full logits.

    python benchmarks/head.py [--rounds 3] [--device cuda]

1,024 tokens, vocabulary 151,936, hidden size 256, float32, one thread; on a GPU 16,384 tokens, hidden sizes 896 and
3,584 and bfloat16. Peak memory is counted above what was in use before the first call. `full` is `log_softmax` over all
logits; `one_pass` forms gradients in the forward pass, for losses that are sums over tokens; `recompute` serves all
other losses and computes each chunk twice. On a GPU `kernels` and `kernels_recompute` do the same by Triton kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from measure import Meter, Verdicts, alternate, heading

VOCABULARY, CALLS, WARM_UP = 151_936, 5, 1
SIZES = {"cpu": (1024, (256,), "float32"), "cuda": (16_384, (896, 3584), "bfloat16")}
"""Tokens, hidden sizes and dtype."""
FORMS: dict[str, tuple[str, ...]] = {"cpu": ("full", "one_pass", "recompute")}
FORMS["cuda"] = (*FORMS["cpu"], "kernels", "kernels_recompute")


def measure(form: str, device: str, size: int) -> None:
    import torch

    from holdfast.models.chunks.kernel_form import kernel_tokens
    from holdfast.models.chunks.logits import HeadWeights
    from holdfast.models.layers.family import HeadSpec
    from holdfast.models.scores import score, separable_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens, _, name = SIZES[device]
    dtype, spec = getattr(torch, name), HeadSpec()
    if form.startswith("kernels"):
        spec = HeadSpec(kernel_tokens=kernel_tokens(spec, VOCABULARY, dtype, torch.cuda.mem_get_info()[1]))
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
        elif form in {"one_pass", "kernels"}:
            loss, _ = separable_loss(
                states, HeadWeights(head, None), targets, lambda logprobs, *_: -logprobs / tokens, spec
            )
        else:
            loss = -score(states, HeadWeights(head, None), targets, spec).logprobs.mean()
        loss.backward()
        times.append(meter.seconds() - start)
        value = loss.item()
        del loss, states, head
    print(json.dumps({"seconds": statistics.median(times[WARM_UP:]), "peak_mib": meter.peak_mib(), "loss": value}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=FORMS["cuda"])
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.arm:
        measure(options.arm, options.device, options.size)
        return
    tokens, sizes, dtype = SIZES[options.device]
    print(heading(device=options.device))
    missed = False
    for size in sizes:
        print(f"{tokens:,} tokens, vocabulary {VOCABULARY:,}, hidden size {size}, {dtype}; median of {CALLS - WARM_UP}")
        arguments = ("--device", options.device, "--size", str(size))
        verdicts = Verdicts(alternate(__file__, FORMS[options.device], options.rounds, *arguments))
        for form in FORMS[options.device][1:]:
            most_time = 1.5 if form.endswith("recompute") else 1.0
            verdicts.at_most(0.30, f"extra peak memory, {form} over full logits", form, "full", "peak_mib")
            verdicts.at_most(most_time, f"time, {form} over full logits", form, "full", "seconds")
        missed = missed or bool(verdicts.missed)
    sys.exit(missed)


if __name__ == "__main__":
    main()
