"""The same learning as TRL's: a real model, the same weights, rows, order, rates and seeds.

    python examples/real/smollm2.py runs/smollm2
    python benchmarks/learning.py --model runs/smollm2 [--part sft] [--device cuda]
    python benchmarks/learning.py --model runs/smollm2 --part grpo --steps 5 --prompts 4 --group 4   # minutes on a CPU

`sft`: 20 updates of four rows of sums or, with --rows GSM8K.jsonl, of GSM8K, in float32; losses must be equal to 1e-4.
TRL gets our tokens and masks, padded and, in a third arm, without padding (its documents side by side, told apart by
positions). `grpo`: sums of two two-digit numbers, from a start by demonstrations, three seeds each; TRL's and our
rewards, averaged over all steps, and accuracy on held-out sums must lie within each other's spread. Draws are each
trainer's own.
Set alike are the loss's average (all tokens of the step: TRL's `dapo`, our `token_mean`), clipping (0.2 and 0.28), one
update a step, no KL term, and advantages over the standard deviation of their group; TRL adds 1e-4 to it, and we too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import heading
from sft_vs_trl import OPTIMIZER, trl_arguments
from verdicts import write_row

UPDATES, ROWS = 20, 4
RATE = 1e-5
LONGEST = 160
SEEDS = (0, 1, 2)
STEPS, PROMPTS, GROUP, NEW_TOKENS, HELD_OUT = 45, 16, 8, 8, 200
COUNTS = ("steps", "prompts", "group", "held_out")
TOLERANCE = 1e-4
COLUMNS = {"instruction": "question", "output": "answer"}


def sums(count: int, start: int = 0) -> list[dict[str, str]]:
    """Return sums of two two-digit numbers; no two of them have the same two numbers."""
    import random

    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    random.Random(7).shuffle(pairs)
    rows = pairs[start : start + count]
    return [{"question": f"What is {a} + {b}? Answer with the number alone.", "answer": str(a + b)} for a, b in rows]


def sft_rows(path: str | None) -> list[dict[str, str]]:
    """Return the rows of all updates, in their order."""
    if path is None:
        return sums(UPDATES * ROWS)
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    short = [row for row in rows if len(row["question"] + row["answer"]) < 3 * LONGEST]
    return short[: UPDATES * ROWS]


def tree(options: argparse.Namespace, **sections: Any) -> dict[str, Any]:
    """Return what runs of both verbs share."""
    return {
        "model": {"path": options.model, "check_gradients": False},
        "run": {"dir": tempfile.mkdtemp(prefix="holdfast-learning-")},
        "optim": {**OPTIMIZER, "lr": RATE, "schedule": "constant", "clip_norm": 1.0},
        "launch": {"device": options.device},
        "checkpoint": {"rehearsal": False, "at_end": False},
        **sections,
    }


def holdfast_sft(options: argparse.Namespace) -> dict[str, Any]:
    """Return the losses of our updates."""
    import holdfast

    losses: list[float] = []
    data = {"batch_size": ROWS, "max_length": LONGEST * 2, "shuffle": False, "columns": COLUMNS}
    config = tree(options, steps=UPDATES, data=data, parallel={"compute_dtype": "float32"})
    config["metrics"] = {"progress": "off"}
    holdfast.sft(config, rows=sft_rows(options.rows), observers=[lambda event: losses.append(event.metrics["loss"])])
    return {"losses": losses}


def tokens_and_labels(options: argparse.Namespace) -> list[dict[str, list[int]]]:
    """Return every row's tokens and labels, as our side makes them."""
    from transformers import AutoTokenizer

    from holdfast.config.sections.data import TextConfig
    from holdfast.data.tokens.chat import RowTokeniser

    tokeniser = RowTokeniser(AutoTokenizer.from_pretrained(options.model), TextConfig(), Path.cwd())
    rows = []
    for number, row in enumerate(sft_rows(options.rows)):
        ours = {"instruction": row["question"], "output": row["answer"]}
        (example,) = tokeniser.examples(ours, number, "rows").examples
        masked = zip(example.tokens.tolist(), example.loss_mask.tolist(), strict=True)
        rows.append({"input_ids": example.tokens.tolist(), "labels": [t if m else -100 for t, m in masked]})
    return rows


