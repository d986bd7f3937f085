"""Completions through transformers' own `generate`: slow, and right for every architecture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Completion:
    """What followed a prompt."""

    tokens: list[int]
    """Up to and including the end-of-sequence token, if it came."""
    finished: bool
    """Whether it ended by itself."""


@torch.no_grad()
def complete(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Sequence[int],
    pad_token: int,
    temperature: float = 0.0,
    rows: int = 64,
) -> list[Completion]:
    """Complete prompts in batches of `rows`, longest first, left-padded.

    Args:
        model: A plain transformers model.
        prompts: Token ids.
        max_new_tokens: Most tokens of a completion.
        stop_tokens: Any of these ends a completion.
        pad_token: Fills the left side.
        temperature: 0 takes the most probable token.
        rows: Prompts decoded together.
    """
    device = next(model.parameters()).device
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    found: dict[int, Completion] = {}
    for start in range(0, len(order), rows):
        members = order[start : start + rows]
        width = max(len(prompts[index]) for index in members)
        tokens = torch.full((len(members), width), pad_token, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, index in enumerate(members):
            tokens[row, width - len(prompts[index]) :] = torch.tensor(list(prompts[index]))
            mask[row, width - len(prompts[index]) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(start)  # of its own: an evaluation must not change what training draws
            out = model.generate(
                input_ids=tokens.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=max_new_tokens,
                eos_token_id=list(stop_tokens),
                pad_token_id=pad_token,
                **sampling,
            )
        for row, index in enumerate(members):
            found[index] = _cut(out[row, width:].tolist(), set(stop_tokens))
    return [found[index] for index in range(len(prompts))]


def _cut(tokens: list[int], stops: set[int]) -> Completion:
    end = next((position for position, token in enumerate(tokens) if token in stops), None)
    return Completion(tokens if end is None else tokens[: end + 1], end is not None)
