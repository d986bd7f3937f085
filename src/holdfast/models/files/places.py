"""Find the local directory of a model by its name. Imports nothing heavy, so that a wrong path is reported at once."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.config.path_uses import KEYS, misplaced
from holdfast.errors import ModelError
from holdfast.files import expanded


def local_directory(name: str, base: Path, key: str = "model.path") -> Path | None:
    """Return the directory that a name means, looked up from the current directory, then beside the YAML.

    Args:
        name: As it is written.
        base: The YAML's directory.
        key: Of the name; it says which kinds of directories are taken.

    Returns:
        The directory; None where there is none, and the name may be one of a hub.

    Raises:
        ModelError: There is no such directory, and no hub has such names; or the path is of another kind.
    """
    for path in (expanded(name), base / name):
        refusal = misplaced(str(path), KEYS.get(key, KEYS["model.path"]), key)
        if refusal is not None:
            raise ModelError(refusal)
    for directory in (expanded(name), base / name):
        if directory.is_dir():
            return directory
    if not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w.-]+", name) or name.startswith((".", "/", "~")):
        run = re.fullmatch(r"(.+)/exports/[\w.-]+/?", name)
        hint = f" The run in {run[1]} would write it at its end: start that one first." if run else ""
        raise ModelError(f"There is no directory {name} (looked from {Path.cwd()} and from {base}).{hint}")
    return None