def trl_sft(options: argparse.Namespace, *, padding_free: bool) -> dict[str, Any]:
    """Return the losses of TRL's updates."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(dataset or self.train_dataset)

    arguments = SFTConfig(
        **trl_arguments(options.device) | {"learning_rate": RATE, "bf16": False},
        per_device_train_batch_size=ROWS,
        max_steps=UPDATES,
        max_length=None,
        padding_free=padding_free,
        logging_steps=1,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
    )
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(tokens_and_labels(options)),
        processing_class=AutoTokenizer.from_pretrained(options.model),
    )
    trainer.train()
    return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


def accuracy(model: Any, tokenizer: Any, options: argparse.Namespace) -> float:
    """Return the share of held-out sums that greedy completions of plain transformers get right."""
    import torch

    rows, right = sums(options.held_out, start=3000), 0
    tokenizer.padding_side = "left"
    model = model.eval().to(options.device)
    for start in range(0, len(rows), 50):
        part = rows[start : start + 50]
        asked = tokenizer.apply_chat_template(
            [[{"role": "user", "content": row["question"]}] for row in part],
            add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
        ).to(options.device)  # fmt: skip
        with torch.no_grad():
            out = model.generate(**asked, max_new_tokens=NEW_TOKENS, do_sample=False)
        texts = tokenizer.batch_decode(out[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(text.strip() == row["answer"] for text, row in zip(texts, part, strict=True))
    return right / len(rows)


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Train a start by 48 demonstrations, and return its directory and its accuracy on held-out sums."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import holdfast

    data = {"batch_size": 12, "max_length": 96, "columns": COLUMNS}
    config = tree(options, steps=8, data=data, metrics={"progress": "off"})
    config["optim"]["lr"] = 2 * RATE
    directory = str(holdfast.sft(config, rows=sums(48, start=2500)).export)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return {"model": directory, "accuracy": accuracy(model, AutoTokenizer.from_pretrained(directory), options)}


def holdfast_grpo(options: argparse.Namespace) -> dict[str, Any]:
    """Return our mean rewards by step, and accuracy on held-out sums."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import holdfast

    rewards: list[float] = []
    config = tree(
        options,
        seed=options.seed,
        steps=options.steps,
        data={"batch_size": options.prompts, "max_length": 96, "columns": COLUMNS},
        rollout={"group_size": options.group, "max_new_tokens": NEW_TOKENS, "show": 0},
        objective={"kind": "clip", "low": 0.2, "high": 0.28},
        advantage={"kind": "grpo", "epsilon": 1e-4},
        reward={"kind": "exact", "column": "output"},
        metrics={"progress": "off"},
    )
    rows = sums(2000)
    outcome = holdfast.grpo(config, rows=rows, observers=[lambda event: rewards.append(event.metrics["reward"])])
    assert outcome.export is not None
    model = AutoModelForCausalLM.from_pretrained(outcome.export, dtype=torch.float32)
    return {
        "rewards": rewards,
        "accuracy": accuracy(model, AutoTokenizer.from_pretrained(outcome.export), options),
    }


