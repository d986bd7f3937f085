"""Decoding alone: against transformers' `generate`, and what sharding adds to it.

    python benchmarks/decode.py [--rounds 3] [--device cuda] [--tiny]

`holdfast` is the in-process engine: new weights are published to it, then it completes one prompt of 64 tokens 8 times
by 64 tokens, and returns log-probabilities with them. `transformers` samples as many tokens with `generate`, as TRL
calls it: 8 copies of the prompt, temperature 1, no other option. Texts never end (`endless` in grpo_vs_trl.py), and the
model's forward calls are counted in both.

`ranks_2` is a rollout of a policy under FSDP2 on 2 gloo ranks, each with a prompt and 8 completions of its own;
`ranks_1` the same in one process, and `twins` in 2 processes beside each other that know nothing of each other, which
says how much of the difference is the shared memory and cores of the machine. Weights are gathered, and counted, in
every rollout. Cost is the mean over the ranks. On a GPU only the first two arms run, with prompts of 256 and 128
tokens for each of 64 rows, then of 256 rows, one arm in memory at a time; and for 64 rows `operations`, which is
`holdfast` without CUDA graphs, `uncompiled`, whose graphs have layers that are not compiled, and `gathered`, which
attends over gathered blocks. A replayed step is no forward call of Python's, so `holdfast` counts few there; an arm
whose graphs, compiled layers or blocks in place were given up fails.
`--tiny` decodes with a tiny model on the CPU, which says that the script runs and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from grpo_vs_trl import SHAPES, Shape, endless
from measure import Meter, Ranks, alternate, heading, take_turn
from verdicts import Verdicts

WARM_UP = 2


ROWS = {
    "64": Shape(256, 128, prompts=8, model="0.5b", steps=5),
    "256": Shape(256, 128, prompts=32, model="0.5b", steps=5),
    "tiny": SHAPES["tiny"],
}
"""What is decoded on a GPU, by rows."""


def report(language_model: Any, rollout: Callable[[], object], shape: Shape, device: str) -> None:
    """Time rollouts and print the arm's line."""
    calls: list[int] = []
    language_model.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    meter = Meter(device)
    times = []
    for _ in range(shape.steps):
        take_turn()
        start = meter.seconds()
        rollout()
        times.append(meter.seconds() - start)
    tokens = shape.rows * shape.completion
    result = {
        "tokens_per_second": tokens / statistics.median(times[WARM_UP:]),
        "ms_per_step": 1000 * statistics.median(times[WARM_UP:]) / shape.completion,
        "tokens": tokens,
        "forwards": len(calls) / shape.steps,
        "speeds": [tokens / seconds for seconds in times[WARM_UP:]],
    }
    print(json.dumps(result))


def holdfast(
    shape: Shape, device: str, *, graphs: bool = True, in_place: bool = True, compiler: str | None = "inductor"
) -> None:
    import torch

    from holdfast.config.sections.model import ModelConfig
    from holdfast.config.sections.rollout import SamplingConfig
    from holdfast.data.tasks.synthetic import character_tokenizer
    from holdfast.models.names import named_parameters
    from holdfast.models.setup.model import blueprint
    from holdfast.rollout.engine import Request, generate
    from holdfast.rollout.local.graphs import CudaRecorder
    from holdfast.rollout.local.inprocess import InProcessEngine
    from holdfast.rollout.sampling import Stops, mixed

    language_model, tokenizer = endless(shape), character_tokenizer()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    weights = {name: tensor.detach().to(device) for name, tensor in named_parameters(language_model).items()}
    origin = blueprint(
        ModelConfig(path="given", tokenizer="builtin:characters"),
        Path(),
        seed=0,
        live=language_model,
        tokenizer=tokenizer,
    )
    place, stops = torch.device(device), Stops(frozenset({tokenizer.eos_token_id}))
    recorder = CudaRecorder(place) if graphs and device == "cuda" else None
    engine = InProcessEngine(origin, place, dtype, stops, recorder=recorder, compiler=compiler)
    engine.in_place = engine.in_place if in_place else None
    todo = iter(range(shape.steps))

    def rollout() -> None:
        number = next(todo)
        engine.update_weights(weights.items(), number)
        texts = shape.texts()[number * shape.prompts : (number + 1) * shape.prompts]
        requests = [
            Request(
                place,
                np.array(tokenizer(text)["input_ids"]),
                tuple(mixed(number, place, i) for i in range(shape.group)),
            )
            for place, text in enumerate(texts)
        ]
        found = generate(engine, requests, SamplingConfig(max_new_tokens=shape.completion))
        assert sum(sampled.tokens.size for sampled in found) == shape.rows * shape.completion

    report(engine._replica.model, rollout, shape, device)
    assert_kept(engine, recorder)


def assert_kept(engine: Any, recorder: Any) -> None:
    assert engine._recorder is recorder, "graphs were given up"
    assert engine.in_place is None or engine.in_place.agrees, "blocks were gathered"
    assert engine._layers is None or engine._layers.are_sound, "compiled layers were given up"


def transformers(shape: Shape, device: str) -> None:
    import torch

    from holdfast.data.tasks.synthetic import character_tokenizer

    tokenizer = character_tokenizer()
    language_model = endless(shape).to(device, torch.float32 if device == "cpu" else torch.bfloat16).eval()
    todo = iter(range(shape.steps))

    def rollout() -> None:
        number = next(todo)
        texts = shape.texts()[number * shape.prompts : (number + 1) * shape.prompts]
        copies = torch.tensor([tokenizer(text)["input_ids"] for text in texts for _ in range(shape.group)])
        with torch.no_grad():
            found = language_model.generate(
                input_ids=copies.to(device),
                attention_mask=torch.ones_like(copies).to(device),
                do_sample=True,
                top_k=0,
                max_new_tokens=shape.completion,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                disable_compile=True,
            )
        assert found.shape == (shape.rows, shape.prompt + shape.completion)

    report(language_model, rollout, shape, device)


