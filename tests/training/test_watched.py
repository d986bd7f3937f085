"""What follows a metric: runs that end when it stops improving, and rates that fall on its plateaus."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.export.about import read_about
from holdfast.config.sections.measured import PatienceConfig
from holdfast.metrics.sink import read_metrics
from holdfast.training.run_state import RunState, state_of
from holdfast.training.watched import MetricStanding, after
from tests.ranks import RankError
from tests.training.cases import run, tree

HELD_OUT = {"sets": {"s": {"synthetic": {"task": "sort", "rows": 16, "seed": 9}}}, "every_steps": 1}
WATCH = """
def interrupt(event):
    import os, signal
    if event.step == 4 and not os.path.exists("{mark}"):
        open("{mark}", "w").close()
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("mode", "delta", "values", "expected"),
    [
        ("min", 0.0, [3.0, 2.0, 2.0, 2.5, 1.0], [(3.0, 0), (2.0, 0), (2.0, 1), (2.0, 2), (1.0, 0)]),
        ("max", 0.0, [3.0, 2.0, 3.0, 3.5], [(3.0, 0), (3.0, 1), (3.0, 2), (3.5, 0)]),
        ("min", 0.5, [3.0, 2.6, 2.4, 2.0], [(3.0, 0), (3.0, 1), (2.4, 0), (2.4, 1)]),
        ("max", 0.0, [math.nan, -math.inf, 1.0, math.inf], [(None, 1), (None, 2), (1.0, 0), (1.0, 1)]),
    ],
)
def test_an_improvement_is_over_the_best_value_by_more_than_the_margin(
    mode: Any, delta: float, values: list[float], expected: list[tuple[float | None, int]]
) -> None:
    section, standing, seen = PatienceConfig(metric="m", mode=mode, min_delta=delta), MetricStanding(None, 0), []

    for value in values:
        standing = after(section, standing, value)
        seen.append(tuple(standing))

    assert seen == expected


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "r" / "events.jsonl").read_text().splitlines()]


def stopping(directory: Path, **sections: Any) -> dict[str, Any]:
    """Return a run whose accuracy on the held-out rows never reaches what it would have to improve by."""
    stop = {"metric": "eval/s/mean_token_accuracy", "mode": "max", "patience": 3, "min_delta": 2.0}
    return tree(str(directory), steps=9, evaluation=HELD_OUT, stop_when=stop, **sections)


@pytest.mark.slow
def test_a_run_ends_as_at_its_last_step_when_its_metric_stops_improving(pools: Any, tmp_path: Path) -> None:
    outcomes = pools(2).run(run, stopping(tmp_path))

    # The first measurement is the best one, and three follow.
    lines = read_metrics(tmp_path / "r" / "metrics.jsonl")
    best = lines[0]["eval/s/mean_token_accuracy"]
    why = f"stop_when: eval/s/mean_token_accuracy has not improved on {best:.6g} in 3 measurements"
    assert [(outcome.step, outcome.stopped) for outcome in outcomes] == [(4, why)] * 2
    assert Path(outcomes[0].export).name == "final"
    assert [event["reason"] for event in events(tmp_path) if event["event"] == "stop"] == [why]
    assert [event["saved"] for event in events(tmp_path) if event["event"] == "checkpoint"] == [4]
    assert state_of(tmp_path / "r", events(tmp_path), 4) == RunState("done", why)

    again = pools(2).run(run, stopping(tmp_path))[0]
    more = pools(2).run(run, stopping(tmp_path, min_steps=6))[0]

    assert (again.step, again.stopped) == (4, why)
    assert (more.step, len(read_metrics(tmp_path / "r" / "metrics.jsonl"))) == (6, 6)


