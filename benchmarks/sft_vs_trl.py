"""SFT throughput against TRL: real tokens per CPU second, one process, one thread, the same model and sequences.

    python benchmarks/sft_vs_trl.py [--rounds 3]

TRL is measured with packing and padded, each stock and with the head it has on a GPU (gpu_like_head.py): stock TRL
falls back to a slow head on the CPU, so only the second ratio says something about a GPU. `bare` is a loop over the
same kernels without a trainer: no data pipeline, no metrics, no sharding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import alternate, cpu_seconds, peak_mib, reset_peak, resident_mib, verdict, worst_ratio

STEPS, WARM_UP, ROWS = 10, 2, 8
LONGEST = 256


def lengths() -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(4.3, 0.7, size=400).astype(int), 16, LONGEST)


def texts() -> list[str]:
    generator = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz0123456789"))
    return ["".join(generator.choice(letters, size - 1)) for size in lengths()]


def config() -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": 32_000,
        "hidden_size": 256,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }


def model() -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config()), attn_implementation="sdpa").float()


def report(times: list[float], tokens: list[int], before: float) -> None:
    steps = list(zip(times[WARM_UP:], tokens[WARM_UP:], strict=True))
    print(
        json.dumps(
            {
                "tokens_per_cpu_second": sum(count for _, count in steps) / sum(seconds for seconds, _ in steps),
                "step_cpu_seconds": statistics.median(seconds for seconds, _ in steps),
                "peak_mib": peak_mib() - before,
                "tokens_per_step": statistics.mean(count for _, count in steps),
            }
        )
    )


def holdfast() -> None:
    from holdfast.config.load import from_mapping
    from holdfast.config.runs import SFTConfig
    from holdfast.data.characters import character_tokenizer
    from holdfast.parallel.mesh import joined
    from holdfast.recipes.sft import sft_step
    from holdfast.training.build import Live, build_run

    tree = {
        "steps": STEPS,
        "model": {"path": "live", "tokenizer": "builtin:characters"},
        "data": {
            "path": "rows",
            "batch_size": ROWS,
            "max_length": LONGEST,
            "tokens_per_micro_batch": 4096,
            "shuffle": False,
        },
        "optim": {"lr": 1e-5, "schedule": "constant"},
        "run": {"dir": tempfile.mkdtemp()},
    }
    rows = [{"text": text} for text in texts()]
    settings = from_mapping(tree, SFTConfig)
    with joined(settings.launch) as world:
        run = build_run(settings, Path.cwd(), world, Live(rows=rows, model=model(), tokenizer=character_tokenizer()))
        before = resident_mib()
        reset_peak()
        times, tokens = [], []
        for _ in range(STEPS):
            start = cpu_seconds()
            metrics = sft_step(run)
            times.append(cpu_seconds() - start)
            tokens.append(int(metrics["data/tokens"]))
    report(times, tokens, before)


def bare() -> None:
    import torch

    from holdfast.data.characters import character_tokenizer
    from holdfast.data.packing import pack
    from holdfast.data.weights import Share
    from holdfast.models.attention import PACKED, register
    from holdfast.models.family import family_of
    from holdfast.models.policy import PolicyModel
    from holdfast.objectives.supervised import NegativeLogLikelihood
    from holdfast.types import Example

    register()
    tokenizer = character_tokenizer()
    language_model = model()
    language_model.set_attn_implementation(PACKED)
    family = family_of(language_model)
    policy = PolicyModel(language_model, family, family.head_spec(float32_product=False, chunk_tokens=None))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)
    examples = []
    for index, text in enumerate(texts()):
        ids = np.array([*tokenizer(text)["input_ids"], 1])
        examples.append(Example(index, index, ids, np.arange(ids.size) > 0))
    batches = []
    for start in range(0, STEPS * ROWS, ROWS):
        rows = examples[start : start + ROWS]
        batches.append(pack(rows, [Share(1.0, float(row.trained_tokens)) for row in rows]))
    before = resident_mib()
    reset_peak()
    times, tokens = [], []
    for batch in batches:
        start = cpu_seconds()
        loss = policy(batch, NegativeLogLikelihood()).loss / batch.count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(cpu_seconds() - start)
        tokens.append(batch.tokens.numel())
    report(times, tokens, before)


def trl(*, packing: bool, fast_head: bool) -> None:
    import os

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig as TrlConfig
    from trl import SFTTrainer

    from holdfast.data.characters import character_tokenizer

    if fast_head:
        import gpu_like_head

        gpu_like_head.install()
    tokenizer = character_tokenizer()
    rows = Dataset.from_dict({"input_ids": [[*tokenizer(text)["input_ids"], 1] for text in texts()]})
    arguments = TrlConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=3 if packing else ROWS,
        max_steps=STEPS,
        learning_rate=1e-5,
        packing=packing,
        max_length=LONGEST,
        report_to="none",
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        optim="adamw_torch_fused",
    )
    stamps: list[float] = []
    tokens: list[int] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            stamps.append(cpu_seconds())

    trainer = SFTTrainer(model=model(), args=arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.add_callback(Clock())
    collate = trainer.data_collator

    def counted(features: Any) -> Any:
        batch = collate(features)
        mask = batch.get("attention_mask")
        tokens.append(int(mask.sum()) if mask is not None else batch["input_ids"].numel())
        return batch

    trainer.data_collator = counted
    before = resident_mib()
    reset_peak()
    with Path(os.devnull).open("w") as quiet, contextlib.redirect_stdout(quiet):
        trainer.train()
    stamps.append(cpu_seconds())
    times = [end - start for start, end in zip(stamps[:-1], stamps[1:], strict=True)]
    report(times, tokens[: len(times)], before)


ARMS = {
    "holdfast": holdfast,
    "bare": bare,
    "trl_packing": lambda: trl(packing=True, fast_head=False),
    "trl_packing_gpu_like": lambda: trl(packing=True, fast_head=True),
    "trl_padded": lambda: trl(packing=False, fast_head=False),
    "trl_padded_gpu_like": lambda: trl(packing=False, fast_head=True),
}
TARGETS = [
    ("trl_packing_gpu_like", 1.0),
    ("trl_packing", 2.0),
    ("trl_padded_gpu_like", 1.35),
    ("trl_padded", 4.0),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.arm:
        ARMS[options.arm]()
        return
    rounds = alternate(__file__, [(name, name) for name in ARMS], options.rounds)
    key = "tokens_per_cpu_second"
    for other, target in TARGETS:
        worst, ratios = worst_ratio(rounds, "holdfast", other, key, at_least=True)
        print(verdict(f"tokens per CPU second, Holdfast over {other}", worst, ratios, target, at_least=True))
    worst, ratios = worst_ratio(rounds, "bare", "holdfast", key, at_least=False)
    print(verdict("bare loop over Holdfast (the trainer's overhead)", worst, ratios, 1.03, at_least=False))
    for other, target in (("trl_packing_gpu_like", 1.0), ("trl_packing", 0.5)):
        worst, ratios = worst_ratio(rounds, "holdfast", other, "peak_mib", at_least=False)
        print(verdict(f"peak memory, Holdfast over {other}", worst, ratios, target, at_least=False))


if __name__ == "__main__":
    main()
