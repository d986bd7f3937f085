"""Train a policy from Python with live rewards; prints one JSON line per rank."""

from __future__ import annotations

import json
import os
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import holdfast
from holdfast.data.tasks.synthetic import character_tokenizer

TINY, CONFIG = json.loads(sys.argv[1]), json.loads(sys.argv[2])


def even(completion_tokens: list[int], number: int) -> dict[str, float]:
    """Score the share of even tokens; the row's number is a part, so that it can be checked."""
    return {"reward": sum(token % 2 == 0 for token in completion_tokens) / len(completion_tokens), "number": number}


def half(completions: list[str]) -> list[float]:
    return [0.5] * len(completions)


def main() -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    rows = [{"prompt": f"add {number}=", "number": number} for number in range(8)]
    seen = []

    outcome = holdfast.grpo(
        CONFIG,
        rows=rows,
        rewards=[even, half],
        model=model,
        tokenizer=character_tokenizer(),
        observers=[lambda event: seen.append(event.metrics["reward"])],
    )

    said = {"rank": os.environ.get("RANK"), "step": outcome.step, "metrics": outcome.metrics, "seen": seen}
    print("said " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
