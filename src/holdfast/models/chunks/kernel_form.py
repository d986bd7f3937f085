"""The sweeps in two Triton kernels: logits stay in the dtype of the product, in one buffer for all chunks.

A logit is written by the product, read once for every statistic, overwritten with its slope, and read by two products.
Where the vocabulary is no multiple of 16, columns of minus infinity follow: they weigh nothing, and their slopes are 0.
Each kernel is an operation of torch with a fake form, so that a step can be planned where there is no device.
"""

from __future__ import annotations

import importlib
import importlib.metadata

import torch
from torch import Tensor

from holdfast.models.chunks.form import ScoreOptions, Slopes, Statistics
from holdfast.models.chunks.logits import HeadWeights, add_product, product_dtype, product_of, scaled
from holdfast.models.layers.family import HeadSpec

DTYPES = {torch.bfloat16, torch.float32}
OLDEST_TRITON = (3, 6)
"""What torch 2.11 brings, the oldest torch that the package takes."""
_OLDEST_CARD = (8, 0)
"""The first compute capability with bfloat16, and the oldest that Triton builds for."""
_MOST_TOKENS, _MOST_BYTES, _SHARE_OF_CARD = 4096, 2**31, 32
_RESTRICTED_ELEMENTS = 2**24
"""Logits that a support is applied to at once: it sorts them, in more than ten times their memory."""


@torch.library.custom_op("holdfast::read_logits", mutates_args=())
def _read_logits(  # noqa: PLR0913, PLR0917 - the operands of a formula
    products: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    inner: float | None,
    factor: float,
    entropy: bool,  # noqa: FBT001 - torch reads this signature
) -> Tensor:
    from holdfast.models.chunks.kernels import read_rows

    return read_rows(products, bias, targets, inner, factor, entropy=entropy)


@_read_logits.register_fake
def _(products, bias, targets, inner, factor, entropy):  # type: ignore[no-untyped-def]  # noqa: ARG001, PLR0913, PLR0917
    return products.new_empty((5, products.shape[0]), dtype=torch.float32)


@torch.library.custom_op("holdfast::write_slopes", mutates_args={"products"})
def _write_slopes(  # noqa: PLR0913, PLR0917 - the operands of a formula
    products: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    numbers: Tensor,
    inner: float | None,
    factor: float,
    entropy: bool,  # noqa: FBT001
) -> None:
    from holdfast.models.chunks.kernels import write_slopes

    write_slopes(products, bias, targets, numbers, inner, factor, entropy=entropy)


@_write_slopes.register_fake
def _(products, bias, targets, numbers, inner, factor, entropy):  # type: ignore[no-untyped-def]  # noqa: ARG001, PLR0913, PLR0917
    return None


