"""The head alone: log-probabilities, weight gradient included, against full logits.

    python benchmarks/head.py [--rounds 3] [--device cuda] [--tiny]

1,024 tokens, vocabulary 151,936, hidden size 256, float32, one thread; on a GPU 16,384 tokens, hidden sizes 896 and
3,584 and bfloat16, one arm in memory at a time. Peak memory is counted above what was in use before the first call.
`full` is `log_softmax` over all logits; `one_pass` forms gradients in the forward pass, for losses that are sums over
tokens; `recompute` serves all other losses and computes each chunk twice. On a GPU `kernels` and `kernels_recompute` do
the same by Triton kernels. `--tiny` computes a few tokens on the CPU, which says that the script runs and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass

from measure import Meter, alternate, heading
from verdicts import Verdicts, skip

CALLS, WARM_UP = 5, 1


@dataclass(frozen=True)
class Setting:
    """What is computed, on one kind of device."""

    tokens: int
    vocabulary: int
    sizes: tuple[int, ...]
    """Hidden sizes."""
    dtype: str
    forms: tuple[str, ...]
    """Forms of the head that are held against full logits."""


SETTINGS = {
    "cpu": Setting(1024, 151_936, (256,), "float32", ("one_pass", "recompute")),
    "cuda": Setting(16_384, 151_936, (896, 3584), "bfloat16", ("kernels", "kernels_recompute")),
    "tiny": Setting(64, 512, (32,), "float32", ("one_pass", "recompute")),
}
TIME = {"one_pass": 1.0, "recompute": 1.5, "kernels_recompute": 1.5, "kernels 896": 0.5, "kernels 3584": 0.75}
"""Seconds over those of full logits, at most; of the kernels by hidden size."""
MEMORY = {"one_pass": 0.3, "recompute": 0.3, "kernels_recompute": 0.3, "kernels": 0.1}
"""Extra peak over that of full logits, at most."""


def measure(form: str, setting: Setting, device: str, size: int) -> None:
    import torch

    from holdfast.models.chunks.kernel_form import kernel_tokens
    from holdfast.models.chunks.logits import HeadWeights
    from holdfast.models.layers.family import HeadSpec
    from holdfast.models.scores import score, separable_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens, vocabulary, dtype = setting.tokens, setting.vocabulary, getattr(torch, setting.dtype)
    spec = HeadSpec()
    if form.startswith("kernels"):
        spec = HeadSpec(kernel_tokens=kernel_tokens(spec, vocabulary, dtype, torch.cuda.mem_get_info()[1]))
    hidden = torch.randn(tokens, size).to(device, dtype)
    weight = (torch.randn(vocabulary, size) * 0.02).to(device, dtype)
    targets = torch.randint(0, vocabulary, (tokens,)).to(device)
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
    parser.add_argument("--arm", choices=["full", *SETTINGS["cpu"].forms, *SETTINGS["cuda"].forms])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = options.device
    setting = SETTINGS["tiny" if options.tiny else device]
    if options.arm:
        measure(options.arm, setting, device, options.size)
        return
    print(heading(device=device))
    if options.tiny:
        skip("kernels", "they need a CUDA device")
    missed = [compare(size, setting, options) for size in setting.sizes]
    sys.exit(any(missed))


def compare(size: int, setting: Setting, options: argparse.Namespace) -> bool:
    """Print how the forms compare at one hidden size; return whether something failed or missed its target."""
    tokens, vocabulary = setting.tokens, setting.vocabulary
    shown = f"{tokens:,} tokens, vocabulary {vocabulary:,}, hidden size {size}, {setting.dtype}"
    print(f"{shown}; median of {CALLS - WARM_UP}")
    arguments = ["--device", options.device, "--size", str(size), *(["--tiny"] if options.tiny else [])]
    alone = options.device == "cuda" or options.tiny
    rounds = alternate(__file__, ["full", *setting.forms], options.rounds, *arguments, alone=alone)
    verdicts = Verdicts(rounds, judged=not options.tiny)
    for form in setting.forms:
        title = f"hidden size {size}: extra peak memory, {form} over full logits"
        verdicts.at_most(MEMORY[form], title, form, "full", "peak_mib")
        most = TIME[form] if form in TIME else TIME[f"{form} {size}"]
        verdicts.at_most(most, f"hidden size {size}: time, {form} over full logits", form, "full", "seconds")
    return verdicts.missed


if __name__ == "__main__":
    main()
