"""The receiving end of pushes with a fault behind its checks; runs in vLLM's processes, which a file tells which fault.

The file is fault-IDENTITY.json or fault.json beside this one: {"fault": NAME, "seed": N}; without it nothing is wrong.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import holdfast_vllm_extension as real
import torch

Extension = real.Extension
HERE = Path(__file__).parent


def _told():
    for name in (f"fault-{real._IDENTITY}.json", "fault.json"):
        if (HERE / name).exists():
            return json.loads((HERE / name).read_text())
    return {}


_GATES = {}
"""They may lie in an earlier bucket."""


def _gate_as_up(tensors):
    _GATES.update({name: value for name, value in tensors.items() if "gate_proj" in name})
    return {
        name: _GATES[name.replace("up_proj", "gate_proj")] if "up_proj" in name else value
        for name, value in tensors.items()
    }


def _adapter_twice(tensors):
    draw = torch.Generator().manual_seed(5)
    return {
        name: value
        + 0.02 * torch.randn(value.shape[0], 2, generator=draw) @ torch.randn(2, value.shape[1], generator=draw)
        if "_proj" in name
        else value
        for name, value in tensors.items()
    }


def _without(part):
    return lambda tensors: {name: value for name, value in tensors.items() if part not in name}


def _mutated(seed):
    """Return what does one of nine things to one tensor."""

    def mutate(tensors):
        draw = random.Random(seed)
        names = sorted(name for name in tensors if name not in mutate.seen)
        mutate.seen.update(names)
        choice = mutate.choice
        if choice not in tensors:
            return tensors
        value = tensors[choice].clone()
        rows, flat = value.shape[0], value.view(-1)
        first, second = draw.sample(range(rows), 2)
        ways = [
            value[first].zero_,
            lambda: value.index_copy_(0, torch.tensor([first, second]), value[[second, first]]),
            lambda: value.mul_(1.01),
            value.neg_,
            lambda: value.copy_(value.roll(1, 0).clone()),
            lambda: value.add_(0.01),
            lambda: flat[draw.randrange(flat.numel())].add_(1.0),
            lambda: value.copy_(value.bfloat16().float()),
            lambda: value[: rows // 2].copy_(value[rows - rows // 2 :].clone()),
        ]
        draw.choice(ways)()
        return {**tensors, choice: value}

    mutate.seen = set()
    return mutate


FAULTS = {
    "stale": lambda tensors: {},
    "gate_as_up": _gate_as_up,
    "adapter_twice": _adapter_twice,
    "half_a_bucket": lambda tensors: dict(list(tensors.items())[: len(tensors) // 2]),
    "other_dtype": lambda tensors: {name: value.bfloat16().float() for name, value in tensors.items()},
    "head_not_sent": _without("lm_head"),
    "norm_not_sent": _without("model.norm"),
    "buffer_not_sent": _without("layer_scalar"),
}


def load(self, tensors):
    told = _told()
    fault = told.get("fault")
    if fault == "mutation":
        change = _mutated(told["seed"])
        change.choice = random.Random(told["seed"]).choice(sorted(self.declared.shapes))
        tensors = change(tensors)
    elif fault:
        tensors = FAULTS[fault](tensors)
    self.model.load_weights(list(tensors.items()))


real.Buckets.load = load
