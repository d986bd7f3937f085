"""SFT throughput against TRL: real tokens per CPU second, one process, one thread, the same model and sequences.

    python benchmarks/sft_vs_trl.py [--rounds 3] [--device cuda]

Every arm trains one epoch of the same 96 sequences in 12 updates with the same optimizer; a digest of the token ids
that went through the backbone says so, and the backbone's forward calls are counted. The arms make their updates in
turn, one each; Holdfast and `bare` make the same ones, and are compared update by update. TRL is measured with packing
and padded, each stock and with the head it has on a GPU (gpu_like_head.py): stock TRL falls back to a slow head on the
CPU, so only the second ratio says something about a GPU. `bare` (CPU only) is a loop over the same kernels without a
trainer: no data pipeline, no metrics, no sharding. On a GPU the model is shaped like a 0.5B one, sequences are 8 times
as long, both trainers compute in bfloat16, and TRL has its own head.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import Meter, Verdicts, alternate, heading, take_turn

ROWS, STEPS, WARM_UP, PACKS = 8, 12, 2, 3
"""Rows to an update, updates (all of the data), updates that are not timed, and TRL's packs to an update."""
OPTIMIZER: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
TEXT_ENDS = 1
"""The token that ends a text, by `character_tokenizer`."""


@dataclass(frozen=True)
class Setting:
    """What is trained on one kind of device."""

    longest: int
    scale: int
    """Times by which every sequence is longer than on the CPU."""
    model: dict[str, int]

    def texts(self) -> list[str]:
        """Return texts of lognormal length, 94 characters in the mean, that fill 36 packs to 0.98."""
        drawn = np.random.default_rng(3).lognormal(4.4, 0.7, size=ROWS * STEPS).astype(int)
        generator = np.random.default_rng(1)
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz0123456789"))
        lengths = drawn.clip(16, 256) * self.scale
        return ["".join(generator.choice(letters, length - 1)) for length in lengths]


