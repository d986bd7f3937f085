"""GRPO steps against TRL: seconds per step, one process, one thread, the same model, prompts, lengths and optimizer.

    python benchmarks/grpo_vs_trl.py [--rounds 3] [--part groups|135m] [--device cuda] [--tiny]

A step samples a group per prompt with the trainer's own rollout, scores it with the same trivial reward in the
trainer's process, and makes one on-policy update without a KL term (TRL: beta 0, num_iterations 1, no recomputation of
activations, float32 on the CPU). Ours is the recipe's whole `grpo_step`. TRL is measured stock and with the head it has
on a GPU (sft_vs_trl.py); only the second ratio says something about a GPU.

Completions have a fixed length in every arm because the model never ends one: see `endless`. Each arm counts the prompt
and completion tokens that its loss was handed, digests the prompts and counts forward calls; the script stops if arms
differ in what they trained on. On a GPU the model is shaped like a 0.5B one and a step has 8 prompts x 8 x 512 tokens;
both trainers compute in bfloat16 (TRL under autocast, as its option `bf16` does), one of them in memory at a time, and
peaks count all that is allocated. `decode_ms` is what a step spends outside its update, per token of a completion;
`update_mfu` is ours, a shared prompt counted once. Ours decodes by CUDA graphs, as is the default there. `--tiny`
trains a tiny model on the CPU, which says that the script runs and nothing else. `--part 135m` trains a model of the
shape of SmolLM2-135M on all cores of the CPU, as users of both would, and compares seconds of the clock.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import sft_vs_trl
from measure import FAILED, Meter, alternate, heading, random_model
from sft_vs_trl import OPTIMIZER, TEXT_ENDS
from verdicts import Verdicts, skip

WARM_UP, TRL_ROWS = 2, 16
"""Steps that are not timed, and the rows that TRL trains at once (it accumulates the rest)."""


@dataclass(frozen=True)
class Shape:
    """What a step samples."""

    prompt: int
    completion: int
    group: int = 8
    prompts: int = 1
    model: str = "small"
    steps: int = 7

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts * self.group

    def texts(self) -> list[str]:
        """Return the prompts of all steps, one token per character."""
        generator = np.random.default_rng(2)
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz0123456789"))
        return ["".join(generator.choice(letters, self.prompt)) for _ in range(self.prompts * self.steps)]


SHAPES = {
    "64+64": Shape(64, 64),
    "256+32": Shape(256, 32),
    "64+64x4": Shape(64, 64, group=4),
    "64+64x16": Shape(64, 64, group=16),
    "135m": Shape(64, 32, prompts=2, model="135m", steps=4),
    "8x8x512": Shape(256, 512, prompts=8, model="0.5b", steps=5),
    "tiny": Shape(8, 8, group=4, prompts=2, model="tiny", steps=3),
}


def endless(shape: Shape) -> Any:
    """Return the model of a shape, changed so that it never ends a text, at no cost in time.

    The first channel of the residual stream is 8 everywhere, since every embedding holds 8 there and no layer writes to
    it; only the end token's holds -8. As the head is the embedding, its logit is lower than all others by a constant of
    50 or more. Neither trainer is told anything: the end token stays what both look for.
    """
    import torch

    language_model = random_model(shape.model)
    with torch.no_grad():
        embedding = language_model.get_input_embeddings().weight
        embedding[:, 0] = 8.0
        embedding[TEXT_ENDS, 0] = -8.0
        for block in language_model.model.layers:
            block.self_attn.o_proj.weight[0] = 0.0
            block.mlp.down_proj.weight[0] = 0.0
    return language_model


def threads_of(shape: Shape) -> int:
    from holdfast.processor import usable_cores

    return usable_cores() if shape.model == "135m" else 1


def meter_of(shape: Shape, device: str) -> Meter:
    return Meter(device, wall=shape.model == "135m")


def reward(completion_tokens: Sequence[int]) -> float:
    """Return a number that differs between completions."""
    return float(sum(completion_tokens) % 7)


class Watch:
    """Counts forward calls and trained tokens, and times steps and their updates.

    A forward pass with gradients belongs to an update; the first of a step ends its rollout.
    """

    def __init__(self, shape: Shape, meter: Meter, *backbones: Any) -> None:
        self.prompts: set[str] = set()
        self.prompt_tokens, self.completion_tokens = 0, 0
        """Of the completions that were rewarded, and what the loss was handed."""
        self._calls = {"update": 0, "rollout": 0}
        self._positions = 0
        self._stamps: list[float] = []
        self._updates: list[float] = []
        self._shape, self._meter = shape, meter
        for backbone in backbones:
            backbone.register_forward_pre_hook(self._count, with_kwargs=True)
        meter.begin_peak(whole=meter.on_gpu)

    def _count(self, _: Any, arguments: Any, named: dict[str, Any]) -> None:
        import torch

        assert not arguments, "tokens are found by the name of the argument"
        trains = torch.is_grad_enabled()
        self._calls["update" if trains else "rollout"] += 1
        if trains:
            self._positions += named["input_ids"].numel()
            if len(self._updates) < len(self._stamps):
                self._updates.append(self._meter.seconds())

    def tick(self) -> None:
        """Note the time between two steps."""
        self._stamps.append(self._meter.seconds())

    def report(self, utilisation: Callable[[float, float], float] | None = None) -> None:
        """Print the arm's line.

        Args:
            utilisation: (positions, seconds) of a step's update -> share of the device's peak.
        """
        peak = self._meter.peak_mib()
        ends = self._stamps[1:]
        steps = [end - start for start, end in zip(self._stamps[:-1], ends, strict=True)][WARM_UP:]
        updates = [end - start for start, end in zip(self._updates, ends, strict=True)][WARM_UP:]
        step, update = statistics.median(steps), statistics.median(updates)
        result = {
            "step_seconds": step,
            "update_seconds": update,
            "decode_ms": 1000 * (step - update) / self._shape.completion,
            "peak_mib": peak,
            "update_forwards": self._calls["update"] / len(ends),
            "rollout_forwards": self._calls["rollout"] / len(ends),
            "update_positions": self._positions / len(ends),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "digest": hashlib.sha256(json.dumps(sorted(self.prompts)).encode()).hexdigest()[:8],
        }
        if utilisation is not None:
            result["update_mfu"] = utilisation(self._positions / len(ends), update)
        print(json.dumps(result))


def holdfast(shape: Shape, device: str) -> None:
    import torch

    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.grpo import GRPOConfig
    from holdfast.data.tasks.synthetic import character_tokenizer
    from holdfast.metrics.throughput import peak_flops
    from holdfast.parallel.mesh import joined_world
    from holdfast.recipes.grpo import grpo_step
    from holdfast.rewards.base import Sample, Scored
    from holdfast.training.policy.build import build_policy_run
    from holdfast.training.setup.begin import Live

    length = shape.prompt + shape.completion
    tree = {
        "steps": shape.steps,
        "model": {"path": "live", "tokenizer": "builtin:characters"},
        "data": {
            "path": "rows",
            "batch_size": shape.prompts,
            "max_length": length,
            "tokens_per_micro_batch": TRL_ROWS * length,
            "shuffle": False,
        },
        "rollout": {"group_size": shape.group, "max_new_tokens": shape.completion, "show": 0},
        "reward": "exact",
        "optim": {**OPTIMIZER, "schedule": "constant", "clip_norm": 1.0},
        "launch": {"device": device},
        "run": {"dir": tempfile.mkdtemp()},
    }

    def score(samples: Sequence[Sample]) -> list[Scored]:
        watch.prompts.update(sample.prompt for sample in samples)
        watch.prompt_tokens += sum(len(sample.prompt_tokens) for sample in samples)
        values = [reward(sample.completion_tokens) for sample in samples]
        return [Scored(value, {"exact": value}) for value in values]

    def note(_: Any, arguments: tuple[Any, ...]) -> None:
        watch.completion_tokens += arguments[0].scored.numel()

    settings = from_mapping(tree, GRPOConfig)
    with joined_world(settings.launch) as world:
        live = Live(
            rows=[{"prompt": text} for text in shape.texts()], model=endless(shape), tokenizer=character_tokenizer()
        )
        training = build_policy_run(settings, Path.cwd(), world, score, live)
        engine: Any = training.evaluation.sampler.engine
        decoder = engine._replica.model  # what `rollout_forwards` counts
        torch.set_num_threads(threads_of(shape))
        watch = Watch(
            shape, meter_of(shape, device), training.model.module.language_model.base_model, decoder.base_model
        )
        training.model.module.register_forward_pre_hook(note)
        watch.tick()
        for _ in range(shape.steps):
            grpo_step(training)
            watch.tick()
    most = peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None
    if most is None:
        watch.report()
    else:
        cost = training.model.cost
        assert cost is not None
        watch.report(lambda positions, seconds: cost.flops(positions, length) / seconds / most)


def trl(shape: Shape, device: str, *, fast_head: bool) -> None:
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from holdfast.data.tasks.synthetic import character_tokenizer

    if fast_head:
        sft_vs_trl.install_gpu_like_head()

    def score(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        watch.prompts.update(prompts)
        return [reward(tokens) for tokens in completion_ids]

    rows = min(shape.rows, TRL_ROWS)
    arguments = GRPOConfig(
        **sft_vs_trl.trl_arguments(device),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=shape.rows // rows,
        num_generations=shape.group,
        max_completion_length=shape.completion,
        max_steps=shape.steps,
        beta=0.0,
        num_iterations=1,
        temperature=1.0,
        shuffle_dataset=False,
    )

    class Trainer(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            watch.prompt_tokens += int(inputs["prompt_mask"].sum())
            watch.completion_tokens += int(inputs["completion_mask"].sum())
            return super()._compute_loss(model, inputs)

    trainer = Trainer(
        model=endless(shape),
        reward_funcs=score,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": shape.texts()}),
        processing_class=character_tokenizer(),
    )
    torch.set_num_threads(threads_of(shape))
    watch = Watch(shape, meter_of(shape, device), trainer.model.base_model)
    sft_vs_trl.train(trainer, watch)


TRAINERS = {
    "holdfast": holdfast,
    "trl_gpu_like": lambda shape, device: trl(shape, device, fast_head=True),
    "trl": lambda shape, device: trl(shape, device, fast_head=False),
}
TARGETS = {
    "cpu": {"trl_gpu_like 64+64": 1.4, "trl 64+64": 2.2, "trl_gpu_like 256+32": 2.2, "trl 256+32": 6.0},
    "cuda": {"trl 8x8x512": 7.0},
    "tiny": {"trl tiny": 7.0},
    "135m": {"trl 135m": 1.3},
}
UPDATE_TARGET = 1.3
"""TRL's seconds of an update over ours, on a GPU."""
MEMORY_TARGETS = {"trl_gpu_like": 1.0, "trl": 0.5}


