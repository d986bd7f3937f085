"""SFT throughput against TRL: real tokens per CPU second, one process, one thread, the same model and sequences.

    python benchmarks/sft_vs_trl.py [--rounds 3]

Every arm trains one epoch of the same 96 sequences in 12 updates with the same optimizer; a digest of the token ids
that went through the backbone says so, and the backbone's forward calls are counted. The arms make their updates in
turn, one each; Holdfast and `bare` make the same ones, and are compared update by update. TRL is measured with packing
and padded, each stock and with the head it has on a GPU (`install_gpu_like_head`): stock TRL falls back to a slow head
on the CPU, so only the second ratio says something about a GPU. `bare` is a loop over the same kernels without a
trainer: no data pipeline, no metrics, no sharding. On a GPU, `update.py` compares SFT.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measure import Meter, alternate, heading, random_model, take_turn
from verdicts import Verdicts

ROWS, STEPS, WARM_UP, PACKS = 8, 12, 2, 3
"""Rows to an update, updates (all of the data), updates that are not timed, and TRL's packs to an update."""
LONGEST = 256
"""Tokens of the longest sequences, and of a pack."""
OPTIMIZER: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
TEXT_ENDS = 1
"""The token that ends a text, by `character_tokenizer`."""


def texts() -> list[str]:
    """Return texts of lognormal length, 94 characters in the mean, that fill 36 packs to 0.98."""
    drawn = np.random.default_rng(3).lognormal(4.4, 0.7, size=ROWS * STEPS).astype(int)
    generator = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz0123456789"))
    return ["".join(generator.choice(letters, length - 1)) for length in drawn.clip(16, LONGEST)]


def trl_arguments(device: str) -> dict[str, Any]:
    """Return what every trainer of TRL is told: the same optimizer, nothing written, no recomputation."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "learning_rate": OPTIMIZER["lr"],
        "adam_beta1": OPTIMIZER["betas"][0],
        "adam_beta2": OPTIMIZER["betas"][1],
        "adam_epsilon": OPTIMIZER["eps"],
        "weight_decay": OPTIMIZER["weight_decay"],
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": device == "cuda",
        "use_cpu": device == "cpu",
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": device == "cuda",
    }


class Watch:
    """Counts a backbone's forward calls and keeps the token ids that went through it."""

    def __init__(self, language_model: Any, meter: Meter) -> None:
        self.calls: list[dict[str, Any]] = []
        self.times: list[float] = []
        self._begun: float | None = None
        self._meter = meter
        language_model.base_model.register_forward_pre_hook(self._keep, with_kwargs=True)
        meter.begin_peak()

    def _keep(self, _: Any, arguments: Any, named: dict[str, Any]) -> None:
        assert not arguments, "documents are told apart by the names of the arguments"
        self.calls.append({name: named.get(name) for name in ("input_ids", "position_ids", "attention_mask")})

    def documents(self, call: dict[str, Any]) -> list[list[int]]:
        """Return the documents of one call: rows without padding, or what begins at position 0."""
        ids, mask = call["input_ids"].cpu(), call["attention_mask"]
        if mask is not None:
            return [row[kept].tolist() for row, kept in zip(ids, mask.cpu().bool(), strict=True)]
        starts = (call["position_ids"].flatten() == 0).nonzero().flatten().tolist()
        flat = ids.flatten().tolist()
        return [flat[start:end] for start, end in zip(starts, [*starts[1:], len(flat)], strict=True)]

    def tick(self) -> None:
        """Note the time between two updates, and let the other arms make theirs."""
        now = self._meter.seconds()
        if self._begun is not None:
            self.times.append(now - self._begun)
        take_turn()
        self._begun = self._meter.seconds()

    def report(self) -> None:
        """Print the arm's line."""
        peak = self._meter.peak_mib()
        assert len(self.calls) % STEPS == 0, f"{len(self.calls)} forward calls in {STEPS} updates"
        per_step = len(self.calls) // STEPS
        found = [self.documents(call) for call in self.calls]
        every = sorted(document for documents in found for document in documents)
        timed = found[WARM_UP * per_step :]
        tokens = sum(len(document) for documents in timed for document in documents)
        positions = sum(call["input_ids"].numel() for call in self.calls)
        result = {
            "tokens_per_second": tokens / sum(self.times[WARM_UP:]),
            "step_seconds": statistics.median(self.times[WARM_UP:]),
            "seconds": self.times[WARM_UP:],
            "peak_mib": peak,
            "forwards_per_step": per_step,
            "updates": len(self.times),
            "tokens": sum(map(len, every)),
            "fill": sum(map(len, every)) / positions,
            "digest": hashlib.sha256(json.dumps(every).encode()).hexdigest()[:8],
        }
        print(json.dumps(result))


