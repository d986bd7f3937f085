"""Which layers of a model show one of each kind, by what its configuration says of single layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import ModelError

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "depth")
"""Names of the field that counts layers."""
_PERIODS = (
    *("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", "full_attention_interval"),
    *("attn_layer_period", "expert_layer_period", "sliding_window_pattern"),
)
"""Fields of a configuration that say after how many layers kinds come again."""


def one_of_each(text: Mapping[str, Any]) -> list[int]:
    """Return the layers of a text model that show one of each kind, ascending.

    Args:
        text: The fields of its configuration.
    """
    whole, count = count_of(text), _least(text)
    if not text.get("num_kv_shared_layers"):
        return list(range(count))
    # The last layers take keys and values of earlier ones: one of each kind from either end.
    own = whole - int(text["num_kv_shared_layers"])
    return sorted({*range(min(count, own)), *range(max(own, whole - count), whole)})


def count_of(text: Mapping[str, Any]) -> int:
    """Return how many layers there are; some families list a kind for each and no number.

    Raises:
        ModelError: The configuration says neither.
    """
    count, kinds = next((text[name] for name in LAYER_COUNTS if name in text), None), text.get("layers_block_type")
    if count is None and not kinds:
        raise ModelError(f"{text.get('model_type')} cannot be made small: its configuration does not count its layers.")
    return len(kinds or ()) if count is None else int(count)


def _least(text: Mapping[str, Any]) -> int:
    """Return how many of the first layers have all kinds among them."""
    whole, kinds = count_of(text), _kinds(text)
    several = [2, max((kinds.index(kind) for kind in set(kinds)), default=0) + 1]
    several += [text[name] for name in _PERIODS if isinstance(text.get(name), int)]
    several += [len(text[name]) for name in ("block_types",) if text.get(name)]
    if isinstance(text.get("first_k_dense_replace"), int):
        several.append(text["first_k_dense_replace"] + 1)
    return min(whole, max(several))


def _kinds(text: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return what fields that speak of single layers say of each."""
    whole = count_of(text)
    members = [value for name, value in text.items() if lists_layers(name, value)]
    lists = [value for value in text.values() if isinstance(value, list) and len(value) == whole]
    lists = [value for value in lists if not any(value is each for each in members)]
    alone = {int(number) for number in text.get("per_layer_config") or {}}
    return [(*(str(each[n]) for each in lists), *(n in each for each in members), n in alone) for n in range(whole)]


def lists_layers(name: str, value: Any) -> bool:
    """Whether a field lists the numbers of layers, ascending, and not a word for each layer."""
    numbers = isinstance(value, list) and all(isinstance(each, int) for each in value) and value == sorted(set(value))
    return numbers and ("layer" in name or "idx" in name or "indices" in name)
