"""Call Holdfast ten times in one process, with calls between that fail; prints one JSON line per rank and call."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import holdfast
from holdfast.data.tasks.synthetic import character_tokenizer

TINY = json.loads(sys.argv[1])
RANK = int(os.environ.get("RANK", "0"))
TEXTS = [{"prompt": f"add {n}=", "completion": str(n)} for n in range(8)]
PAIRS = [{"prompt": f"add {n}=", "chosen": str(n), "rejected": "x"} for n in range(8)]
PROMPTS = [{"prompt": f"add {n}="} for n in range(8)]


def failing(event: Any) -> None:
    raise ValueError(f"at step {event.step}")


def length(completion: str) -> float:
    return float(len(completion))


def main() -> None:
    torch.manual_seed(3)
    live: dict[str, Any] = {"model": AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))}
    live["tokenizer"] = character_tokenizer()
    shared = {"steps": 1, "launch": {"device": "cpu", "timeout_minutes": 1}, "metrics": {"progress": "off"}}
    data = {"data": {"batch_size": 4, "max_length": 32}}
    policy = {**data, "rollout": {"group_size": 2, "max_new_tokens": 4}}
    calls: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (holdfast.sft, data, {"rows": TEXTS}),
        (holdfast.dpo, {**data, "preference": {"loss": "dpo"}}, {"rows": PAIRS}),
        (holdfast.grpo, policy, {"rows": PROMPTS, "rewards": length}),
        (holdfast.sft, {"data": {"batch_size": 0}}, {"rows": TEXTS}),
        (holdfast.sft, data, {"rows": PAIRS}),
        (holdfast.sft, data, {"rows": TEXTS}),
        (holdfast.sft, data, {"rows": TEXTS, "observers": [failing]}),
        (holdfast.reward, {**data, "preference": {"loss": "bradley_terry"}}, {"rows": PAIRS}),
        (holdfast.grpo, policy, {"rows": PROMPTS, "rewards": length}),
        (holdfast.sft, data, {"rows": TEXTS}),
    ]
    for number, (verb, sections, arguments) in enumerate(calls, 1):
        if verb is holdfast.reward:
            arguments = {**arguments, "tokenizer": live["tokenizer"]}  # noqa: PLW2901 - it makes a model of its own
            tree = {**shared, **sections, "model": {"config": TINY | {"num_labels": 1}}}
        else:
            arguments = {**arguments, **live}  # noqa: PLW2901
            tree = {**shared, **sections}
        try:
            how = verb({**tree, "run": {"name": f"call-{number}"}}, **arguments).step
        except Exception as error:  # noqa: BLE001 - what is tested is what came of it
            how = type(error).__name__
        gc.collect()  # what an exception held
        threads = len(list(Path("/proc/self/task").iterdir()))
        print("said " + json.dumps({"rank": RANK, "call": number, "how": how, "threads": threads}), flush=True)


if __name__ == "__main__":
    main()
