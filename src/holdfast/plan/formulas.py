"""What a step takes by formulas, where nothing can be executed: no compiler, or a model that asks for numbers.

They hold to a tenth or so for language models of blocks; a plan says when it is made of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.config.sections.parallel import NoRecompute, SelectiveRecompute
from holdfast.config.verbs.training import TrainingConfig
from holdfast.models.build.model import Blueprint, blueprint, set_storage, storage_of
from holdfast.parallel.plan import ShardPlan
from holdfast.plan.kinds import ACTIVATIONS, GATHERED, GRADIENTS, HEAD, OPTIMIZER, PARAMETERS
from holdfast.plan.memory import Peak
from holdfast.plan.origin import without_files
from holdfast.plan.records import Execution, Place
from holdfast.training.build.model import make_plan, policy_model

STATE_BYTES = {"adamw": 8.0, "adamw_bf16": 6.0, "adamw_8bit": 2.1, "adamw_4bit": 1.1, "adamw_fp8": 2.1, "muon": 4.0}
"""Of an optimizer per trained parameter; sgd has none without momentum."""
_KEPT = {"none": 34.0, "selective": 18.0, "full": 2.0}
"""Bytes that a block keeps for each number of the hidden state of a token (Korthikanti et al., arXiv:2205.05198)."""


def by_formulas(config: TrainingConfig, base: Path, place: Place, reason: str) -> Execution:
    """Return an execution's numbers without executing; `reason` says why.

    Raises:
        UserError: The model cannot be planned.
    """
    shapes, notes = without_files(config, base)
    origin = blueprint(shapes.model, base, seed=shapes.seed, scorer=shapes.scores)
    set_storage(origin.model, *storage_of(shapes.model))
    policy = policy_model(shapes, origin, None)
    plan = make_plan(shapes, policy, max(1, place.ranks // shapes.parallel.replicate), place.torch_device.type)
    tokens = min(shapes.data.tokens_per_micro_batch, shapes.data.batch_size * shapes.data.max_length)
    parts = _parts(shapes, origin, plan, tokens)
    loaded = {PARAMETERS: parts[PARAMETERS]}
    peaks = {
        ("load", place.device): Peak(sum(loaded.values()), loaded),
        ("backward", place.device): Peak(sum(parts.values()), parts),
    }
    states = shapes.optim.kind
    whole = plan.parameters * storage_of(shapes.model)[0].itemsize
    return Execution(
        place=place,
        plan=plan,
        first=peaks,
        steady=peaks,
        checkpoint_bytes=int(whole + plan.trainable * STATE_BYTES.get(states, 4.0)),
        tokens=tokens,
        parameters=plan.parameters,
        flops={"backward": (6 * plan.trainable + 4 * (plan.parameters - plan.trainable)) * tokens},
        executed=False,
        notes=[*notes, f"by formulas, since {reason}. Rollouts, references and critics are not in them"],
    )


def _parts(config: TrainingConfig, origin: Blueprint, plan: ShardPlan, tokens: int) -> dict[str, int]:
    """Return bytes by kind at the peak of a backward pass."""
    text: Any = origin.skeleton.config.get_text_config()
    width, layers, vocabulary = int(text.hidden_size), int(text.num_hidden_layers), int(text.vocab_size)
    computed, stored = (2 if plan.compute_dtype == "bfloat16" else 4), storage_of(config.model)[0].itemsize
    units = sorted((unit.bytes_ // stored for unit in plan.units), reverse=True)
    trained = plan.trainable // plan.shard
    match config.parallel.recompute:
        case NoRecompute():
            kept = _KEPT["none"] * layers
        case SelectiveRecompute():
            kept = _KEPT["selective"] * layers
        case _:
            kept = _KEPT["full"] * layers + _KEPT["none"]
    head = 8 * vocabulary * width if plan.trainable == plan.parameters else 2 * vocabulary * width
    return {
        PARAMETERS: plan.shard_bytes,
        GATHERED: computed * sum(units[:3]) if plan.sharded and plan.shard > 1 else 0,
        GRADIENTS: max(stored, 4) * trained + (computed + 4) * units[0] * bool(plan.trainable),
        OPTIMIZER: 0 if plan.cpu_offload else int(STATE_BYTES.get(config.optim.kind, 4.0) * trained),
        ACTIVATIONS: int(kept * tokens * width),
        HEAD: head,
    }