def test_a_run_that_goes_on_from_a_checkpoint_has_its_patience_used_as_before(pools: Any, tmp_path: Path) -> None:
    first = pools(1).run(run, stopping(tmp_path) | {"steps": 3})[0]
    second = pools(1).run(run, stopping(tmp_path))[0]

    assert (first.step, first.stopped) == (3, None)
    assert (second.step, str(second.stopped)[:10]) == (4, "stop_when:")


def test_a_run_stopped_at_an_evaluation_makes_it_later_and_decides_as_one_that_was_not(
    pools: Any, tmp_path: Path
) -> None:
    (tmp_path / "watch.py").write_text(WATCH.format(mark=tmp_path / "mark"))
    values = stopping(tmp_path, observers=["watch.py:interrupt"])
    whole = pools(1).run(run, stopping(tmp_path / "whole"))[0]

    first = pools(1).run(run, values, str(tmp_path))[0]
    second = pools(1).run(run, values, str(tmp_path))[0]

    assert (first.step, first.stopped) == (4, "stopped by SIGTERM")
    assert (second.step, second.stopped) == (whole.step, whole.stopped) == (4, whole.stopped)
    assert second.metrics["eval/s/loss"] == whole.metrics["eval/s/loss"]


BEST = {"export_best": {"metric": "eval/s/loss", "mode": "min"}}


def exported_step(directory: Path, name: str) -> int:
    about = read_about(directory / "r" / "exports" / name)
    assert about is not None
    return about.step