def rank_of_rollouts(shape: Shape, _: str) -> None:
    """Sample as one rank of a policy's run, or as all of it."""
    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.grpo import GRPOConfig
    from holdfast.data.tasks.synthetic import character_tokenizer
    from holdfast.parallel.mesh import joined_world
    from holdfast.rollout.sampling import mixed
    from holdfast.training.policy.build import build_policy_run
    from holdfast.training.policy.rollouts import sample_groups
    from holdfast.training.setup.begin import Live

    tree = {
        "steps": shape.steps,
        "model": {"path": "live", "tokenizer": "builtin:characters"},
        "data": {"path": "rows", "batch_size": 2, "max_length": shape.prompt + shape.completion, "shuffle": False},
        "rollout": {"group_size": shape.group, "max_new_tokens": shape.completion, "show": 0},
        "reward": "exact",
        "optim": {"lr": 1e-5, "schedule": "constant"},
        "run": {"dir": tempfile.mkdtemp()},
    }
    config = from_mapping(tree, GRPOConfig)
    with joined_world(config.launch) as world:
        live = Live(
            rows=[{"prompt": text} for text in shape.texts() * 2],
            model=endless(shape),
            tokenizer=character_tokenizer(),
        )
        training = build_policy_run(config, Path.cwd(), world, lambda _: [], live)
        calls: list[int] = []
        engine: Any = training.evaluation.sampler.engine
        engine._replica.model.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
        meter, times = Meter(), []
        for number in range(shape.steps):
            stream: Any = training.stream
            batch = stream.next(number, 2)
            prompts = batch.own_prompts[:1]
            training.model.state.updates = number  # new weights, as far as the engine can know
            seeds = {prompt.prompt_id: tuple(mixed(number, i) for i in range(shape.group)) for prompt in prompts}
            take_turn()
            start = meter.seconds()
            groups = sample_groups(training.model, training.evaluation.sampler, prompts, config.rollout, seeds)
            times.append(meter.seconds() - start)
            tokens = sum(trajectory.completion_length for group in groups for trajectory in group.trajectories)
            assert tokens == shape.rows * shape.completion
    updates = times[WARM_UP:]
    print(json.dumps({"seconds": statistics.median(updates), "updates": updates, "forwards": len(calls) / shape.steps}))


Decode = Callable[[Shape, str], None]
ARMS: dict[str, Decode] = {"holdfast": holdfast, "transformers": transformers}
ON_CUDA: dict[str, Decode] = {
    "operations": partial(holdfast, graphs=False),
    "gathered": partial(holdfast, in_place=False),
    "uncompiled": partial(holdfast, compiler=None),
}
SHARDED = {"ranks_2": Ranks(2), "ranks_1": Ranks(1), "twins": Ranks(2, connected=False)}
OVER_GENERATE, OVER_OPERATIONS, OVER_UNCOMPILED = 1.7, 2.0, 1.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=[*ARMS, *ON_CUDA, *SHARDED])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", choices=list(ROWS), help="of an arm on a GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.arm:
        shape = ROWS[options.rows] if options.rows else SHAPES["64+64"]
        (ARMS | ON_CUDA).get(options.arm, rank_of_rollouts)(shape, options.device)
        return
    print(heading("transformers", device=options.device))
    if options.tiny or options.device == "cuda":
        missed = [on_gpu(rows, options) for rows in (["tiny"] if options.tiny else ["64", "256"])]
        sys.exit(any(missed))
    verdicts = Verdicts(alternate(__file__, list(ARMS), options.rounds))
    title = "tokens per second, Holdfast over transformers' generate"
    verdicts.at_least(OVER_GENERATE, title, "holdfast", "transformers", "speeds")
    missed_alone = verdicts.missed
    verdicts = Verdicts(alternate(__file__, list(SHARDED), options.rounds, ranks=SHARDED))
    verdicts.at_most_over_all(1.1, "rollout, each of 2 ranks over one process", "ranks_2", "ranks_1", "updates")
    verdicts.at_most_over_all(1.1, "rollout, each of 2 ranks over each of 2", "ranks_2", "twins", "updates")
    sys.exit(missed_alone or verdicts.missed)


def on_gpu(rows: str, options: argparse.Namespace) -> bool:
    """Compare so many rows, one arm in memory at a time; return whether something failed or missed its target."""
    with_others = rows == "64"
    arms = [*ARMS, *(ON_CUDA if with_others else ())]
    rounds = alternate(__file__, arms, options.rounds, "--device", options.device, "--rows", rows, alone=True)
    verdicts = Verdicts(rounds, judged=not options.tiny)
    for arm in arms:
        verdicts.tell(f"{rows} rows, milliseconds a token, {arm}", arm, "ms_per_step")
    title = f"{rows} rows, tokens per second, Holdfast over transformers' generate"
    verdicts.at_least(OVER_GENERATE, title, "holdfast", "transformers", "speeds")
    if with_others:
        title = f"{rows} rows, tokens per second, CUDA graphs over operation by operation"
        verdicts.at_least(OVER_OPERATIONS, title, "holdfast", "operations", "speeds")
        title = f"{rows} rows, tokens per second, blocks in place over gathered"
        verdicts.at_least(1.0, title, "holdfast", "gathered", "speeds")
        title = f"{rows} rows, tokens per second, compiled layers in CUDA graphs over uncompiled ones"
        verdicts.at_least(OVER_UNCOMPILED, title, "holdfast", "uncompiled", "speeds")
    return verdicts.missed


if __name__ == "__main__":
    main()
