"""Which parts of a bar's line stay where a terminal is narrow, and the steps to come."""

from __future__ import annotations

import pytest

from holdfast.metrics.progress import End, Lines, fitting_parts

SIZES = {"loss": 13, "accuracy": 16, "lr": 13, "norm": 12}


@pytest.mark.parametrize(
    ("width", "has_end", "parts"),
    [
        (10, True, ""),
        (30, True, "loss"),
        (50, True, "loss left"),
        (60, True, "loss left accuracy"),
        (64, True, "loss left accuracy bar"),
        (75, True, "loss left accuracy bar"),
        (80, True, "loss left accuracy bar lr"),
        (90, True, "loss left accuracy bar lr elapsed"),
        (200, True, "loss left accuracy bar lr elapsed norm"),
        (60, False, "loss accuracy lr"),
    ],
)
def test_parts_drop_out_by_rank_and_none_is_cut(width: int, has_end: bool, parts: str) -> None:
    times = {"elapsed": len("0:00:00")} | ({"left": len("0:00:00")} if has_end else {})

    fitting = fitting_parts(SIZES, width - len("step  12/200"), times)

    assert fitting - {"numbers"} == set(parts.split())


@pytest.mark.parametrize(
    ("width", "parts"), [(55, "loss left"), (56, "loss left accuracy"), (92, "loss left accuracy bar lr")]
)
def test_long_times_leave_room_for_fewer_parts(width: int, parts: str) -> None:
    times = {"elapsed": len("1 day, 6:00:02"), "left": len("380:05:00")}

    assert fitting_parts(SIZES, width - len("step  12/200"), times) - {"numbers"} == set(parts.split())


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