def holdfast() -> None:
    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.training import SFTConfig
    from holdfast.data.tasks.synthetic import character_tokenizer
    from holdfast.parallel.mesh import joined_world
    from holdfast.recipes.sft import sft_step
    from holdfast.training.setup.begin import Live, build_run

    tree = {
        "steps": STEPS,
        "model": {"path": "live", "tokenizer": "builtin:characters"},
        "data": {
            "path": "rows",
            "batch_size": ROWS,
            "max_length": LONGEST,
            "tokens_per_micro_batch": 16 * LONGEST,
            "shuffle": False,
        },
        "optim": {**OPTIMIZER, "schedule": "constant", "clip_norm": 1.0},
        "launch": {"device": "cpu"},
        "run": {"dir": tempfile.mkdtemp()},
    }
    rows = [{"text": text} for text in texts()]
    settings = from_mapping(tree, SFTConfig)
    with joined_world(settings.launch) as world:
        live = Live(rows=rows, model=random_model("small"), tokenizer=character_tokenizer())
        training = build_run(settings, Path.cwd(), world, live)
        watch = Watch(training.model.module.language_model, Meter())
        watch.tick()
        for _ in range(STEPS):
            sft_step(training)
            watch.tick()
    watch.report()


def bare() -> None:
    import torch

    from holdfast.data.batches.packing import Share, pack
    from holdfast.data.tasks.synthetic import character_tokenizer
    from holdfast.models.heads.policy import PolicyModel
    from holdfast.models.layers.attention import PACKED, register_attention
    from holdfast.models.layers.family import family_of
    from holdfast.objectives.supervised import NegativeLogLikelihood
    from holdfast.types import Example

    register_attention()
    tokenizer = character_tokenizer()
    language_model = random_model("small")
    language_model.set_attn_implementation(PACKED)
    family = family_of(language_model)
    policy = PolicyModel(language_model, family, family.head_spec(float32_product=False, chunk_tokens=None))
    optimizer = torch.optim.AdamW(policy.parameters(), **OPTIMIZER, fused=True)
    batches = []
    drawn = texts()
    for start in range(0, len(drawn), ROWS):
        rows = []
        for index, text in enumerate(drawn[start : start + ROWS]):
            ids = np.array([*tokenizer(text)["input_ids"], TEXT_ENDS])
            rows.append(Example(index, index, ids, np.arange(ids.size) > 0))
        batches.append(pack(rows, [Share(1.0, float(row.trained_tokens)) for row in rows]))
    watch = Watch(language_model, Meter())
    watch.tick()
    for batch in batches:
        loss = policy(batch, NegativeLogLikelihood()).loss / batch.count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch.tick()
    watch.report()


