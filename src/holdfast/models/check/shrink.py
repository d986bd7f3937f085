"""Shrink a configuration to a small model of the same architecture, which can be tested on a CPU without weights.

One layer of each kind remains, with fewer heads, experts and tokens. Everything that determines the computation is
kept: head sizes, rotary angles, windows, chunks, caps, scales, and every length at which one of them changes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from holdfast.errors import ModelError
from holdfast.models.layers.family import blocks_of

_SPREAD = 0.05
"""Of what is added to norms and biases, so that none is the identity."""
LAYER_COUNTS = (
    *("num_hidden_layers", "n_layers", "n_layer", "decoder_layers", "num_decoder_layers", "num_layers", "depth"),
)
"""Names of the field that counts the decoder's layers. Fields for encoders, which some decoders have, are left out."""
_PERIODS = (
    *("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", "full_attention_interval"),
    *("attn_layer_period", "expert_layer_period", "sliding_window_pattern"),
)
"""Fields that give the period with which kinds of layers repeat."""


class CannotShrink(ModelError):
    """No small model of an architecture can be built; this says nothing against the architecture."""


def one_of_each(text: Mapping[str, Any]) -> list[int]:
    """Return the layers of a text model that show one of each kind, ascending.

    Args:
        text: The fields of its configuration.

    Raises:
        CannotShrink: The configuration does not count its layers.
    """
    layer_count = count_of(text)
    if layer_count is None:
        raise CannotShrink(
            f"{text.get('model_type')} cannot be made small: its configuration does not count its layers"
        )
    count = _least(text, layer_count)
    if not text.get("num_kv_shared_layers"):
        return list(range(count))
    # The last layers take keys and values of earlier ones: one of each kind from either end.
    unshared = layer_count - int(text["num_kv_shared_layers"])
    return sorted({*range(min(count, unshared)), *range(max(unshared, layer_count - count), layer_count)})


def count_of(text: Mapping[str, Any]) -> int | None:
    """Return how many layers there are; some families list a kind for each and no number. None where neither is."""
    count, kinds = next((text[name] for name in LAYER_COUNTS if text.get(name)), None), text.get("layers_block_type")
    return len(kinds) if count is None and kinds else count


def layers_in(model: Any) -> int:
    """Return how many layers the text part of a model has: as its configuration counts them, else its blocks."""
    return count_of(model.config.get_text_config().to_dict()) or len(blocks_of(model))


def _least(text: Mapping[str, Any], layer_count: int) -> int:
    """Return how many of the first layers have all kinds among them."""
    kinds = _kinds(text, layer_count)
    several = [2, max((kinds.index(kind) for kind in set(kinds)), default=0) + 1]
    several += [text[name] for name in _PERIODS if isinstance(text.get(name), int)]
    several += [len(text[name]) for name in ("block_types",) if text.get(name)]
    if isinstance(text.get("first_k_dense_replace"), int):
        several.append(text["first_k_dense_replace"] + 1)
    return min(layer_count, max(several))


def _kinds(text: Mapping[str, Any], layer_count: int) -> list[tuple[Any, ...]]:
    """Return what fields that speak of single layers say of each."""
    members = [value for name, value in text.items() if lists_layers(name, value)]
    lists = [value for value in text.values() if isinstance(value, list) and len(value) == layer_count]
    lists = [value for value in lists if not any(value is field for field in members)]
    alone = {int(number) for number in text.get("per_layer_config") or {}}
    return [
        (*(str(field[n]) for field in lists), *(n in field for field in members), n in alone)
        for n in range(layer_count)
    ]


def lists_layers(name: str, value: Any) -> bool:
    """Whether a field lists the numbers of layers, ascending, and not a word for each layer."""
    numbers = (
        isinstance(value, list) and all(isinstance(number, int) for number in value) and value == sorted(set(value))
    )
    return numbers and ("layer" in name or "idx" in name or "indices" in name)


VOCABULARY = 256
"""Tokens of a shrunken model; those that mean something have the last ids."""
_NARROW = 128
"""Most columns between the two products of a feed-forward layer."""
_MOST = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "n_group"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    "topk_group": 1,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
}
_TOKEN = re.compile(r"(token_id|token_index)$")
_WIDTH = re.compile(r"(^|_)(intermediate_size(_mlp)?|ffn_dim|n_inner|ffn_hidden_size)$")


def shrink(config: Any, build: Callable[[Any], nn.Module]) -> Any:
    """Return a small configuration of the same architecture.

    Args:
        config: transformers' configuration.
        build: Makes a model of a configuration, on the meta device.

    Raises:
        CannotShrink: Its layers are not counted, or transformers builds a model of none of those that were tried.
    """
    problems = []
    for narrow in (True, False):
        try:
            small = type(config).from_dict(_shrunken(config, narrow=narrow))
            build(small)
        except (
            *(ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError),
            StrictDataclassError,
        ) as error:
            problems.append(" ".join(str(error).split())[:160])
            continue
        return small
    raise CannotShrink(f"{config.model_type} cannot be made small: {problems[-1]}")


