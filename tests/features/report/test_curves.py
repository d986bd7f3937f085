"""Columns hold the effective log, and fewer points hold its extremes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from holdfast.features.report.curves import Curves, LineReader, Rewind
from holdfast.features.report.drawn import MOST_POINTS, bucket_means, drawn_indices
from holdfast.metrics.sink import read_metrics
from tests.features.report.cases import killed_run


def curves_of(path: Path) -> Curves:
    curves = Curves()
    for _, line in LineReader(path).new(to_end=True):
        curves.add(line)
    return curves


def test_columns_are_the_effective_log(tmp_path: Path) -> None:
    path = killed_run(tmp_path).place / "metrics.jsonl"

    curves = curves_of(path)

    for name, column in curves.columns.items():
        lines = [(line["step"], line[name]) for line in read_metrics(path) if name in line]
        read = [
            (step, None if math.isnan(value) else value)
            for step, value in zip(column.steps, column.values, strict=True)
        ]
        assert read == lines
    assert curves.rewinds == [Rewind(14, 10), Rewind(37, 30), Rewind(52, 50)]
    assert [list(part.steps) for part in curves.lost["reward"]] == [[11, 12, 13, 14], [*range(31, 38)], [51, 52]]
    assert curves.evaluated == [0, 60]
    assert curves.columns["loss"].not_finite == [20, 21]


def test_a_torn_last_line_waits_and_is_read_when_its_end_comes(tmp_path: Path) -> None:
    path, reader = tmp_path / "metrics.jsonl", LineReader(tmp_path / "metrics.jsonl")
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')

    first = [line for _, line in reader.new()]
    torn = reader.is_torn
    with path.open("a") as file:
        file.write('ss": 0.5}\n')
    second = [line for _, line in reader.new()]

    assert first == [{"step": 1, "loss": 1.0}]
    assert torn
    assert second == [{"step": 2, "loss": 0.5}]
    assert not reader.is_torn


def test_offsets_are_where_lines_begin(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"step": number, "pad": "ü" * 70_000}) + "\n" for number in range(40)))

    for place, line in LineReader(path).new():
        data = path.read_bytes()[place:]
        assert json.loads(data.partition(b"\n")[0]) == line


def test_of_a_long_log_a_follower_reads_whole_lines_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": number}) + "\n" for number in range(10_000)))

    lines = [line["step"] for _, line in LineReader(path, last_bytes=1000).new()]

    assert lines[-1] == 9999
    assert lines == list(range(lines[0], 10_000))
    assert 40 < len(lines) < 80


def test_extremes_and_gaps_of_a_long_curve_stay() -> None:
    values = [math.sin(place / 3000) for place in range(100_000)]
    values[70_001], values[12_345], values[50_000] = 9.0, -7.0, math.nan

    places = drawn_indices(values)

    assert len(places) <= MOST_POINTS + 1
    assert list(places) == sorted(set(places))
    assert {0, 99_999, 70_001, 12_345, 50_000} <= set(places)


@pytest.mark.parametrize("size", [0, 1, MOST_POINTS])
def test_short_curves_are_drawn_whole(size: int) -> None:
    assert list(drawn_indices([1.0] * size)) == list(range(size))


def test_means_of_parts_add_up_to_the_whole() -> None:
    values = [float(step % 7) for step in range(1000)]

    means = bucket_means(values)

    assert len(means) == 200
    assert sum(means) * 5 == pytest.approx(sum(values))
    assert bucket_means([]) == []


@pytest.mark.parametrize(
    "line", [None, 3, [], {"loss": 1.0}, {"step": "x"}, {"step": True}, {"event": "rewind"}, {"step": 2**70}]
)
def test_a_line_that_is_no_step_is_counted_and_left_out(line: object) -> None:
    curves = Curves()

    curves.add(line)

    assert (curves.unread, curves.columns, curves.last) == (1, {}, None)