class KernelForm:
    """A `Form` for a head in bfloat16 or float32, without smoothed labels."""

    sums_wide = True

    def __init__(self, head: HeadWeights, options: ScoreOptions) -> None:
        spec = options.spec
        assert spec.kernel_tokens is not None
        self.tokens = spec.kernel_tokens
        self._head, self._options = head, options
        capped = spec.softcap is not None
        self._inner = spec.scale / spec.softcap if spec.softcap is not None else None
        self._factor = (spec.softcap if capped and spec.softcap is not None else spec.scale) / options.temperature
        self._columns = columns_of(head.weight.shape[0])
        self._bias = head.bias
        if head.bias is not None and self._columns > len(head.bias):
            self._bias = torch.nn.functional.pad(head.bias.detach(), (0, self._columns - len(head.bias)))
        self._buffer: Tensor | None = None
        self._numbers: tuple[Tensor, ...] = ()

    def statistics(self, states: Tensor, targets: Tensor) -> Statistics:
        """Return the statistics of a chunk; no later one may be longer than the first."""
        weight = self._head.weight
        if self._buffer is None:
            dtype = product_dtype(self._options.spec, states.dtype)
            self._buffer = states.new_empty((states.shape[0], self._columns), dtype=dtype)
        padded = self._buffer[: states.shape[0]]
        products = product_of(states, weight, self._options.spec, padded[:, : weight.shape[0]])
        if padded.shape[1] > weight.shape[0]:
            padded[:, weight.shape[0] :] = float("-inf")  # slopes of the last chunk stand there
        if self._options.spec.support is not None:
            self._restrict(products, targets)
        best, others, chosen, mean_gap, count = _read_logits(
            padded, self._bias, targets, self._inner, self._factor, self._options.want_entropy
        )
        log_total = others.log1p()
        logprobs = (chosen - best) * self._factor - log_total
        # The kernel passes over what is no number while it looks for the largest.
        accuracy = torch.where((chosen >= best) & ~logprobs.isnan(), 1.0 / count, 0.0)
        self._numbers = (best, log_total, mean_gap)
        return Statistics(logprobs, log_total - mean_gap if self._options.want_entropy else None, accuracy, logprobs)

    def slopes(self, statistics: Statistics, targets: Tensor, by_logprob: Tensor, by_entropy: Tensor | None) -> Slopes:
        """Return the slopes of that chunk, in the dtype of the product; they lie where its logits were."""
        assert self._buffer is not None
        padded = self._buffer[: targets.shape[0]]
        at_target = by_logprob * -statistics.logprobs.expm1()
        last = torch.zeros_like(at_target) if by_entropy is None else by_entropy
        numbers = torch.stack([*self._numbers, by_logprob, at_target, last])
        _write_slopes(padded, self._bias, targets, numbers, self._inner, self._factor, by_entropy is not None)
        return Slopes(padded[:, : self._head.weight.shape[0]], None)

    def add_product(self, total: Tensor | None, by_logits: Tensor, states: Tensor) -> Tensor:
        """Return a sum with a product added; on a device it is never rounded to the dtype of its factors."""
        if not states.is_cuda or states.dtype == torch.float32:
            return add_product(total, by_logits, states)
        if total is None:
            return torch.mm(by_logits.t(), states, out_dtype=torch.float32)
        return torch.addmm(total, by_logits.t(), states, out_dtype=torch.float32, out=total)

    def _restrict(self, products: Tensor, targets: Tensor) -> None:
        """Write minus infinity over the products of tokens that the support leaves out."""
        spec = self._options.spec
        assert spec.support is not None
        rows = max(1, _RESTRICTED_ELEMENTS // products.shape[1])
        for start in range(0, products.shape[0], rows):
            part = products[start : start + rows]
            # A copy: products in float32 would be overwritten.
            logits, _ = scaled(part.to(torch.float32, copy=True), self._head.bias, spec, self._options.temperature)
            logits = spec.support.restrict(logits, targets[start : start + rows])
            part.masked_fill_(logits == float("-inf"), float("-inf"))


def columns_of(vocabulary: int) -> int:
    """Return how many columns logits have: with a multiple of 16, a row is read 16 bytes at a time."""
    return vocabulary if vocabulary % 16 == 0 else -(-vocabulary // 64) * 64


def kernels_take(options: ScoreOptions, dtype: torch.dtype) -> bool:
    """Return whether a call with products in a dtype is one for the kernels."""
    return options.spec.kernel_tokens is not None and dtype in DTYPES and not options.label_smoothing


def kernel_tokens(spec: HeadSpec, vocabulary: int, dtype: torch.dtype, card_bytes: int) -> int:
    """Return how many tokens the kernels score at once.

    It decides the order of sums, so it follows from what a resumed run finds again: never from what is free.

    Args:
        spec: With `chunk_tokens`, which goes before.
        vocabulary: Logits of a token.
        dtype: Of logits.
        card_bytes: The device's memory in all.
    """
    if spec.chunk_tokens is not None:
        return spec.chunk_tokens
    room = min(_MOST_BYTES, card_bytes // _SHARE_OF_CARD)
    tokens = min(_MOST_TOKENS, room // (vocabulary * dtype.itemsize))
    return max(128, tokens // 128 * 128)


def why_no_kernels(spec: HeadSpec, dtype: torch.dtype, device: torch.device) -> str:
    """Return why the kernels cannot run on a CUDA device; "" if nothing is known against it."""
    if dtype not in DTYPES:
        return f"they take bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if spec.scale <= 0:
        return f"they take a positive scale of logits, not {spec.scale:g}"
    if torch.version.hip is not None:
        return "they were written for NVIDIA's cards"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CARD:
        return f"they need compute capability 8.0, and the card has {capability[0]}.{capability[1]}"
    return why_no_triton()


def why_no_triton() -> str:
    """Return why Triton cannot be used here; "" if it can."""
    try:
        importlib.import_module("triton")
        version = importlib.metadata.version("triton")
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        return f"Triton is not installed ({error})"
    if tuple(int(number) for number in version.split(".")[:2]) < OLDEST_TRITON:
        return f"they need Triton {'.'.join(map(str, OLDEST_TRITON))} or later, and {version} is installed"
    return ""
