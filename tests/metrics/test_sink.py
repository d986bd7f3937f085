"""metrics.jsonl after a kill: whole lines stay, however long the torn one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.metrics.sink import JsonlSink, read_metrics


@pytest.mark.parametrize("torn", [0, 1, 70_000, 200_000])
@pytest.mark.parametrize("line", [20, 65_535, 65_536, 150_000])
def test_what_follows_the_last_whole_line_is_cut(tmp_path: Path, torn: int, line: int) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = '{"step":1}\n' + '{"step":2,"text":"' + "x" * (line - 21) + '"}\n'
    path.write_text(whole + '{"step":3'[:torn].ljust(torn, "y"))

    sink = JsonlSink(path)
    sink.write(3, {})
    sink.close()

    assert sink.had_lines
    assert path.read_text() == whole + '{"step":3}\n'
    assert [entry["step"] for entry in read_metrics(path)] == [1, 2, 3]


def test_a_file_of_one_torn_line_holds_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("y" * 100_000)

    sink = JsonlSink(path)
    sink.close()

    assert not sink.had_lines
    assert path.read_bytes() == b""
