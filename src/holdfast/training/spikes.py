"""The batch of a step whose loss or gradient spiked, in a file of each rank: which rows it was, and how they begin.

What makes an alarm a spike are numbers that all ranks share, so all of them write their part without a word between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.escaping import escaped
from holdfast.training.run import Run
from holdfast.types import Batch

FOLDER = "spikes"
_SHOWN_TOKENS = 200
"""Of a sequence, as text."""


def record_batch(run: Run, step: int) -> str:
    """Write the sequences that this rank trained in a step; return the file's path in the run.

    Raises:
        OSError: The disk does not take it.
    """
    name = f"{FOLDER}/step-{step:08d}.rank-{run.setting.ranks.rank}.jsonl"
    place = run.setting.directory / name
    place.parent.mkdir(exist_ok=True)
    lines = [json.dumps(line) for line in _sequences(run.setting.log.batches, run.trained.origin.tokenizer)]
    place.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return name


def _sequences(batches: Sequence[Batch], tokenizer: Any) -> Iterator[dict[str, Any]]:
    written = set()
    for batch in batches:
        for index, sample in enumerate(batch.sample_ids):
            own = batch.sequence_ids == index
            tokens = batch.tokens[own].tolist()
            if sample in written or not tokens:
                continue
            written.add(sample)
            text = "" if tokenizer is None else tokenizer.decode(tokens[:_SHOWN_TOKENS])
            yield {
                "sample_id": sample,
                "prompt_id": batch.prompt_ids[index],
                "source": batch.sources[index],
                "tokens": len(tokens),
                "trained_tokens": int(batch.loss_mask[own].sum()),
                "begins": escaped(text),
            }
