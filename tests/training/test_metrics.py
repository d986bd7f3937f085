"""Every number of a run: its name, that JSON can hold it, and losses of sources against plain transformers."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import patience
from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.packing import unpack
from holdfast.parallel.mesh import World
from holdfast.training.phases import PhaseClock
from holdfast.training.setup.begin import build_run
from holdfast.training.step import train_step
from tests.tiny import tiny_directory, tiny_model
from tests.training.cases import run, tree

EVERY_STEP = {
    "step", "loss", "nll", "mean_token_accuracy", "entropy", "grad_norm", "learning_rate", "num_tokens", "epoch",
    "nll/sort", "nll/add", "optim/skipped_steps", "optim/no_gradient", "step_time", "data/rows",
    "data/tokens", "data/mean_length", "data/fill", "data/micro_batches", "data/order_hash", "timing/data",
    "timing/forward_backward", "timing/optimizer", "timing/other",
    "throughput/tokens_per_second", "throughput/mfu", "memory/resident_gib",
}  # fmt: skip
OF_AN_EVALUATION = {
    "eval/held_out/loss", "eval/held_out/nll", "eval/held_out/mean_token_accuracy",
    "eval/held_out/completions/accuracy", "eval/held_out/completions/finished",
}  # fmt: skip
SOURCES = [
    {"synthetic": {"task": "sort", "rows": 100}, "name": "sort", "weight": 3.0},
    {"synthetic": {"task": "add", "rows": 100, "seed": 4}, "name": "add", "weight": 1.0},
]


def everything(directory: Path) -> dict[str, Any]:
    held_out = {"synthetic": {"task": "sort", "rows": 10, "seed": 9}}
    return tree(
        str(directory),
        data={"synthetic": None, "sources": SOURCES},
        evaluation={
            "sets": {"held_out": held_out},
            "every_steps": 2,
            "completions": {"samples": 4, "max_new_tokens": 4},
        },
        metrics={"progress": "off", "entropy": True, "peak_flops": 1e12, "sinks": ["tensorboard"]},
        checkpoint={"at_end": False, "rehearsal": False},
    )


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is no JSON")


def measured(world: World, values: dict[str, Any]) -> None:
    """Run SFT, and wait for its tracker as long as a busy machine needs."""
    before = patience.current
    patience.current = replace(before, tracker_close_seconds=120.0)
    try:
        run(world, values)
    finally:
        patience.current = before


@pytest.fixture(scope="module")
def directory(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run on two ranks that measures all it can."""
    place = tmp_path_factory.mktemp("measured")
    pools(2).run(measured, everything(place))
    return place / "r"


