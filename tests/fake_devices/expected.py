"""What every run of the lane takes as rank 0 of 8, and the tables of recipes, written down.

python -m tests.fake_devices.expected writes both anew.

A change of these numbers is a change of memory or host syncs of a step. Write them anew with the change that
means it, and say in its message what has become of them.
"""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).with_name("expected.json")
TOLERANCE = 0.02
"""Of each kind of bytes; what sums by hand are held to."""
WRITTEN_FOR = (2, 13)
"""The newest torch whose memory is written down; a newer one may take less, of other kinds at another moment."""
COMPARED = ("host_values", "peaks", "made")


RECIPES = sorted((Path(__file__).parents[2] / "examples" / "gpu").glob("*.yaml"))


def command_of(recipe: Path) -> list[str]:
    """Return the command by which a recipe says that it is planned, without the program's name."""
    line = next(line for line in recipe.read_text(encoding="utf-8").splitlines() if "holdfast plan" in line)
    return shlex.split(line.lstrip("# "))[1:]


def table_of(recipe: Path) -> Path:
    """Return where a recipe's table stands."""
    return recipe.with_name(f"{recipe.stem}.plan.txt")


@cache
def _all() -> dict[str, dict[str, Any]]:
    written: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return written


def expected(name: str) -> dict[str, Any]:
    """Return what is written down of a run."""
    return _all()[name]


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Say how an execution differs from what is written down; "" if it does not."""
    if "error" in after:
        return str(after["error"]).strip().splitlines()[-1][:160]
    if before["host_values"] != after["host_values"]:
        return f"other host values: {before['host_values']} became {after['host_values']}"
    for phase in {*before["peaks"], *after["peaks"]}:
        old, new = (said["peaks"].get(phase, (0, {}))[1] for said in (before, after))
        if words := _other(old, new):
            return f"peak of {phase}: {words}"
    return _other(before["made"], after["made"])


def _other(old: dict[str, int], new: dict[str, int]) -> str:
    if tuple(map(int, torch.__version__.split(".")[:2])) > WRITTEN_FOR:
        before, after = sum(old.values()), sum(new.values())
        return f"{before:,} bytes became {after:,}" if after > (1 + TOLERANCE) * before else ""
    for kind in sorted({*old, *new}):
        one, other = old.get(kind, 0), new.get(kind, 0)
        if abs(other - one) > TOLERANCE * one:
            return f"{one:,} bytes of {kind} became {other:,}"
    return ""


def main() -> None:
    """Execute the lane as rank 0 of 8, and write down what it says."""
    import tempfile

    from tests.fake_devices.conftest import child, executed
    from tests.fake_devices.lane import make_models

    with tempfile.TemporaryDirectory() as place:
        make_models(Path(place))
        said = executed(Path(place), 8, 0)
    broken = {name: line["error"] for name, line in said.items() if "error" in line}
    assert not broken, broken
    written = {name: {what: line[what] for what in COMPARED} for name, line in said.items()}
    FILE.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for recipe in RECIPES:
        table_of(recipe).write_text(child("holdfast.cli.main", *command_of(recipe)).stdout, encoding="utf-8")


if __name__ == "__main__":
    main()
