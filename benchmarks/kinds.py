"""What the trainer costs on a mixture of experts and on a model that sees: CPU seconds of an update over a bare loop's.

    python benchmarks/kinds.py [--rounds 3]

`holdfast_*` is our trainer in one process, `bare_*` a loop over the same kernels without one: no metrics, no sharding,
no statistics of routers and no loss of theirs. Both make the same 10 updates in turn, one each, and are compared update
by update. The loop turns rows with images into patches and tokens within its updates, as any loop has to. The mixture
is a Mixtral of 8 experts in 2 blocks with 2,048 tokens per update, the model that sees a Qwen2.5-VL with 16 rows per
update and a picture of 112 x 168 pixels in each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measure import Meter, alternate, heading, take_turn
from verdicts import Verdicts

STEPS, WARM_UP, ROWS = 10, 2, 16
OPTIMIZER: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
TEXT = {"vocab_size": 8_000, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mixture": {
        "model_type": "mixtral",
        **TEXT,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
    },
    "vision": {
        "model_type": "qwen2_5_vl",
        "image_token_id": 61,
        "vision_start_token_id": 60,
        "vision_end_token_id": 62,
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            **TEXT,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "bos_token_id": None,
            "eos_token_id": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]},
        },
        "vision_config": {
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": 14,
            "out_hidden_size": 256,
            "window_size": 56,
            "fullatt_block_indexes": [3],
        },
    },
}
PROCESSOR = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
PROCESSOR["size"] = {"shortest_edge": 56 * 56, "longest_edge": 448 * 448}  # type: ignore[assignment]
TOKENIZER = {"mixture": "builtin:characters", "vision": "builtin:pictures"}


def rows(kind: str) -> list[dict[str, Any]]:
    """Return texts of 128 tokens, or shorter ones behind a picture of noise."""
    from PIL import Image

    generator = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    made: list[dict[str, Any]] = []
    for _ in range(STEPS * ROWS):
        if kind == "mixture":
            made.append({"text": "".join(generator.choice(letters, 127))})
            continue
        pixels = generator.integers(0, 256, (112, 168, 3), dtype=np.uint8)
        said = "".join(generator.choice(letters, 40))
        made.append({"prompt": "<image>say=", "completion": said, "images": [Image.fromarray(pixels)]})
    return made


def tree(kind: str) -> dict[str, Any]:
    """Return the run."""
    model: dict[str, Any] = {"config": MODELS[kind], "tokenizer": TOKENIZER[kind]}
    if kind == "vision":
        model["image_processor"] = PROCESSOR
    return {
        "steps": STEPS,
        "model": model,
        "data": {
            "path": "rows",
            "batch_size": ROWS,
            "max_length": 256,
            "tokens_per_micro_batch": ROWS * 256,
            "shuffle": False,
        },
        "optim": {**OPTIMIZER, "schedule": "constant", "clip_norm": 1.0},
        "run": {"dir": tempfile.mkdtemp()},
    }


class Watch:
    """Times updates, and keeps the token ids that went through the backbone."""

    def __init__(self, language_model: Any) -> None:
        self._meter, self._begun = Meter(), 0.0
        self._times: list[float] = []
        self._digest = hashlib.sha256()
        language_model.base_model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, _: Any, __: Any, named: dict[str, Any]) -> None:
        self._digest.update(str(sorted(named["input_ids"].flatten().tolist())).encode())

    def begin(self) -> None:
        """Wait for the other arm, and begin an update."""
        take_turn()
        self._begun = self._meter.seconds()

    def end(self) -> None:
        """End it."""
        self._times.append(self._meter.seconds() - self._begun)

    def report(self) -> None:
        """Print the arm's line."""
        timed = self._times[WARM_UP:]
        told = {"step_seconds": statistics.median(timed), "seconds": timed, "digest": self._digest.hexdigest()[:8]}
        print(json.dumps(told))


def holdfast(kind: str) -> None:
    """Make the updates with the trainer."""
    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.training import SFTConfig
    from holdfast.parallel.mesh import joined_world
    from holdfast.recipes.sft import sft_step
    from holdfast.training.setup.begin import Live, build_run

    settings = from_mapping(tree(kind), SFTConfig)
    with joined_world(settings.launch) as world:
        training = build_run(settings, Path.cwd(), world, Live(rows=rows(kind)))
        watch = Watch(training.model.module.language_model)
        for _ in range(STEPS):
            watch.begin()
            sft_step(training)
            watch.end()
    watch.report()


def bare(kind: str) -> None:
    """Make the updates with a loop."""
    import torch

    from holdfast.models.files.vision import set_attention
    from holdfast.models.heads.policy import PolicyModel
    from holdfast.models.layers.attention import PACKED, register_attention
    from holdfast.models.layers.family import family_of
    from holdfast.models.setup.model import configured
    from holdfast.objectives.supervised import NegativeLogLikelihood

    register_attention()
    torch.manual_seed(0)
    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.training import SFTConfig

    settings = from_mapping(tree(kind), SFTConfig)
    config, processor = configured(settings.model, Path.cwd())
    language_model = _auto(kind).from_config(config).float()
    set_attention(language_model, PACKED)
    family = family_of(language_model)
    policy = PolicyModel(language_model, family, family.head_spec(float32_product=False, chunk_tokens=None))
    policy.routers = None
    optimizer = torch.optim.AdamW(policy.parameters(), **OPTIMIZER, fused=True)
    watch = Watch(language_model)
    batches = _batches(kind, settings, config, processor)
    for _ in range(STEPS):
        watch.begin()
        batch = next(batches)
        (policy(batch, NegativeLogLikelihood()).loss / batch.count).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch.end()
    watch.report()


def _auto(kind: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if kind == "vision" else AutoModelForCausalLM


def _batches(kind: str, settings: Any, config: Any, processor: Any) -> Iterator[Any]:
    from holdfast.data.batches.packing import Share, pack
    from holdfast.data.tokens.chat import RowTokeniser
    from holdfast.models.files.origin import load_tokenizer
    from holdfast.models.files.vision import image_side

    tokenizer = load_tokenizer(settings.model, Path.cwd())
    tokeniser = RowTokeniser(tokenizer, settings.data, Path.cwd(), image_side(processor, tokenizer, config))
    given = rows(kind)
    for start in range(0, len(given), ROWS):
        members = [
            tokeniser.examples(row, start + place, "rows").examples[0]
            for place, row in enumerate(given[start : start + ROWS])
        ]
        yield pack(members, [Share(1.0, float(member.trained_tokens)) for member in members])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.arm:
        arm, kind = options.arm.split("_")
        {"holdfast": holdfast, "bare": bare}[arm](kind)
        return
    print(heading("transformers"))
    rounds = [
        dict(item for pair in pairs for item in pair.items())
        for pairs in zip(
            *(alternate(__file__, [f"holdfast_{kind}", f"bare_{kind}"], options.rounds) for kind in MODELS), strict=True
        )
    ]
    for kind in MODELS:
        for turn in rounds:
            if turn[f"holdfast_{kind}"]["digest"] != turn[f"bare_{kind}"]["digest"]:
                sys.exit(f"the arms of {kind} did not see the same tokens")
    verdicts = Verdicts(rounds)
    verdicts.at_most(
        1.05, "a mixture of experts, Holdfast over a bare loop", "holdfast_mixture", "bare_mixture", "seconds"
    )
    verdicts.at_most(1.05, "a model that sees, Holdfast over a bare loop", "holdfast_vision", "bare_vision", "seconds")
    sys.exit(verdicts.missed)


if __name__ == "__main__":
    main()
