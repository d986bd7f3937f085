from __future__ import annotations

from pathlib import Path

import pytest

from tests.foreign.reading import unpack


@pytest.fixture(scope="session")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every fixture; tests that change one copy it first."""
    return unpack(tmp_path_factory.mktemp("foreign"))
