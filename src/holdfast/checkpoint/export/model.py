"""Write a model directory that plain transformers loads; it is staged, read back and renamed into place."""

from __future__ import annotations

import copy
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from holdfast.checkpoint.export.about import with_file_hashes
from holdfast.checkpoint.export.card import laid_cards, with_card
from holdfast.checkpoint.export.code import localise_code
from holdfast.checkpoint.export.small_files import ExportFailed, check_readable
from holdfast.checkpoint.format.manifest import NAME as MANIFEST
from holdfast.checkpoint.place.layout import STAGING, TRASH
from holdfast.checkpoint.place.storage import LocalStorage, exchange
from holdfast.config.load import EXPORTED_CONFIG
from holdfast.errors import ConfigError
from holdfast.models.files.conversion import Conversion, Header, plan_outgoing
from holdfast.models.files.processors import PROCESSOR_FILES
from holdfast.models.files.safetensors_files import (
    INDEX,
    index_json,
    plan_files,
    read_header,
    write_file,
)
from holdfast.models.setup.model import Blueprint
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.stream import Holding, Pieces, converted_tensors, drained, headers_of, held_tensors

EXPORT_ASSETS = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
    "chat_template.json",
)
"""Copied byte for byte from where the model came from."""


ExportReached = Callable[[str], object]
EXPORT_PHASES = ("tensors", "assets", "read back", "publish", "published")
"""Phases of writing an export, at which crash tests kill the process."""


@dataclass(frozen=True)
class ExportFormat:
    """How a model directory is written."""

    dtype: torch.dtype | None
    largest_file_bytes: int
    texts: dict[str, str]
    reached: ExportReached = lambda _: None


def export(  # noqa: PLR0913 - a public verb; its options are keywords
    policy: nn.Module,
    origin: Blueprint,
    directory: Path,
    ranks: RankGroup,
    *,
    dtype: torch.dtype | None = None,
    largest_file_bytes: int = 5_000_000_000,
    extra_files: Mapping[str, str] | None = None,
    reached: ExportReached = lambda _: None,
) -> None:
    """Write `directory`; every rank calls this, rank 0 writes.

    Args:
        policy: The sharded model.
        origin: What it was built from: names, configuration, tokenizer, assets.
        directory: The model directory; replaced if it exists.
        ranks: The group.
        dtype: Cast floating-point tensors to this; None keeps them as stored.
        largest_file_bytes: Weights are spread over files of at most this size.
        extra_files: Texts to lay beside the weights, by file name.
        reached: Told each of `EXPORT_PHASES` as it begins, on the rank that writes.

    Peak memory is one converted tensor. The directory appears whole or not at all; one that stood there is replaced.

    Raises:
        ExportFailed: Writing failed, or what was written reads back differently; on all ranks.
    """
    holdings = held_tensors(policy)
    form = ExportFormat(dtype, largest_file_bytes, dict(extra_files or {}), reached)
    write_model(holdings, headers_of(holdings, dtype), origin, directory, ranks, form)


def write_model(
    holdings: Mapping[str, Holding],
    held_headers: Mapping[str, Header],
    origin: Blueprint,
    directory: Path,
    ranks: RankGroup,
    form: ExportFormat,
) -> None:
    """Do what `export` does with tensors that may be sharded, or be read only when they are asked for.

    Args:
        holdings: The model's tensors under their canonical names.
        held_headers: Their shapes, with the dtypes that are written.
        origin, directory, ranks: As in `export`.
        form: The other arguments of `export`.

    Raises:
        ExportFailed: As `export`.
    """
    ranks.on_first_rank(lambda: check_target(directory))
    conversions, headers = _planned(held_headers, origin)
    tensors = converted_tensors(holdings, conversions, form.dtype, keep=ranks.rank == 0)
    with ranks.together(), drained(tensors):
        if ranks.rank == 0:
            _write(directory, origin, headers, tensors, form)


def check_export_names(policy: nn.Module, origin: Blueprint, dtype: torch.dtype | None) -> dict[str, Header]:
    """Return names and shapes that an export would have; no tensor is gathered.

    Raises:
        ModelError: A parameter has no place in the model's directory.
    """
    return _planned(headers_of(held_tensors(policy), dtype), origin)[1]


def _planned(headers: Mapping[str, Header], origin: Blueprint) -> tuple[Sequence[Conversion], dict[str, Header]]:
    conversions = plan_outgoing(origin.skeleton, headers, origin.used_conversions)
    return conversions, {name: header for conversion in conversions for name, header in conversion.targets.items()}


def check_target(directory: Path) -> None:
    """Refuse to replace anything but an export.

    Raises:
        ConfigError: Something else stands there, or it lies inside a checkpoint.
    """
    check_outside(directory)
    if not directory.exists():
        return
    if directory.resolve() == Path.cwd() or not directory.is_dir():
        raise ConfigError(f"{directory} cannot be replaced by an export. Name a new directory.")
    if any(directory.iterdir()) and not (directory / EXPORTED_CONFIG).exists():
        raise ConfigError(
            f"{directory} holds other things than an export, which would be deleted. Name a new directory."
        )


def check_outside(target: Path) -> None:
    """Refuse to write into a checkpoint: it would not be what its manifest says any more.

    Raises:
        ConfigError: One of the directories above is a checkpoint.
    """
    above = next((folder for folder in target.resolve().parents if (folder / MANIFEST).exists()), None)
    if above is not None:
        raise ConfigError(f"{target} lies inside the checkpoint {above}, which would be damaged. Name another place.")


