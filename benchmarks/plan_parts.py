"""A plan's parts against sums by hand, for twelve shapes: each part, never totals alone.

The sums are those of tests/fake_devices/parts.py: from shapes, with nothing of the package. A part that is further than
2 % from its sum is printed as MISS, and the script then exits with status 1.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fake_devices.conftest import executed  # noqa: E402 - the sums lie beside the tests
from tests.fake_devices.parts import SHAPES, by_hand  # noqa: E402 - same

TOLERANCE = 0.02


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        planned = executed(Path(place), 0, 0)
    worst = 0.0
    print(f"{'shape':32s}{'phase':11s}{'part':13s}{'planned MiB':>13s}{'by hand MiB':>13s}{'gap':>9s}")
    for name, shape in SHAPES.items():
        for phase, parts in by_hand(shape).items():
            for kind, expected in parts.items():
                counted = planned[name]["peaks"][f"{phase} cuda"][1].get(kind, 0)
                gap = counted / expected - 1
                worst = max(worst, abs(gap))
                mark = "  MISS" if abs(gap) > TOLERANCE else ""
                row = f"{name:32s}{phase:11s}{kind:13s}{counted / 2**20:13.2f}{expected / 2**20:13.2f}{gap:9.2%}"
                print(row + mark)
    print(f"largest gap {worst:.2%}, at most {TOLERANCE:.0%} is asked for")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
