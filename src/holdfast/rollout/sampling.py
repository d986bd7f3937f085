"""Draw tokens from logits by inverting the distribution at a uniform number, a hash of request seed and position.

The number depends on nothing else: neither on the batch in which a request is decoded, nor on the rank, nor on time.
With equal logits, the same request gives the same tokens anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.config.sections.rollout import SamplingConfig
from holdfast.models.support import Support

_BLOCK = 512
"""Tokens per block: a draw first finds a block, then a token in it, by two short float64 sums instead of a long one."""

_GOLDEN = -7046029254386353131
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)
"""The constants of SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"), as signed
64-bit integers."""


def mixed(value: int, *more: int) -> int:
    """Fold integers into one 63-bit seed; another order or another number of them gives another seed."""
    state = 0
    for integer in (value, *more, 1 + len(more)):
        state = (state + integer * _MULTIPLIERS[0] + _GOLDEN) % 2**64
        state = (state ^ state >> 30) * _MULTIPLIERS[0] % 2**64
        state = (state ^ state >> 27) * _MULTIPLIERS[1] % 2**64
        state ^= state >> 31
    return state % 2**63


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return [n] float64 numbers in [0, 1), a function of seed and position alone.

    Args:
        seeds: [n] int64
        positions: [n] int64, which token of the completion.
    """
    bits = _mix(seeds + (positions + 1) * _GOLDEN)
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53


def _mix(bits: Tensor) -> Tensor:
    # >> copies the sign bit of an int64, so what it shifts in is masked away.
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * _MULTIPLIERS[0]
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * _MULTIPLIERS[1]
    return bits ^ ((bits >> 31) & (2**33 - 1))


def draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row, and return tokens [n] and their log-probabilities [n].

    Args:
        logits: [n, V] float32 or float64, already divided by the temperature; overwritten.
        uniforms: [n] float64 in [0, 1).
    """
    rows, vocabulary = logits.shape
    maximum = logits.amax(-1, keepdim=True)
    weights = logits.sub_(maximum).exp_()
    full_width = vocabulary // _BLOCK * _BLOCK
    sums = weights[:, :full_width].view(rows, -1, _BLOCK).sum(-1) if full_width else weights[:, :0]
    if full_width < vocabulary:
        sums = torch.cat([sums, weights[:, full_width:].sum(-1, keepdim=True)], 1)
    ends = sums.double().cumsum(-1)
    targets = _below(uniforms[:, None] * ends[:, -1:], ends)
    block = torch.searchsorted(ends, targets, right=True).clamp_(max=ends.shape[1] - 1)
    remainder = targets - (ends.gather(1, block) - sums.double().gather(1, block))
    indices = block * _BLOCK + torch.arange(min(_BLOCK, vocabulary), device=logits.device)
    outside = indices >= vocabulary
    inside = weights.gather(1, indices.masked_fill_(outside, 0)).masked_fill_(outside, 0)
    steps = inside.double().cumsum(-1)
    offset = torch.searchsorted(steps, _below(remainder, steps), right=True)
    tokens = (block * _BLOCK + offset).squeeze(1).clamp_(max=vocabulary - 1)
    drawn_weights = weights.gather(1, tokens[:, None]).squeeze(1)
    return tokens, (drawn_weights.double().log() - ends[:, -1].log()).to(logits.dtype)


def _below(numbers: Tensor, ends: Tensor) -> Tensor:
    """Bring numbers [n, 1] below the last of the running sums [n, m]: rounding may put them behind every token."""
    last = ends[:, -1:]
    return torch.minimum(numbers, torch.nextafter(last, last * 0))


def most_probable(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable tokens [n] and their log-probabilities [n]; logits are [n, V]."""
    tokens = logits.argmax(-1)
    return tokens, logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)


def restrict(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return logits with the tokens that top_k, top_p and min_p leave out at minus infinity.

    Args:
        logits: [n, V], already divided by the temperature.
        sampling: The options, applied in the order top_k, top_p, min_p, as transformers does.
    """
    if sampling.top_k is None and sampling.top_p == 1.0 and sampling.min_p == 0.0:
        return logits
    return Support(sampling.top_k, sampling.top_p, sampling.min_p).restrict(logits)


def penalise(logits: Tensor, is_present: Tensor, penalty: float) -> Tensor:
    """Make tokens less probable that stand in the prompt or the completion so far.

    Args:
        logits: [n, V], before the temperature.
        is_present: [n, V] bool.
        penalty: Above 1 discourages repetition. Keskar et al., "CTRL" (arXiv:1909.05858), section 4.1, in the form that
            also lowers negative logits.
    """
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(is_present, lowered, logits)


_UNSURE = 16
"""Characters at the beginning of a decoded part that may be others in the text of the whole."""
_UNDECODABLE = "\ufffd"
"""What a decoder writes for bytes that are no character."""


@dataclass(frozen=True)
class Stops:
    """Tokens and texts that end a completion; both belong to it."""

    tokens: frozenset[int]
    decode: Callable[[Sequence[int]], str] = lambda tokens: ""  # noqa: ARG005 - without texts nothing is decoded
    texts: tuple[str, ...] = ()

    def with_texts(self, texts: Sequence[str]) -> Stops:
        """Return stops at the same tokens and at these texts."""
        return replace(self, texts=tuple(texts))

    def end(self, tokens: Sequence[int], before: int) -> int | None:
        """Return how many tokens the completion has, or None if it goes on.

        Args:
            tokens: All of them so far.
            before: How many were looked at before, and did not end it.
        """
        for size in range(before + 1, len(tokens) + 1):
            if tokens[size - 1] in self.tokens or (self.texts and self._has_text(tokens, size)):
                return size
        return None

    def _has_text(self, tokens: Sequence[int], size: int) -> bool:
        """Say whether the text of the first `size` tokens holds a stop text, where that of one token less does not.

        Few tokens are decoded to rule it out: the last one, and before it those whose text surely has room for a stop
        text. Where they begin, a decoder may drop a space, or find a part of a character.
        """
        room = max(map(len, self.texts)) + _UNSURE
        start = size - 1 - room
        while start > 0 and len(self.decode(tokens[start : size - 1]).lstrip(_UNDECODABLE)) < room:
            start -= size - start
        if start > 0 and not self._in(tokens[start:size]):
            return False
        return self._in(tokens[:size])

    def _in(self, tokens: Sequence[int]) -> bool:
        text = self.decode(tokens)
        return any(stop in text for stop in self.texts)
