"""The lab of a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.failures.lab import Lab, Observed
from tests.failures.table import BY_NUMBER


@pytest.fixture
def both(pools: Any, tmp_path: Path) -> Callable[[str], tuple[Observed, Observed]]:
    """Return what the naive way and ours came to, after seeing that the one fails and the other holds."""

    def observe(number: str) -> tuple[Observed, Observed]:
        failure = BY_NUMBER[number]
        naive = failure.naive(Lab(pools, tmp_path / "naive"))
        ours = failure.ours(Lab(pools, tmp_path / "ours"))
        assert not naive.holds, naive.words
        assert ours.holds, ours.words
        return naive, ours

    (tmp_path / "naive").mkdir()
    (tmp_path / "ours").mkdir()
    return observe
