"""A file of reference log-probabilities is what was written, or it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.training.other_models.table import load_table, save_table

ABOUT = {"model": "a1b2", "rows": "c3d4"}
TABLE = {bytes(range(16)): -1.5, bytes(range(240, 256)): -20.25}


def test_every_bit_that_flips_is_found(tmp_path: Path) -> None:
    path = tmp_path / "said"
    save_table(TABLE, path, ABOUT)
    whole = path.read_bytes()
    assert load_table(path, ABOUT) == TABLE

    unnoticed = []
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            if load_table(path, ABOUT) != TABLE:
                unnoticed.append(bit)
        except ConfigError:
            continue

    assert unnoticed == []


@pytest.mark.parametrize("length", [0, 7, 100])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "said"
    save_table(TABLE, path, ABOUT)
    path.write_bytes(path.read_bytes()[:length])

    with pytest.raises(ConfigError, match="is not a whole file of reference log-probabilities"):
        load_table(path, ABOUT)


@pytest.mark.parametrize("name", ["model", "rows"])
def test_a_file_of_other_things_is_refused_by_what_differs(tmp_path: Path, name: str) -> None:
    path = tmp_path / "said"
    save_table(TABLE, path, ABOUT)

    with pytest.raises(ConfigError, match=f"does not have: {name} differ"):
        load_table(path, ABOUT | {name: "0000"})