def test_an_evaluation_that_is_made_later_counts_in_all_starts_that_follow(pools: Any, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(WATCH.format(mark=tmp_path / "mark"))
    values = stopping(tmp_path, observers=["watch.py:interrupt"], checkpoint=BEST)
    more = stopping(tmp_path, observers=["watch.py:interrupt"], checkpoint=BEST)
    more["stop_when"]["patience"] = 5

    pools(1).run(run, values, str(tmp_path))
    second = pools(1).run(run, values, str(tmp_path))[0]
    best, lines, before = (
        exported_step(tmp_path, "best"),
        read_metrics(tmp_path / "r" / "metrics.jsonl"),
        events(tmp_path),
    )
    third = pools(1).run(run, values, str(tmp_path))[0]
    same = (read_metrics(tmp_path / "r" / "metrics.jsonl"), events(tmp_path))
    fourth = pools(1).run(run, more, str(tmp_path))[0]

    losses = [line["eval/s/loss"] for line in lines if "eval/s/loss" in line]
    assert (len(losses), losses.index(min(losses)), best) == (4, 3, 4)
    assert (third.step, third.stopped) == (second.step, second.stopped)
    assert same == (lines, before)
    # Three without an improvement up to step 4, and two more.
    assert (fourth.step, str(fourth.stopped)[-17:]) == (6, "in 5 measurements")


def test_an_evaluation_that_a_stop_left_at_the_last_step_is_made_by_the_next_start(pools: Any, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(WATCH.format(mark=tmp_path / "mark"))
    values = stopping(tmp_path, observers=["watch.py:interrupt"], checkpoint=BEST) | {"steps": 4}
    values["stop_when"]["patience"] = 9

    outcomes = [pools(1).run(run, values, str(tmp_path))[0] for _ in range(3)]

    steps = [line["step"] for line in read_metrics(tmp_path / "r" / "metrics.jsonl") if "eval/s/loss" in line]
    assert [(outcome.step, outcome.stopped) for outcome in outcomes] == [
        (4, "stopped by SIGTERM"),
        (4, None),
        (4, None),
    ]
    assert (steps, exported_step(tmp_path, "best"), exported_step(tmp_path, "final")) == ([1, 2, 3, 4], 4, 4)
    assert state_of(tmp_path / "r", events(tmp_path), 4) == RunState("done", "")


def test_a_best_model_whose_export_failed_after_an_owed_evaluation_is_exported_by_the_next_start(
    pools: Any, tmp_path: Path
) -> None:
    (tmp_path / "watch.py").write_text(WATCH.format(mark=tmp_path / "mark"))
    values = stopping(tmp_path, observers=["watch.py:interrupt"], checkpoint=BEST) | {"steps": 4}
    values["stop_when"]["patience"] = 9
    exports = tmp_path / "r" / "exports"

    pools(1).run(run, values, str(tmp_path))
    before = exported_step(tmp_path, "best")
    kept = exports.rename(tmp_path / "kept")
    exports.write_text("")
    with pytest.raises(RankError):
        pools(1).run(run, values, str(tmp_path))
    exports.unlink()
    kept.rename(exports)
    third = pools(1).run(run, values, str(tmp_path))[0]

    assert (before, exported_step(tmp_path, "best"), third.step) == (3, 4, 4)


@pytest.mark.parametrize("metric", ["eval/s/mean_token_accuracy", "loss"])
def test_what_an_error_in_an_evaluation_leaves_is_measured_by_the_next_start(
    pools: Any, tmp_path: Path, metric: str
) -> None:
    values = stopping(tmp_path)
    values["stop_when"] |= {"metric": metric, "min_delta": 99.0}
    values["evaluation"] = HELD_OUT | {"completions": {"samples": 2, "max_new_tokens": 2}}
    in_the_way = tmp_path / "r" / "completions" / "step-00000003.s.jsonl"
    in_the_way.mkdir(parents=True)

    with pytest.raises(RankError, match=in_the_way.name):
        pools(1).run(run, values)
    in_the_way.rmdir()
    second = pools(1).run(run, values)[0]

    assert [event["saved"] for event in events(tmp_path) if event["event"] == "checkpoint"] == [3, 4]
    assert (second.step, str(second.stopped)[-17:]) == (4, "in 3 measurements")


def test_a_run_that_a_metric_of_its_steps_ends_is_evaluated_as_at_its_last_step(pools: Any, tmp_path: Path) -> None:
    stop = {"metric": "loss", "mode": "min", "patience": 2, "min_delta": 99.0}
    values = tree(str(tmp_path), steps=9, evaluation={"sets": HELD_OUT["sets"]}, stop_when=stop, checkpoint=BEST)

    outcome = pools(1).run(run, values)[0]

    steps = [line["step"] for line in read_metrics(tmp_path / "r" / "metrics.jsonl") if "eval/s/loss" in line]
    assert (outcome.step, str(outcome.stopped)[:10], steps) == (3, "stop_when:", [3])
    assert exported_step(tmp_path, "best") == 3


def test_rates_fall_on_plateaus_as_torch_has_them_and_go_on_after_a_resume(pools: Any, tmp_path: Path) -> None:
    schedule = {
        "kind": "plateau", "metric": "eval/s/loss", "mode": "min", "patience": 2, "factor": 0.5, "min_delta": 0.2,
        "cooldown": 1, "final_ratio": 0.2,
    }  # fmt: skip
    sections = {"optim": {"lr": 2e-3, "schedule": schedule}, "evaluation": HELD_OUT}

    pools(1).run(run, tree(str(tmp_path), steps=5, **sections))
    pools(1).run(run, tree(str(tmp_path), steps=12, **sections))
    pools(1).run(run, tree(str(tmp_path / "whole"), steps=12, **sections))

    lines = read_metrics(tmp_path / "r" / "metrics.jsonl")
    whole = read_metrics(tmp_path / "whole" / "r" / "metrics.jsonl")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2e-3)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, "min", factor=0.5, patience=1, threshold=0.2, threshold_mode="abs", cooldown=1, min_lr=4e-4
    )
    expected = []
    for line in whole:
        expected.append(optimizer.param_groups[0]["lr"])
        theirs.step(line["eval/s/loss"])
    assert [line["learning_rate"] for line in whole] == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) > 2
    assert [line["learning_rate"] for line in lines] == [line["learning_rate"] for line in whole]
    assert [line["loss"] for line in lines] == [line["loss"] for line in whole]
