"""The Python files that come with a model: without them its export would load nowhere else.

A configuration names them in `auto_map`, as "file.Class" or "owner/name--file.Class". transformers' save_pretrained
copies those of a configuration and of a tokenizer, and not that of the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.errors import ModelError
from holdfast.models.setup.model import Blueprint


def localise_code(origin: Blueprint) -> dict[str, Path]:
    """Return the Python files of a model by name, and let its configuration name them as files of its own directory.

    They are those that this process runs; where it runs none of a name, those beside the weights. What `auto_map` names
    in a repository of the hub, and this process does not run, stays there.

    Raises:
        ModelError: A file is missing.
    """
    config: Any = origin.original_config
    names: dict[str, Any] = getattr(config, "auto_map", None) or {}
    files: dict[str, Path] = {}
    for key, reference in list(names.items()):
        repository, _, local = str(reference).rpartition("--")
        file = _file_of(origin, local.rpartition(".")[0])
        if file is not None:
            files |= _with_imports(file)
            names[key] = local
        elif not repository:
            raise ModelError(
                f"The model's configuration names {local} as its {key}, and {local.rpartition('.')[0]}.py lies neither "
                f"in {origin.directory} nor where the model was loaded from: an export would not load. Put the file "
                f"there, or remove {key} from auto_map in config.json."
            )
    return files


def _file_of(origin: Blueprint, module: str) -> Path | None:
    folders = [file.parent for file in _running(origin)] + ([] if origin.directory is None else [origin.directory])
    return next((path for folder in folders if (path := folder / f"{module}.py").is_file()), None)


def _running(origin: Blueprint) -> Iterator[Path]:
    """Yield the files of code that came with the model and is loaded."""
    from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

    for instance in (origin.skeleton, origin.original_config):
        if type(instance).__module__.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}."):
            yield Path(inspect.getfile(type(instance)))


def _with_imports(file: Path) -> dict[str, Path]:
    from transformers.dynamic_module_utils import get_relative_import_files

    return {path.name: path for path in (file, *map(Path, get_relative_import_files(file)))}