def trl_grpo(options: argparse.Namespace) -> dict[str, Any]:
    """Return TRL's mean rewards by step, and accuracy on held-out sums."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    def score(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [float(said[0]["content"].strip() == right) for said, right in zip(completions, answer, strict=True)]

    arguments = GRPOConfig(
        **trl_arguments(options.device) | {"learning_rate": RATE, "bf16": False},
        seed=options.seed,
        per_device_train_batch_size=options.prompts * options.group // 4,
        gradient_accumulation_steps=4,
        num_generations=options.group,
        max_completion_length=NEW_TOKENS,
        max_steps=options.steps,
        beta=0.0,
        num_iterations=1,
        temperature=1.0,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=0.2,
        epsilon_high=0.28,
        logging_steps=1,
    )
    rows = [{"prompt": [{"role": "user", "content": r["question"]}], "answer": r["answer"]} for r in sums(2000)]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        reward_funcs=score,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return {"rewards": rewards, "accuracy": accuracy(trainer.model, tokenizer, options)}


ARMS = {
    "start": start,
    "holdfast sft": holdfast_sft,
    "trl sft": lambda options: trl_sft(options, padding_free=False),
    "trl sft padding_free": lambda options: trl_sft(options, padding_free=True),
    "holdfast grpo": holdfast_grpo,
    "trl grpo": trl_grpo,
}


def run(options: argparse.Namespace, arm: str, seed: int = 0) -> dict[str, Any]:
    """Run an arm in a process of its own; its result has the minutes of all of it."""
    began = time.monotonic()
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [sys.executable, "-W", "ignore", __file__, "--arm", arm, "--model", options.model]
        command += ["--device", options.device, "--seed", str(seed), "--out", file.name]
        command += ["--rows", options.rows] if options.rows else []
        command += [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in COUNTS]
        subprocess.run(command, check=True, stdout=sys.stderr)
        result: dict[str, Any] = json.loads(file.read())
    return result | {"minutes": (time.monotonic() - began) / 60}


def compare_sft(options: argparse.Namespace) -> bool:
    """Print how far the losses of all arms are apart; return whether too far."""
    losses = {arm: run(options, arm)["losses"] for arm in ARMS if " sft" in arm}
    ours, missed = losses.pop("holdfast sft"), False
    print("losses of holdfast:", *(f"{loss:.6f}" for loss in ours))
    for arm, theirs in losses.items():
        worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        missed |= worst > TOLERANCE
        print(f"{arm}: {len(theirs)} losses, the largest difference is {worst:.1e} (at most {TOLERANCE:g})")
    return missed


def compare_grpo(options: argparse.Namespace) -> bool:
    """Print rewards and accuracy of all seeds; return whether a spread of one trainer does not meet the other's."""
    began = run(options, "start")
    options.model = began["model"]
    counts = ", ".join(f"{name.replace('_', '-')} {getattr(options, name)}" for name in COUNTS)
    print(f"{counts}; after the start by demonstrations: accuracy {began['accuracy']:.3f}", flush=True)
    arms = ["holdfast grpo"] if options.ours else ["holdfast grpo", "trl grpo"]
    results = {arm: [run(options, arm, seed) for seed in SEEDS] for arm in arms}
    spans: dict[str, list[tuple[float, float]]] = {"mean reward": [], "accuracy": []}
    for arm, seeds in results.items():
        for seed, result in zip(SEEDS, seeds, strict=True):
            rewards = result["rewards"]
            curve = " ".join(f"{reward:.2f}" for reward in rewards)
            result["mean reward"] = statistics.mean(rewards)
            ends = f"mean reward {result['mean reward']:.3f}, accuracy {result['accuracy']:.3f}"
            print(f"{arm}, seed {seed}: rewards {curve}; {ends}, {result['minutes']:.1f} minutes", flush=True)
        for name, span in spans.items():
            values = [result[name] for result in seeds]
            span.append((min(values), max(values)))
            write_row(f"{arm} on sums, {name} of {len(seeds)} seeds", f"{min(values):.3f} to {max(values):.3f}")
    return not options.ours and _spreads_apart(spans)


def _spreads_apart(spans: dict[str, list[tuple[float, float]]]) -> bool:
    """Print how far each number of both trainers spreads over seeds; return whether two spreads do not meet."""
    missed = False
    for name, ((low, high), (other_low, other_high)) in spans.items():
        apart = max(low, other_low) > min(high, other_high)
        missed |= apart
        print(
            f"{name}: holdfast {low:.3f} to {high:.3f}, TRL {other_low:.3f} to {other_high:.3f}: "
            f"{'apart, MISS' if apart else 'within each other'}"
        )
    return missed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a directory that examples/real/smollm2.py wrote")
    parser.add_argument("--part", choices=["sft", "grpo"], help="default: both")
    parser.add_argument("--rows", help="GSM8K's training rows, for sft")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ours", action="store_true", help="leave TRL out of grpo")
    for name, count in zip(COUNTS, (STEPS, PROMPTS, GROUP, HELD_OUT), strict=True):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=count, help=f"of grpo; default {count}")
    parser.add_argument("--arm", choices=list(ARMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.arm:
        Path(options.out).write_text(json.dumps(ARMS[options.arm](options)))
        return
    print(heading(*(() if options.ours else ("trl",)), "transformers", device=options.device))
    missed = False
    if options.part != "grpo":
        missed |= compare_sft(options)
    if options.part != "sft":
        missed |= compare_grpo(options)
    sys.exit(missed)


if __name__ == "__main__":
    main()
