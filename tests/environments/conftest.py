"""Pools of real processes for the tests of environments."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.environment import EnvironmentConfig
from holdfast.environments.pool import EnvironmentPool

Start = Callable[..., EnvironmentPool]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the pool of an environment's source, whose class is called World; it is closed at the end."""
    pools: list[EnvironmentPool] = []

    def begin(source: str, **options: Any) -> EnvironmentPool:
        (tmp_path / "world.py").write_text(textwrap.dedent(source))
        config = EnvironmentConfig.model_validate({"path": "world.py:World", **options})
        pools.append(EnvironmentPool(config, tmp_path, tmp_path / "logs"))
        pools[-1].start()
        return pools[-1]

    yield begin
    for pool in pools:
        pool.close()
