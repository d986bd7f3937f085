"""Completions of the replica are the plain model's, where attention has rules of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.data.tasks.synthetic import character_tokenizer
from tests.models.architectures import strong_model
from tests.training.cases import evaluate, tree

NEW_TOKENS = 8
PROMPTS = ("sort 31=", "add 7+8=", "reverse 987654321=")


def greedy(model: Any, prompt: str) -> str:
    """Continue a prompt by the most likely token, the whole text anew each time."""
    tokenizer = character_tokenizer()
    tokens = tokenizer(prompt)["input_ids"]
    start = len(tokens)
    while len(tokens) < start + NEW_TOKENS:
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(tokens[start:], skip_special_tokens=True))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_completions_with_soft_caps_sinks_and_windows_are_those_of_the_plain_model(
    pools: Any, tmp_path: Path, kind: str
) -> None:
    model = strong_model(kind, seed=1, vocab_size=len(character_tokenizer()), tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": prompt, "completion": "1"} for prompt in PROMPTS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = {
        "sets": {"s": {"path": str(tmp_path / "rows.jsonl")}},
        "completions": {"samples": 3, "max_new_tokens": NEW_TOKENS},
    }
    section = {"path": str(tmp_path / "model"), "config": None, "tokenizer": None}

    pools(2).run(evaluate, tree(str(tmp_path), model=section, evaluation=evaluation))

    (file,) = (tmp_path / "r" / "completions").glob("model-*/*.jsonl")
    found = [json.loads(line)["completion"] for line in file.read_text().splitlines()]
    assert found == [greedy(model, prompt) for prompt in PROMPTS]
    assert len(set(found)) == len(PROMPTS)
