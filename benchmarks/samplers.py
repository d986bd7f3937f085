"""Arms of `cpu.py` that run where Holdfast is not installed: llama.cpp and vLLM, which sample from the same shape."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import take_turn

SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
UPDATES, WARM_UP = 4, 1
PROMPTS, PROMPT, NEW = 64, 32, 32


def timed_on(
    threads: int, act: Callable[[int], object], tokens: Callable[[int], int] = lambda _: PROMPTS * NEW
) -> None:
    """Time like `timed`, without torch."""
    seconds, counted = [], 0
    for number in range(UPDATES):
        take_turn()
        began = time.perf_counter()
        act(number)
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
            counted += tokens(number)
    rate = counted / sum(seconds)
    print(json.dumps({"tokens_per_second": rate, "seconds": seconds, "threads": threads}))


def llama_rollout(threads: int, dtype: str) -> None:
    import ctypes

    import llama_cpp as llama

    file = Path(tempfile.mkdtemp()) / "model.gguf"
    write_gguf(file, dtype)
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = PROMPTS * (PROMPT + NEW), PROMPTS * PROMPT, PROMPTS * PROMPT
    options.n_seq_max, options.n_threads, options.n_threads_batch = PROMPTS, threads, threads
    quiet = llama.llama_log_callback(lambda *_: None)  # the library keeps no reference to it
    llama.llama_log_set(quiet, ctypes.c_void_p())
    context = llama.llama_init_from_model(
        llama.llama_model_load_from_file(str(file).encode(), llama.llama_model_default_params()), options
    )
    sampler = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    llama.llama_sampler_chain_add(sampler, llama.llama_sampler_init_dist(0))
    batch = llama.llama_batch_init(PROMPTS * PROMPT, 0, 1)
    prompts = np.random.default_rng(1).integers(3, 49_000, (PROMPTS, PROMPT))

    def decode(tokens: Any, position: int) -> list[int]:
        """Compute [PROMPTS, n] tokens and return a token drawn for each row."""
        last = []
        for index, (row, column) in enumerate(np.ndindex(tokens.shape)):
            batch.token[index], batch.pos[index] = int(tokens[row, column]), position + column
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = column == tokens.shape[1] - 1
            last += [index] if batch.logits[index] else []
        batch.n_tokens = tokens.size
        assert llama.llama_decode(context, batch) == 0
        return [llama.llama_sampler_sample(sampler, context, index) for index in last]

    def rollout(_: int) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        drawn = decode(prompts, 0)
        for number in range(NEW - 1):
            drawn = decode(np.array(drawn)[:, None], PROMPT + number)

    timed_on(threads, rollout)


def write_gguf(file: Path, dtype: str) -> None:
    """Write random weights of the shape as llama.cpp reads them."""
    import gguf

    kind = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}[dtype]
    heads, shared, hidden = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["hidden_size"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(SHAPE["vocab_size"])
    writer.add_tokenizer_model("none")
    narrow = hidden // heads * shared
    matrices = {
        "attn_q": (hidden, hidden), "attn_k": (narrow, hidden), "attn_v": (narrow, hidden),
        "attn_output": (hidden, hidden), "ffn_gate": (SHAPE["intermediate_size"], hidden),
        "ffn_up": (SHAPE["intermediate_size"], hidden), "ffn_down": (hidden, SHAPE["intermediate_size"]),
    }  # fmt: skip
    named = {"token_embd": (SHAPE["vocab_size"], hidden)}
    for layer in range(SHAPE["num_hidden_layers"]):
        named |= {f"blk.{layer}.{name}": shape for name, shape in matrices.items()}
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    generator = np.random.default_rng(0)
    for name, shape in named.items():
        values = generator.normal(0, 0.02, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vllm_rollout(threads: int, dtype: str) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    directory = Path(tempfile.mkdtemp())
    config = SHAPE | {"architectures": ["LlamaForCausalLM"], "dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config))
    engine = LLM(
        str(directory), load_format="dummy", skip_tokenizer_init=True, dtype=dtype, max_model_len=PROMPT + NEW,
        enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    prompts = np.random.default_rng(1).integers(3, 49_000, (PROMPTS, PROMPT))
    sampling = SamplingParams(max_tokens=NEW, ignore_eos=True, detokenize=False)

    def rollout(_: int) -> None:
        found = engine.generate(
            [{"prompt_token_ids": row.tolist()} for row in prompts], sampling, use_tqdm=False
        )  # fmt: skip
        assert sum(len(each.outputs[0].token_ids) for each in found) == PROMPTS * NEW

    timed_on(threads, rollout)
