"""The model families that GGUF files are written of, and what llama.cpp must know of each.

llama.cpp fixes much of a family in its own code: where windows lie, how scores are scaled, which activation is used. A
configuration that differs there is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import ModelError

Value = str | int | float
_ROTARY = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Family:
    """An architecture of llama.cpp."""

    architecture: str
    """Its name in GGUF."""
    is_gemma: bool = False
    """Whether norms multiply by one plus their weight, the activation is GELU, and the head is tied."""
    swaps_rotary: bool = False
    """Whether rows of queries and keys stand in pairs, and not as two halves as in transformers."""
    window_period: int = 0
    """Every so many layers one sees everything and the others a window; 0 for no windows."""


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", swaps_rotary=True),
    "Qwen2ForCausalLM": Family("qwen2"),
    "Qwen3ForCausalLM": Family("qwen3"),
    "GemmaForCausalLM": Family("gemma", is_gemma=True),
    "Gemma2ForCausalLM": Family("gemma2", is_gemma=True, window_period=2),
    "Gemma3ForCausalLM": Family("gemma3", is_gemma=True, window_period=6),
}
"""Class in transformers to the family."""


def family_of(config: Any) -> Family:
    """Return the family of a configuration.

    Raises:
        ModelError: It is none of them, or has a value that llama.cpp has no place for.
    """
    names = config.architectures or [type(config).__name__]
    family = FAMILIES.get(names[0])
    if family is None:
        raise ModelError(
            f"{names[0]} cannot be written as GGUF: Holdfast knows {', '.join(FAMILIES)}. Nothing was written; "
            "use --format hf, and llama.cpp's own converter."
        )
    if problems := list(_problems(config, family)):
        raise ModelError(
            f"This {names[0]} cannot be written as GGUF: {'; '.join(problems)}. llama.cpp would compute another model. "
            "Nothing was written."
        )
    return family


def head_size(config: Any) -> int:
    """Return the length of a query."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rotary(config: Any) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the rotary parameters of layers that see everything, and of those with a window where they differ."""
    parameters: Mapping[str, Any] = config.rope_parameters
    if "full_attention" in parameters:
        return parameters["full_attention"], parameters["sliding_attention"]
    return parameters, None


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _problems(config: Any, family: Family) -> Iterator[str]:
    rotary, windowed = _rotary(config)
    kind = rotary.get("rope_type", "default")
    if kind not in _ROTARY:
        yield f"its rotary angles are {kind!r}, and {', '.join(_ROTARY)} are known"
    if windowed is not None and windowed.get("rope_type", "default") != "default":
        yield f"the rotary angles of its windows are {windowed['rope_type']!r}"
    if rotary.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"only a part of a head is rotated ({rotary['partial_rotary_factor']})"
    expected = "gelu_pytorch_tanh" if family.is_gemma else "silu"
    if _activation(config) != expected:
        yield f"its activation is {_activation(config)}, and llama.cpp has {expected}"
    if family.is_gemma and not config.tie_word_embeddings:
        yield "its head is not tied to its embeddings"
    if getattr(config, "use_bidirectional_attention", False):
        yield "its attention looks ahead"
    yield from _window_problems(config, family)
    if family.window_period:
        largest = config.num_hidden_layers == (46 if family.window_period == 2 else 62)
        usual = config.hidden_size / config.num_attention_heads if largest else head_size(config)
        if config.query_pre_attn_scalar != usual:
            yield f"query_pre_attn_scalar is {config.query_pre_attn_scalar}, and llama.cpp has {usual:g}"


def _window_problems(config: Any, family: Family) -> Iterator[str]:
    layers = getattr(config, "layer_types", None) or []
    period = family.window_period
    usual = [
        "sliding_attention" if period and (number + 1) % period else "full_attention" for number in range(len(layers))
    ]
    if list(layers) != usual:
        where = f"all but every layer {period}" if period else "none"
        yield f"the layers with a window are {layers.count('sliding_attention')} of {len(layers)}, not {where}"


def metadata(config: Any, family: Family) -> dict[str, Value]:
    """Return the keys of an architecture, without its name before them.

    Integers are written as unsigned ones of 32 bits, and others as float32.
    """
    rotary, windowed = _rotary(config)
    size = head_size(config)
    values: dict[str, Value] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": size,
        "rope.freq_base": float(rotary["rope_theta"]),
    }
    if rotary.get("rope_type") == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rotary["factor"])}
    if windowed is not None:
        values["rope.freq_base_swa"] = float(windowed["rope_theta"])
    if family.window_period:
        values["attention.sliding_window"] = config.sliding_window
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(config, name, None) is not None:
                values[name] = float(getattr(config, name))
    return values


def rotary_divisors(config: Any) -> np.ndarray[Any, Any] | None:
    """Return by what llama.cpp divides the rotary frequencies, [size of a head / 2]; None for angles as they are.

    Llama 3.1 divides those of long waves by a factor, and those between smoothly.
    """
    rotary, _ = _rotary(config)
    if rotary.get("rope_type") != "llama3":
        return None
    size, factor = head_size(config), float(rotary["factor"])
    frequencies = float(rotary["rope_theta"]) ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    low, high = float(rotary["low_freq_factor"]), float(rotary["high_freq_factor"])
    turns = float(rotary["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors: np.ndarray[Any, Any] = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return divisors


def in_pairs(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return rows of queries or keys as llama.cpp rotates them: element i of the first half beside that of the second.

    Args:
        rows: [heads * size of a head, ...].
        heads: Of queries, or of keys.
    """
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def in_halves(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return rows that `in_pairs` wrote as transformers has them."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))