def _write(
    directory: Path,
    origin: Blueprint,
    headers: dict[str, Header],
    tensors: Iterator[tuple[str, Pieces]],
    form: ExportFormat,
) -> None:
    staging = directory.parent / f"{STAGING}{directory.name}-{uuid.uuid4().hex[:8]}"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        form.reached("tensors")
        files, hashes, storage = plan_files(headers, form.largest_file_bytes), {}, LocalStorage(staging)
        for name, members in files.items():
            with storage.create(name, sync=False) as file:
                write_file(file, {member: headers[member] for member in members}, tensors)
            hashes[name] = file.hexdigest()
        form.reached("assets")
        stored = next(header.dtype for header in headers.values() if header.dtype.is_floating_point)
        write_assets(staging, origin, stored)
        hashes |= {file.name: storage.hash(file.name) for file in sorted(staging.glob("*.py"))}
        index = {INDEX: index_json(files, headers)} if len(files) > 1 else {}
        texts = laid_cards(with_card(with_file_hashes(form.texts, staging, hashes)), directory, origin.directory)
        hashes |= write_texts(staging, {**index, **texts})
        hashes = {name: hashes.get(name) or storage.hash(name) for name in storage.files("")}
        form.reached("read back")
        with settled(staging, hashes):
            _read_back(staging, files, headers, hashes)
            check_readable(staging, origin)
        form.reached("publish")
        replace_directory(staging, directory)
        form.reached("published")
    except (OSError, MemoryError, SafetensorError) as error:
        what = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ExportFailed(f"{directory} could not be written: {what}.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


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
    code = localise_code(origin)
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


def write_texts(staging: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """Write small files, and return the hash of what each was given."""
    hashes = {}
    for name, text in texts.items():
        with LocalStorage(staging).create(name, sync=False) as file:
            file.write(text.encode())
        hashes[name] = file.hexdigest()
    return hashes


@contextmanager
def settled(staging: Path, names: Iterable[str]) -> Iterator[None]:
    """Make a directory durable while the block reads it; the block ends when every file and name is on the disk.

    Args:
        staging: The directory; its files were written and not yet synced.
        names: Of its files.

    Raises:
        OSError: The disk did not take them; nothing of the directory may be published.
    """
    storage = LocalStorage(staging)
    folders = sorted({str(parent) for name in names for parent in Path(name).parents}, reverse=True)
    with ThreadPoolExecutor(1) as thread:  # an fsync waits for the disk and leaves the processor to the readers
        work = [thread.submit(storage.sync, name) for name in (*names, *folders)]
        yield
        for future in work:
            future.result()


def check_bytes(staging: Path, hashes: Mapping[str, str]) -> None:
    """Read every file of a directory and compare.

    The system may answer from its cache: emptying that first would make an export take twice as long.

    Raises:
        ExportFailed: A file holds other bytes, is missing, or was written by somebody else.
    """
    storage = LocalStorage(staging)
    actual = {name: storage.hash(name) for name in storage.files("")}
    for name in sorted({*actual, *hashes}):
        if actual.get(name) != hashes.get(name):
            raise ExportFailed(
                f"{staging / name} reads back differently from what was written: its hash is {actual.get(name)}, "
                f"{hashes.get(name)} was written. The export was thrown away; look at the disk."
            )


def _read_back(
    staging: Path, files: Mapping[str, list[str]], headers: Mapping[str, Header], hashes: Mapping[str, str]
) -> None:
    check_bytes(staging, hashes)
    for name, members in files.items():
        if read_header(staging / name) != {member: headers[member] for member in members}:
            raise ExportFailed(f"{staging / name} holds other tensors than were planned.")


def replace_directory(staging: Path, directory: Path) -> None:
    """Give a finished directory its name; one that has it is exchanged in one step, then deleted."""
    old = staging
    if directory.exists() and not exchange(staging, directory):
        # A file system that cannot exchange: for a moment neither has the name. Both names end alike, by which
        # `clean_exports` knows what a kill in that moment left.
        old = staging.with_name(TRASH + staging.name.removeprefix(STAGING))
        directory.rename(old)
        try:
            staging.rename(directory)
        except OSError:
            old.rename(directory)
            raise
    elif not directory.exists():
        staging.rename(directory)
    sync_directory(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def clean_exports(folder: Path) -> None:
    """Remove what exports that were killed left half written or half deleted; the caller holds the run's lease.

    One that was killed when it had taken the old export's name away and not yet given it to the new one is finished.
    """
    if not folder.is_dir():
        return
    for old in list(folder.glob(f"{TRASH}*")):
        ending = old.name.removeprefix(TRASH)
        new, target = folder / f"{STAGING}{ending}", folder / ending.rpartition("-")[0]
        if new.is_dir() and not target.exists():  # of such two, nothing was deleted yet
            new.rename(target)
            sync_directory(folder)
    for leftover in folder.glob(".*"):
        if leftover.name.startswith((STAGING, TRASH)):
            shutil.rmtree(leftover, ignore_errors=True)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable.

    Raises:
        OSError: The disk did not take them; with the directory's path.
    """
    LocalStorage(directory).sync("")
