"""What is written instead of a mistake can be copied into the file: the mistake is then gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from holdfast.config.base import OneOrSeveral, kinds_of
from holdfast.config.load import from_mapping
from holdfast.config.tree import KeyType
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.yaml12 import parse_text
from holdfast.errors import ConfigError
from tests.messages import Said

LEAST: dict[str, Any] = {"steps": 3, "model": {"path": "m"}, "data": {"path": "rows.jsonl"}}
NEEDED: dict[str, dict[str, Any]] = {
    "sft": {}, "dpo": {"preference": {"loss": "dpo"}}, "reward": {"preference": {"loss": "bradley_terry"}},
    "grpo": {"reward": "exact"}, "distill": {"teacher": {"path": "m"}},
}  # fmt: skip


def mistakes(verb: str, values: dict[str, Any], *overrides: str) -> list[str]:
    """Return what is wrong with a tree beside the least that its verb needs."""
    try:
        from_mapping({**LEAST, **values}, ROOTS[verb], "run.yaml", overrides)
    except ConfigError as error:
        return [line for line in str(error).splitlines() if not line.endswith("mistakes:")]
    return []


@pytest.mark.parametrize(
    ("verb", "key", "remedy"),
    [
        ("dpo", "preference", "preference: {loss: dpo}"),
        ("reward", "preference", "preference: {loss: bradley_terry}"),
        ("grpo", "reward", "reward: 'my_reward.py:score'"),
        ("distill", "teacher", "teacher: {path: Qwen/Qwen3-8B}"),
        ("sft", "model", "model: {path: Qwen/Qwen3-0.6B}"),
        ("sft", "data", "data: {path: rows.jsonl}"),
    ],
)
def test_a_section_that_is_required_is_named_with_one_that_will_do(verb: str, key: str, remedy: str) -> None:
    whole = {**LEAST, **NEEDED[verb]}
    without = {name: value for name, value in whole.items() if name != key}

    with pytest.raises(ConfigError) as raised:
        from_mapping(without, ROOTS[verb], "run.yaml")

    assert str(raised.value).startswith(f"run.yaml: {key}: ")
    assert str(raised.value).endswith(f" {remedy}")
    assert mistakes(verb, {**whole, **parse_text(remedy, "").values}) == []


def test_an_empty_section_that_is_required_is_not_told_to_be_removed() -> None:
    (line,) = mistakes("dpo", {"preference": None})

    assert line.startswith("run.yaml: preference: ")
    assert "preference: {loss: dpo}" in line
    assert "remove" not in line


@pytest.mark.parametrize(
    ("verb", "values", "key", "remedy"),
    [
        ("dpo", {"preference": "ipo"}, "preference", "preference: {loss: ipo}"),
        ("sft", {"model": "some/model"}, "model", "model: {path: some/model}"),
        ("sft", {"data": "rows.jsonl"}, "data", "data: {path: rows.jsonl}"),
        ("sft", {"evaluation": {"sets": {"a": "rows.jsonl"}}}, "evaluation.sets.a", "a: {path: rows.jsonl}"),
        ("sft", {"launch": "cpu"}, "launch", None),
    ],
)
def test_a_text_in_the_place_of_a_section_is_shown_inside_it(
    verb: str, values: dict[str, Any], key: str, remedy: str | None
) -> None:
    (line,) = mistakes(verb, values)

    assert line.startswith(f"run.yaml: {key}: ")
    assert line.endswith(f" write {remedy}" if remedy else "'cpu'")


def test_a_path_in_the_place_of_a_kind_is_shown_as_a_path(said: Said) -> None:
    (line,) = mistakes("distill", {"teacher": "some/model"})

    assert line.endswith(" teacher: {path: some/model}")
    said(line)


@pytest.mark.parametrize(
    ("verb", "values", "told"),
    [
        ("dpo", {"preference": {"loss": "dpo", "beta": 0.1}}, "loss: {kind: dpo, beta: 0.1}"),
        ("dpo", {"preference": {"beta": 0.1}}, "loss: {kind: dpo, beta: 0.1}"),
        ("dpo", {"preference": {"loss": ["ipo", "dpo"], "label_smoothing": 0.1}},
         "loss: [ipo, {kind: dpo, label_smoothing: 0.1}]"),
        ("grpo", {"reward": "a.py:f", "kwargs": {"a": 1}}, "reward: {kind: path, path: 'a.py:f', kwargs: {a: 1}}"),
        ("sft", {"optim": {"schedule": {"kind": "linear"}, "warmup_steps": 3}},
         "schedule: {kind: linear, warmup_steps: 3}"),
    ],
)  # fmt: skip
def test_a_key_beside_its_shorthand_is_told_with_the_long_form(verb: str, values: dict[str, Any], told: str) -> None:
    lines = mistakes(verb, values)

    section = told.partition(":")[0]
    assert [line.partition(f" {section}: write ")[2] for line in lines] == [told]


def test_keys_that_belong_to_one_shorthand_are_told_with_one_long_form() -> None:
    lines = mistakes("sft", {"optim": {"schedule": "linear", "warmup_steps": 3, "final_ratio": 0.1}})

    form = "schedule: {kind: linear, warmup_steps: 3, final_ratio: 0.1}"
    assert [line.partition(": write ")[2] for line in lines] == [form, form]
    assert [line.split(": ")[1] for line in lines] == ["optim.warmup_steps", "optim.final_ratio"]


def test_a_key_of_a_kind_that_is_not_chosen_beside_it_is_told_with_the_kinds_that_have_it(said: Said) -> None:
    (line,) = mistakes("dpo", {"preference": {"loss": "ipo", "label_smoothing": 0.1}})

    assert line.startswith("run.yaml: preference.label_smoothing: ")
    assert [kind for kind in ("ipo", "dpo", "robust") if kind not in line] == []
    said(line)


def test_a_key_of_a_function_given_as_a_shorthand_can_be_set_on_the_command_line() -> None:
    assert mistakes("dpo", {"preference": {"loss": "a.py:f"}}, "preference.loss.needs_reference=false") == []


def shorthands(section: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield where a kind alone can stand, the kind, and a key that this kind has and the section around it lacks."""
    for name, field in section.model_fields.items():
        shape = KeyType((section,)).below(name)
        if shape.default_kind is not None:
            is_list = shape.is_list and not any(isinstance(mark, OneOrSeveral) for mark in field.metadata)
            for member in shape.sections:
                for kind in kinds_of(member):
                    strangers = {*member.model_fields} - {*section.model_fields} - {"kind"}
                    yield from (((*path, f"{name}[]" if is_list else name), kind, key) for key in sorted(strangers))
        elif not shape.several and len(shape.sections) == 1:
            yield from shorthands(shape.sections[0], (*path, name))


@pytest.mark.parametrize("verb", ROOTS)
def test_every_key_beside_every_shorthand_of_the_tree_is_told_with_a_long_form_that_takes_it(verb: str) -> None:
    looked = 0
    for path, kind, key in shorthands(ROOTS[verb]):
        *above, last = path
        name = last.removesuffix("[]")
        value = [kind] if last.endswith("[]") else kind

        lines = mistakes(verb, {**NEEDED[verb], **_nested(above, {name: value, key: "odd"}, verb)})

        dotted = ".".join([*above, key])
        (line,) = (line for line in lines if line.startswith(f"run.yaml: {dotted}: "))
        assert f": write {name}: " in line, line
        form = parse_text(line.partition(": write ")[2], "").values
        again = mistakes(verb, {**NEEDED[verb], **_nested(above, form, verb)})
        assert not [line for line in again if "unknown key" in line or "no such key" in line], again
        looked += 1
    assert looked > 60


def _nested(above: list[str], values: dict[str, Any], verb: str) -> dict[str, Any]:
    for key in reversed(above):
        values = {key: {**(NEEDED[verb] | LEAST).get(key, {}), **values}}
    return values
