"""Write what examples/sft_gsm8k.yaml starts from: the rows, and a small Llama of random weights with a BPE of its own.

    python examples/gsm8k_start.py [train.jsonl]

Without a file the rows of openai/gsm8k come from the hub. It also scores every row's own answer by the math reward, as
a policy that is always right would be scored: 7,473 of 7,473 are 1.0.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

DIRECTORY = Path("runs/gsm8k_start")
VOCABULARY = 1000
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}{{ '\\n' }}"
    "{%- if message.role == 'assistant' -%}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{%- else -%}{{ message.content }}<|im_end|>{%- endif -%}{{ '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}"
)


def read_rows(path: str | None) -> list[dict[str, str]]:
    """Return the training rows: `question`, and `answer` with its steps and `#### result` at its end."""
    if path is not None:
        return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    from datasets import load_dataset

    return list(load_dataset("openai/gsm8k", "main", split="train"))


def train_tokenizer(texts: list[str]) -> Any:
    """Train a byte-level BPE, and give it a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def score_gold(rows: list[dict[str, str]]) -> None:
    """Score every row's own answer by the math reward, and print how many are right."""
    from holdfast.config.sections.reward import MathConfig, RewardPoolConfig
    from holdfast.rewards.base import Sample
    from holdfast.rewards.pool import RewardPool

    samples = [
        Sample(number, row["question"], row["answer"], [], [], "stop", {"answer": row["answer"]})
        for number, row in enumerate(rows)
    ]
    began = time.monotonic()
    with RewardPool([MathConfig()], RewardPoolConfig(workers=2), Path.cwd(), DIRECTORY) as pool:
        right = sum(scored.reward == 1.0 for scored in pool.score(samples))
    print(f"gold answers that the math reward scores 1.0: {right:,} of {len(rows):,}, {time.monotonic() - began:.1f} s")


def main() -> None:
    """Write rows, tokenizer and model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = read_rows(sys.argv[1] if len(sys.argv) > 1 else None)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    (DIRECTORY / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = train_tokenizer([text for row in rows for text in (row["question"], row["answer"])])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(DIRECTORY / "model")
    tokenizer.save_pretrained(DIRECTORY / "model")
    print(f"{len(rows):,} rows and the model are in {DIRECTORY}")
    score_gold(rows)


if __name__ == "__main__":
    main()
