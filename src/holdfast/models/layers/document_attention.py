"""Attention within documents by torch's own products, document by document, and as one operation of a compiled block.

Documents of equal length that lie next to each other share one product. Masks are built per length, never of a row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own short name
from torch import Tensor

from holdfast.models.layers.exchange import RowExchange
from holdfast.models.layers.shared_keys import SharedKeys, key_places


class AttentionOptions(NamedTuple):
    """What a layer asks for."""

    scaling: float | None
    """Factor of the products; default 1 / sqrt(head size)."""
    window: int | None
    """Tokens that a query sees, its own included; None for all."""
    softcap: float | None
    """Scores are bounded by cap * tanh(score / cap) (Gemma 2, arXiv:2408.00118)."""
    dropout: float
    """Probability of dropping an attention weight."""


def attend_in_documents(  # noqa: PLR0913 - the operands of a formula
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    lengths: tuple[int, ...],
    branches: tuple[tuple[int, ...], ...],
    options: AttentionOptions,
) -> Tensor:
    """Attend causally within each document.

    Args:
        query: [1, heads, T, size]
        key: [1, key heads, T, size]; each serves heads / key heads queries.
        value: As key; its heads may be of another size.
        sinks: [heads], one more logit per head that takes weight and gives nothing (gpt-oss, after arXiv:2309.17453).
        lengths: Tokens of each document.
        branches: Of each document, lengths of the parts that share its head.
        options: What the layer asks for.

    Returns:
        [1, T, heads, value size]
    """
    plain = options.softcap is None and sinks is None
    scaling, dropout = options.scaling, options.dropout

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = _mask(q.shape[2], k.shape[2], options.window, query.device)
        if not plain:
            return _explicit(q, k, v, mask, sinks, options)
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )

    parts = []
    for start, count, length, parts_of_head in neighbours(lengths, branches):
        q, k, v = (tensor[:, :, start : start + count * length] for tensor in (query, key, value))
        if parts_of_head:
            for offset in range(0, count * length, length):
                document = slice(offset, offset + length)
                parts += _branched(attend, q[:, :, document], k[:, :, document], v[:, :, document], parts_of_head)
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
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Attend with the weights written out, for what the fused kernels do not offer."""
    scaling, softcap, dropout = options.scaling, options.softcap, options.dropout
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


_OPERANDS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor layout, float? scaling, int? window, float? softcap"
)


@torch.library.custom_op("holdfast::documents_attention", mutates_args=(), schema=f"({_OPERANDS}) -> Tensor")
def _operation(  # noqa: PLR0913 - the operands of a formula
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layout: Tensor, *options: Any
) -> Tensor:
    scaling, window, softcap = options
    asked = AttentionOptions(scaling, window, softcap, 0.0)
    return attend_in_documents(query, key, value, sinks, *read_layout(layout), asked).contiguous()


