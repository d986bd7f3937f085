"""What a job does when its run has ended, decided from the files of the run alone."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.features.cluster.requeue import decide


def run_that(directory: Path, step: int, **ending: object) -> Path:
    """Write what a run leaves that ended at a step."""
    directory.mkdir(exist_ok=True)
    (directory / "run.json").write_text(json.dumps({"run_id": "a", "verb": "sft"}))
    (directory / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
    with (directory / "events.jsonl").open("a") as events:
        events.write(json.dumps({"step": step, **ending}) + "\n")
    return directory


def test_a_stopped_run_is_requeued(tmp_path: Path) -> None:
    place = run_that(tmp_path / "run", 7, event="stop", reason="stopped by SIGTERM")

    again, words = decide(place, "5")

    assert again
    assert (
        words
        == "The run is stopped at step 7: stopped by SIGTERM. Job 5 is requeued, 1 of at most 3 times at this step."
    )


def test_a_run_that_is_done_is_not_requeued(tmp_path: Path) -> None:
    assert decide(run_that(tmp_path / "run", 60, event="done"), "5") == (False, "The run is done.")


def test_a_run_that_was_refused_before_it_wrote_is_not_requeued(tmp_path: Path) -> None:
    again, words = decide(tmp_path / "run", "5")

    assert not again
    assert "holds no run" in words
    assert not (tmp_path / "run").exists()


def test_the_fourth_requeue_at_one_step_does_not_happen(tmp_path: Path) -> None:
    place = run_that(tmp_path / "run", 7, event="failed", reason="Rank 1 died")

    answers = [decide(place, "5")[0] for _ in range(4)]

    assert answers == [True, True, True, False]
    assert "requeued 3 times at this step" in decide(place, "5")[1]


def test_a_step_further_on_counts_anew_and_so_does_another_job(tmp_path: Path) -> None:
    place = run_that(tmp_path / "run", 7, event="failed", reason="Rank 1 died")
    assert [decide(place, "5")[0] for _ in range(4)] == [True, True, True, False]

    assert decide(place, "6")[0]
    run_that(place, 8, event="failed", reason="Rank 1 died")
    assert decide(place, "5")[0]
