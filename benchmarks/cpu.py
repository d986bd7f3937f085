"""A CPU at its limit: updates and rollouts of the SmolLM2-135M shape by threads and dtype, beside plain transformers.

    python benchmarks/cpu.py [--rounds 2] [--only sft rollout] [--rows 8]

Arms take turns, one update or rollout each; cost is wall time, since threads are what is compared, so a busy neighbour
counts: the heading says how busy the machine was. `holdfast auto` has the threads that its start chose. `transformers`
is a loop that a user would write: padded rows, AdamW, all threads; in bfloat16 under autocast. `trl` is TRL's trainer
with the same rows, where TRL is installed. Rollouts complete 64 prompts of 32 tokens by 32 tokens; `generate` is
transformers'. `llama.cpp` (through llama-cpp-python, with `gguf`) and `vllm` (its CPU build) sample from the same shape
where `HOLDFAST_LLAMA_PYTHON` and `HOLDFAST_VLLM_PYTHON` name an interpreter that has them. The share of the limit is
6 FLOPs a parameter and token over what the same threads reach in products of matrices of 2,048 rows. bfloat16 says
something where the processor multiplies it, and is left out elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from measure import alternate, heading, take_turn
from samplers import NEW, PROMPT, PROMPTS, SHAPE, UPDATES, WARM_UP, llama_rollout, timed_on, vllm_rollout
from sft_vs_trl import TEXT_ENDS, trl_arguments
from verdicts import Verdicts, show, skip


def cores() -> int:
    from holdfast.processor import usable_cores

    return usable_cores()


def texts_of(count: int) -> list[str]:
    """Return texts of lognormal length, about 100 characters in the mean."""
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(4.4, 0.5, count).clip(24, 255).astype(int)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz0123456789"))
    return ["".join(generator.choice(letters, length)) for length in lengths]


def rows_of(count: int) -> list[Any]:
    """Return the token ids of these texts, ended as Holdfast ends them."""
    from holdfast.data.tasks.synthetic import character_tokenizer

    tokenizer = character_tokenizer()
    return [np.array([*tokenizer(text)["input_ids"], TEXT_ENDS]) for text in texts_of(count)]


def new_model(threads: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE), attn_implementation="sdpa").float()


def timed(act: Callable[[int], object], tokens: Callable[[int], int]) -> None:
    """Time updates or rollouts by the clock and print the arm's line."""
    import torch

    timed_on(torch.get_num_threads(), act, tokens)


def holdfast_sft(rows: int, threads: int | str, dtype: str) -> None:
    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.training import SFTConfig
    from holdfast.data.tasks.synthetic import character_tokenizer
    from holdfast.parallel.mesh import joined_world
    from holdfast.recipes.sft import sft_step
    from holdfast.training.setup.begin import Live, build_run

    texts = rows_of(rows * UPDATES)
    tree = {
        "steps": UPDATES,
        "model": {"path": "live", "tokenizer": "builtin:characters"},
        "data": {"path": "rows", "batch_size": rows, "max_length": 256, "shuffle": False},
        "optim": {"lr": 1e-5, "schedule": "constant"},
        "parallel": {"compute_dtype": dtype},
        "launch": {"device": "cpu", "threads_per_rank": threads},
        "run": {"dir": tempfile.mkdtemp()},
    }
    if threads == "auto":
        os.environ.pop("OMP_NUM_THREADS")
    config = from_mapping(tree, SFTConfig)
    items = [{"text": text} for text in texts_of(rows * UPDATES)]
    with joined_world(config.launch) as world:
        live = Live(rows=items, model=new_model(1), tokenizer=character_tokenizer())
        if threads != "auto":
            import torch

            torch.set_num_threads(int(threads))
        training = build_run(config, Path.cwd(), world, live)
        updates: list[Any] = []
        timed(lambda _: updates.append(sft_step(training)), lambda number: sizes(texts, rows, number))