def check_alike(rounds: Sequence[dict[str, dict[str, Any]]], arms: Sequence[str]) -> None:
    """Stop if arms of one shape did not train on the same prompts and as many tokens."""
    for name in ("digest", "prompt_tokens", "completion_tokens"):
        for shape in {arm.split()[1] for arm in arms}:
            values = {
                turn[arm][name]
                for turn in rounds
                for arm in arms
                if arm.split()[1] == shape and FAILED not in turn[arm]
            }
            if len(values) > 1:
                sys.exit(f"the arms did not do the same work: {name} of {shape} {values}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", help="trainer and shape, such as 'trl 64+64'")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part", choices=["trainers", "groups", "135m"], help="default: the first two")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = options.device
    if options.arm:
        trainer, shape = options.arm.split()
        TRAINERS[trainer](SHAPES[shape], device)
        return
    if options.tiny or device == "cuda":
        sys.exit(compare_on_gpu("tiny" if options.tiny else device, options))
    print(heading("trl", "transformers"))
    targets = {} if options.part == "groups" else TARGETS["135m" if options.part == "135m" else "cpu"]
    shapes = {other.split()[1] for other in targets}
    arms = sorted([f"holdfast {shape}" for shape in shapes] + list(targets))
    if with_groups := options.part in {None, "groups"}:
        arms += ["holdfast 64+64x4", "holdfast 64+64x16"]
    rounds = alternate(__file__, arms, options.rounds)
    check_alike(rounds, arms)
    verdicts = Verdicts(rounds)
    compare_trainers(verdicts, targets, MEMORY_TARGETS)
    if with_groups:
        title = "seconds per step, groups of 16 over groups of 4"
        verdicts.at_most(2.2, title, "holdfast 64+64x16", "holdfast 64+64x4", "step_seconds")
    sys.exit(verdicts.missed)


