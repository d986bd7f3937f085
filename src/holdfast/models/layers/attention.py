"""Attention inside documents that lie side by side, through transformers' attention interface.

transformers' models call the function registered under their `_attn_implementation` with queries, keys and values of
the whole row. Ours attends within each document only, from the lengths that travel with the call: no mask of the row
is ever built. On CUDA in 16-bit this is torch's variable-length flash kernel; elsewhere, and for soft caps and sinks,
one product per document (documents of equal length that lie next to each other share one).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import ModelError
from holdfast.models.layers.document_attention import (
    AttentionOptions,
    Documents,
    KernelRuns,
    attend_as_operation,
    attend_in_documents,
)
from holdfast.models.layers.shared_keys import repeat_keys

PACKED = "holdfast_packed"
"""Name under which transformers finds this attention."""

_KNOWN = {"s_aux", "position_ids"}
"""Tensors among a layer's options that packed attention uses, or that only models use."""


def upstream_attention(model: Any) -> str:
    """Return the attention of transformers' own that is exact for a model: `sdpa`, or `eager` where that is not.

    transformers 5.19 lets Gemma 2 have sdpa, which then leaves its soft cap out without a word; 5.23 refuses it.
    """
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if getattr(model, "_supports_sdpa", False) and softcap is None else "eager"


def register_attention() -> None:
    """Make the packed attention known to transformers; doing it again changes nothing."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, _no_mask)


def _no_mask(*_: object, **__: object) -> None:
    return None


def packed_attention(  # noqa: PLR0913 - the operands of a formula
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - the interface's; documents take its place
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each document.

    Args:
        module: The attention layer.
        query: [1, heads, T, head size]
        key: [1, key heads, T, head size]; each serves heads / key heads queries.
        value: As key.
        attention_mask: Not used.
        scaling: Factor of the products; default 1 / sqrt(head size).
        dropout: Probability of dropping an attention weight.
        options: `documents` (ours), and what a layer asks for: `sliding_window`, `softcap`, `s_aux` (sinks).

    Returns:
        [1, T, heads, head size], and None in place of attention weights.

    Raises:
        ModelError: The model does not hand our lengths to its attention, or asks for a bias we do not know.
    """
    documents = _documents(module, options)
    asked = AttentionOptions(scaling, options.get("sliding_window"), options.get("softcap"), dropout)
    sinks = options.get("s_aux")
    if documents.exchange is not None:
        return _exchanged(query, key, value, sinks, documents, asked), None
    return _attend(query, key, value, sinks, documents, asked), None


# Collectives of a thread group, whose sizes the compiler would take for constants.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def _exchanged(  # noqa: PLR0913 - the operands of a formula
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, documents: Documents, options: AttentionOptions
) -> Tensor:
    """Attend in whole rows, of which this rank has a span of all heads before and after; [1, span, heads, size]."""
    exchange = documents.exchange
    assert exchange is not None
    query, key, value = exchange.to_heads(query), exchange.keys_to_heads(key), exchange.keys_to_heads(value)
    sinks = None if sinks is None else exchange.head_values(sinks)
    return exchange.to_span(_attend(query, key, value, sinks, documents, options))


def _attend(  # noqa: PLR0913 - the operands of a formula
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, documents: Documents, options: AttentionOptions
) -> Tensor:
    """Attend in whole rows by the form that takes these operands; [1, T, heads, size]."""
    plain = options.softcap is None and sinks is None and not options.dropout
    if plain and flash_takes(query.device.type, query.dtype, query.shape[-1], value.shape[-1]):
        return _flash(query, key, value, documents.runs, options)
    if torch.compiler.is_compiling() and not options.dropout:
        return attend_as_operation(query, key, value, sinks, documents.layout, options)
    attended: Tensor = _document_by_document(query, key, value, sinks, documents, options)
    return attended


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's; lengths of documents decide what runs
def _document_by_document(  # noqa: PLR0913 - the operands of a formula
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, documents: Documents, options: AttentionOptions
) -> Tensor:
    return attend_in_documents(query, key, value, sinks, documents.lengths, documents.branches, options)


