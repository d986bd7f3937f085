"""Streams over rows in memory, and what they serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from holdfast.config.sections.data import DataConfig
from holdfast.data.batches.assembly import Layout
from holdfast.data.batches.candidates import CandidateReader, Ranks, Tokenise
from holdfast.data.batches.packing import unpack
from holdfast.data.batches.passes import StreamLimits
from holdfast.data.batches.stream import SampleStream
from holdfast.data.rows.reading import DrawOrder, RowReader
from holdfast.data.rows.rows import Row, Source
from holdfast.types import MiniBatch
from tests.batching.sources import as_tokens

T = TypeVar("T")


class Alone:
    """The ranks of a run of a single process."""

    rank = 0
    size = 1

    def gather(self, item: T) -> list[T]:
        return [item]

    def swap(self, outgoing: Sequence[T]) -> list[T]:
        return list(outgoing)


def stream(
    *sources: Source,
    ranks: Ranks | None = None,
    weights: Sequence[float] | None = None,
    seed: int = 0,
    limits: StreamLimits | None = None,
    tokenise: Tokenise = as_tokens,
    accept: Callable[[Row], bool] | None = None,
    **data: Any,
) -> SampleStream:
    """Return a stream of small batches; unshuffled unless asked for."""
    settings = {"path": "rows", "batch_size": 4, "max_length": 16, "tokens_per_micro_batch": 16, "shuffle": False}
    config = DataConfig(**(settings | data))
    ranks = ranks or Alone()
    order = DrawOrder(
        [source.size for source in sources], weights, seed=seed, shuffle=config.shuffle, block=config.shuffle_buffer
    )
    reader = CandidateReader(RowReader(sources, order), tokenise, ranks, accept)
    return SampleStream(reader, config, Layout(), limits)


def held(mini_batch: MiniBatch | None) -> dict[int, list[int]]:
    """Return the tokens of every sample of this rank's micro-batches, by sample id; pieces of a sample in order."""
    assert mini_batch is not None
    pieces = [example for batch in mini_batch.micro_batches for example in unpack(batch)]
    tokens: dict[int, list[int]] = {}
    for example in sorted(pieces, key=lambda piece: (piece.sample_id, piece.tokens[0])):
        tokens.setdefault(example.sample_id, []).extend(example.tokens.tolist())
    return tokens


def numbers(mini_batch: MiniBatch | None) -> list[int]:
    """Return the numbers of the rows in a mini-batch, in the order of their sample ids."""
    return [tokens[0] // 1000 for tokens in held(mini_batch).values()]


def serve(source: SampleStream, steps: int, first: int = 0) -> list[list[int]]:
    """Return the row numbers of so many updates, or of fewer if the stream ends."""
    batches = (source.next(step) for step in range(first, first + steps))
    return [numbers(batch) for batch in iter(lambda: next(batches, None), None)]
