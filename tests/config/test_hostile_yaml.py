"""YAML that would take all time and memory is refused by its true cause, and quickly."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import pytest

from holdfast.config.yaml12 import MOST_LEVELS, MOST_NODES, parse_file, parse_text, parse_value
from holdfast.errors import ConfigError
from tests.messages import Said

BOMB = "a0: &a0 [lol,lol,lol,lol,lol,lol,lol,lol,lol]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 10)
)
TOO_MANY = f"{MOST_NODES:,}"
TOO_DEEP = f"{MOST_LEVELS}"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("text", "place", "named"),
    [
        (BOMB, "run.yaml:1", TOO_MANY),
        ("a: " + "[" * 20_000, "run.yaml:1", TOO_DEEP),
        ("a: " + "{a: " * 20_000, "run.yaml:1", TOO_DEEP),
        ("".join(" " * n + "a:\n" for n in range(300)), "run.yaml:100", TOO_DEEP),
        ("a:\n" + "- b\n" * 15_000, f"run.yaml:{MOST_NODES + 1}", TOO_MANY),
        ("a:\n" + "- b\n" * 200_000, f"run.yaml:{2 * MOST_NODES - 1}", TOO_MANY),
        ("a: &a [*a]\n", "run.yaml:1", "*name"),
        ("a: &a {b: {c: *a}}\n", "run.yaml:1", "*name"),
        ("a: \x00\n", "run.yaml", ""),
    ],
    ids=["aliases", "brackets", "braces", "indents", "items", "more items", "self", "self below", "control characters"],
)
def test_a_document_beyond_reason_is_refused_by_its_cause_within_two_seconds(
    text: str, place: str, named: str, said: Said
) -> None:
    tracemalloc.start()
    start = time.process_time()

    with pytest.raises(ConfigError) as refused:
        parse_text(text, "run.yaml")

    seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    said(str(refused.value))
    assert str(refused.value).startswith(f"{place}: ")
    assert named in str(refused.value)
    assert seconds < 8  # 2 without the tracing of memory
    assert peak < 100 * 2**20


def test_the_number_of_nodes_is_the_stated_one() -> None:
    fits = MOST_NODES - 1  # the key is one

    assert len(parse_text("a: [" + "b," * fits + "]", "run.yaml").values["a"]) == fits
    with pytest.raises(ConfigError, match=TOO_MANY):
        parse_text("a: [" + "b," * (fits + 1) + "]", "run.yaml")


def test_an_anchor_that_is_used_twice_and_holds_nothing_of_itself_is_no_mistake() -> None:
    assert parse_text("a: &a {b: [1]}\nc: [*a, *a]\n", "run.yaml").values["c"] == [{"b": [1]}, {"b": [1]}]


def test_an_override_beyond_reason_is_refused_by_its_cause() -> None:
    with pytest.raises(ConfigError, match=TOO_DEEP):
        parse_value("[" * 20_000)


def test_what_is_no_regular_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "run.yaml"
    os.mkfifo(pipe)

    with pytest.raises(ConfigError, match=r"run\.yaml .* pipe"):
        parse_file(pipe)


@pytest.mark.parametrize("text", ["1" * 10_000, "0x" + "f" * 5_000])
def test_a_number_of_endless_digits_is_a_mistake(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\d+,\d+ digits"):
        parse_value(text)
