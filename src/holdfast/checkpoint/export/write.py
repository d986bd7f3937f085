"""Write the directory of an export from tensors in memory or on disk: staged, read back and renamed into place."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from holdfast.checkpoint.export.assets import ExportFailed, check_readable, write_assets
from holdfast.checkpoint.export.card import Papers
from holdfast.checkpoint.format.manifest import NAME as MANIFEST
from holdfast.checkpoint.place.layout import STAGING, TRASH
from holdfast.checkpoint.place.storage import LocalStorage, exchange
from holdfast.config.load import EXPORTED_CONFIG
from holdfast.errors import ConfigError, HoldfastError
from holdfast.files import NotRegular
from holdfast.models.files.conversion import Conversion, Header, plan_outgoing
from holdfast.models.files.safetensors_files import INDEX, index_json, plan_files, read_header, write_file
from holdfast.models.setup.model import Blueprint
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.failure.classify import broken_by_peer
from holdfast.parallel.stream import Holding, Pieces, StreamStopped, converted_tensors, headers_of, held_tensors

ExportReached = Callable[[str], object]
EXPORT_PHASES = ("tensors", "assets", "read back", "publish", "published")
"""Phases of writing an export, at which crash tests kill the process."""


@dataclass(frozen=True)
class Weights:
    """The tensors of an export, and the names and files that they get."""

    read: Callable[[str], Holding]
    """Returns a tensor, or this rank's shard of it, by canonical name: from memory, or from a file."""
    conversions: Sequence[Conversion]
    files: Mapping[str, list[str]]
    """Names in each file, in the order of the conversions."""
    dtype: torch.dtype | None = None
    """Cast floating-point tensors to this; None keeps them as stored."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Words for the header of each file."""

    @property
    def headers(self) -> dict[str, Header]:
        """Return shapes and dtypes in the files."""
        return {name: header for conversion in self.conversions for name, header in conversion.targets.items()}


def export(  # noqa: PLR0913 - a public verb; its options are keywords
    policy: nn.Module,
    origin: Blueprint,
    directory: Path,
    ranks: RankGroup,
    *,
    dtype: torch.dtype | None = None,
    largest_file_bytes: int = 5_000_000_000,
    papers: Papers = Papers(),  # noqa: B008 - it never changes
    reached: ExportReached = lambda _: None,
) -> None:
    """Write a model directory that plain transformers loads; every rank calls this, rank 0 writes.

    Args:
        policy: The sharded model.
        origin: What it was built from: names, configuration, tokenizer, assets.
        directory: The model directory; replaced if it exists.
        ranks: The group.
        dtype: Cast floating-point tensors to this; None keeps them as stored.
        largest_file_bytes: Weights are spread over files of at most this size.
        papers: What the export says of itself.
        reached: Told each of `EXPORT_PHASES` as it begins, on the rank that writes.

    Peak memory is one converted tensor. The directory appears whole or not at all; one that stood there is replaced.

    Raises:
        ExportFailed: Any rank has an error, or what was written reads back differently; on all ranks.
    """
    with raised_together(directory, ranks):
        holdings = held_tensors(policy)
        headers = headers_of(holdings, None)
        weights = model_weights(holdings.__getitem__, headers, origin, dtype, largest_file_bytes)
    write_export(weights, papers, directory, ranks, origin, reached)


def model_weights(
    read: Callable[[str], Holding],
    held: Mapping[str, Header],
    origin: Blueprint,
    dtype: torch.dtype | None = None,
    largest_file_bytes: int = 5_000_000_000,
) -> Weights:
    """Plan names and files of a model's tensors; no tensor is read.

    Args:
        read: Returns a tensor of the model, or this rank's shard of it, by canonical name.
        held: Shape and dtype of each.
        origin, dtype, largest_file_bytes: As in `export`.

    Raises:
        ModelError: A parameter has no place in the model's directory.
    """
    conversions = plan_outgoing(origin.skeleton, with_dtype(held, dtype), origin.used_conversions)
    weights = Weights(read, conversions, {}, dtype)
    return replace(weights, files=plan_files(weights.headers, largest_file_bytes))


def with_dtype(headers: Mapping[str, Header], dtype: torch.dtype | None) -> dict[str, Header]:
    """Return headers with floating-point dtypes replaced by `dtype` if given."""
    return {
        name: header if dtype is None or not header.dtype.is_floating_point else header._replace(dtype=dtype)
        for name, header in headers.items()
    }


def check_export_names(policy: nn.Module, origin: Blueprint, dtype: torch.dtype | None) -> dict[str, Header]:
    """Return names and shapes that an export would have; no tensor is gathered.

    Raises:
        ModelError: A parameter has no place in the model's directory.
    """
    holdings = held_tensors(policy)
    return model_weights(holdings.__getitem__, headers_of(holdings, None), origin, dtype).headers