def compare_on_gpu(setting: str, options: argparse.Namespace) -> bool:
    """Compare with TRL, one arm in memory at a time; return whether something failed or missed its target."""
    targets = TARGETS[setting]
    (shape,) = {other.split()[1] for other in targets}
    if find_spec("trl") is None:
        skip("arm trl", "trl is not installed")
        targets = {}
    print(heading(*("trl",) * bool(targets), "transformers", device=options.device))
    ours, arms = f"holdfast {shape}", [f"holdfast {shape}", *targets]
    rounds = alternate(__file__, arms, options.rounds, "--device", options.device, alone=True)
    check_alike(rounds, arms)
    verdicts = Verdicts(rounds, judged=not options.tiny)
    compare_trainers(verdicts, targets, {})
    for arm in arms:
        for name in ("step_seconds", "update_seconds", "decode_ms", "peak_mib"):
            verdicts.tell(f"{name}, {arm}", arm, name)
    for other in arms[1:]:
        title = f"seconds of an update, {other} over Holdfast"
        verdicts.at_least(UPDATE_TARGET, title, other, ours, "update_seconds")
        verdicts.at_most(None, f"peak memory, Holdfast over {other}", ours, other, "peak_mib")
    return verdicts.missed


def compare_trainers(verdicts: Verdicts, targets: dict[str, float], memory_targets: dict[str, float]) -> None:
    """Print how many times our seconds and memory the others take."""
    for other, target in targets.items():
        ours = f"holdfast {other.split()[1]}"
        verdicts.at_least(target, f"seconds per step, {other} over Holdfast", other, ours, "step_seconds")
    for other in targets:
        kind, shape = other.split()
        if kind in memory_targets:
            title = f"peak memory, Holdfast over {other}"
            verdicts.at_most(memory_targets[kind], title, f"holdfast {shape}", other, "peak_mib")


if __name__ == "__main__":
    main()