def sizes(texts: list[Any], rows: int, number: int) -> int:
    return sum(map(len, texts[number * rows : (number + 1) * rows]))


def transformers_sft(rows: int, threads: int, dtype: str) -> None:
    import torch

    model, texts = new_model(threads), rows_of(rows * UPDATES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def update(number: int) -> None:
        some = texts[number * rows : (number + 1) * rows]
        width = max(map(len, some))
        ids, mask = torch.zeros(rows, width, dtype=torch.int64), torch.zeros(rows, width, dtype=torch.int64)
        for row, text in enumerate(some):
            ids[row, : len(text)], mask[row, : len(text)] = torch.from_numpy(text), 1
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    timed(update, lambda number: sizes(texts, rows, number))


def trl_sft(rows: int, threads: int, dtype: str) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from holdfast.data.tasks.synthetic import character_tokenizer

    texts = rows_of(rows * UPDATES)
    arguments = trl_arguments("cpu") | {"bf16": dtype == "bfloat16"}
    trainer = SFTTrainer(
        model=new_model(threads),
        args=SFTConfig(**arguments, per_device_train_batch_size=rows, max_steps=UPDATES, max_length=256),
        train_dataset=Dataset.from_dict({"input_ids": [ids.tolist() for ids in texts]}),
        processing_class=character_tokenizer(),
    )
    began, seconds = [0.0], []

    class Tick(TrainerCallback):  # type: ignore[misc]  # transformers'
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            take_turn()
            began[0] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - began[0])

    trainer.add_callback(Tick())
    trainer.train()
    tokens = sum(map(len, texts)) * (UPDATES - WARM_UP) / UPDATES
    rate = tokens / sum(seconds[WARM_UP:])
    print(json.dumps({"tokens_per_second": rate, "seconds": seconds[WARM_UP:], "threads": threads}))


def holdfast_rollout(threads: int, dtype: str) -> None:
    import torch

    from holdfast.config.sections.model import ModelConfig
    from holdfast.config.sections.rollout import SamplingConfig
    from holdfast.data.tasks.synthetic import character_tokenizer
    from holdfast.models.names import named_parameters
    from holdfast.models.setup.model import blueprint
    from holdfast.rollout.engine import Request, generate
    from holdfast.rollout.local.inprocess import InProcessEngine
    from holdfast.rollout.sampling import Stops

    model = new_model(threads)
    section = ModelConfig(path="live", tokenizer="builtin:characters")
    origin = blueprint(section, Path.cwd(), seed=0, live=model, tokenizer=character_tokenizer())
    engine = InProcessEngine(origin, torch.device("cpu"), getattr(torch, dtype), Stops(frozenset()))
    engine.update_weights(named_parameters(model).items(), 0)
    prompts = np.random.default_rng(1).integers(3, 49_000, (PROMPTS, PROMPT))

    def rollout(number: int) -> None:
        requests = [Request(index, prompt, (100 * number + index,)) for index, prompt in enumerate(prompts)]
        assert len(generate(engine, requests, SamplingConfig(max_new_tokens=NEW))) == PROMPTS

    timed(rollout, lambda _: PROMPTS * NEW)


def transformers_rollout(threads: int, dtype: str) -> None:
    import torch

    model = new_model(threads).to(getattr(torch, dtype)).eval()
    prompts = torch.from_numpy(np.random.default_rng(1).integers(3, 49_000, (PROMPTS, PROMPT)))

    def rollout(_: int) -> None:
        with torch.no_grad():
            found = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=NEW, pad_token_id=0
            )
        assert found.shape == (PROMPTS, PROMPT + NEW)

    timed(rollout, lambda _: PROMPTS * NEW)


TARGETS = {("rollout", "transformers"): 2.0, ("rollout", "vllm"): 0.7, ("sft", "trl"): 1.3}

INTERPRETERS = {"llama.cpp": "HOLDFAST_LLAMA_PYTHON", "vllm": "HOLDFAST_VLLM_PYTHON"}
"""Other samplers, and the variable that names an interpreter which has them."""