@torch.library.custom_op(
    "holdfast::documents_attention_backward", mutates_args=(), schema=f"(Tensor gradient, {_OPERANDS}) -> Tensor[]"
)
def _backward_operation(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> list[Tensor]:
    sinks, layout, scaling, window, softcap = others
    lengths, branches = read_layout(layout)
    asked = AttentionOptions(scaling, window, softcap, 0.0)

    def attend(*operands: Tensor) -> Tensor:
        query, key, value, *rest = operands
        sinks = rest[0] if rest else None
        return attend_in_documents(query, key, value, sinks, lengths, branches, asked)

    operands = (query, key, value) if sinks is None else (query, key, value, sinks)
    # Within an operation autograd records nothing; torch.func does.
    _, backward, *_ = torch.func.vjp(attend, *operands)
    return [slope.contiguous() for slope in backward(gradient)]


@_operation.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


@_backward_operation.register_fake
def _(_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *_: object) -> list[Tensor]:
    operands = [query, key, value] if sinks is None else [query, key, value, sinks]
    return [operand.new_empty(operand.shape) for operand in operands]


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    *operands, ctx.scaling, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(*operands)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    options = (ctx.scaling, ctx.window, ctx.softcap)
    query, key, value, *sinks = _backward_operation(gradient, *ctx.saved_tensors, *options)
    return query, key, value, sinks[0] if sinks else None, None, None, None, None


_operation.register_autograd(_differentiate, setup_context=_save_operands)


def attend_as_operation(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layout: Tensor, options: AttentionOptions
) -> Tensor:
    """Do what `attend_in_documents` does, as one operation of a compiled program, without dropout.

    The compiler sees neither lengths nor loops, so one program serves all of them. The backward pass computes the
    attention weights again.

    Args:
        query, key, value, sinks, options: As in `attend_in_documents`.
        layout: That of `Documents`.
    """
    attended: Tensor = _operation(query, key, value, sinks, layout, options.scaling, options.window, options.softcap)
    return attended


@dataclass(frozen=True)
class KernelRuns:
    """Runs of queries and the keys that each sees, as torch's variable-length kernel takes them.

    A run is a whole document, or a head that branches share, or one of its branches. The kernel aligns the last query
    of a run with its last key, so a branch sees its head and itself.
    """

    query_offsets: Tensor
    """[runs + 1] int32 on the device: where the queries of each run start, and the end of the last."""
    key_offsets: Tensor
    """As `query_offsets`, of the keys."""
    shared: SharedKeys | None
    """The keys that runs see; None where they are those of the queries."""
    longest: tuple[Tensor, Tensor]
    """Two tensors without data on the host, as long as the longest run of queries and of keys."""


@dataclass(frozen=True)
class Documents:
    """Where documents begin and end in a packed row."""

    lengths: tuple[int, ...]
    """Tokens of each, on the host."""
    branches: tuple[tuple[int, ...], ...]
    """Of each: lengths of the parts that share its head and do not see each other; empty if it is one sequence."""
    layout: Tensor
    """[documents, 1 + most branches] int64 on the host: the length of each and those of its branches. Rows and columns
    of zeros mean nothing; there are at least two of both."""
    runs: KernelRuns
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
        branches = branches or tuple(() for _ in lengths)
        return cls(lengths, branches, _layout(lengths, branches), _runs(lengths, branches, device), exchange)


def neighbours(
    lengths: Sequence[int], branches: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """Yield (start, documents, length, branches) for each run of neighbours of equal shape."""
    start = 0
    for (length, parts), run in groupby(zip(lengths, branches, strict=True)):
        count = len(list(run))
        yield start, count, length, parts
        start += count * length


def read_layout(layout: Tensor) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the lengths of documents and of their branches, which `Documents.layout` holds."""
    rows = [[number for number in row if number] for row in layout.tolist()]
    rows = [row for row in rows if row]
    return tuple(row[0] for row in rows), tuple(tuple(row[1:]) for row in rows)


def _layout(lengths: Sequence[int], branches: Sequence[tuple[int, ...]]) -> Tensor:
    # Sizes of 0 and 1 are constants to the compiler.
    width = max(2, 1 + max(map(len, branches), default=0))
    rows = [(length, *parts, *(0,) * (width - 1 - len(parts))) for length, parts in zip(lengths, branches, strict=True)]
    rows += [(0,) * width] * (2 - len(rows))
    return _of_any_size(torch.tensor(rows, dtype=torch.int64))


def _runs(lengths: tuple[int, ...], branches: tuple[tuple[int, ...], ...], device: torch.device) -> KernelRuns:
    queries = keys = lengths
    shared: SharedKeys | None = None
    if any(branches):
        places, queries, keys = key_places(lengths, branches)
        found = SharedKeys.of(places)
        sent = [_of_any_size(_sent(each, device)) for each in (found.places, found.own, found.shared)]
        shared = SharedKeys(sent[0], sent[1], sent[2], _of_any_size(found.counts))
    query_offsets = _offsets(queries, device)
    key_offsets = query_offsets if shared is None else _offsets(keys, device)
    return KernelRuns(query_offsets, key_offsets, shared, (_as_size(max(queries)), _as_size(max(keys))))


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return _of_any_size(_sent(ends, device))


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy numbers to a device, on a GPU from pinned memory: more than 64 KiB of other memory would wait for it."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


def _as_size(number: int) -> Tensor:
    """Return a number as the size of a tensor without data, since the compiler takes an attribute for a constant."""
    return _of_any_size(torch.zeros(()).expand(number))


def _of_any_size(tensor: Tensor) -> Tensor:
    """Mark all sizes of a tensor as ones that change, so that a compiled block is not compiled again for each."""
    dynamo: Any = sys.modules.get("torch._dynamo")  # takes a second to import; where it is not, nothing is compiled
    if dynamo is not None:
        dynamo.maybe_mark_dynamic(tensor, list(range(tensor.ndim)))
    return tensor
