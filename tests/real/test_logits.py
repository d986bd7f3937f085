"""The trainer's logits of a pretrained model, of sequences laid side by side without padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast.config.load import from_mapping
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.packing import Share, pack
from holdfast.models.chunks.logits import HeadWeights, logits_of
from holdfast.parallel.mesh import joined_world
from holdfast.training.run import Run
from holdfast.training.setup.begin import Live, build_model
from holdfast.types import Example

TEXTS = (
    "What is 59 + 63? Answer with the number alone.",
    "The capital of France is Paris, and the capital of Italy is Rome. Both are old.",
)


def test_logits_are_those_of_plain_transformers(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    sequences = [np.array(tokenizer(text)["input_ids"], dtype=np.int64) for text in TEXTS]
    examples = [Example(n, n, tokens, np.arange(tokens.size) > 0) for n, tokens in enumerate(sequences)]
    config = from_mapping(
        {"steps": 1, "model": {"path": str(model), "check_gradients": False}, "data": {"path": "rows.jsonl"}}, SFTConfig
    )
    chunks: list[Tensor] = []

    with joined_world(LaunchConfig(device="cpu")) as world, torch.no_grad():
        sharded = build_model(Run.of(config, Path.cwd(), world), Live(), lambda _: None)
        batch = pack(examples, [Share(1.0, 1.0)] * len(examples), padded=sharded.module.padded)

        def look(hidden: Tensor, head: HeadWeights) -> None:
            chunks.append(logits_of(hidden, head, sharded.module.head_spec)[0])

        sharded.module.show_predictors(batch, look)
        ours = torch.cat(chunks)

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        theirs = torch.cat([plain(torch.from_numpy(tokens)[None]).logits[0, :-1] for tokens in sequences])
    assert float(theirs.abs().max()) > 20
    assert float((ours - theirs).abs().max()) <= 1e-5