ROLLOUTS: dict[str, Callable[[int, str], None]] = {
    "holdfast": holdfast_rollout,
    "transformers": transformers_rollout,
    "llama.cpp": llama_rollout,
    "vllm": vllm_rollout,
}


def be_arm(name: str, rows: int) -> None:
    work, who, threads, dtype = name.split()
    count = threads if threads == "auto" else int(threads)
    other = os.environ.get(INTERPRETERS.get(who, ""))
    if other and Path(sys.prefix) != Path(other).parents[1]:
        os.execv(other, [other, *sys.argv])
    if work == "rollout":
        ROLLOUTS[who](int(count), dtype)
    elif who == "holdfast":
        holdfast_sft(rows, count, dtype)
    else:
        (transformers_sft if who == "transformers" else trl_sft)(rows, int(count), dtype)


def product_rate(threads: int, dtype: str) -> float:
    """Return FLOPs a second of products of matrices."""
    import torch

    torch.set_num_threads(threads)
    matrix = torch.randn(2048, 2048).to(getattr(torch, dtype))
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=["sft", "rollout"], default=["sft", "rollout"])
    parser.add_argument("--rows", type=int, default=8, help="rows to an update")
    parser.add_argument("--arm")
    options = parser.parse_args()
    if options.arm:
        be_arm(options.arm, options.rows)
        return
    from holdfast.processor import bfloat16_unit

    unit, all_cores = bfloat16_unit(), cores()
    dtypes = ["float32", *(["bfloat16"] if unit else [])]
    load = os.getloadavg()[0]
    print(f"{heading('transformers')} (here: wall seconds); load {load:.1f}; {unit or 'no unit'} for bfloat16")
    if not unit:
        skip("bfloat16", "this processor does not multiply it")
    has_trl = find_spec("trl") is not None
    if not has_trl:
        skip("trl", "not installed")
    missed = False
    for work in options.only:
        samplers = [who for who, variable in INTERPRETERS.items() if work == "rollout" and os.environ.get(variable)]
        peers = ["transformers", *(["trl"] if has_trl and work == "sft" else []), *samplers]
        arms = [f"{work} {who} {all_cores} {dtype}" for dtype in dtypes for who in ("holdfast", *peers)]
        arms += [f"{work} holdfast 1 float32"] if all_cores > 1 else []
        arms += [f"{work} holdfast auto float32"] if work == "sft" and all_cores > 1 else []
        found = alternate(__file__, arms, options.rounds, "--rows", str(options.rows))
        verdicts = Verdicts(found)
        for dtype in dtypes:
            for peer in peers:
                target = TARGETS.get((work, peer))
                title = f"{work}, {dtype}, {all_cores} threads: tokens a second over {peer}"
                verdicts.at_least(
                    target, title, f"{work} holdfast {all_cores} {dtype}", f"{work} {peer} {all_cores} {dtype}",
                    "tokens_per_second",
                )  # fmt: skip
        if all_cores > 1:
            title = f"{work}: {all_cores} threads over one"
            verdicts.at_least(
                None, title, f"{work} holdfast {all_cores} float32", f"{work} holdfast 1 float32", "tokens_per_second"
            )
        missed = missed or verdicts.missed
        if work == "sft":
            limit_shares(found, all_cores, dtypes)
    sys.exit(missed)


def limit_shares(found: list[dict[str, dict[str, Any]]], threads: int, dtypes: list[str]) -> None:
    parameters = 134_515_008
    for dtype, target in zip(dtypes, (0.5, 0.3), strict=False):
        rate = statistics.median(turn[f"sft holdfast {threads} {dtype}"]["tokens_per_second"] for turn in found)
        share = 6 * parameters * rate / product_rate(threads, dtype)
        show(
            f"sft, {dtype}, {threads} threads: share of the products' limit",
            f"{share:.2f}",
            f">= {target}",
            met=share >= target,
        )


if __name__ == "__main__":
    main()
