"""Write what examples/sft_calculator.yaml starts from: sums as conversations, and a BPE with a template for tools.

    python examples/calculator_start.py

Two in five of the rows to imitate call the calculator, and the others guess wrongly.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from calculator import add

from holdfast.environments.tools import tool_of

DIRECTORY = Path("runs/calculator_start")
TEMPLATE = (
    "{%- if tools -%}<|im_start|>system\n{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif -%}"
    "{%- for message in messages -%}<|im_start|>{{ message.role + '\n' }}"
    "{%- if message.role == 'assistant' -%}{% generation %}{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] -%}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{%- endfor -%}<|im_end|>{% endgeneration %}"
    "{%- else -%}{{ message.content }}<|im_end|>{%- endif -%}{{ '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


def question(draw: random.Random) -> tuple[int, int, list[dict[str, Any]]]:
    """Return two numbers, and the prompt that asks for their sum."""
    a, b = draw.randint(10, 99), draw.randint(10, 99)
    return a, b, [{"role": "user", "content": f"{a} + {b} = ?"}]


def demonstration(draw: random.Random) -> dict[str, Any]:
    """Return a conversation to imitate."""
    a, b, prompt = question(draw)
    if draw.random() < 0.6:
        guess = str(a + b + draw.choice([-11, -10, -9, -2, -1, 1, 2, 9, 10, 11]))
        return {"messages": [*prompt, {"role": "assistant", "content": guess}]}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    answers = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]
    return {"messages": [*prompt, *answers]}


def train_tokenizer(texts: list[str]) -> Any:
    """Train a byte-level BPE in which every digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
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


def main() -> None:
    """Write rows and tokenizer."""
    draw, tools = random.Random(0), [dict(tool_of(add, "the example").schema)]
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    demonstrations = [{**demonstration(draw), "tools": tools} for _ in range(24_000)]
    prompts = []
    for _ in range(8_200):
        a, b, prompt = question(draw)
        prompts.append({"prompt": prompt, "answer": str(a + b)})
    unseen = [{**demonstration(draw), "tools": tools} for _ in range(200)]
    files = {"sft": demonstrations, "sft_held_out": unseen, "prompts": prompts[:8_000], "held_out": prompts[8_000:]}
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (DIRECTORY / f"{name}.jsonl").write_text(text, encoding="utf-8")
    schema = json.dumps(tools[0]["function"])
    texts = [json.dumps(row["messages"]) + schema + TEMPLATE for row in demonstrations[:200]]
    texts += ["assistant\n<tool_call>\n" + '{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'] * 400
    train_tokenizer(texts).save_pretrained(DIRECTORY / "tokenizer")
    print(f"rows and the tokenizer are in {DIRECTORY}")


if __name__ == "__main__":
    main()
