"""Pools of rewards for judged code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rewards.conftest import Start, started


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function (source of my.py, rewards, options) -> started pool."""
    with started(tmp_path) as begin:
        yield begin
