"""The recorded map: one lane can be recorded alone, and the tests that were not run keep what is known of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tools import record_map
from tools.record_map import SOURCE, prepare, read_map, write

HERE = "tests/test_record_map.py"


def test_what_was_not_recorded_again_keeps_its_row_under_todays_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_map, "MAP", tmp_path / "map.json.gz")
    record_map.MAP.write_bytes(
        gzip.compress(
            json.dumps(
                {
                    "files": ["errors.py", "no_longer_there.py", "files.py"],
                    "sets": [[0, 1], [2]],
                    "tests": {
                        f"{HERE}::kept": [0, 3.0],
                        f"{HERE}::run_again": [1, 9.0],
                        "tests/test_that_went.py::test": [1, 1.0],
                    },
                }
            ).encode()
        )
    )
    prepare(tmp_path)
    offsets = json.loads((tmp_path / "offsets.json").read_text())
    lines = [
        [f"{HERE}::run_again[one]", 1.0, [offsets[str(SOURCE / "http.py")]]],
        [f"{HERE}::run_again[two]", 0.5, [offsets[str(SOURCE / "files.py")]]],
    ]
    (tmp_path / "tests-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    write(tmp_path)

    entered = read_map()
    assert entered is not None
    assert entered.files == {
        f"{HERE}::kept": frozenset({"errors.py"}),
        f"{HERE}::run_again": frozenset({"http.py", "files.py"}),
    }
    assert entered.seconds == {f"{HERE}::kept": 3.0, f"{HERE}::run_again": 1.5}
