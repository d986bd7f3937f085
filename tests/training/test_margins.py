"""What stands in a line of metrics about two sides of single answers."""

from __future__ import annotations

import pytest

from holdfast.training.preference.run import with_margins


def line(desirable: float) -> dict[str, float]:
    sides = {"rewards/chosen": 0.5, "rewards/rejected": -0.25, "logps/chosen": -3.0, "logps/rejected": -4.0}
    return {f"eval/held/{name}": value for name, value in (sides | {"kto/desirable": desirable}).items()}


def test_both_sides_have_a_margin() -> None:
    assert with_margins(line(0.5)) == line(0.5) | {"eval/held/rewards/margins": 0.75}


@pytest.mark.parametrize(("desirable", "gone"), [(1.0, "rejected"), (0.0, "chosen")])
def test_a_side_without_answers_has_no_mean_and_no_margin(desirable: float, gone: str) -> None:
    whole = line(desirable)

    assert with_margins(whole) == {name: value for name, value in whole.items() if not name.endswith(gone)}
