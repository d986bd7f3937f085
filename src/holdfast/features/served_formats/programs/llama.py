"""Answer rows by llama.cpp, through llama-cpp-python; run by an interpreter that has it, with nothing of Holdfast.

The request is JSON on standard input: `model`, `threads`, and `rows` with `messages` or `text`, `ids`, `prompt_ids` and
`new_tokens`. The answer is JSON in the file that the first argument names. Keys and values are cached in float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter


def main() -> None:
    """Read the request and write the answer."""
    request = json.load(sys.stdin)
    rows = request["rows"]
    longest = max([len(row["ids"]) for row in rows] + [len(row["prompt_ids"]) + row["new_tokens"] for row in rows])
    model = llama_cpp.Llama(
        request["model"], n_ctx=longest + 8, n_batch=512, n_threads=request["threads"], logits_all=True, n_gpu_layers=0,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, verbose=False,
    )  # fmt: skip
    answer = {"program": f"llama-cpp-python {llama_cpp.__version__}", "rows": [_answer(model, row) for row in rows]}
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


def _answer(model: Any, row: dict[str, Any]) -> dict[str, Any]:
    logits = _logits(model, row["ids"])
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    chosen = [float(logprobs[at, token]) for at, token in enumerate(row["ids"][1:])]
    return {
        "ids": _tokens(model, row),
        "prompt_ids": _tokens(model, row, prompt=True),
        "logprobs": chosen,
        "greedy": _greedy(model, row["prompt_ids"], row["new_tokens"]),
    }


def _logits(model: Any, ids: list[int]) -> Any:
    model.reset()
    model.eval(ids)
    return np.array(model.scores[: len(ids)], dtype=np.float64)


def _greedy(model: Any, ids: list[int], count: int) -> list[int]:
    chosen: list[int] = []
    if not ids:
        return chosen
    model.reset()
    model.eval(ids)
    while len(chosen) < count:
        chosen.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(chosen[-1:])
    return chosen


def _tokens(model: Any, row: dict[str, Any], *, prompt: bool = False) -> list[int]:
    """Return a row's tokens as the file's own tokenizer and template make them."""
    if row["messages"] is None:
        text = row["prompt_text"] if prompt else row["text"]
        return list(model.tokenize(text.encode(), add_bos=True, special=True))
    template = model.metadata.get("tokenizer.chat_template")
    if template is None:
        return []
    words = {kind: _piece(model, f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
    adds = prompt or row["prompt_messages"] == row["messages"]
    formatter = Jinja2ChatFormatter(template, words["eos"], words["bos"], add_generation_prompt=adds)
    messages = row["prompt_messages"] if prompt else row["messages"]
    text = formatter(messages=messages).prompt
    return list(model.tokenize(text.encode(), add_bos=False, special=True))


def _piece(model: Any, key: str) -> str:
    number = model.metadata.get(key)
    return "" if number is None else str(model.detokenize([int(number)], special=True).decode())


if __name__ == "__main__":
    main()