def write_export(  # noqa: PLR0913, PLR0917 - what is written, where, by whom
    weights: Weights,
    papers: Papers,
    directory: Path,
    ranks: RankGroup,
    origin: Blueprint | None,
    reached: ExportReached = lambda _: None,
) -> None:
    """Write a directory, whole or not at all; every rank calls this, rank 0 writes.

    Args:
        weights: The tensors.
        papers: What the export says of itself.
        directory: Replaced if it is an export.
        ranks: The group.
        origin: What the model was built from, whose files are laid beside the weights; None for adapters.
        reached: Told each of `EXPORT_PHASES` as it begins, on rank 0.

    Raises:
        ConfigError: The directory is not an export, or it lies inside a checkpoint.
        ExportFailed: Any rank has an error, or what was written reads back differently; on all ranks.
    """
    with raised_together(directory, ranks), ExitStack() as places:
        with converted_tensors(weights.read, weights.conversions, weights.dtype, ranks) as tensors:
            if ranks.rank == 0:
                check_target(directory)
                staging = places.enter_context(staging_beside(directory))
                reached("tensors")
                hashes = _write_weights(staging, weights, tensors)
        if ranks.rank == 0:
            reached("assets")
            _lay_small_files(staging, weights, papers, origin, directory, hashes)
            reached("read back")
            with _settled(staging, hashes):
                _read_back(staging, weights, hashes)
                if origin is not None:
                    check_readable(staging, origin)
            reached("publish")
            replace_directory(staging, directory)
            reached("published")


@contextmanager
def raised_together(directory: Path, ranks: RankGroup) -> Iterator[None]:
    """Raise on every rank what any rank raised in the block of an export; of several errors the lowest rank's.

    Args:
        directory: Of the export.
        ranks: The group; each rank enters the block.

    Raises:
        ExportFailed: Of an error that is no `HoldfastError`.
    """
    stopped = None
    with ranks.together():
        try:
            yield
        except StreamStopped as error:
            stopped = error  # the rank that has the cause raises it
        except (HoldfastError, NotRegular):
            raise
        except Exception as error:
            if broken_by_peer(error):  # no agreement reaches a rank that is gone; its failure has a report of its own
                raise
            what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            where = f"on rank {ranks.rank}, " if ranks.rank else ""
            raise ExportFailed(f"{directory} could not be written: {where}{what}.") from error
    if stopped is not None:
        raise stopped


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


@contextmanager
def staging_beside(directory: Path) -> Iterator[Path]:
    """Make a directory beside the one that is to be written, and remove what is left of it."""
    staging = directory.parent / f"{STAGING}{directory.name}-{uuid.uuid4().hex[:8]}"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_weights(staging: Path, weights: Weights, tensors: Iterator[tuple[str, Pieces]]) -> dict[str, str]:
    """Write the files of tensors, and return the hash of what each was given."""
    headers, hashes = weights.headers, {}
    for name, members in weights.files.items():
        with LocalStorage(staging).create(name, sync=False) as file:
            write_file(file, {member: headers[member] for member in members}, tensors, weights.notes)
        hashes[name] = file.hexdigest()
    return hashes


def _lay_small_files(  # noqa: PLR0913, PLR0917 - what an export is made of
    staging: Path,
    weights: Weights,
    papers: Papers,
    origin: Blueprint | None,
    directory: Path,
    hashes: dict[str, str],
) -> None:
    """Write the files beside the weights, and add the hash of each to `hashes`."""
    storage, headers = LocalStorage(staging), weights.headers
    if origin is not None:
        write_assets(staging, origin, next(head.dtype for head in headers.values() if head.dtype.is_floating_point))
        hashes |= {file.name: storage.hash(file.name) for file in sorted(staging.glob("*.py"))}
    source = None if origin is None else origin.directory
    texts = papers.laid(staging, hashes, directory, source, adapter=origin is None)
    if len(weights.files) > 1:
        texts[INDEX] = index_json(weights.files, headers)
    hashes |= _write_texts(staging, texts)
    hashes |= {name: storage.hash(name) for name in storage.files("") if name not in hashes}


def _write_texts(staging: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """Write small files, and return the hash of what each was given."""
    hashes = {}
    for name, text in texts.items():
        with LocalStorage(staging).create(name, sync=False) as file:
            file.write(text.encode())
        hashes[name] = file.hexdigest()
    return hashes


@contextmanager
def _settled(staging: Path, names: Iterable[str]) -> Iterator[None]:
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


def _check_bytes(staging: Path, hashes: Mapping[str, str]) -> None:
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


def _read_back(staging: Path, weights: Weights, hashes: Mapping[str, str]) -> None:
    _check_bytes(staging, hashes)
    for name, members in weights.files.items():
        if read_header(staging / name) != {member: weights.headers[member] for member in members}:
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