def install_gpu_like_head() -> None:
    """Give TRL in this process, on the CPU, the head that it has on a GPU.

    On CUDA, TRL 1.16 scores trained tokens alone with a chunked kernel; on the CPU it makes many float32 passes over
    every position. The patch takes its GPU branch and computes the same log-probabilities 256 rows at a time. Entropy
    and accuracy, which TRL only logs, are 0. Loss and gradients are TRL's within 1.3e-6.
    """
    import torch
    import trl.trainer.utils as utils

    class Logprobs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, targets: Any) -> Any:
            normalisers, chosen = [hidden.new_zeros(0)], [hidden.new_zeros(0)]
            for rows, wanted in zip(hidden.split(256), targets.split(256), strict=True):
                logits = rows @ weight.t()
                normalisers.append(logits.logsumexp(-1))
                chosen.append(logits.gather(1, wanted[:, None]).squeeze(1))
            normaliser = torch.cat(normalisers)
            ctx.save_for_backward(hidden, weight, targets, normaliser)
            return torch.cat(chosen) - normaliser

        @staticmethod
        def backward(ctx: Any, by_logprob: Any) -> Any:
            hidden, weight, targets, normaliser = ctx.saved_tensors
            by_hidden, by_weight = torch.empty_like(hidden), torch.zeros_like(weight)
            for start in range(0, hidden.shape[0], 256):
                rows = slice(start, start + 256)
                slope = (hidden[rows] @ weight.t()).sub_(normaliser[rows, None]).exp_().mul_(-by_logprob[rows, None])
                slope[torch.arange(slope.shape[0]), targets[rows]] += by_logprob[rows]
                by_hidden[rows] = slope @ weight
                by_weight.addmm_(slope.t(), hidden[rows])
            return by_hidden, by_weight, None

    class Replacement:
        """Has the arguments and the five outputs of TRL's autograd function."""

        @staticmethod
        def apply(hidden: Any, weight: Any, bias: Any, targets: Any, temperature: float, *others: Any) -> Any:
            softcap, scale, outputs = others[1:]
            assert bias is None and softcap is None and scale == 1.0, "the patch serves plain heads"
            logprobs = Logprobs.apply(hidden / temperature if temperature != 1.0 else hidden, weight, targets)
            empty = torch.zeros_like(logprobs).detach()
            names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
            return (logprobs, *(empty if name in outputs else None for name in names))

    utils._use_triton = lambda _: True
    utils._ChunkedLogProbFunction = Replacement


def trl(*, packing: bool, fast_head: bool) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from holdfast.data.tasks.synthetic import character_tokenizer

    if fast_head:
        install_gpu_like_head()
    tokenizer = character_tokenizer()
    sequences = [[*tokenizer(text)["input_ids"], TEXT_ENDS] for text in texts()]
    arguments = SFTConfig(
        **trl_arguments("cpu"),
        per_device_train_batch_size=PACKS if packing else ROWS,
        max_steps=STEPS,
        packing=packing,
        max_length=LONGEST,
    )
    trainer = SFTTrainer(
        model=random_model("small"),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": sequences}),
        processing_class=tokenizer,
    )
    train(trainer, Watch(trainer.model, Meter()))


def train(trainer: Any, watch: Any) -> None:
    """Run a trainer of TRL with a tick between its updates, and print the arm's line."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.tick()

    trainer.add_callback(Clock())
    with Path(os.devnull).open("w") as quiet, contextlib.redirect_stdout(quiet):
        trainer.train()
    watch.tick()
    watch.report()


ARMS = {
    "holdfast": holdfast,
    "bare": bare,
    "trl_packing_gpu_like": lambda: trl(packing=True, fast_head=True),
    "trl_packing": lambda: trl(packing=True, fast_head=False),
    "trl_padded_gpu_like": lambda: trl(packing=False, fast_head=True),
    "trl_padded": lambda: trl(packing=False, fast_head=False),
}
TARGETS = {"trl_packing_gpu_like": 1.0, "trl_packing": 2.0, "trl_padded_gpu_like": 1.35, "trl_padded": 4.0}
MEMORY_TARGETS = {"trl_packing_gpu_like": 1.0, "trl_packing": 0.5}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.arm:
        ARMS[options.arm]()
        return
    print(heading("trl", "transformers"))
    arms = ["holdfast", "bare", *TARGETS]
    rounds = alternate(__file__, arms, options.rounds)
    for name in ("digest", "tokens", "updates"):
        values = {turn[arm][name] for turn in rounds for arm in arms}
        if len(values) != 1:
            sys.exit(f"the arms did not do the same work: {name} {values}")
    verdicts = Verdicts(rounds)
    for other, target in TARGETS.items():
        title = f"tokens per second, Holdfast over {other}"
        verdicts.at_least(target, title, "holdfast", other, "tokens_per_second")
    title = "the trainer's overhead, seconds of an update over a bare loop's"
    verdicts.at_most(1.03, title, "holdfast", "bare", "seconds")
    for other, target in MEMORY_TARGETS.items():
        verdicts.at_most(target, f"peak memory, Holdfast over {other}", "holdfast", other, "peak_mib")
    sys.exit(verdicts.missed)


if __name__ == "__main__":
    main()
