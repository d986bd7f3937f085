"""Cursors in checkpoints of earlier commits lead to the batches that those commits would have served."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from holdfast.data.batches.passes import StreamLimits
from tests.batching.sources import indexed, streamed
from tests.batching.streams import held, stream
from tests.batching.test_resume import KINDS

RECORDS = Path(__file__).with_name("earlier_cursors.json")
"""Of a commit that had no `Pass`: for each case its states before steps 1, 5 and 9, and a sum of each batch."""
LIMITS: dict[str, dict[str, Any]] = {
    "endless": {},
    "two passes and a half": {"passes": 2.5},
    "two batches a pass": {"batches": 2, "passes": 3.5},
    "half of the rows": {"passes": 1.5, "by_rows": True},
    "repeated": {"batches": 3, "repeat": True},
    "first rows": {"draws": 9, "passes": 2},
}


def opened(kind: str, limits: str, source: str) -> Any:
    rows = indexed(17) if source == "indexed" else streamed(17)
    accept = (lambda row: row["number"] % 5 != 2) if source == "indexed" else None
    settings = {"allow_partial": True, **KINDS[kind]}
    return stream(rows, seed=5, limits=StreamLimits(**LIMITS[limits]), accept=accept, **settings)


def served(found: Any, first: int, last: int) -> list[int]:
    """Return a sum over the tokens of each batch of steps first..last-1, up to the end."""
    batches = (found.next(step) for step in range(first, last))
    held_by = (sorted(held(batch).items()) for batch in iter(lambda: next(batches, None), None))
    return [zlib.crc32(json.dumps(tokens).encode()) for tokens in held_by]


@pytest.mark.parametrize("source", ["indexed", "streamed"])
@pytest.mark.parametrize("limits", LIMITS)
def test_streams_go_on_from_recorded_cursors_with_the_recorded_batches(limits: str, source: str) -> None:
    for kind in KINDS:
        record = json.loads(RECORDS.read_text())[f"{kind}, {limits}, {source}"]

        for step, state in record["states"].items():
            found = opened(kind, limits, source)
            found.load_state(state)

            assert served(found, int(step), 12) == record["served"][int(step) :], (kind, step)
            assert found.state() == record["end"], (kind, step)