def drawn_model(make: Callable[[Any], Any], config: Any) -> Any:
    """Return a model of random weights that are large enough for a soft cap, a window or an angle to be seen."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed every GPU, and no one would restore it
        model = make(config)
        with torch.no_grad():
            for module in model.modules():
                for name, value in module.named_parameters(recurse=False):
                    if isinstance(module, nn.Linear | nn.Embedding) and value.ndim == 2:
                        value.normal_(0.0, value.shape[1] ** -0.5 if isinstance(module, nn.Linear) else 0.5)
                    elif name in {"weight", "bias"}:
                        value.add_(torch.randn_like(value) * _SPREAD)
    return model.eval()


def _shrunken(config: Any, *, narrow: bool) -> dict[str, Any]:
    values: dict[str, Any] = copy.deepcopy(config.to_dict())
    text = config.get_text_config()
    key = next((name for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is text), None)
    text_values = values if key is None else values[key]
    names = {name: text.attribute_map.get(name, name) for name in ("hidden_size", "num_attention_heads")}
    width = text_values[names["hidden_size"]]
    _keep_layers(text_values, one_of_each(text_values))
    for name, most in _MOST.items():
        if isinstance(text_values.get(name), int):
            text_values[name] = min(text_values[name], most)
    if narrow:
        _narrow(text_values, names["hidden_size"], names["num_attention_heads"])
    for name, tower in values.items():
        if name.endswith("_config") and name not in {key, "per_layer_config"} and isinstance(tower, dict):
            _shrink_tower(tower, width, text_values[names["hidden_size"]])
    _move_tokens(values, text_values)
    return values


def _keep_layers(text: dict[str, Any], selected: list[int]) -> None:
    layer_count = count_of(text) or 0
    for name, value in list(text.items()):
        if name in LAYER_COUNTS:
            text[name] = len(selected)
        elif lists_layers(name, value):
            text[name] = [selected.index(number) for number in value if number in selected]
        elif isinstance(value, list) and len(value) == layer_count:
            text[name] = [value[number] for number in selected]
    _keep_exceptions(text, selected, layer_count)


def _keep_exceptions(text: dict[str, Any], selected: list[int], layer_count: int) -> None:
    """Keep what is said of single layers by their numbers, and how many share keys and values."""
    if text.get("per_layer_config"):
        by_layer = {int(number): values for number, values in text["per_layer_config"].items()}
        text["per_layer_config"] = {
            str(selected.index(number)): by_layer[number] for number in by_layer if number in selected
        }
    if text.get("num_kv_shared_layers"):
        own_layers = layer_count - text["num_kv_shared_layers"]
        text["num_kv_shared_layers"] = sum(number >= own_layers for number in selected)


def _narrow(text: dict[str, Any], hidden: str, attention_heads: str) -> None:
    """Leave one or two heads of the size that they have, and a feed-forward layer to match."""
    heads, width = text[attention_heads], text[hidden]
    key_heads = text.get("num_key_value_heads") or heads
    text[attention_heads] = min(2, heads)
    if text.get("num_key_value_heads"):
        text["num_key_value_heads"] = text[attention_heads] if key_heads == heads else 1
    for layer in (text.get("per_layer_config") or {}).values():
        if layer.get("num_key_value_heads"):
            layer["num_key_value_heads"] = 1
    text[hidden] = text[attention_heads] * (text.get("head_dim") or width // heads)
    _narrow_between(text, width, text[hidden])


def _narrow_between(text: dict[str, Any], width: int, new_width: int) -> None:
    for name, value in text.items():
        if _WIDTH.search(name) and isinstance(value, int | list):
            text[name] = [min(size, _NARROW) for size in value] if isinstance(value, list) else min(value, _NARROW)
        elif name in {"word_embed_proj_dim", "lru_width"} and value == width:
            text[name] = new_width


def _shrink_tower(tower: dict[str, Any], width: int, new_width: int) -> None:
    layer_count = next((tower[name] for name in LAYER_COUNTS if isinstance(tower.get(name), int)), 0)
    for name, value in tower.items():
        if name in LAYER_COUNTS and isinstance(value, int):
            tower[name] = min(value, 2)
        elif name.endswith("indexes") and isinstance(value, list):
            tower[name] = sorted({min(number, 1) for number in value})
        elif isinstance(value, list) and len(value) == layer_count > 2:
            tower[name] = value[:2]
        elif name in {"out_hidden_size", "projection_dim"} and value == width:
            tower[name] = new_width


def _move_tokens(values: dict[str, Any], text: dict[str, Any]) -> None:
    """Give tokens that mean something ids that there still are, the same one wherever the same one stood."""
    last = text["vocab_size"] - 1
    moved: dict[int, int] = {}

    def new_of(token: int) -> int:
        return token if token <= last else moved.setdefault(token, last - len(moved))

    for section in (values, text):
        for name, value in section.items():
            if _TOKEN.search(name) and isinstance(value, int) and not isinstance(value, bool):
                section[name] = new_of(value)
            elif name.endswith("token_id") and isinstance(value, list):
                section[name] = [new_of(token) for token in value]