def _documents(module: nn.Module, options: Mapping[str, Any]) -> Documents:
    """Return where documents end, after making sure that nothing else decides who sees whom."""
    documents: Documents | None = options.get("documents")
    unknown = sorted(name for name, value in options.items() if isinstance(value, Tensor) and name not in _KNOWN)
    windowed = getattr(getattr(module, "config", None), "sliding_window", None) is not None
    if documents is None:
        problem = "does not pass keyword arguments to its attention, so packed documents would see each other"
    elif unknown:
        problem = f"hands {unknown[0]} to its attention, which packed attention does not know"
    elif options.get("is_causal") is False:
        problem = "attends to later tokens, which packed attention does not do"
    elif windowed and "sliding_window" not in options:
        # Such a layer counts on the mask of the row for its window, and packed attention builds none.
        problem = "does not say whether its sliding window is on"
    else:
        return documents
    raise ModelError(f"{type(module).__name__} {problem}. Set model.attention: sdpa.")


def flash_takes(device_type: str, dtype: torch.dtype, query_size: int, value_size: int) -> bool:
    """Whether torch's variable-length kernel takes heads of these sizes; it pads none and wants one size for all."""
    half = device_type == "cuda" and dtype in {torch.bfloat16, torch.float16}
    return half and value_size == query_size and query_size <= 256 and query_size % 8 == 0


def pads_branches(model: Any, device_type: str, dtype: torch.dtype) -> bool:
    """Whether branches of a shared head are computed side by side, as long as the longest, in some layer of a model."""
    written_out = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None or any(
        name.endswith(".sinks") for name, _ in model.named_parameters()
    )
    return written_out or not all(flash_takes(device_type, dtype, *sizes) for sizes in head_sizes(model))


def head_sizes(model: Any) -> set[tuple[int, int]]:
    """Return the sizes of a head's query and value that the attention layers of a language model have.

    The layers tell them. A configuration has one `head_dim`, while the layers of Gemma 4 are of two sizes, and that of
    DeepSeek's counts only what is rotated.
    """
    sizes = set()
    for layer in model.get_decoder().modules():
        size = getattr(layer, "qk_head_dim", None) or getattr(layer, "head_dim", None)
        if isinstance(size, int) and hasattr(layer, "layer_idx"):
            value_size: Any = getattr(layer, "v_head_dim", None) or size
            sizes.add((size, int(value_size)))
    text = model.config.get_text_config()
    size = text.hidden_size // text.num_attention_heads
    return sizes or {(size, size)}


def attention_layers(model: Any) -> int:
    """Return how many attention layers a language model has, among recurrent ones."""
    # Mamba's mixers have heads of a size too, but no groups of them share keys.
    return sum(
        hasattr(layer, "layer_idx") and (hasattr(layer, "qk_head_dim") or hasattr(layer, "num_key_value_groups"))
        for layer in model.get_decoder().modules()
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, runs: KernelRuns, options: AttentionOptions) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    arguments, named = flash_call(query, key, value, runs, options, groups=takes_groups())
    out = varlen_attn(*arguments, **named)
    assert isinstance(out, Tensor)
    return out[None]


def flash_call(  # noqa: PLR0913 - the operands of a formula
    query: Tensor, key: Tensor, value: Tensor, runs: KernelRuns, options: AttentionOptions, *, groups: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `torch.nn.attention.varlen.varlen_attn`, by position and by name.

    Its window counts the tokens to the left of a query, without the query's own; (-1, 0) is plain causal attention.

    Args:
        query, key, value: As in `packed_attention`.
        runs: Which keys each query sees.
        options: What the layer asks for; the kernel knows neither soft caps nor dropout.
        groups: Whether the kernel takes fewer key heads than query heads; otherwise key heads are repeated.
    """
    if runs.shared is not None:
        key, value = repeat_keys(key, runs.shared), repeat_keys(value, runs.shared)
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [T, heads, size]
    left = -1 if options.window is None else options.window - 1
    named: dict[str, Any] = {"scale": options.scaling, "window_size": (left, 0)}
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and groups:
        named["enable_gqa"] = True
    elif repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    longest = (size.shape[0] for size in runs.longest)
    return (query, key, value, runs.query_offsets, runs.key_offsets, *longest), named


def cache_argument(model: nn.Module, value: Any) -> dict[str, Any]:
    """Return a cache as the argument of a call of a model."""
    return {_cache_name(type(model).forward): value}


def cache_of(output: Any) -> Any:
    """Return the cache that a model returned; None if it returned none."""
    return output.cache if hasattr(output, "cache") else getattr(output, "past_key_values", None)


@cache
def _cache_name(forward: Any) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


# Dynamo traces what a cache wraps, with a warning; a constant it asks for once.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
def takes_groups() -> bool:
    """Return whether `varlen_attn` has the option `enable_gqa`."""
    return "enable_gqa" in _options()


@cache
def _options() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)
