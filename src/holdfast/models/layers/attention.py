"""Attention inside documents that lie side by side, through transformers' attention interface.

transformers' models call the function registered under their `_attn_implementation` with queries, keys and values of
the whole row. Ours attends within each document only, from the lengths that travel with the call: no mask of the row
is ever built. On CUDA in 16-bit this is torch's variable-length flash kernel; elsewhere, and for soft caps and sinks,
one product per document (documents of equal length that lie next to each other share one).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own short name
from torch import Tensor, nn

from holdfast.errors import ModelError
from holdfast.models.layers.exchange import RowExchange

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


@dataclass(frozen=True)
class Documents:
    """Where documents begin and end in a packed row."""

    lengths: tuple[int, ...]
    """Tokens of each, on the host."""
    offsets: Tensor
    """[documents + 1] int32 on the device: where each starts, and the end of the last"""
    branches: tuple[tuple[int, ...], ...]
    """Of each: lengths of the parts that share its head and do not see each other; empty if it is one sequence."""
    exchange: RowExchange | None = None
    """Set where this rank computes a span of the row, and attention needs all of it."""

    @classmethod
    def of(
        cls,
        lengths: tuple[int, ...],
        device: torch.device,
        branches: tuple[tuple[int, ...], ...] | None = None,
        exchange: RowExchange | None = None,
    ) -> Documents:
        """Lay documents of these lengths side by side."""
        ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(lengths, ends.to(device, non_blocking=True), branches or tuple(() for _ in lengths), exchange)

    def runs(self) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
        """Yield (start, documents, length, branches) for each run of neighbours of equal shape."""
        start = 0
        for (length, branches), run in groupby(zip(self.lengths, self.branches, strict=True)):
            count = len(list(run))
            yield start, count, length, branches
            start += count * length


def register_attention() -> None:
    """Make the packed attention known to transformers; doing it again changes nothing."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, _no_mask)


def _no_mask(*_: object, **__: object) -> None:
    return None


# Documents differ in every batch, and a compiled block would be compiled again for each.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
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
    window = options.get("sliding_window")
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    exchange = documents.exchange
    if exchange is not None:
        query, key, value = exchange.to_heads(query), exchange.keys_to_heads(key), exchange.keys_to_heads(value)
        sinks = None if sinks is None else exchange.head_values(sinks)
    out = _attended(query, key, value, documents, (scaling, dropout, window, softcap, sinks))
    return (out if exchange is None else exchange.to_span(out)), None


