"""Walk every architecture of the test matrix and write what it did into docs/models.md.

    python -m tests.training.matrix_table [model_type ...]

Takes minutes. `tests/training/test_matrix.py` compares the table with what it sees.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.ranks import RankPool
from tests.training.matrix import ARCHITECTURES, LARGEST_DIFFERENCE, walk

PAGE = Path("docs/models.md")
BEGIN, END = "<!-- architectures: written by tests/training/matrix_table.py -->\n", "<!-- end of architectures -->\n"
HEAD = "| attention | `model_type` |\n|---|---|\n"


def table_in(page: Path) -> dict[str, str]:
    """Return what the table in a page says of each model_type: its attention, or how it failed."""
    inside = page.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    lines = inside.removeprefix(HEAD).splitlines()
    return {name: line.split("|")[1].strip() for line in lines for name in line.split("`")[1::2]}


def table_of(found: Mapping[str, str]) -> str:
    """Return the table: a line for each kind of attention and each failure, with the architectures that have it."""
    lines = [(said, [f"`{name}`" for name in found if found[name] == said]) for said in dict.fromkeys(found.values())]
    return HEAD + "".join(f"| {said} | {', '.join(names)} |\n" for said, names in lines)


def main() -> int:
    """Walk, and write the page."""
    pools = {size: RankPool(size) for size in (1, 2)}
    found = table_in(PAGE)
    for model_type in sys.argv[1:] or ARCHITECTURES:
        with tempfile.TemporaryDirectory() as place:
            try:
                walked = walk(pools.__getitem__, model_type, Path(place))
            except Exception as error:  # noqa: BLE001 - the failing call is what the table is to say
                print(f"{model_type}: {error}", flush=True)
                reason = str(error).strip().splitlines()[-1][:160].replace("`", "").replace("|", "")
                found[model_type] = f"refused: {reason}"
                continue
        print(f"{model_type}: moved {walked.moved:.3g}, difference {walked.difference:.3g}", flush=True)
        passed = walked.difference < LARGEST_DIFFERENCE < walked.moved
        found[model_type] = walked.attention if passed else f"{walked.attention}, differs"
    for pool in pools.values():
        pool.close()
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    table = table_of({name: found[name] for name in ARCHITECTURES if name in found})
    PAGE.write_text(before + BEGIN + table + END + rest.split(END)[1], encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
