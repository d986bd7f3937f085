"""Which parts of a bar's line stay where a terminal is narrow."""

from __future__ import annotations

import pytest

from holdfast.metrics.progress import End, Lines, Times, fitted_frame

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


@pytest.mark.parametrize(
    ("end", "step", "epoch", "expected"),
    [
        (End(100), 3, 0.3, 100),
        (End(), 3, 0.3, None),
        (End(None, 2.0), 3, 0.3, 20),
        (End(None, 2.0), 3, 0.0, None),  # the length of a stream is known at its end
        (End(None, 2.0), 0, 0.0, None),
        (End(None, 1.0), 3, 24 / 26, 4),  # 26 rows in batches of 8, of which the last one is small
        (End(20, 1.0), 3, 0.3, 10),  # half of the rows are left out as they are read
        (End(5, 1.0), 3, 0.3, 5),
        (End(None, 1.1), 10, 1.0, 11),
        (End(None, 1.0), 12, 1.0, 12),
    ],
)
def test_the_steps_of_a_run_by_epochs_follow_from_those_so_far(
    end: End, step: int, epoch: float, expected: int | None
) -> None:
    assert end.expected(step, epoch) == expected


def test_lines_of_a_run_by_epochs_say_of_how_many_steps() -> None:
    written: list[str] = []
    lines = Lines(End(None, 2.0), written.append)

    for step in range(1, 9):
        lines.update(step, {"loss": 1.0, "epoch": step / 4})

    assert written == ["step 1/8  loss 1.0000", "step 8/8  loss 1.0000"]
