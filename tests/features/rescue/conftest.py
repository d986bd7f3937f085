from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.archives import unpack
from tests.features.rescue.reading import ARCHIVE


@pytest.fixture(scope="session")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every fixture; tests that change one copy it first."""
    folder = unpack(ARCHIVE, tmp_path_factory.mktemp("foreign"))
    written_anew = os.environ.get("HOLDFAST_FOREIGN")  # by tools/test_rescue.sh
    for each in Path(written_anew).iterdir() if written_anew else ():
        if each.is_dir():
            shutil.rmtree(folder / each.name, ignore_errors=True)
            shutil.copytree(each, folder / each.name)
    return folder
