"""YAML as people write it: scalars of YAML 1.2, and the line of every key."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.yaml12 import parse_text, parse_value, to_yaml
from holdfast.errors import ConfigError
from tests.messages import Said


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1e-5", 0.00001),
        ("2E6", 2000000.0),
        ("1e3", 1000.0),
        ("-1.5e+2", -150.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_000", 1000),
        ("-1_0.5e-3", -0.0105),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("010", 10),
        ("08", 8),
        ("0o17", 15),
        ("0x1F", 31),
        ("+3", 3),
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("NO", "NO"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("12:30:45", "12:30:45"),
        ("2024-01-31", "2024-01-31"),
        ("0b11", "0b11"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("0x", "0x"),
        ("'1e-5'", "1e-5"),
        ('"off"', "off"),
        ("!!str 5", "5"),
        ("[yes, 1e-5, 010, null]", ["yes", 0.00001, 10, None]),
    ],
)
def test_a_scalar_means_what_yaml_1_2_says(written: str, meant: Any) -> None:
    value = parse_text(f"key: {written}\n", "f.yaml").values["key"]

    assert value == meant
    assert type(value) is type(meant)


def test_not_a_number_is_read_as_one() -> None:
    assert math.isnan(parse_text("key: .nan", "f.yaml").values["key"])


def test_keys_are_words_even_if_they_look_like_something_else() -> None:
    values = parse_text("{100: 1, null: 2, 1e-5: 3, true: 4}", "f.yaml").values

    assert values == {"100": 1, "null": 2, "1e-5": 3, "true": 4}


def test_every_key_and_item_has_its_line() -> None:
    document = parse_text("# words\na: 1\n\nb:\n  c: 2\n  d:\n    - x\n    - e: 5\n", "f.yaml")

    assert {path: place.line for path, place in document.places.items()} == {
        ("a",): 2, ("b",): 4, ("b", "c"): 5, ("b", "d"): 6, ("b", "d", 0): 7, ("b", "d", 1): 8, ("b", "d", 1, "e"): 8,
    }  # fmt: skip
    assert document.place(("b", "c")).text == "f.yaml:5"
    assert document.place(("b", "missing", "deeper")).text == "f.yaml:4"
    assert document.place(("missing",)).text == "f.yaml"


def test_keys_that_stand_twice_are_all_noted_and_the_first_value_stays() -> None:
    document = parse_text("a: 1\nb: {c: 1, c: 2}\na: 3\na: 4\n", "f.yaml")

    assert document.values == {"a": 1, "b": {"c": 1}}
    twice = [(place.text, message.partition(":")[0]) for place, message in document.twice]
    assert twice == [("f.yaml:2", "b.c"), ("f.yaml:3", "a"), ("f.yaml:4", "a")]


def test_an_anchor_repeats_a_section() -> None:
    values = parse_text("one: &rate {lr: 1e-5}\ntwo: *rate\n", "f.yaml").values

    assert values["two"] == {"lr": 0.00001}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: b: c", "f.yaml:1"),
        ("a: 1\n\tb: 2", "f.yaml:2"),
        ("a: [1", "f.yaml:1"),
        ("a: 1\n---\nb: 2", "f.yaml:2"),
        ("? [1]\n: 2", "f.yaml:1"),
        ("a: !!int x", "f.yaml:1"),
        ("a: &x [*x]", "f.yaml:1"),
        ("- 1", "f.yaml"),
    ],
)
def test_what_is_not_yaml_is_named_with_its_line(text: str, place: str, said: Said) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_text(text, "f.yaml")

    said(str(raised.value))
    assert str(raised.value).startswith(f"{place}: ")


@pytest.mark.parametrize(
    "value", ["!!python/object/apply:os.system [exit]", "!!python/name:os.system x", "!!set {a}", "!!timestamp x"]
)
def test_a_tag_that_could_make_more_than_plain_values_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"f.yaml:1: .*'tag:yaml.org,2002:(python|set|timestamp)"):
        parse_text(f"a: {value}", "f.yaml")


def test_an_empty_file_is_an_empty_tree() -> None:
    assert parse_text("# nothing yet\n", "f.yaml").values == {}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2e-6", 0.000002),
        ("010", 10),
        (" 7 ", 7),
        ("null", None),
        ("", None),
        ("off", "off"),
        ("'5'", "5"),
        ("[a, 1e-3]", ["a", 0.001]),
        ("{kind: linear, final_ratio: 0.1}", {"kind": "linear", "final_ratio": 0.1}),
        ("a: b", "a: b"),
        ("/data/run #3", "/data/run #3"),
        ("- x", "- x"),
        ("*x", "*x"),
        ("[", "["),
        ("{{ messages }}", "{{ messages }}"),
        ("{% for m in messages %}", "{% for m in messages %}"),
    ],
)
def test_the_right_side_of_an_override_is_flow_yaml_or_stands_for_itself(written: str, meant: Any) -> None:
    value = parse_value(written)

    assert value == meant
    assert type(value) is type(meant)


def test_a_key_twice_in_an_override_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="a: set twice"):
        parse_value("{a: 1, a: 2}")


def test_a_number_of_an_override_with_digits_without_end_is_a_mistake(said: Said) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_value("9" * 5000)

    said(str(raised.value))


# Letters, digits and signs in every order; control characters are PyYAML's own business.
WORDS = st.text(st.characters(exclude_categories=["C", "Z"]) | st.sampled_from(" \n0123456789eEo.+-_"), min_size=1)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(WORDS, PLAIN, max_size=4))
def test_what_is_written_reads_back_as_the_same_values(values: dict[str, Any]) -> None:
    assert parse_text(to_yaml(values), "f.yaml").values == values


@pytest.mark.parametrize("word", ["7e10", "0o17", "off", "010", "1_0", "null", "12:30", "2024-01-31", "1e-5", ".5"])
def test_words_that_look_like_numbers_are_written_in_quotes(word: str) -> None:
    text = to_yaml({"revision": word})

    assert text == f"revision: '{word}'\n"
    assert yaml.safe_load(text) == {"revision": word}
