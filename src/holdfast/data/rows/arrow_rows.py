"""Rows in Arrow tables of the `datasets` library: parquet and arrow files, saved data sets, the hub.

In Arrow, all structs of a column have the same keys, so that a key that a row lacks becomes null. Nulls inside of a
column are therefore dropped; a column whose value is null is kept, so that it can be reported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from holdfast.config.sections.data import SourceConfig
from holdfast.errors import DataError
from holdfast.files import open_regular, size_words

PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow",)

_ROWS_PER_READ = 256
_ARROW_MARK = b"ARROW1"
"""How an Arrow file with a footer begins; one of the streaming format has no mark."""
_BOMB_BYTES = 2**30
_BOMB_RATIO = 1000
"""Bytes of a row group over its bytes on disk; of texts and images it is below 50."""
_BOMB_ROWS = 10_000_000


class ArrowRows:
    """A `datasets.Dataset`, memory-mapped from its file."""

    def __init__(self, dataset: Any, content_hash: str) -> None:
        self._dataset = dataset
        self.content_hash = content_hash

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return without_inner_nulls(self._dataset[index])


@dataclass(frozen=True)
class HubStream:
    """A hub data set read front to back."""

    dataset: Any
    content_hash: str

    def scan(self, start: int) -> Iterator[dict[str, Any]]:
        """Yield rows from row `start` on."""
        rows = self.dataset.skip(start) if start else self.dataset
        yield from map(without_inner_nulls, rows)


def without_inner_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the nulls inside columns, keep the columns."""
    return {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def open_parquet(files: Sequence[Path]) -> ArrowRows:
    """Open parquet files through the library's Arrow cache, which all ranks of a machine share.

    Raises:
        DataError: A file is not parquet, or the files have different columns.
    """
    from datasets import load_dataset

    _refuse_bombs(files)
    names = [str(path) for path in files]
    with _reading(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"):
        dataset = load_dataset("parquet", data_files={"train": names}, split="train")
    digest = xxhash.xxh3_128()
    for path in files:
        with open_regular(path) as opened:
            hashlib.file_digest(opened, lambda: digest)
    return ArrowRows(dataset, digest.hexdigest())


def _refuse_bombs(files: Sequence[Path]) -> None:
    """Look at footers alone, which say what a file unpacks to.

    Raises:
        DataError: A file unpacks to far more than it can hold, and would fill memory or the disk.
    """
    from pyarrow import ArrowException  # type: ignore[import-untyped]  # has no stubs
    from pyarrow.parquet import read_metadata  # type: ignore[import-untyped]  # has no stubs

    for path in files:
        try:
            footer, size = read_metadata(path), path.stat().st_size
        except (ArrowException, OSError):
            continue  # whoever reads it says what is wrong
        if footer.num_rows > max(_BOMB_ROWS, size):
            raise DataError(
                f"{path} says that its {size_words(size)} are {footer.num_rows:,} rows, too many to be true."
            )
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            packed = sum(group.column(column).total_compressed_size for column in range(group.num_columns))
            if group.total_byte_size > max(_BOMB_BYTES, _BOMB_RATIO * packed):
                unpacked = size_words(group.total_byte_size)
                raise DataError(
                    f"{path}: {size_words(packed)} of row group {number} unpack to {unpacked}. "
                    "Rows do not pack so well; if these do, write the file again with smaller row groups or without "
                    "compression."
                )


def scan_parquet(files: Sequence[Path], start: int) -> Iterator[dict[str, Any]]:
    """Yield rows front to back; files before row `start` are skipped by their footers.

    Raises:
        DataError: A file is not parquet, or unpacks to far more than it can hold.
    """
    from datasets import Dataset
    from pyarrow import ArrowException, Table
    from pyarrow.parquet import ParquetFile

    _refuse_bombs(files)
    to_skip = start
    for path in files:
        try:
            with ParquetFile(path) as opened:
                if to_skip >= opened.metadata.num_rows:
                    to_skip -= opened.metadata.num_rows
                    continue
                for batch in opened.iter_batches(batch_size=_ROWS_PER_READ):
                    remaining = batch.slice(to_skip)
                    to_skip = max(0, to_skip - batch.num_rows)
                    yield from map(without_inner_nulls, Dataset(Table.from_batches([remaining])))
        except (ArrowException, OSError, ValueError, MemoryError) as error:
            raise DataError(f"{path}: cannot be read as parquet ({error}). Fetch or write it again.") from None


def open_arrow(files: Sequence[Path]) -> ArrowRows:
    """Open Arrow files, of the streaming format or the one with a footer, where they lie.

    Raises:
        DataError: A file is not Arrow, or the files have different columns.
    """
    from datasets import Dataset
    from pyarrow import ArrowException, concat_tables

    digest = xxhash.xxh3_128()
    tables = []
    for path in files:
        with open_regular(path) as opened:
            hashlib.file_digest(opened, lambda: digest)
        tables.append(_arrow_table(path))
    try:
        return ArrowRows(Dataset(concat_tables(tables)), digest.hexdigest())
    except (ArrowException, ValueError) as error:
        raise DataError(f"{files[0]} and {len(files) - 1} more: {' '.join(str(error).split())}") from None


def _arrow_table(path: Path) -> Any:
    """Return the rows of an Arrow file, mapped and not copied unless it is compressed."""
    from pyarrow import ArrowException, ipc, memory_map

    try:
        opened = memory_map(str(path))
        is_file = opened.read(len(_ARROW_MARK)) == _ARROW_MARK
        opened.seek(0)
        table = (ipc.open_file(opened) if is_file else ipc.open_stream(opened)).read_all()
        table.validate(full=True)  # offsets that lie would be read beyond the end
    except (ArrowException, OSError, ValueError, MemoryError) as error:
        raise DataError(f"{path}: cannot be read as an Arrow file ({error}).") from None
    return table


def scan_arrow(files: Sequence[Path], start: int) -> Iterator[dict[str, Any]]:
    """Yield rows front to back.

    Raises:
        DataError: A file is not Arrow.
    """
    from datasets import Dataset

    to_skip = start
    for path in files:
        table = _arrow_table(path)
        for first in range(min(to_skip, table.num_rows), table.num_rows, _ROWS_PER_READ):
            yield from map(without_inner_nulls, Dataset(table.slice(first, _ROWS_PER_READ)))
        to_skip = max(0, to_skip - table.num_rows)


def is_saved_dataset(directory: Path) -> bool:
    """Say whether `datasets.save_to_disk` wrote the directory."""
    return (directory / "dataset_dict.json").is_file() or (
        (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file()
    )


def open_saved(directory: Path, split: str | None) -> ArrowRows:
    """Open what `datasets.save_to_disk` wrote; `choose_split` says what a missing split means.

    Raises:
        DataError: The directory is damaged, or has no such split.
    """
    from datasets import DatasetDict, load_from_disk

    with _reading(str(directory)):
        loaded = load_from_disk(str(directory))
    splits = dict(loaded) if isinstance(loaded, DatasetDict) else {str(loaded.split or "train"): loaded}
    dataset = splits[choose_split(splits, split, str(directory))]
    # The library's fingerprint is stored with the data and changes with every transformation.
    return ArrowRows(dataset, dataset._fingerprint)


def choose_split(splits: Mapping[str, Any], split: str | None, path: str) -> str:
    """Return the name of the split asked for; if none is, `train` or the only one there is.

    Raises:
        DataError: There is no such split; those that exist are listed.
    """
    listed = ", ".join(splits)
    if split is not None:
        if split in splits:
            return split
        raise DataError(f"{path} has no split {split!r}; its splits are: {listed}.")
    if "train" in splits:
        return "train"
    if len(splits) == 1:
        return next(iter(splits))
    example = f"{path}@{next(iter(splits))}"
    raise DataError(f"{path} has the splits {listed} and none is called train. Choose one, as in {example}.")


def open_hub(name: str, split: str, source: SourceConfig, tried: str) -> ArrowRows | HubStream:
    """Open a data set of the hub by name. The library runs no code that comes with it.

    Args:
        name: Of the data set.
        split: Which one.
        source: Configuration, revision, and whether to read front to back over the network, without a copy on disk.
        tried: Where the name was looked for as a local path, for the error.

    Raises:
        DataError: The hub has no such data set, configuration or split, or cannot be reached.
    """
    from datasets import load_dataset_builder

    with _reading(f"data set {name}@{split} ({tried}, so the hub was asked)"):
        builder = load_dataset_builder(name, source.config_name, revision=source.revision)
        # The builder's hash follows the commit, so a moved branch is another data set.
        content_hash = f"{builder.hash}/{builder.config.name}/{split}"
        if source.streaming:
            return HubStream(builder.as_streaming_dataset(split=split), content_hash)
        builder.download_and_prepare()
        return ArrowRows(builder.as_dataset(split=split), content_hash)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn the library's errors into ours, as one paragraph with their cause."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (OSError, ValueError, TypeError, RuntimeError, MemoryError, DatasetsError) as error:
        cause = error.__cause__ or error
        raise DataError(f"Cannot read {name}: {type(cause).__name__}: {' '.join(str(cause).split())}") from None
