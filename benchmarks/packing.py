"""Packing 100,000 documents: CPU microseconds per token, and whether memory stays flat.

    python benchmarks/packing.py [--documents 100000] [--rounds 3]

One process; rows are tokens already, so what is timed is ours alone: order, planning, moving, packing. An arm runs in a
process of its own; `best_fit` and `wrapped` read documents of lognormal length, `plan` plans all of them at once.
Memory is flat if the resident set grows by less than 16 MiB between the first tenth of the documents and the last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from measure import Meter, alternate, heading, resident_mib

from holdfast.config.sections.data import DataConfig
from holdfast.data.batches.assembly import plan_packs
from holdfast.data.batches.candidates import CandidateReader
from holdfast.data.batches.passes import StreamLimits
from holdfast.data.batches.stream import SampleStream
from holdfast.data.rows.reading import DrawOrder, RowReader
from holdfast.data.rows.rows import from_rows
from holdfast.data.tokens.chat import Tokenised
from holdfast.parallel.collectives import RankGroup
from holdfast.types import Example

LONGEST, BUDGET, BATCH = 2048, 16_384, {"best_fit": 512, "wrapped": 64}
MOST_MICROSECONDS, MOST_GROWTH_MIB = 2.0, 16.0


class Lengths:
    """Rows that say how long a document is."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"length": int(self._lengths[index])}


def lengths_of(documents: int, median: float) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(median), 1.0, documents)
    return drawn.astype(np.int64).clip(8, LONGEST)


def tokenise(row: Mapping[str, Any], sample_id: int, source: str, name: str) -> Tokenised:  # noqa: ARG001
    mask = np.ones(row["length"], dtype=np.bool_)
    mask[0] = False
    return Tokenised((Example(sample_id, sample_id, np.zeros(row["length"], dtype=np.int64), mask, source),), {})


def serve(packing: Literal["best_fit", "wrapped"], documents: int, median: float) -> dict[str, float]:
    lengths = lengths_of(documents, median)
    source = from_rows(Lengths(lengths), "documents")
    config = DataConfig(
        path="documents", packing=packing, max_length=LONGEST, tokens_per_micro_batch=BUDGET, batch_size=BATCH[packing]
    )
    ranks = RankGroup()
    reader = CandidateReader(RowReader([source], DrawOrder([source.size])), tokenise, ranks)
    stream = SampleStream(reader, config, limits=StreamLimits(passes=1))
    tokens = step = 0
    fill = 0.0
    resident: list[float] = []
    meter = Meter()
    begin = meter.seconds()
    while (batch := stream.next(step)) is not None:
        tokens += batch.tokens
        fill += batch.metrics["data/fill"]
        step += 1
        resident.append(resident_mib())
    seconds = meter.seconds() - begin
    tenth = max(1, len(resident) // 10)
    return {
        "us_per_token": 1e6 * seconds / tokens,
        "us_per_document": 1e6 * seconds / documents,
        "tokens": tokens,
        "fill": fill / step,
        "growth_mib": max(resident[-tenth:]) - max(resident[:tenth]),
    }


def plan(documents: int, median: float) -> dict[str, float]:
    lengths = lengths_of(documents, median).tolist()
    meter = Meter()
    begin = meter.seconds()
    packs = plan_packs(lengths, budget=BUDGET, ranks=8)
    seconds = meter.seconds() - begin
    return {
        "us_per_token": 1e6 * seconds / sum(lengths),
        "us_per_document": 1e6 * seconds / documents,
        "tokens": sum(lengths),
        "fill": sum(lengths) / (len(packs[0]) * 8 * BUDGET),
    }


ARMS = {
    "best_fit, median 300": lambda documents: serve("best_fit", documents, 300),
    "best_fit, median 60": lambda documents: serve("best_fit", documents, 60),
    "wrapped, median 300": lambda documents: serve("wrapped", documents, 300),
    "wrapped, median 60": lambda documents: serve("wrapped", documents, 60),
    "plan of all at once, 8 ranks": lambda documents: plan(documents, 300),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", choices=sorted(ARMS))
    options = parser.parse_args()
    if options.arm is not None:
        print(json.dumps(ARMS[options.arm](options.documents)))
        return
    missed = False
    print(heading())
    print(f"{options.documents:,} documents of 8 to {LONGEST} tokens; packs of {BUDGET}; rows to an update: {BATCH}")
    rounds = alternate(__file__, list(ARMS), options.rounds, "--documents", str(options.documents))
    for name in ARMS:
        times = [turn[name]["us_per_token"] for turn in rounds]
        growths = [turn[name]["growth_mib"] for turn in rounds if "growth_mib" in turn[name]]
        ok = max(times) < MOST_MICROSECONDS and max(growths, default=0.0) < MOST_GROWTH_MIB
        missed = missed or not ok
        each = " ".join(f"{value:.3f}" for value in times)
        line = f"{'ok  ' if ok else 'MISS'}  {name}: worst {max(times):.3f} us per token"
        line += f" (target < {MOST_MICROSECONDS}; rounds {each})"
        if growths:
            line += f", memory grows by at most {max(growths):.1f} MiB (target < {MOST_GROWTH_MIB:.0f})"
        print(line)
    sys.exit(missed)


if __name__ == "__main__":
    main()
