"""Walk every architecture of the test matrix and write what it did into docs/models.md.

    python -m tests.training.matrix_table [model_type ...]

Takes minutes. `tests/training/test_matrix.py` compares the table with what it sees.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.ranks import RankPool
from tests.training.matrix import ARCHITECTURES, LARGEST_DIFFERENCE, Walked, walk

PAGE = Path("docs/models.md")
BEGIN, END = "<!-- architectures: written by tests/training/matrix_table.py -->\n", "<!-- end of architectures -->\n"
HEAD = "| `model_type` | parameters | attention | result |\n|---|---|---|---|\n"


def row_of(walked: Walked) -> str:
    """Return an architecture's line of the table."""
    return f"| `{walked.model_type}` | {walked.parameters:,} | {walked.attention} | pass |"


def table_in(page: Path) -> dict[str, str]:
    """Return the lines of the table in a page, by model_type."""
    inside = page.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    lines = inside.removeprefix(HEAD).splitlines()
    return {line.split("`")[1]: line for line in lines if line}


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
                reason = str(error).strip().splitlines()[-1][:160]
                found[model_type] = f"| `{model_type}` | | | refused: {reason} |"
                continue
        print(f"{model_type}: moved {walked.moved:.3g}, difference {walked.difference:.3g}", flush=True)
        passed = walked.difference < LARGEST_DIFFERENCE < walked.moved
        found[model_type] = row_of(walked) if passed else row_of(walked).replace("pass", "differs")
    for pool in pools.values():
        pool.close()
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    lines = [found[name] for name in ARCHITECTURES if name in found]
    PAGE.write_text(before + BEGIN + HEAD + "\n".join(lines) + "\n" + END + rest.split(END)[1], encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
