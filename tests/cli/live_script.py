"""Train from Python with live objects, twice where asked; prints one JSON line per rank and run."""

from __future__ import annotations

import json
import os
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import holdfast
from holdfast.data.tasks.synthetic import character_tokenizer

TINY, CONFIG = json.loads(sys.argv[1]), json.loads(sys.argv[2])


def main() -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = [{"prompt": f"add {n}=", "completion": str(n)} for n in range(12)]
    seen = []

    outcome = holdfast.sft(
        CONFIG,
        rows=rows,
        model=model,
        tokenizer=character_tokenizer(),
        observers=[lambda event: seen.append(event.step)],
    )

    untouched = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    said = {
        "rank": os.environ.get("RANK"), "step": outcome.step, "loss": outcome.metrics["loss"],
        "stopped": outcome.stopped, "directory": outcome.directory, "export": outcome.export, "seen": seen,
        "untouched": untouched,
    }  # fmt: skip
    print("said " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