@pytest.fixture(scope="module")
def lines(directory: Path) -> list[dict[str, float]]:
    text = (directory / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_every_metric_has_its_name_and_a_finite_number(lines: list[dict[str, float]]) -> None:
    names = [set(line) for line in lines]

    assert names == [
        EVERY_STEP,
        EVERY_STEP | OF_AN_EVALUATION | {"timing/evaluation"},
        EVERY_STEP,
        EVERY_STEP | OF_AN_EVALUATION | {"timing/evaluation"},
    ]
    for line in lines:
        for name, value in line.items():
            assert isinstance(value, int | float), name
            assert math.isfinite(value), name


def test_metrics_that_count_or_are_shares_stay_in_their_range(lines: list[dict[str, float]]) -> None:
    for line in lines:
        assert 0 <= line["mean_token_accuracy"] <= 1
        assert 0 < line["data/fill"] <= 1
        assert 0 < line["entropy"] <= math.log(64)
        assert line["data/rows"] == 16
        assert line["loss"] == pytest.approx(line["nll"], rel=1e-6)  # token_mean
    tokens = np.cumsum([line["data/tokens"] for line in lines])
    assert [line["num_tokens"] for line in lines] == tokens.tolist()


def seconds_of_phases(line: Mapping[str, float]) -> float:
    """Return the seconds of all phases of a step; an evaluation is no part of one."""
    return sum(value for name, value in line.items() if name.startswith("timing/") and name != "timing/evaluation")


def test_the_phases_of_a_step_add_up_to_its_time(lines: list[dict[str, float]]) -> None:
    for line in lines:
        assert seconds_of_phases(line) == pytest.approx(line["step_time"], rel=1e-9)


def test_a_step_that_waits_for_the_save_before_it_says_so(pools: Any, tmp_path: Path) -> None:
    """Every step saves, and a save that reads all of it back takes longer than such a step."""
    checkpoint = {"every_steps": 1, "background": True, "rehearsal": False}
    values = tree(str(tmp_path), steps=6, checkpoint=checkpoint, metrics={"progress": "off"})

    pools(1).run(run, values)

    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert ["timing/save" in line for line in lines] == [False, True, True, True, True, True]
    waits = [line.get("timing/save_wait", 0.0) for line in lines]
    assert waits[:2] == [0.0, 0.0]  # the first save waits for none, and is told with the second step
    assert sum(wait > 1e-4 for wait in waits[2:]) >= 2
    for line in lines:
        assert seconds_of_phases(line) == pytest.approx(line["step_time"], rel=1e-9)


def test_a_second_counts_towards_the_innermost_phase_alone() -> None:
    clock = PhaseClock()

    with clock.phase("outer"):
        time.sleep(0.02)
        with clock.phase("inner"):
            time.sleep(0.05)
        with clock.stopped(), clock.phase("evaluation"):
            time.sleep(0.2)
    time.sleep(0.03)
    times = clock.read()

    assert set(times) == {"timing/other", "timing/outer", "timing/inner", "step_time"}
    assert sum(value for name, value in times.items() if name != "step_time") == pytest.approx(times["step_time"])
    assert 0.02 <= times["timing/outer"] < 0.05 <= times["timing/inner"] < 0.15
    assert times["timing/other"] >= 0.03
    assert set(clock.read()) == {"timing/other", "step_time"}


def test_tensorboard_has_every_metric_of_every_step(directory: Path, lines: list[dict[str, float]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()

    assert set(events.Tags()["scalars"]) == (EVERY_STEP | OF_AN_EVALUATION | {"timing/evaluation"}) - {"step"}
    for name in events.Tags()["scalars"]:
        written = {line["step"]: line[name] for line in lines if name in line}
        read = {event.step: event.value for event in events.Scalars(name)}
        assert read == pytest.approx(written, rel=1e-6), name  # event files hold float32


def first_update(world: World, values: dict[str, Any]) -> tuple[dict[str, float], list[Any]]:
    """Make one update; return its metrics and (source, tokens, trained) of every sequence this rank held."""
    built = build_run(from_mapping(values, SFTConfig), Path(), world)
    mini_batch = built.stream.next(0)
    assert mini_batch is not None
    held = [
        (example.source, example.tokens.tolist(), example.loss_mask.tolist())
        for micro_batch in mini_batch.micro_batches
        for example in unpack(micro_batch)
    ]
    names = built.source_names
    return train_step(built.model, mini_batch, built.evaluation.objective, source_names=names).read().metrics, held


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_nll_of_a_source_is_that_of_its_own_tokens_by_plain_transformers(
    pools: Any, tmp_path: Path, ranks: int
) -> None:
    model = tiny_model("llama").double()
    values = tree(
        str(tmp_path),
        model={"path": str(tiny_directory(tmp_path / "m", "llama")), "config": None, "dtype": "float64"}
        | {"tokenizer": None},
        data={"synthetic": None, "sources": SOURCES, "average": "sequence_mean", "tokens_per_micro_batch": 96},
    )

    found = pools(ranks).run(first_update, values)

    terms: dict[str, list[list[float]]] = defaultdict(list)
    for source, tokens, trained in (sequence for _, held in found for sequence in held):
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        positions = [position for position in range(1, len(tokens)) if trained[position]]
        terms[source].append([-float(logprobs[position - 1, tokens[position]]) for position in positions])
    assert set(terms) == {"sort", "add"}
    sequences = [of_sequence for of_source in terms.values() for of_sequence in of_source]
    assert len(sequences) == 16
    for metrics, _ in found:
        for name, of_source in terms.items():
            assert metrics[f"nll/{name}"] == pytest.approx(mean_of_all(of_source), rel=1e-10)
        assert metrics["nll"] == pytest.approx(mean_of_all(sequences), rel=1e-10)
        assert metrics["loss"] == pytest.approx(np.mean([np.mean(each) for each in sequences]), rel=1e-10)


def mean_of_all(sequences: list[list[float]]) -> float:
    return float(np.mean([term for sequence in sequences for term in sequence]))
