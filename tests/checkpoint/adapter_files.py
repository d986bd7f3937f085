"""An export of adapters whose numbers are all the same."""

from __future__ import annotations

from pathlib import Path

import torch

from holdfast.checkpoint.export.adapters import Description, write_adapters
from holdfast.checkpoint.export.card import Papers
from holdfast.checkpoint.export.write import ExportReached
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.stream import headers_of

TEXTS = {"holdfast.yaml": "steps: 4"}


def write_adapters_of(number: float, place: Path, reached: ExportReached = lambda _: None) -> None:
    """Write adapters, on one process."""
    tensors = {"layer.lora_A.weight": torch.full((2, 3), number)}
    about, papers = Description("{}", base=None), Papers(texts=TEXTS)
    write_adapters(tensors.__getitem__, headers_of(tensors, None), about, place, RankGroup(), papers, reached=reached)
