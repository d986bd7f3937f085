"""What rank pools run: whole streams, built from a configuration as a run builds them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.assembly import Layout
from holdfast.data.batches.packing import unpack
from holdfast.data.batches.stream import SampleStream
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.mesh import World
from holdfast.training.run import Run
from holdfast.training.setup.rows import open_data, row_tokeniser, training_stream

Served = list[list[tuple[int, tuple[int, ...]]]]
"""Per update: (sample id, tokens) of every sequence, over all ranks."""


def tree(**sections: Any) -> dict[str, Any]:
    """Return a run's tree whose `data` section is filled up."""
    data = {"batch_size": 8, "max_length": 48, "tokens_per_micro_batch": 48, "append_eos": False} | sections.pop(
        "data", {}
    )
    return {"steps": 99, "model": {"path": "unused"}, "data": data} | sections


@cache
def ranks() -> RankGroup:
    """Return the ranks of this rank's pool; a group for every case would cost more than the cases."""
    return RankGroup()


def open_stream(world: World, settings: dict[str, Any]) -> SampleStream:
    """Build the training stream as a run does, a model and its check aside."""
    config = from_mapping(settings, SFTConfig)
    run = Run(config=config, base=Path.cwd(), world=world, ranks=ranks())
    data = open_data(run)
    tokenise = row_tokeniser(run, character_tokenizer(), data.formats)
    return training_stream(run, data, tokenise, Layout())


def serve(stream: SampleStream, first: int, last: int) -> list[dict[str, Any]]:
    """Return what this rank holds of updates first..last-1, and what it says of the whole."""
    found = []
    for step in range(first, last):
        mini_batch = stream.next(step)
        if mini_batch is None:
            break
        examples = [example for batch in mini_batch.micro_batches for example in unpack(batch)]
        found.append(
            {
                "held": [(example.sample_id, tuple(example.tokens.tolist())) for example in examples],
                "micro_batches": len(mini_batch.micro_batches),
                "largest": max(int(batch.tokens.numel()) for batch in mini_batch.micro_batches),
                "loss_sum": sum(float((batch.weights * batch.loss_mask).sum()) for batch in mini_batch.micro_batches),
                "count": mini_batch.count,
                "samples": mini_batch.samples,
                "metrics": {k: v for k, v in mini_batch.metrics.items() if k not in BY_SPLIT},
                "epoch": stream.epoch,
                "state": stream.state(),
            }
        )
    return found


BY_SPLIT = {"data/fill", "data/micro_batches"}
"""Metrics that say how the work was split, and so differ with the ranks."""


def straight(world: World, settings: dict[str, Any], steps: int) -> tuple[list[dict[str, Any]], int]:
    """Serve from the start; also return how many rows this rank made into tokens."""
    stream = open_stream(world, settings)
    return serve(stream, 0, steps), stream.rows_tokenised


def resumed(world: World, settings: dict[str, Any], starts: list[tuple[dict[str, Any], int, int]]) -> list[Any]:
    """Serve updates first..last-1 from each (state, first, last), with a stream of its own each time."""
    found = []
    for state, first, last in starts:
        stream = open_stream(world, settings)
        stream.load_state(state)
        found.append(serve(stream, first, last))
    return found


def swapped(world: World, sizes: list[list[int]]) -> list[tuple[int, dict[str, Any]]]:
    """Send arrays of `sizes[from][to]` numbers to every rank; return what arrived and where it came from."""
    outgoing = []
    for target, size in enumerate(sizes[world.rank]):
        generator = np.random.default_rng([world.rank, target])
        sent = {"numbers": generator.integers(0, 2**60, size), "bits": generator.random(size).astype(np.float32)}
        outgoing.append((world.rank, sent))
    return ranks().swap(outgoing)
