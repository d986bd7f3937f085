"""Writes a model directory from another system's checkpoint, with one tensor in memory at a time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointMismatch
from holdfast.checkpoint.export.about import Exported
from holdfast.checkpoint.export.card import Papers
from holdfast.checkpoint.export.write import check_outside, model_weights, write_export
from holdfast.checkpoint.format.unsupported_tensors import is_finite
from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ConfigError
from holdfast.features.rescue.reading.alignment import align
from holdfast.features.rescue.reading.record import DamagedFile, ForeignCheckpoint, UnreadableForeign
from holdfast.files import REGULAR, file_kind, size_words
from holdfast.models.files.conversion import Header
from holdfast.models.names import canonical_name, named_parameters, tied_names
from holdfast.models.setup.model import described
from holdfast.parallel.collectives import RankGroup

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_SMALL = {".json", ".txt", ".jinja", ".model"}
_MOST_BYTES = 64 * 2**20
"""Of a file that describes a model or its tokens: the largest vocabularies take some 30 MiB."""


def export_foreign(
    checkpoint: ForeignCheckpoint, directory: Path, *, model: Path | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write a directory that plain transformers loads.

    Args:
        checkpoint: Without damage.
        directory: New, or empty.
        model: A model directory for what lies not beside the checkpoint: its configuration, its tokenizer.
        dtype: Cast floating-point tensors to this; None keeps them as stored.

    Raises:
        ConfigError: The directory exists.
        UnreadableForeign: Configuration or tokenizer are nowhere.
        CheckpointMismatch: The weights are not those of the configuration's model.
        CheckpointCorrupt: A file is damaged; nothing was left behind.
        ExportFailed: Writing failed, or what was written reads back differently.
    """
    check_outside(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists, and nothing is overwritten. Name a new directory.")
    with tempfile.TemporaryDirectory(prefix="holdfast-assets-") as folder:
        lay_small_files(Path(folder), checkpoint, model)
        origin = described(ModelConfig(path=folder), Path(folder), None)
        parameters = named_parameters(origin.skeleton)
        stored = {canonical_name(name) for name in origin.skeleton.state_dict()}
        buffers = {canonical_name(name) for name, _ in origin.skeleton.named_buffers()} & stored
        align(checkpoint, {*parameters, *buffers}, tied_names(origin.skeleton))
        shapes = {name: tuple(value.shape) for name, value in parameters.items()}
        weights = {name: checkpoint.weights[name] for name in fitting(checkpoint, shapes, buffers)}
        headers = {name: Header(weight.shape, weight.dtype) for name, weight in weights.items()}
        about = Exported(
            run_id="", run=f"{checkpoint.system} {checkpoint.path.name}", step=checkpoint.step or 0,
            parent={"imported": str(checkpoint.path), "system": checkpoint.system},
        )  # fmt: skip
        planned = model_weights(lambda name: read_finite(name, weights[name].read), headers, origin, dtype)
        write_export(planned, Papers(about), directory, RankGroup(), origin)


def fitting(checkpoint: ForeignCheckpoint, shapes: Mapping[str, tuple[int, ...]], buffers: set[str]) -> list[str]:
    """Return the names of the weights that a model takes, which are all of them.

    Raises:
        CheckpointMismatch: Some are missing, too many, or of another shape.
    """
    weights = checkpoint.weights
    lacking = [name for name in shapes if name not in weights]
    extra = [name for name in weights if name not in shapes and name not in buffers]
    mismatched = [name for name in shapes if name in weights and weights[name].shape != shapes[name]]
    problems = [f"it lacks {lacking[0]}" + _more(lacking)] if lacking else []
    problems += [f"it has {extra[0]}, which the model has not" + _more(extra)] if extra else []
    problems += [
        f"{name} is {list(weights[name].shape)} there and {list(shapes[name])} in the model" for name in mismatched[:2]
    ]
    if problems:
        raise CheckpointMismatch(
            f"{checkpoint.path} does not fit the model of its configuration: {'; '.join(problems)}. Nothing was "
            "written. Name the directory of the right model with --model, or a run's file with its adapters with --as."
        )
    return [name for name in weights if name in shapes or name in buffers]


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def lay_small_files(folder: Path, checkpoint: ForeignCheckpoint, model: Path | None) -> None:
    """Lay configuration and tokenizer into a folder: those beside the checkpoint, and what is missing from a model's.

    Raises:
        UnreadableForeign: One of them is nowhere.
    """
    directories = [directory for directory in (checkpoint.model_files, model) if directory is not None]
    configuration, tokenizer = _with_one_of(directories, ("config.json",)), _with_one_of(directories, _VOCABULARIES)
    if configuration is None or tokenizer is None:
        missing = "config.json" if configuration is None else "tokenizer"
        raise UnreadableForeign(
            f"{checkpoint.path} has no {missing} beside it, and an export has one. Name the directory of the model "
            "that it began with: --model DIR."
        )
    files = [file for file in configuration.iterdir() if tokenizer == configuration or not _is_of_tokens(file)]
    files += [file for file in tokenizer.iterdir() if _is_of_tokens(file)]
    for file in filter(_is_small, files):
        _refuse_strange(file, checkpoint)
        shutil.copyfile(file, folder / file.name)
    generation = "generation_config.json"
    if not (folder / generation).exists() and model is not None and (model / generation).is_file():
        shutil.copyfile(model / generation, folder / generation)


def _refuse_strange(file: Path, checkpoint: ForeignCheckpoint) -> None:
    """Refuse what an export would carry out of a checkpoint and was never part of it; a --model is the user's own.

    Raises:
        UnreadableForeign: It is a link to elsewhere, no file, or too large.
    """
    if checkpoint.model_files is None or not file.is_relative_to(checkpoint.model_files):
        return
    kind = file_kind(file, within=_root_of(checkpoint.path))
    size = file.stat().st_size
    if kind != REGULAR or size > _MOST_BYTES:
        description = kind if kind != REGULAR else f"{size_words(size)}, and no file that describes a model is so large"
        raise UnreadableForeign(
            f"{file} is {description}. Nothing was written. Put the file itself in its place, or remove it."
        )


def _root_of(path: Path) -> Path:
    """Return the directory that links of a checkpoint stay in; in Hugging Face's cache they lead to blobs beside it."""
    folder = path if path.is_dir() else path.parent
    is_cached = folder.parent.name == "snapshots" and (folder.parents[1] / "blobs").is_dir()
    return folder.parents[1] if is_cached else folder


def _with_one_of(directories: Sequence[Path], names: Sequence[str]) -> Path | None:
    """Return the first directory that holds a file of one of the names."""
    return next((directory for directory in directories if any((directory / name).is_file() for name in names)), None)


def _is_small(file: Path) -> bool:
    """Return whether a file describes a model or its tokens: weights, progress and code do not."""
    of_training = file.name.startswith(("trainer_state", "optimizer", "scheduler"))
    return file.suffix in _SMALL and ".index." not in file.name and not of_training and file.is_file()


def _is_of_tokens(file: Path) -> bool:
    return "token" in file.name or file.name in {*_VOCABULARIES, "merges.txt", "chat_template.jinja"}


def read_finite(name: str, read: Callable[[], Tensor]) -> Tensor:
    """Return a tensor of the source, whose numbers are all finite.

    Raises:
        CheckpointCorrupt: Its file is damaged, copies of it differ, or a number is NaN or infinite.
    """
    try:
        values = read()
    except (DamagedFile, OSError) as error:
        raise CheckpointCorrupt(f"{name} cannot be read: its file {error}. Nothing was left behind.") from error
    if not is_finite(values):
        raise CheckpointCorrupt(
            f"{name} of the source has a number that is not finite (NaN, or infinite). Nothing was left behind; take "
            "the step before."
        )
    return values
