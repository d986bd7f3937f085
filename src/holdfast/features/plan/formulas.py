"""Estimates of a step's memory from a configuration and the shape of its model. This module imports nothing heavy.

They hold to a tenth or so for language models of blocks, and leave out rollouts, references, teachers and critics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.config.sections.parallel import NoRecompute, SelectiveRecompute
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.features.plan.counting.kinds import ACTIVATIONS, GATHERED, GRADIENTS, HEAD, OPTIMIZER, PARAMETERS

SHAPE_FOLDER = Path(__file__).with_name("execution") / "shapes"
"""Configurations of models that are planned often, by the hub's name with -- for its slash."""
_KEPT = {"none": 34.0, "selective": 18.0, "full": 2.0}
"""Bytes that a block keeps for each number of the hidden state of a token (Korthikanti et al., arXiv:2205.05198)."""
_STATES = {"adamw_bf16": 6, "adamw_8bit": 2, "muon": 4, "sgd": 4}
"""Bytes of an optimizer's states for a parameter; 8 of all others."""


_FOUR_BITS = 0.5 + 4 / 64
"""Bytes of a number in 4 bits: its own, and its part of the float32 scale of 64 numbers."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters of a model, and its widths."""

    parameters: int
    trainable: int
    units: tuple[int, ...]
    """Of each unit that is gathered at once, the largest first."""
    layers: int
    width: int
    vocabulary: int
    block: int = 0
    """Numbers of the linear layers of a block; 0 where they are not counted apart."""


def size_of_values(config: TrainingConfig, values: Mapping[str, Any]) -> ModelSize:
    """Return the size of a language model of blocks, from the values of its config.json.

    Raises:
        LookupError: One of them is not there.
    """
    text = values.get("text_config") or values
    width, layers, vocabulary = (int(text[name]) for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads = int(text["num_attention_heads"])
    head = int(text.get("head_dim") or width // heads)
    key_heads = int(text.get("num_key_value_heads") or heads)
    experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
    inner = int(text.get("moe_intermediate_size" if experts else "intermediate_size") or text["intermediate_size"])
    sides = [(width, heads * head), (width, key_heads * head), (width, key_heads * head), (heads * head, width)]
    block = sum(rows * columns for rows, columns in sides) + 3 * width * inner * max(1, experts)
    table = vocabulary * width
    units = sorted([*[block] * layers, table, *([] if text.get("tie_word_embeddings") else [table])], reverse=True)
    lora = config.model.lora
    adapters = 0 if lora is None else lora.rank * layers * (sum(map(sum, sides)) + 3 * (width + inner))
    return ModelSize(sum(units) + adapters, adapters or sum(units), tuple(units), layers, width, vocabulary, block)


def shape_file(name: str) -> Path:
    """Return where the configuration of a model is, if the package knows it."""
    return SHAPE_FOLDER / f"{name.replace('/', '--')}.json"


def known_size(config: TrainingConfig, base: Path) -> ModelSize | None:
    """Return the size of a run's model without importing anything; None where its config.json is not at hand."""
    model = config.model
    try:
        if model.path is None:
            return size_of_values(config, model.config or {})
        own, known = base / model.path / "config.json", shape_file(model.path)
        file = own if own.is_file() or not known.is_file() else known
        return size_of_values(config, json.loads(file.read_text(encoding="utf-8")) | model.config_override)
    except (LookupError, OSError, TypeError, ValueError):
        return None


def sequences_of_row(config: TrainingConfig) -> int:
    """Return how many sequences a row has, which no micro-batch splits: two of a pair, one of KTO and all others."""
    return 2 if isinstance(config, DPOConfig) and config.preference.takes_pairs else 1


def largest_tokens(config: TrainingConfig) -> int:
    """Return the tokens of the largest micro-batch."""
    longest = config.data.batch_size * sequences_of_row(config) * config.data.max_length
    return min(config.data.tokens_per_micro_batch, longest)


def uncounted(config: TrainingConfig) -> str:
    """Return the parts of a run that the formulas do not count; "" if they count everything."""
    match config:
        case GRPOConfig():
            return "rollouts, a reference and a critic"
        case DPOConfig() | DistillConfig():
            return "the reference or the teacher"
        case _:
            return ""


def parts_by_formulas(config: TrainingConfig, size: ModelSize, ranks: int, device: str) -> dict[str, int]:
    """Return bytes by kind of one rank, at the peak of a backward pass.

    Args:
        config: Of the run.
        size: Of its model.
        ranks: Of the run.
        device: "cuda" or "cpu".
    """
    parallel, offloads, shard = config.parallel, config.parallel.offloads, max(1, ranks // config.parallel.replicate)
    computed, stored, frozen_stored = _widths(config, device)
    frozen = size.parameters - size.trainable
    packed = _packed(config, size)
    # Of offloaded blocks the one at work and a neighbour, which is copied, are on the device.
    layers = min(size.layers, 2) if "activations" in offloads else size.layers
    match parallel.recompute:
        case NoRecompute():
            activations = _KEPT["none"] * layers
        case SelectiveRecompute():
            activations = _KEPT["selective"] * layers
        case _:
            activations = _KEPT["full"] * layers + _KEPT["none"]
    wide = (size.trainable if stored != computed else 0) + (frozen - packed if frozen_stored != computed else 0)
    kept_frozen = frozen_stored * (frozen - packed) + int(_FOUR_BITS * packed)
    on_device = "parameters" not in offloads
    return {
        PARAMETERS: on_device * (stored * size.trainable + kept_frozen) // shard,
        GATHERED: computed * sum(size.units[:3]) if shard > 1 else computed * wide,
        GRADIENTS: on_device * max(stored, 4) * size.trainable // shard
        + (computed + 4) * size.units[0] * (frozen == 0),
        OPTIMIZER: 0 if "optimizer" in offloads else _STATES.get(config.optim.kind, 8) * size.trainable // shard,
        ACTIVATIONS: int(activations * largest_tokens(config) * size.width),
        HEAD: (2 if frozen else 8) * size.vocabulary * size.width,
    }


def checkpoint_by_formulas(config: TrainingConfig, size: ModelSize, device: str) -> int:
    """Return the bytes of the tensors of a checkpoint."""
    _, stored, frozen_stored = _widths(config, device)
    states = _STATES.get(config.optim.kind, 8) if config.checkpoint.contents == "full" else 0
    frozen = 0 if config.checkpoint.frozen == "skip" else size.parameters - size.trainable
    packed = min(frozen, _packed(config, size))
    return (stored + states) * size.trainable + frozen_stored * (frozen - packed) + int(_FOUR_BITS * packed)


def _packed(config: TrainingConfig, size: ModelSize) -> int:
    """Return how many frozen numbers of the blocks are kept in 4 bits."""
    lora = config.model.lora
    return 0 if lora is None or lora.quantize is None else size.block * size.layers


def _widths(config: TrainingConfig, device: str) -> tuple[int, int, int]:
    """Return bytes of a number: in passes, of trained weights as stored, of frozen ones."""
    model, compute = config.model, config.parallel.compute_dtype
    computed = 2 if compute == "bfloat16" or (compute == "auto" and device == "cuda") else 4
    stored = 2 if model.dtype == "bfloat16" else 4
    settled = computed if model.lora is not None and device == "cuda" else stored
    return computed, stored, {"auto": settled, "same": stored, "bfloat16": 2, "float32": 4}[model.frozen_dtype]
