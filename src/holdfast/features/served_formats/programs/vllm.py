"""Answer rows by vLLM; run by an interpreter that has it, with nothing of Holdfast.

Request and answer are those of `llama.py` beside this file; `model` is a directory.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def main() -> None:
    """Read the request and write the answer."""
    # On CPUs vLLM binds threads to cores of its own choice, and takes half of the memory for its cache.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm

    request = json.load(sys.stdin)
    rows, directory = request["rows"], request["model"]
    longest = max([len(row["ids"]) for row in rows] + [len(row["prompt_ids"]) + row["new_tokens"] for row in rows])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    engine = vllm.LLM(directory, max_model_len=longest + 8, enforce_eager=True, max_num_seqs=4, seed=0)
    whole = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    scored = engine.generate([{"prompt_token_ids": row["ids"]} for row in rows], whole, use_tqdm=False)
    greedy = vllm.SamplingParams(
        temperature=0.0, max_tokens=rows[0]["new_tokens"], ignore_eos=True, stop_token_ids=[], detokenize=False
    )
    written = engine.generate([{"prompt_token_ids": row["prompt_ids"]} for row in rows], greedy, use_tqdm=False)
    answers = [
        {
            "ids": _tokens(tokenizer, row),
            "prompt_ids": _tokens(tokenizer, row, prompt=True),
            "logprobs": [of[token].logprob for of, token in zip(one.prompt_logprobs[1:], row["ids"][1:], strict=True)],
            "greedy": list(other.outputs[0].token_ids),
        }
        for row, one, other in zip(rows, scored, written, strict=True)
    ]
    answer = {"program": f"vllm {vllm.__version__}", "rows": answers}
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


def _tokens(tokenizer: Any, row: dict[str, Any], *, prompt: bool = False) -> list[int]:
    if row["messages"] is None:
        return list(tokenizer(row["prompt_text"] if prompt else row["text"])["input_ids"])
    messages = row["prompt_messages"] if prompt else row["messages"]
    adds = prompt or row["prompt_messages"] == row["messages"]
    return list(tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=adds, return_dict=False))


if __name__ == "__main__":
    main()
