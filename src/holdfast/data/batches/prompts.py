"""Turn rows into prompts for sampling, and the resumable stream of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.config.sections.data import DataConfig, PromptDataConfig
from holdfast.data.batches.candidates import Candidates
from holdfast.data.batches.stream import BatchStream
from holdfast.data.content.lengths import joined_inputs
from holdfast.data.rows.rows import Row
from holdfast.data.tokens.chat import RowTokeniser, Tokenised
from holdfast.errors import DataError
from holdfast.types import Prompt


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of a step."""

    own_prompts: tuple[Prompt, ...]
    """Those of this rank, in draw order."""
    ids: tuple[int, ...]
    """Prompt ids over all ranks, in draw order."""
    metrics: Mapping[str, float]
    """What reading counted, over all ranks."""


class PromptStream(BatchStream[Prompt, PromptBatch]):
    """Prompts, a step's at a time. A rank continues the prompts it read: none of them moves."""

    def _batch_of(self, candidates: Candidates[Prompt]) -> PromptBatch:
        own_prompts = tuple(prompt for _, prompt in sorted(candidates.own_sequences.items()))
        counted = {f"data/{name}": float(number) for name, number in candidates.counts.items()}
        return PromptBatch(own_prompts, tuple(sequence.draw for sequence in candidates.sequences), counted)


def prompt_tokeniser(
    tokeniser: RowTokeniser,
    decode: Callable[[list[int]], str],
    config: DataConfig,
    longest: int,
    why_no_videos: str = "",
) -> Callable[[Row, int, str, str], Tokenised[Prompt]]:
    """Return the function that turns rows into prompts.

    Args:
        tokeniser: Renders and tokenises a row's prompt.
        decode: Tokens to text, special tokens included.
        config: The data section.
        longest: Tokens a prompt may have.
        why_no_videos: Why a prompt may have no videos; "" if it may.
    """

    def tokenise(row: Row, sample_id: int, source: str, name: str) -> Tokenised[Prompt]:
        written, laid, positions, counts, images = tokeniser.opening(row, name, why_no_videos)
        tokens = np.asarray(laid.tokens, dtype=np.int64)
        if tokens.size == 0:
            raise DataError(f"{name}: its prompt is empty, and there is nothing to continue. Remove the row.")
        if tokens.size <= longest:
            columns: dict[str, Any] = dict(row)
            inputs = joined_inputs(laid)
            prompt = Prompt(sample_id, tokens, decode(written), columns, source, inputs, positions, images)
            return Tokenised((prompt,), counts, lengths=(tokens.size,))
        if config.overlong == "refuse":
            limit, key = f"data.max_length={config.max_length} less rollout.max_new_tokens", "data.max_length"
            if isinstance(config, PromptDataConfig) and config.max_prompt_length is not None:
                limit = key = "data.max_prompt_length"
            raise DataError(
                f"{name}: its prompt has {tokens.size} tokens, and {limit} leaves room for {longest}. Raise {key}, or "
                "set data.overlong: drop."
            )
        return Tokenised((), {"overlong_dropped": 1}, lengths=(tokens.size,))

    return tokenise
