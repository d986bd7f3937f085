"""A byte-level tokenizer trained here, and the chat templates of `templates/`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

# Read once, when `datasets` is imported: keeps what parquet tests cache out of the user's home.
os.environ.setdefault("HF_DATASETS_CACHE", str(Path(tempfile.gettempdir()) / "holdfast-test-datasets"))

TEMPLATES = Path(__file__).parent / "templates"

SPECIAL_TOKENS = [
    "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|User|>",
    "<|Assistant|>",
]  # fmt: skip
MARKUP_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

SENTENCES = [
    "What is the weather in Paris? It is sunny today, and 21 degrees.",
    "Hello! Hi there. How can I help you with the numbers 2 and 4?",
    "Let me think about the question, then answer it. Four. Thank you.",
    "You are a helpful assistant. The user asks, the assistant answers.",
]


def _train(texts: list[str], vocabulary: int) -> Any:
    """Train a byte-level BPE with the markers of many families."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


@pytest.fixture(scope="session")
def train_bpe() -> Callable[[list[str], int], Any]:
    """Return a function from texts and a vocabulary size to a tokenizer."""
    return _train


@pytest.fixture(scope="session")
def bpe() -> Any:
    """Return a tokenizer without a chat template."""
    return _train(SENTENCES * 4, 400)


@pytest.fixture
def with_template(bpe: Any) -> Callable[[str], Any]:
    """Return a function that gives the tokenizer the template of a file."""

    def load(name: str) -> Any:
        tokenizer = deepcopy(bpe)
        tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
        return tokenizer

    return load
