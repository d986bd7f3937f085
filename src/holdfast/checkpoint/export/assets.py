"""The files beside the weights of a model: configuration, tokenizer, processor, and Python code that came with it.

They are written for exports and for checkpoints. They are loaded again and compared with the objects in memory, by the
classes of those objects, so that no code that came with a model is looked up or run again.
"""

from __future__ import annotations

import copy
import inspect
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import ModelError, RunStopped
from holdfast.models.files.origin import TOKENIZER_PROBE
from holdfast.models.files.processors import PROCESSOR_FILES
from holdfast.models.setup.model import Blueprint

EXPORT_ASSETS = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
    "chat_template.json",
)
"""Copied byte for byte from where the model came from."""

_OF_LOADING = {"_name_or_path", "transformers_version"}


class ExportFailed(RunStopped):  # noqa: N818 - the name says what happened
    """An export could not be written, or read back differently; nothing was left in its place."""


def write_assets(folder: Path, origin: Blueprint, dtype: torch.dtype) -> None:
    """Write configuration, tokenizer, processor, generation settings, and the Python files that come with a model.

    Args:
        folder: Where to.
        origin: What the model was built from.
        dtype: That the weights beside them are stored in.

    Raises:
        ModelError: A Python file is missing.
    """
    config: Any = origin.original_config
    code = _localised_code(origin)
    config.architectures = [type(origin.skeleton).__name__]
    config.dtype = dtype
    config.save_pretrained(str(folder))
    origin.tokenizer.save_pretrained(str(folder))
    _forget_loading(folder / "tokenizer_config.json")
    for name, file in code.items():
        shutil.copyfile(file, folder / name)
    for name in EXPORT_ASSETS:
        if origin.directory is not None and (origin.directory / name).exists():
            shutil.copyfile(origin.directory / name, folder / name)
    if origin.image_processor is not None and not any((folder / name).exists() for name in PROCESSOR_FILES):
        origin.image_processor.save_pretrained(str(folder))
    generation = copy.deepcopy(getattr(origin.skeleton, "generation_config", None))
    if generation is not None and not (folder / EXPORT_ASSETS[0]).exists():
        generation.use_cache = True  # off only while training
        generation.save_pretrained(str(folder))


def _forget_loading(file: Path) -> None:
    """Drop what transformers notes of how a tokenizer was loaded: an export is the same wherever it was made."""
    values = json.loads(file.read_text(encoding="utf-8"))
    remaining = {key: value for key, value in values.items() if key not in {"is_local", "local_files_only"}}
    if remaining != values:
        text = json.dumps(remaining, indent=2, sort_keys=True, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")


def _localised_code(origin: Blueprint) -> dict[str, Path]:
    """Return the Python files of a model by name, and let its configuration name them as files of its own directory.

    A configuration names them in `auto_map`, as "file.Class" or "owner/name--file.Class". transformers' save_pretrained
    copies those of a configuration and of a tokenizer, and not that of the model.

    The files are those that this process runs; where it runs none of a name, those beside the weights. Code that
    `auto_map` names in a repository of the hub, and that this process does not run, stays there.

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


def check_readable(folder: Path, origin: Blueprint) -> None:
    """Load configuration and tokenizer, and compare them with those in memory.

    Args:
        folder: Where `write_assets` wrote them.
        origin: What was written.

    Raises:
        ExportFailed: One cannot be loaded, or is another than was to be written.
    """
    config: Any = origin.original_config
    reloaded = _loaded(folder, "configuration", config)
    _refuse(folder, "configuration", _differing(_as_read(config), _plain(reloaded)))
    if origin.tokenizer is None:
        return
    tokenizer = _loaded(folder, "tokenizer", origin.tokenizer)
    _refuse(folder, "tokenizer", _differing(_marks(origin.tokenizer), _marks(tokenizer)))


def _as_read(config: Any) -> dict[str, Any]:
    """Return the values of a configuration after a way through a file: a class may normalise what it reads."""
    with tempfile.TemporaryDirectory(prefix="holdfast-config-") as folder:
        (Path(folder) / "config.json").write_text(config.to_json_string(), encoding="utf-8")
        return _plain(type(config).from_pretrained(folder))


def _loaded(folder: Path, label: str, written: Any) -> Any:
    try:
        return type(written).from_pretrained(str(folder))
    except Exception as error:  # the tokenizers library raises Exception itself
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ExportFailed(
            f"The {label} that was written to {folder} cannot be loaded: {type(error).__name__}: {reason} The "
            f"directory was thrown away; save_pretrained of {type(written).__name__} must write what its "
            "from_pretrained reads."
        ) from error


def _refuse(folder: Path, label: str, differing: list[str]) -> None:
    if differing:
        raise ExportFailed(
            f"The {label} that was written to {folder} is another one when it is loaded: {'; '.join(differing[:4])}. "
            "The directory was thrown away. Look at what model.path and model.tokenizer name: saved and loaded by "
            "transformers, they must stay the same."
        )


def _plain(config: Any) -> dict[str, Any]:
    values = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in _OF_LOADING}


def _marks(tokenizer: Any) -> dict[str, Any]:
    """Return what tells a tokenizer from another one."""
    return {
        "tokens of a probe text": tokenizer(TOKENIZER_PROBE)["input_ids"],
        "words": len(tokenizer),
        "special tokens": {key: str(value) for key, value in tokenizer.special_tokens_map.items()},
        "chat template": getattr(tokenizer, "chat_template", None),
    }


def _differing(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    return [
        f"{key} {actual.get(key)!r:.60} instead of {expected.get(key)!r:.60}"
        for key in sorted({*expected, *actual})
        if expected.get(key) != actual.get(key)
    ]
