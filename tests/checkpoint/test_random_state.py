"""Random state: what is drawn after a load is what was drawn after the save, from every global generator."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import checkpoint


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the global generator is meant
    torch.manual_seed(number)  # CUDA's too


def draws(device: str) -> tuple[list[float], ...]:
    """Draw from each generator; more than one kind, since a generator may keep half of a pair back."""
    return (
        [random.random(), random.gauss(0, 1)],
        [*np.random.rand(3).tolist(), float(np.random.standard_normal())],  # noqa: NPY002 - as above
        torch.rand(5).tolist(),
        torch.rand(1000, device=device).tolist(),
        torch.nn.functional.dropout(torch.ones(1000, device=device)).tolist(),
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_drawn_after_a_load_is_what_was_drawn_after_the_save(tmp_path: Path, device: str) -> None:
    model = nn.Linear(3, 2, device=device)
    seed(7)
    draws(device)
    checkpoint.save(str(tmp_path / "step-00000001"), model, None)
    wanted = draws(device)
    assert draws(device) != wanted

    seed(8)
    loaded = checkpoint.load(str(tmp_path / "step-00000001"), model, None)

    assert loaded.exact
    assert draws(device) == wanted
    kept = json.loads(next((tmp_path / "step-00000001/rank").iterdir()).read_text())["random"]
    assert set(kept) - {"cuda"} == {"python", "numpy", "torch"}
    assert ("cuda" in kept) == torch.cuda.is_available()
