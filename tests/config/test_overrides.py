"""`a.b=value` on the command line is the file's tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.config.verbs.training import SFTConfig, as_plain
from tests.config.conftest import WHOLE, Mistakes
from tests.messages import assert_only, places

Load = Callable[..., SFTConfig]


def test_an_override_is_the_same_as_the_line_in_the_file(read: Load) -> None:
    written = read(WHOLE + "optim: {lr: 2e-6, schedule: {kind: linear, final_ratio: 0.1}}\nlaunch: {ranks: 4}\n")

    given = read(WHOLE, "optim.lr=2e-6", "optim.schedule={kind: linear, final_ratio: 0.1}", "launch.ranks=4")

    assert given == written


def test_an_override_replaces_one_key_and_leaves_its_neighbours(read: Load) -> None:
    config = read(WHOLE + "optim: {kind: sgd, lr: 1e-3, momentum: 0.5}\n", "optim.lr=2e-6")

    assert config.optim.lr == 0.000002
    assert config.optim.kind == "sgd"
    assert config.optim.momentum == 0.5


def test_an_override_makes_the_sections_on_its_way(read: Load) -> None:
    config = read(WHOLE, "evaluation.sets.hard.path=hard.jsonl", "data.batch_size_schedule.100=64")

    assert config.evaluation.sets["hard"].path == "hard.jsonl"
    assert config.data.batch_size_schedule == {100: 64}


def test_a_section_written_as_its_kind_can_be_descended_into(read: Load) -> None:
    config = read(WHOLE + "optim: sgd\n", "optim.momentum=0.5", "optim.schedule=wsd", "optim.schedule.decay_ratio=0.1")

    assert config.optim.kind == "sgd"
    assert config.optim.momentum == 0.5
    assert config.optim.schedule.kind == "wsd"
    assert config.optim.schedule.decay_ratio == 0.1


def test_an_override_reaches_into_a_list(read: Load) -> None:
    text = "steps: 1\nmodel: {path: m}\ndata: {sources: [{path: a}, {path: b}]}\n"

    config = read(text, "data.sources.1.path=c", "data.sources.0={path: d, name: first}")

    assert [source.path for source in config.data.sources] == ["d", "c"]
    assert config.data.sources[0].name == "first"


def test_the_last_of_two_overrides_wins(read: Load) -> None:
    assert read(WHOLE, "steps=5", "steps=6").steps == 6


def test_null_gives_a_key_back_to_its_absence(read: Load) -> None:
    assert read(WHOLE + "epochs: 2\n", "steps=null").steps is None


@pytest.mark.parametrize(
    ("text", "override", "key"),
    [
        ("evaluation: {every_steps: 5}\n", "evaluation=null", "evaluation"),
        ("optim: {schedule: {kind: linear}}\n", "optim.schedule=null", "optim.schedule"),
        ("evaluation: {sets: {a: {path: a}, b: {path: b}}}\n", "evaluation.sets=null", "evaluation.sets"),
        ("metrics: {sinks: [csv]}\n", "metrics.sinks=null", "metrics.sinks"),
        ("model: {path: m, lora: {rank: 4}}\n", "model.lora=null", "model.lora"),
    ],
)
def test_null_switches_off_what_a_file_says_in_a_section(read: Load, text: str, override: str, key: str) -> None:
    whole = WHOLE if not text.startswith("model") else "steps: 3\ndata: {path: rows.jsonl, batch_size: 2}\n"
    plain, switched = as_plain(read(WHOLE)), as_plain(read(whole + text, override))

    for part in key.split("."):
        plain, switched = plain[part], switched[part]
    assert switched == plain


def test_null_takes_one_of_several_sections_away(read: Load) -> None:
    text = WHOLE + "evaluation: {sets: {a: {path: a}, b: {path: b}}}\n"

    assert list(read(text, "evaluation.sets.a=null").evaluation.sets) == ["b"]


def test_null_for_a_section_that_must_be_there_is_the_command_lines_mistake(mistakes: Mistakes) -> None:
    assert places(mistakes(WHOLE, "data=null")) == ["command line (data=null): data"]


def test_mistakes_of_the_command_line_alone_do_not_blame_the_file(mistakes: Mistakes) -> None:
    both = mistakes(WHOLE + "sed: 3\n", "optim.lrr=1")
    alone = mistakes(WHOLE, "optim.lrr=1", "optim.lr")

    assert places(both) == ["run.yaml:4: sed", "command line (optim.lrr=1): optim.lrr"]
    assert places(alone) == ["command line (optim.lrr=1): optim.lrr", "command line (optim.lr)"]


@pytest.mark.parametrize(
    ("override", "at", "named"),
    [
        ("optim.lr", "", "section.key=value optim.lr=2e-6"),
        ("=3", "", "section.key=value optim.lr=2e-6"),
        ("optim..lr=3", "", "section.key=value optim.lr=2e-6"),
        ("steps.x=3", "", "3"),
        ("data.path.x=3", "", "data.path 'rows.jsonl'"),
        ("optim.lr=x", "optim.lr", "'x'"),
        ("optim.schedule.kind=linea", "optim.schedule", "'linea' cosine_with_restarts inverse_sqrt"),
        ("otim.lr=3", "otim", "optim"),
        ("optim.no_decay.0=x", "", "'0'"),
        ("launch={ranks: 1, ranks: 2}", "ranks", "1"),
    ],
)
def test_a_wrong_override_is_shown_as_it_was_typed(mistakes: Mistakes, override: str, at: str, named: str) -> None:
    text = WHOLE + "optim: {no_decay: []}\n"

    assert_only(mistakes(text, override), f"command line ({override}): {at}", named)


def test_a_section_that_stands_in_the_file_is_the_files_mistake(mistakes: Mistakes) -> None:
    assert places(mistakes(WHOLE + "optm: {lr: 1}\n", "optm.eps=1")) == ["run.yaml:4: optm"]


def test_an_index_beyond_a_list_is_named(mistakes: Mistakes) -> None:
    text = "steps: 1\nmodel: {path: m}\ndata: {sources: [{path: a}, {path: b}]}\n"

    assert_only(mistakes(text, "data.sources.2.path=c"), "command line (data.sources.2.path=c)", "'2'")


NUMBERS = {
    "optim.lr": st.floats(1e-12, 10.0),
    "seed": st.integers(0, 2**40),
    "data.max_length": st.integers(1, 4096),
    "evaluation.limit_samples": st.integers(1, 2**40),
    "data.shuffle": st.booleans(),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.fixed_dictionaries({}, optional=NUMBERS))
def test_whatever_number_is_given_arrives(read: Load, values: dict[str, Any]) -> None:
    config = read(WHOLE, *(f"{key}={str(value).lower()}" for key, value in values.items()))

    for key, value in values.items():
        found: Any = as_plain(config)
        for part in key.split("."):
            found = found[part]
        assert found == value
