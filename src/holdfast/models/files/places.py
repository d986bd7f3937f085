"""Find the local directory of a model by its name. Imports nothing heavy, so that a wrong path is reported at once."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.config.path_kinds import KEYS, misplaced, pointer_refusal
from holdfast.errors import ModelError
from holdfast.files import expanded

_READ = ("*.safetensors", "*.json", "*.model")


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
            for file in (file for pattern in _READ for file in sorted(directory.glob(pattern))):
                if refusal := pointer_refusal(file):
                    raise ModelError(refusal)
            return directory
    if not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w.-]+", name) or name.startswith((".", "/", "~")):
        looked = " and ".join(dict.fromkeys(f"from {directory}" for directory in (Path.cwd(), base.resolve())))
        raise ModelError(f"There is no directory {name} (looked {looked}).{_of_run(name, base)}")
    return None


def _of_run(name: str, base: Path) -> str:
    """Say what an export that is not there has to do with its run; "" of what is no export."""
    match = re.fullmatch(r"(.+)/exports/[\w.-]+/?", name)
    if match is None:
        return ""
    exports = next(
        (path for path in (expanded(f"{match[1]}/exports"), base / match[1] / "exports") if path.is_dir()), None
    )
    present = [] if exports is None else sorted(path.name for path in exports.iterdir() if path.is_dir())
    if present:
        return f" The run in {match[1]} has exported {', '.join(present)}."
    return f" The run in {match[1]} would write it at its end: start that one first."
