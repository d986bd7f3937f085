"""Pools of real processes for the tests of environments."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.environment import EnvironmentConfig
from holdfast.environments.pool import EnvironmentPool

Start = Callable[..., EnvironmentPool]


@contextmanager
def started(tmp_path: Path, file: str, section: Mapping[str, Any]) -> Iterator[Start]:
    """Give a function that writes a source, and starts a pool of a section and further keys; all are closed at the end.

    Args:
        tmp_path: Directory of the file.
        file: Name of the source.
        section: Of `environment`.
    """
    pools: list[EnvironmentPool] = []

    def begin(source: str, **options: Any) -> EnvironmentPool:
        (tmp_path / file).write_text(textwrap.dedent(source))
        config = EnvironmentConfig.model_validate({**section, **options})
        pools.append(EnvironmentPool(config, tmp_path, tmp_path / "logs"))
        pools[-1].start()
        return pools[-1]

    yield begin
    for pool in pools:
        pool.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the pool of an environment's source, whose class is called World; it is closed at the end."""
    with started(tmp_path, "world.py", {"path": "world.py:World"}) as begin:
        yield begin
