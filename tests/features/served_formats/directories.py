"""Small model directories with the tokenizers of real families, trained on a few sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_model

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = [
    "the sea was calm that morning and the ships lay still",
    "what is 17 + 25? it's 42, isn't it?",
    "naïve café",
]
_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "llama": "smollm",
    "llama:3.1": "llama-bpe",
    "llama:spm": "spm",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "gemma": "spm",
    "gemma2": "spm",
    "gemma3_text": "spm",
}
"""Kind of model, and what stands behind a colon, to the tokenizer that it usually has."""
_OVERRIDES: dict[str, dict[str, Any]] = {
    "llama:3.1": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "tie_word_embeddings": False,
    },
    "gemma": {"head_dim": 8},
    "gemma2": {"query_pre_attn_scalar": 8, "num_hidden_layers": 4},
    "gemma3_text": {"query_pre_attn_scalar": 8, "num_hidden_layers": 6},
}  # fmt: skip


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Return a trained tokenizer: "smollm", "llama-bpe" and "qwen2" of bytes, "spm" with spaces as signs."""
    if kind == "spm":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=special, show_progress=False)
        tokenizer.train_from_iterator(SENTENCES, trainer)
        tree = tokenizer.to_str()
        tokenizer = _with_special(Tokenizer.from_str(tree))
    else:
        tokenizer = Tokenizer(models.BPE())
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
        parts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        digits = {"llama-bpe": "{1,3}", "qwen2": ""}
        tokenizer.pre_tokenizer = (
            pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
            if kind == "smollm"
            else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_REGEX % digits[kind]), "isolated"), parts])
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=340, special_tokens=list(SPECIAL), show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )  # fmt: skip
        tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|endoftext|>", pad_token="<|endoftext|>",
        **({"unk_token": "<unk>"} if kind == "spm" else {}),
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    return fast


def _with_special(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with bytes as its own tokens, and the words of a conversation as special ones."""
    import json

    tree = json.loads(tokenizer.to_str())
    tree["added_tokens"] = [token for token in tree["added_tokens"] if not token["content"].startswith("<0x")]
    made = Tokenizer.from_str(json.dumps(tree))
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return made


def model_directory(path: Path, family: str, *, padding: int = 0, **overrides: Any) -> Path:
    """Save a model of a family, with weights far from those of a start and tokens of its own.

    Args:
        path: The new directory.
        family: A key of `FAMILIES`.
        padding: Rows of the embeddings that are no token's.
        overrides: Of its configuration.
    """
    tokenizer = tokenizer_of(FAMILIES[family])
    values = {"vocab_size": len(tokenizer) + padding, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    model = tiny_model(family, **{**values, **_OVERRIDES.get(family, {}), **overrides})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(4)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
