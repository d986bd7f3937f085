"""A whole run: what it writes, when it evaluates, how it stops, and that its export is the model it trained."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.metrics.sink import read_metrics
from tests.training.cases import evaluate, run, tree

OBSERVERS = """
def stop_at_three(event):
    return "stop" if event.step == 3 else None

def count(event, state):
    state["seen"] = state.get("seen", 0) + 1
    return ["evaluate", "save"] if event.step == 2 else None

def fails(event):
    raise ValueError("no such metric")

def answers_nonsense(event):
    return "explode"
"""


@pytest.fixture
def observers(tmp_path: Path) -> Path:
    (tmp_path / "watch.py").write_text(OBSERVERS)
    return tmp_path


def test_a_run_leaves_metrics_its_configuration_and_a_model_transformers_loads(pools: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    held_out = {"synthetic": {"task": "sort", "rows": 40, "seed": 9}}
    values = tree(str(tmp_path), evaluation={"sets": {"held_out": held_out}, "every_steps": 2})

    outcome = pools(2).run(run, values)[0]

    lines = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [("eval/held_out/loss" in line) for line in lines] == [False, True, False, True]
    assert outcome.stopped is None
    export = Path(outcome.export)
    model = AutoModelForCausalLM.from_pretrained(export)
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert model.config.use_cache
    text = "sort 4213=1234"
    tokens = torch.tensor([[*tokenizer(text)["input_ids"], 1]])
    with torch.no_grad():
        logprobs = model(input_ids=tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])
    assert torch.isfinite(logprobs).all()
    again = pools(1).run(evaluate, tree(str(tmp_path), model=_exported(export), evaluation=values["evaluation"]))[0]
    assert again["eval/held_out/loss"] == pytest.approx(lines[-1]["eval/held_out/loss"], rel=1e-6)


def _exported(path: Path) -> dict[str, Any]:
    return {"path": str(path), "config": None, "tokenizer": None}


def test_two_ranks_and_one_train_the_same_model(pools: Any, tmp_path: Path) -> None:
    found = {}
    for ranks in (1, 2):
        values = tree(str(tmp_path / str(ranks)), model={"dtype": "float64"})
        found[ranks] = pools(ranks).run(run, values)[0].metrics

    assert found[1]["loss"] == pytest.approx(found[2]["loss"], rel=1e-9)
    assert found[1]["num_tokens"] == found[2]["num_tokens"]


def test_an_observer_stops_the_run_on_all_ranks(pools: Any, observers: Path) -> None:
    values = tree(str(observers), observers=["watch.py:stop_at_three"])

    outcomes = pools(2).run(run, values, str(observers))

    assert [(outcome.step, outcome.stopped) for outcome in outcomes] == [(3, "stopped by an observer")] * 2


def test_min_steps_outranks_an_observer(pools: Any, observers: Path) -> None:
    values = tree(str(observers), observers=["watch.py:stop_at_three"], min_steps=4)

    assert pools(2).run(run, values, str(observers))[0].step == 4


def test_an_observer_can_ask_for_an_evaluation_and_a_checkpoint(pools: Any, observers: Path) -> None:
    held_out = {"synthetic": {"task": "sort", "rows": 16, "seed": 9}}
    values = tree(str(observers), observers=["watch.py:count"], evaluation={"sets": {"s": held_out}, "at_end": False})

    pools(2).run(run, values, str(observers))

    lines = read_metrics(observers / "r" / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval/s/loss" in line] == [2]
    events = [json.loads(line) for line in (observers / "r" / "events.jsonl").read_text().splitlines()]
    assert [event["saved"] for event in events if event["event"] == "checkpoint"] == [2, 4]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "Observer watch.py:fails failed at step 1: ValueError: no such metric."),
        pytest.param(
            "answers_nonsense",
            "Observer watch.py:answers_nonsense answered 'explode' at step 1; it may answer stop",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_observer_that_fails_ends_the_run_on_all_ranks_alike(
    pools: Any, observers: Path, name: str, message: str
) -> None:
    errors = pools(2).errors(run, tree(str(observers), observers=[f"watch.py:{name}"]), str(observers))

    assert len(set(errors)) == 1
    assert errors[0][0] == "ObserverFailed"
    assert errors[0][1].startswith(message)


def test_epochs_end_with_the_last_partial_batch(pools: Any, tmp_path: Path) -> None:
    values = tree(str(tmp_path), epochs=2, data={"synthetic": {"task": "sort", "rows": 40}})
    values.pop("steps")

    outcome = pools(2).run(run, values)[0]

    lines = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert [line["data/rows"] for line in lines] == [16, 16, 8] * 2
    assert [line["epoch"] for line in lines] == [0.4, 0.8, 1.0, 1.4, 1.8, 2.0]
    assert outcome.step == 6


def test_a_dry_run_does_everything_and_keeps_nothing(pools: Any, tmp_path: Path) -> None:
    held_out = {"synthetic": {"task": "sort", "rows": 16, "seed": 9}}
    completions = {"samples": 4, "max_new_tokens": 4}
    values = tree(
        str(tmp_path), dry_run=True, evaluation={"sets": {"s": held_out}, "completions": completions}, steps=500
    )

    outcome = pools(2).run(run, values)[0]

    assert outcome.step == 2
    assert outcome.export is None
    assert "eval/s/completions/accuracy" in outcome.metrics
    assert list(tmp_path.iterdir()) == []


def test_limits_on_batches_shape_the_epoch(pools: Any, tmp_path: Path) -> None:
    few = pools(1).run(run, tree(str(tmp_path / "few"), epochs=2, limit_batches=3, steps=100))[0]
    again = pools(1).run(run, tree(str(tmp_path / "again"), overfit_batches=1, steps=60, optim={"lr": 5e-3}))[0]

    assert few.step == 6
    assert again.metrics["mean_token_accuracy"] > 0.9  # one batch, learned by heart


def test_the_batch_size_follows_its_schedule(pools: Any, tmp_path: Path) -> None:
    values = tree(str(tmp_path), data={"batch_size": 4, "batch_size_schedule": {2: 8, 3: 16}})

    pools(2).run(run, values)

    assert [line["data/rows"] for line in read_metrics(tmp_path / "r" / "metrics.jsonl")] == [4, 4, 8, 16]


def test_each_source_has_a_loss_of_its_own(pools: Any, tmp_path: Path) -> None:
    sources = [
        {"synthetic": {"task": task, "rows": 100}, "name": task, "weight": weight}
        for task, weight in (("sort", 3.0), ("add", 1.0))
    ]
    values = tree(str(tmp_path), data={"synthetic": None, "sources": sources})

    one, two = (pools(ranks).run(run, values | {"run": {"dir": str(tmp_path / str(ranks))}})[0] for ranks in (1, 2))

    for name in ("nll/sort", "nll/add"):
        assert one.metrics[name] == pytest.approx(two.metrics[name], rel=1e-5)
    assert one.metrics["nll/sort"] != pytest.approx(one.metrics["nll/add"], rel=1e-3)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_completions_are_graded_and_written(pools: Any, tmp_path: Path, ranks: int) -> None:
    held_out = {"synthetic": {"task": "sort", "rows": 8, "seed": 0, "min_length": 2, "max_length": 2}}
    values = tree(
        str(tmp_path),
        steps=150,
        data={"synthetic": {"task": "sort", "rows": 64, "min_length": 2, "max_length": 2}},
        optim={"lr": 5e-3},
        evaluation={"sets": {"seen": held_out}, "completions": {"samples": 8, "max_new_tokens": 6}},
    )

    metrics = pools(ranks).run(run, values)[0].metrics

    lines = (tmp_path / "r" / "completions" / "step-00000150.seen.jsonl").read_text().splitlines()
    answered = [json.loads(line) for line in lines]
    assert [item["sample_id"] for item in answered] == list(range(8))
    right = [item["completion"] == item["reference"] and item["finished"] for item in answered]
    assert metrics["eval/seen/completions/accuracy"] == sum(right) / 8 > 0.5
    assert all(item["reference"] == "".join(sorted(item["prompt"][5:7])) for item in answered)


def test_tensorboard_holds_the_same_numbers(pools: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pools(1).run(run, tree(str(tmp_path), metrics={"progress": "off", "sinks": ["tensorboard"]}))
    # A run waits four seconds for a tracker, less than importing one may take on a busy machine: this sends the rest.
    command = [sys.executable, "-P", "-m", "holdfast.features.trackers.process", str(tmp_path / "r"), "tensorboard"]
    subprocess.run(command, check=True, timeout=120)

    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    lines = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([line["loss"] for line in lines])


def test_mfu_is_flops_over_time_and_peak(pools: Any, tmp_path: Path) -> None:
    pools(2).run(run, tree(str(tmp_path), metrics={"progress": "off", "peak_flops": 1e12}))

    line = read_metrics(tmp_path / "r" / "metrics.jsonl")[-1]
    parameters = 64 * 32 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 64) + 32
    flops = line["data/tokens"] * (6 * parameters + 6 * 2 * 32 * line["data/mean_length"])
    assert line["throughput/mfu"] == pytest.approx(flops / line["step_time"] / 2e12)
    assert line["throughput/tokens_per_second"] == pytest.approx(line["data/tokens"] / line["step_time"])


def test_a_clock_can_end_the_run(pools: Any, tmp_path: Path) -> None:
    values = tree(str(tmp_path), max_minutes=0.01)
    values.pop("steps")

    outcomes = pools(2).run(run, values)

    assert outcomes[0].stopped == "max_minutes=0.01 have passed"
    assert outcomes[0].step == outcomes[1].step >= 1
    assert math.isfinite(outcomes[0].metrics["loss"])


def test_an_evaluation_at_the_start_is_that_of_the_model_before_its_first_step(pools: Any, tmp_path: Path) -> None:
    held_out = {"synthetic": {"task": "sort", "rows": 40, "seed": 9}}
    sections = {"evaluation": {"sets": {"held": held_out}, "at_start": True, "at_end": False}}

    pools(2).run(run, tree(str(tmp_path), **sections))
    plain = pools(1).run(evaluate, tree(str(tmp_path / "never"), **sections))[0]

    lines = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert [(line["step"], "eval/held/loss" in line, "loss" in line) for line in lines] == [
        (0, True, False),
        *((step, False, True) for step in (1, 2, 3, 4)),
    ]
    assert lines[0]["eval/held/loss"] == pytest.approx(plain["eval/held/loss"], rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_limit_samples_measures_the_first_rows_alone(pools: Any, tmp_path: Path, ranks: int) -> None:
    """The limit is neither a multiple of the batch nor of the ranks; another file holds the same first rows."""
    rows = [{"prompt": f"{number}=", "completion": "abcdefgh"[: number % 8 + 1]} for number in range(60)]
    for name, kept in (("all", rows), ("first", rows[:19])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))

    found = []
    for name, limit in (("all", 19), ("first", None), ("all", None)):
        section = {"sets": {"s": {"path": str(tmp_path / f"{name}.jsonl")}}, "limit_samples": limit}
        found.append(pools(ranks).run(evaluate, tree(str(tmp_path), evaluation=section))[0]["eval/s/loss"])

    limited, first, whole = found
    assert limited == pytest.approx(first, rel=1e-6)
    assert limited != pytest.approx(whole, rel=1e-4)
