"""Archives of fixtures, unpacked on any version of Python."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive of ours below a folder; return the folder."""
    safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # 3.11.0 to 3.11.3 have none
    with tarfile.open(archive) as file:
        file.extractall(folder, **safe)
    return folder
