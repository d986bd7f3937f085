"""Which parts of a bar's line stay where a terminal is narrow."""

from __future__ import annotations

import pytest

from holdfast.metrics.progress import Times, fitted_frame

TIMES = Times("step  12/200", "0:00:12", "left 0:03:10")
NUMBERS = {"loss": "loss 1.2345", "accuracy": "accuracy 0.512", "norm": "norm 0.100", "lr": "lr 1.00e-04"}
RANKS = ("loss", "accuracy", "lr", "norm")


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (10, "step  12/200"),
        (30, "step  12/200  loss 1.2345"),
        (50, "step  12/200  loss 1.2345  left 0:03:10"),
        (60, "step  12/200  loss 1.2345  accuracy 0.512  left 0:03:10"),
        (64, "step  12/200 ########  loss 1.2345  accuracy 0.512  left 0:03:10"),
        (76, "step  12/200 ####################  loss 1.2345  accuracy 0.512  left 0:03:10"),
        (80, "step  12/200 ###########  loss 1.2345  accuracy 0.512  lr 1.00e-04  left 0:03:10"),
        (90, "step  12/200 #############  loss 1.2345  accuracy 0.512  lr 1.00e-04  0:00:12 left 0:03:10"),
        (200, f"step  12/200 {'#' * 24}  {'  '.join(NUMBERS.values())}  0:00:12 left 0:03:10"),
    ],
)
def test_parts_drop_out_by_rank_and_none_is_cut(width: int, line: str) -> None:
    parts = fitted_frame(TIMES, NUMBERS, RANKS, True, width)

    assert parts.before + "#" * parts.bar + parts.after == line


def test_a_run_whose_steps_are_not_known_has_neither_bar_nor_time_left() -> None:
    parts = fitted_frame(Times("step 12", "0:00:12", ""), NUMBERS, RANKS, False, 60)

    assert parts == ("step 12", 0, "  loss 1.2345  accuracy 0.512  lr 1.00e-04  0:00:12")
