"""Sources from paths, splits, globs, saved data sets and live objects."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.data import SourceConfig
from holdfast.data.rows.rows import SPREAD_ROWS, Source, columns_of, from_rows, open_source
from holdfast.errors import DataError
from holdfast.training.run import ConfiguredRun

ROWS = [{"question": f"q{number}", "answer": f"a{number}"} for number in range(7)]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        from datasets import Dataset

        Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save(directory: Path, splits: dict[str, list[dict[str, Any]]] | None = None) -> Path:
    from datasets import Dataset, DatasetDict

    if splits is None:
        Dataset.from_list(ROWS).save_to_disk(directory)
    else:
        DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(directory)
    return directory


def rows_of(source: Source) -> list[Any]:
    """Read a source by number where it can be, and check that a scan from the middle agrees."""
    rows = list(source.scan(0)) if source.size is None else [source.row(index) for index in range(source.size)]
    assert list(source.scan(2)) == rows[2:]
    return rows


def opened(path: Path | str, **options: Any) -> Source:
    return open_source(SourceConfig(path=str(path), **options), Path("/nowhere"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_rows_are_the_same_from_every_kind_of_file(kind: str, streaming: bool, tmp_path: Path) -> None:
    path = save(tmp_path / "rows") if kind == "saved" else write(tmp_path / f"rows.{kind}")

    source = opened(path, streaming=streaming)

    assert rows_of(source) == ROWS
    assert source.size == (None if streaming else 7)
    assert source.name == "rows"


def test_a_relative_path_starts_in_the_current_directory_then_beside_the_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    write(beside / "rows.jsonl", ROWS[:1])
    here.mkdir()
    monkeypatch.chdir(here)
    config = SourceConfig(path="rows.jsonl")

    assert open_source(config, beside).size == 1
    write(here / "rows.jsonl", ROWS[:2])
    assert open_source(config, beside).size == 2


def test_a_missing_file_is_named_with_the_places_tried(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_source(SourceConfig(path="no/such/rows.jsonl"), tmp_path)

    assert str(tmp_path / "no/such/rows.jsonl") in str(caught.value)
    assert str(Path.cwd() / "no/such/rows.jsonl") in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_an_empty_data_set_is_refused(streaming: bool, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rows has no rows"):
        opened(write(tmp_path / "rows.jsonl", []), streaming=streaming)


def test_a_glob_takes_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "part-2.jsonl", ROWS[4:])
    write(tmp_path / "part-1.jsonl", ROWS[:4])
    write(tmp_path / "other.jsonl", ROWS[:1])

    source = opened(tmp_path / "part-*.jsonl")

    assert rows_of(source) == ROWS
    assert source.name == tmp_path.name


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_directory_is_split_by_the_names_of_its_files(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "tests" / f"train-00001-of-00002.{kind}", ROWS[2:4])
    write(tmp_path / "eval_and_train" / f"train-00000-of-00002.{kind}", ROWS[:2])
    write(tmp_path / "dev" / f"rows.{kind}", ROWS[4:])

    assert rows_of(opened(tmp_path)) == ROWS[:4]
    assert rows_of(opened(f"{tmp_path}@train")) == ROWS[:4]
    assert rows_of(opened(f"{tmp_path}@validation")) == ROWS[4:]
    assert rows_of(opened(f"{tmp_path}@dev")) == ROWS[4:]
    with pytest.raises(DataError, match="has no split 'test'; its splits are: train, validation"):
        opened(f"{tmp_path}@test")


def test_a_directory_whose_names_say_no_split_is_all_training_rows(tmp_path: Path) -> None:
    write(tmp_path / "latest.jsonl", ROWS[:3])
    write(tmp_path / "trainer_notes.jsonl", ROWS[3:])

    assert opened(tmp_path).size == 7


def test_a_file_without_a_split_among_files_with_one_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    write(tmp_path / "more.jsonl")

    with pytest.raises(DataError, match="more.jsonl carries no split in its name"):
        opened(tmp_path)


def test_a_directory_with_two_kinds_or_no_data_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no data")
    with pytest.raises(DataError, match="has no data files"):
        opened(tmp_path)

    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="holds both JSON and parquet files"):
        opened(tmp_path)


def test_one_file_has_only_the_split_train(tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl")

    assert opened(f"{path}@train").size == 7
    with pytest.raises(DataError, match="has no split 'test'; its splits are: train"):
        opened(f"{path}@test")


def test_a_file_may_have_an_at_sign_in_its_name(tmp_path: Path) -> None:
    assert opened(write(tmp_path / "rows@2024.jsonl")).size == 7


def test_a_saved_dictionary_of_splits_is_opened_by_split(tmp_path: Path) -> None:
    path = save(tmp_path / "saved", {"train": ROWS[:5], "test": ROWS[5:]})
    odd = save(tmp_path / "odd", {"easy": ROWS[:5], "hard": ROWS[5:]})

    assert rows_of(opened(path)) == ROWS[:5]
    assert rows_of(opened(f"{path}@test")) == ROWS[5:]
    assert rows_of(opened(f"{odd}@hard")) == ROWS[5:]
    with pytest.raises(DataError, match="has the splits easy, hard and none is called train"):
        opened(odd)


def test_max_samples_takes_the_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl")

    assert rows_of(opened(path, max_samples=4)) == ROWS[:4]
    assert rows_of(opened(path, max_samples=4, streaming=True)) == ROWS[:4]
    assert opened(path, max_samples=40).size == 7


def test_columns_are_renamed_and_the_others_keep_their_names(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "a", "level": 3}]
    path = write(tmp_path / "rows.jsonl", rows)

    source = opened(path, columns={"prompt": "question", "completion": "answer", "answer": "answer"})

    assert source.row(0) == {"prompt": "q", "completion": "a", "answer": "a", "level": 3}
    assert set(columns_of(source)) == {"prompt", "completion", "answer", "level"}


def test_a_rename_of_a_missing_column_names_the_row_and_its_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "q"}, {"query": "q", "level": 3}])

    with pytest.raises(DataError, match="has no column 'problem', which data.columns wants as 'prompt'.*: question"):
        opened(path, columns={"prompt": "problem"})
    source = opened(path, columns={"prompt": "question"})
    with pytest.raises(DataError, match=r"Row 1 of .*rows.jsonl has no column 'question'.*are: query, level\."):
        source.row(1)


def test_nulls_that_a_table_adds_inside_columns_are_dropped_and_null_columns_stay(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"calls": [{"name": "weather", "arguments": {"city": "Paris"}}], "note": "x"},
        {"calls": [{"name": "clock", "arguments": {"zone": "UTC"}}], "note": None},
    ]
    path = write(tmp_path / "rows.parquet", rows)

    assert rows_of(opened(path)) == rows
    assert rows_of(opened(path, streaming=True)) == rows


def test_a_parquet_stream_starts_inside_any_file_and_batch(tmp_path: Path) -> None:
    rows = [{"number": number} for number in range(1200)]
    write(tmp_path / "a.parquet", rows[:600])
    write(tmp_path / "b.parquet", rows[600:])

    source = opened(tmp_path / "*.parquet", streaming=True)

    for start in (0, 255, 256, 300, 599, 600, 1000, 1199, 1200):
        assert list(source.scan(start)) == rows[start:]


def test_a_parquet_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"not parquet")

    with pytest.raises(DataError, match="Cannot read .*rows.parquet"):
        opened(path)
    with pytest.raises(DataError, match="rows.parquet: cannot be read as parquet"):
        opened(path, streaming=True)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_fingerprint_follows_content_and_options_and_not_the_place(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows.{kind}")
    copy = Path(shutil.copy(path, tmp_path / f"copy.{kind}"))
    os.utime(copy, (0, 0))
    changed = write(tmp_path / f"changed.{kind}", [*ROWS[:3], {"question": "q3", "answer": "A3"}, *ROWS[4:]])

    original = opened(path).fingerprint
    others = [
        opened(changed).fingerprint,
        opened(path, max_samples=6).fingerprint,
        opened(path, columns={"prompt": "question"}).fingerprint,
    ]

    assert opened(copy).fingerprint == original
    assert len({original, *others}) == 4


def test_the_fingerprint_of_a_saved_data_set_changes_with_its_split(tmp_path: Path) -> None:
    path = save(tmp_path / "saved", {"train": ROWS[:5], "test": ROWS[5:]})

    assert opened(path).fingerprint == opened(f"{path}@train").fingerprint
    assert opened(path).fingerprint != opened(f"{path}@test").fingerprint


def test_live_lists_and_data_sets_are_sources_by_number() -> None:
    from datasets import Dataset

    for rows in (ROWS, tuple(ROWS), Dataset.from_list(ROWS)):
        source = from_rows(rows, "live")
        assert rows_of(source) == ROWS
        assert (source.size, source.name) == (7, "live")


def test_a_live_stream_is_read_anew_by_every_scan() -> None:
    from datasets import Dataset

    class Endless:
        def __iter__(self) -> Iterator[dict[str, str]]:
            yield from ROWS

    for rows in (Endless(), Dataset.from_list(ROWS).to_iterable_dataset()):
        source = from_rows(rows, "live")
        assert source.size is None
        assert rows_of(source) == rows_of(source) == ROWS


@pytest.mark.parametrize("size", [3, 1_000, 20_000])
@pytest.mark.parametrize("kind", ["list", "data set"])
def test_the_fingerprint_of_live_rows_follows_those_in_the_middle(kind: str, size: int) -> None:
    from datasets import Dataset

    def fingerprint(rows: list[dict[str, str]]) -> str:
        return from_rows(rows if kind == "list" else Dataset.from_list(rows), "live").fingerprint

    rows = [{"question": f"{number}?", "answer": str(number)} for number in range(size)]
    reversed_inside = [rows[0], *rows[-2:0:-1], rows[-1]]
    changed = [*rows[: size // 2], {"question": "q", "answer": "a"}, *rows[size // 2 + 1 :]]

    original = fingerprint(rows)

    assert fingerprint([dict(row) for row in rows]) == original
    assert (fingerprint(reversed_inside) == original) == (size == 3)
    if size <= SPREAD_ROWS:
        assert fingerprint(changed) != original


def test_a_live_row_that_cannot_be_read_is_left_for_its_step() -> None:
    class Damaged(list[dict[str, str]]):
        def __getitem__(self, index: Any) -> Any:
            if index == 1:
                raise OSError(5, "Input/output error")
            return super().__getitem__(index)

    source = from_rows(Damaged(ROWS), "live")

    assert source.row(0) == ROWS[0]
    with pytest.raises(OSError, match="Input/output error"):
        source.row(1)


def test_the_fingerprint_of_live_rows_follows_their_ends_and_number() -> None:
    original = from_rows(ROWS, "live").fingerprint

    assert from_rows([dict(row) for row in ROWS], "live").fingerprint == original
    assert from_rows(ROWS[:-1], "live").fingerprint != original
    assert from_rows([*ROWS[:-1], {"question": "q", "answer": "a"}], "live").fingerprint != original
    assert from_rows([{"x": object()}], "live").fingerprint == from_rows([{"x": object()}], "live").fingerprint


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "live has no rows"),
        ({"question": ["q"]}, "a mapping is one row"),
        (["text"], "Row 0 of live is a str; rows are mappings of columns"),
        ((row for row in ROWS), "live: a generator can be read once"),
    ],
)
def test_live_objects_that_are_no_rows_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_rows(rows, "live")


def test_rows_outside_a_source_are_an_error(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "rows.jsonl"), max_samples=4)

    with pytest.raises(IndexError):
        source.row(4)
    with pytest.raises(IndexError):
        source.row(-1)
    with pytest.raises(TypeError, match="streamed"):
        opened(tmp_path / "rows.jsonl", streaming=True).row(0)


def test_a_generated_task_is_a_source_with_renames_and_a_limit() -> None:
    config = SourceConfig.model_validate(
        {"synthetic": {"task": "sort", "rows": 9}, "columns": {"completion": "answer"}, "max_samples": 5}
    )

    source = open_source(config, Path())

    assert (source.size, source.name) == (5, "sort")
    assert set(source.row(4)) == {"prompt", "completion", "digits"}


def test_rows_in_memory_are_renamed_and_limited_as_the_data_section_says() -> None:
    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.training import SFTConfig
    from holdfast.training.setup.rows import open_data

    data = {"path": "given", "columns": {"prompt": "question", "completion": "answer"}, "max_samples": 2}
    config = from_mapping({"steps": 1, "model": {"path": "m"}, "data": data}, SFTConfig)

    opened_data = open_data(
        ConfiguredRun(config=config, base=Path()), [{"question": f"q{n}", "answer": f"a{n}", "id": n} for n in range(5)]
    )

    (source,) = opened_data.training
    assert [source.row(index) for index in range(source.size or 0)] == [
        {"id": 0, "prompt": "q0", "completion": "a0"},
        {"id": 1, "prompt": "q1", "completion": "a1"},
    ]