SETTINGS = {
    "cpu": Setting(
        longest=256,
        scale=1,
        model={
            "vocab_size": 32_000,
            "hidden_size": 256,
            "intermediate_size": 1408,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "cuda": Setting(
        longest=2048,
        scale=8,
        model={
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
        },
    ),
}


def model(setting: Setting) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **setting.model, max_position_embeddings=4096, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()


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
        "dataloader_pin_memory": False,
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


def holdfast(device: str) -> None:
    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.training import SFTConfig
    from holdfast.data.tasks.synthetic import character_tokenizer
    from holdfast.parallel.mesh import joined_world
    from holdfast.recipes.sft import sft_step
    from holdfast.training.setup.begin import Live, build_run

    setting = SETTINGS[device]
    tree = {
        "steps": STEPS,
        "model": {"path": "live", "tokenizer": "builtin:characters"},
        "data": {
            "path": "rows",
            "batch_size": ROWS,
            "max_length": setting.longest,
            "tokens_per_micro_batch": 16 * setting.longest,
            "shuffle": False,
        },
        "optim": {**OPTIMIZER, "schedule": "constant", "clip_norm": 1.0},
        "launch": {"device": device},
        "run": {"dir": tempfile.mkdtemp()},
    }
    rows = [{"text": text} for text in setting.texts()]
    settings = from_mapping(tree, SFTConfig)
    with joined_world(settings.launch) as world:
        live = Live(rows=rows, model=model(setting), tokenizer=character_tokenizer())
        run = build_run(settings, Path.cwd(), world, live)
        watch = Watch(run.trained.model.language_model, Meter(device))
        watch.tick()
        for _ in range(STEPS):
            sft_step(run)
            watch.tick()
    watch.report()


def bare(_: str) -> None:
    import torch

    from holdfast.data.batches.packing import pack
    from holdfast.data.batches.weights import Share
    from holdfast.data.tasks.synthetic import character_tokenizer
    from holdfast.models.heads.policy import PolicyModel
    from holdfast.models.layers.attention import PACKED, register_attention
    from holdfast.models.layers.family import family_of
    from holdfast.objectives.supervised import NegativeLogLikelihood
    from holdfast.types import Example

    register_attention()
    setting, tokenizer = SETTINGS["cpu"], character_tokenizer()
    language_model = model(setting)
    language_model.set_attn_implementation(PACKED)
    family = family_of(language_model)
    policy = PolicyModel(language_model, family, family.head_spec(float32_product=False, chunk_tokens=None))
    optimizer = torch.optim.AdamW(policy.parameters(), **OPTIMIZER, fused=True)
    batches = []
    texts = setting.texts()
    for start in range(0, len(texts), ROWS):
        rows = []
        for index, text in enumerate(texts[start : start + ROWS]):
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


def trl(device: str, *, packing: bool, fast_head: bool) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from holdfast.data.tasks.synthetic import character_tokenizer

    if fast_head:
        import gpu_like_head

        gpu_like_head.install()
    setting, tokenizer = SETTINGS[device], character_tokenizer()
    sequences = [[*tokenizer(text)["input_ids"], TEXT_ENDS] for text in setting.texts()]
    arguments = SFTConfig(
        **trl_arguments(device),
        per_device_train_batch_size=PACKS if packing else ROWS,
        max_steps=STEPS,
        packing=packing,
        max_length=setting.longest,
    )
    trainer = SFTTrainer(
        model=model(setting),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": sequences}),
        processing_class=tokenizer,
    )
    train(trainer, Watch(trainer.model, Meter(device)))


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
    "trl_packing_gpu_like": lambda device: trl(device, packing=True, fast_head=True),
    "trl_packing": lambda device: trl(device, packing=True, fast_head=False),
    "trl_padded_gpu_like": lambda device: trl(device, packing=False, fast_head=True),
    "trl_padded": lambda device: trl(device, packing=False, fast_head=False),
}
TARGETS = {
    "cpu": {"trl_packing_gpu_like": 1.0, "trl_packing": 2.0, "trl_padded_gpu_like": 1.35, "trl_padded": 4.0},
    "cuda": {"trl_packing": 1.2, "trl_padded": 2.0},
}
MEMORY_TARGETS = {"cpu": {"trl_packing_gpu_like": 1.0, "trl_packing": 0.5}, "cuda": {"trl_packing": 0.9}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=list(ARMS))
    parser.add_argument("--device", choices=list(SETTINGS), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = options.device
    if options.arm:
        ARMS[options.arm](device)
        return
    print(heading("trl", "transformers", device=device))
    # On a GPU our trainer computes in bfloat16 through FSDP2; a loop with the same kernels would be half a trainer.
    if device == "cpu":
        sys.exit(compare(device, options.rounds, ["bare", *TARGETS[device]]))
    # Arms in turn are in memory together, and on 80 GiB there is no room for ours and both of TRL's.
    missed = [compare(device, options.rounds, [other]) for other in TARGETS[device]]
    sys.exit(any(missed))


def compare(device: str, count: int, others: list[str]) -> bool:
    """Run our arm and others in turn, and print how they compare; return whether a target is missed."""
    arms = ["holdfast", *others]
    rounds = alternate(__file__, arms, count, "--device", device)
    for name in ("digest", "tokens", "updates"):
        values = {turn[arm][name] for turn in rounds for arm in arms}
        if len(values) != 1:
            sys.exit(f"the arms did not do the same work: {name} {values}")
    verdicts = Verdicts(rounds)
    for other, target in TARGETS[device].items():
        if other in others:
            title = f"tokens per second, Holdfast over {other}"
            verdicts.at_least(target, title, "holdfast", other, "tokens_per_second")
    if "bare" in others:
        title = "the trainer's overhead, seconds of an update over a bare loop's"
        verdicts.at_most(1.03, title, "holdfast", "bare", "seconds")
    for other, target in MEMORY_TARGETS[device].items():
        if other in others:
            verdicts.at_most(target, f"peak memory, Holdfast over {other}", "holdfast", other, "peak_mib")
    return verdicts.missed


if __name__ == "__main__":
    main()