def _attended(query: Tensor, key: Tensor, value: Tensor, documents: Documents, options: tuple[Any, ...]) -> Tensor:
    """Attend in whole rows; [1, heads, T, size] -> [1, T, heads, size]."""
    scaling, dropout, window, softcap, sinks = options
    plain = softcap is None and sinks is None
    if plain and not dropout and flash_takes(query.device.type, query.dtype, query.shape[-1], value.shape[-1]):
        return _flash(query, key, value, documents, scaling, window)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = _mask(q.shape[2], k.shape[2], window, query.device)
        if not plain:
            return _explicit(q, k, v, mask, scaling, dropout, softcap, sinks)
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )

    parts = []
    for start, count, length, branches in documents.runs():
        q, k, v = (tensor[:, :, start : start + count * length] for tensor in (query, key, value))
        if branches:
            for place in range(0, count * length, length):
                document = slice(place, place + length)
                parts += _branched(attend, q[:, :, document], k[:, :, document], v[:, :, document], branches)
        else:
            out = attend(*(_stack(tensor, count, length) for tensor in (q, k, v)))
            parts.append(out.transpose(1, 2).reshape(1, count * length, *out.shape[1::2]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _branched(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    branches: tuple[int, ...],
) -> list[Tensor]:
    """Attend within a head, and from each branch to the head and itself; return [1, part, heads, size] each.

    Branches run side by side, as long as the longest: what a shorter one has too much is cut off again.
    """
    head = query.shape[2] - sum(branches)
    longest, count = max(branches), len(branches)
    starts = torch.tensor([head + sum(branches[:number]) for number in range(count)], device=query.device)
    places = (starts[:, None] + torch.arange(longest, device=query.device)).clamp_(max=query.shape[2] - 1)
    own = [tensor[0][:, places].transpose(0, 1) for tensor in (query, key, value)]  # [branches, heads, longest, size]
    shared = [tensor[:, :, :head].expand(count, -1, -1, -1) for tensor in (key, value)]
    out = attend(own[0], *(torch.cat(pair, 2) for pair in zip(shared, own[1:], strict=True)))
    parts = [attend(query[:, :, :head], key[:, :, :head], value[:, :, :head])] if head else []
    parts += [out[number : number + 1, :, :length] for number, length in enumerate(branches)]
    return [part.transpose(1, 2) for part in parts]


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


def _stack(tensor: Tensor, count: int, length: int) -> Tensor:
    """[1, heads, count * length, size] -> [count, heads, length, size]"""
    if count == 1:
        return tensor
    heads, _, size = tensor.shape[1:]
    return tensor.squeeze(0).view(heads, count, length, size).transpose(0, 1)


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return [queries, keys], True where a query may see a key, or None for plain causal attention.

    The queries are the last of the keys. A query sees itself and the window - 1 tokens before it, as in transformers
    and Mistral 7B (arXiv:2310.06825).
    """
    if queries == keys and (window is None or window >= keys):
        return None
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _explicit(  # noqa: PLR0913 - the operands of a formula
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with the weights written out, for what the fused kernels do not offer.

    `softcap` bounds scores by cap * tanh(score / cap) (Gemma 2, arXiv:2408.00118); `sinks` [heads] is one more logit
    per head that takes weight and gives nothing (gpt-oss, after arXiv:2309.17453).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    length = key.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril() if mask is None else mask
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    wide = scores.dtype if scores.dtype == torch.float64 else torch.float32
    weights = scores.softmax(-1, dtype=wide).to(query.dtype)[..., :length]
    return F.dropout(weights, dropout) @ value if dropout else weights @ value


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


@cache
def _flash_takes_groups() -> bool:
    """Whether torch's kernel takes fewer key heads than query heads; torch 2.11 does not."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    call = flash_call if not any(documents.branches) else branched_flash_call
    arguments, options = call(query, key, value, documents, scaling, window, groups=_flash_takes_groups())
    out = varlen_attn(*arguments, **options)
    assert isinstance(out, Tensor)
    return out[None]


def branched_flash_call(*call: Any, groups: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `varlen_attn` where branches share a head; arguments as in `flash_call`.

    Keys and values of a head are repeated for each of its branches; queries are not. The kernel aligns the last query
    with the last key, so a branch sees its head and itself.
    """
    query, key, value, documents, *others = call
    places, query_lengths, key_lengths = key_places(documents)
    index = places.to(query.device, non_blocking=True)
    arguments, options = flash_call(query, key[:, :, index], value[:, :, index], documents, *others, groups=groups)
    offsets = [
        torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(query.device, non_blocking=True)
        for lengths in (query_lengths, key_lengths)
    ]
    return (*arguments[:3], *offsets, max(query_lengths), max(key_lengths)), options


def key_places(documents: Documents) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return where the keys of each run of queries lie, [all keys] int64, and how many queries and keys each run has.

    A run is a whole document, or a head, or one of its branches.
    """
    places, queries, keys, start = [], [], [], 0
    for length, branches in zip(documents.lengths, documents.branches, strict=True):
        head = length - sum(branches)
        shared = torch.arange(start, start + head)
        if head:
            places.append(shared)
            queries.append(head)
            keys.append(head)
        after = start + head
        for part in branches:
            places += [shared, torch.arange(after, after + part)]
            queries.append(part)
            keys.append(head + part)
            after += part
        start += length
    return torch.cat(places), tuple(queries), tuple(keys)


def flash_call(  # noqa: PLR0913 - the operands of a formula
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scaling: float | None,
    window: int | None,
    *,
    groups: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `torch.nn.attention.varlen.varlen_attn`, by position and by name.

    Its window counts the tokens to the left of a query, without the query's own; (-1, 0) is plain causal attention.

    Args:
        query, key, value: As in `packed_attention`.
        documents: Where they end.
        scaling: Factor of the products.
        window: Tokens a query sees, its own included; None for all.
        groups: Whether the kernel takes fewer key heads than query heads; otherwise key heads are repeated.
    """
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [T, heads, size]
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and groups:
        options["enable_gqa"] = True
    elif repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    longest = max(documents.lengths)
    return (query, key, value, documents.offsets, documents.offsets, longest, longest), options
