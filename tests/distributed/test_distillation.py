"""A distillation's updates are those of full distributions of plain transformers, whatever the split; it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.metrics.sink import read_metrics
from tests.distributed.cases import rows_of
from tests.distributed.distill_cases import abandoned, by_hand, finished, settings, texts_of, train
from tests.distributed.test_preference import assert_same
from tests.tiny import tiny_directory, tiny_model

ROWS = rows_of(8)
LOSS: dict[str, float] = {"beta": 0.3, "temperature": 1.5, "sft": 0.2}
DISTILL = {"loss": {"kind": "jsd", "beta": 0.3}, "temperature": 1.5, "sft_weight": 0.2}
TEACHER: dict[str, Any] = {"seed": 5, "hidden_size": 48, "num_hidden_layers": 1, "num_key_value_heads": 4}
"""Wider and shallower than the student. Norms of starcoder2 compute in float64 where the model does."""

OTHER = TEACHER | {"seed": 6, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("student"), "starcoder2")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("teacher"), "starcoder2", **TEACHER)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("other"), "starcoder2", **OTHER)


def both() -> tuple[Any, Any]:
    return tiny_model("starcoder2").double(), tiny_model("starcoder2", **TEACHER).double()


@pytest.fixture(scope="module")
def on_rows() -> dict[str, Any]:
    texts = texts_of(ROWS, character_tokenizer())
    return by_hand(*both(), [texts[:4], texts[4:]], 0.5, **LOSS)


SPLITS = [
    pytest.param(1, {}, {}, {}, id="1 rank"),
    pytest.param(1, {"tokens_per_micro_batch": 64}, {}, {"model": {"head": {"chunk_tokens": 7}}}, id="1 rank, packs"),
    pytest.param(2, {"packing": "none"}, {}, {"parallel": {"reshard": False}}, id="2 ranks, padded, units stay whole"),
    pytest.param(2, {}, {"kind": "offloaded"}, {"model": {"head": {"chunk_tokens": 3}}}, id="2 ranks, in host memory"),
    pytest.param(4, {"tokens_per_micro_batch": 64}, {}, {}, id="4 ranks, packs of 64 tokens"),
]


@pytest.mark.parametrize(("ranks", "data", "place", "sections"), SPLITS)
def test_every_split_makes_the_updates_of_full_distributions(  # noqa: PLR0913, PLR0917 - a split and its fixtures
    pools: Any,
    student: Path,
    teacher: Path,
    on_rows: dict[str, Any],
    ranks: int,
    data: dict[str, Any],
    place: dict[str, Any],
    sections: dict[str, Any],
) -> None:
    tree = settings(student, teacher, distill=DISTILL, data=data, teacher=place, **sections)
    stored = load_file(teacher / "model.safetensors")

    outcomes = pools(ranks).run(train, tree, ROWS)

    for found in outcomes:
        assert_same(found, on_rows)
        np.testing.assert_allclose([line["divergence"] for line in found["lines"]], on_rows["divergences"], rtol=1e-10)
        assert found["placed"] == {(ranks > 1, False, True)}
        for name, values in found["teacher"].items():
            np.testing.assert_array_equal(values, stored[name].double().numpy(), err_msg=name)
    held = [found["held"] for found in outcomes]
    assert sum(held) == sum(values.numel() for values in stored.values())
    assert max(held) <= 1.1 * sum(held) / ranks


@pytest.mark.parametrize(("ranks", "data", "place", "sections"), SPLITS[:-1])
def test_two_teachers_teach_by_their_weights(  # noqa: PLR0913, PLR0917 - a split and its fixtures
    pools: Any,
    student: Path,
    teacher: Path,
    other: Path,
    ranks: int,
    data: dict[str, Any],
    place: dict[str, Any],
    sections: dict[str, Any],
) -> None:
    tree = settings(student, teacher, distill=DISTILL, data=data, **sections)
    tree["teacher"] = [{"path": str(teacher), "weight": 0.75, **place}, {"path": str(other), "weight": 0.5}]
    texts, (own, first) = texts_of(ROWS, character_tokenizer()), both()
    second = tiny_model("starcoder2", **OTHER).double()
    expected = by_hand(own, [(0.75, first), (0.5, second)], [texts[:4], texts[4:]], 0.5, **LOSS)

    outcomes = pools(ranks).run(train, tree, ROWS)

    for found in outcomes:
        assert_same(found, expected)
        np.testing.assert_allclose([line["divergence"] for line in found["lines"]], expected["divergences"], rtol=1e-10)


@pytest.mark.slow
def test_a_run_of_two_teachers_resumes_at_another_number_of_ranks_and_knows_their_weights(
    pools: Any, student: Path, teacher: Path, other: Path, tmp_path: Path
) -> None:
    def tree(place: str, steps: int, weight: float = 0.5) -> dict[str, Any]:
        sections = {
            "run": {"dir": str(tmp_path / place), "name": "r"},
            "optim": {"kind": "adamw", "lr": 0.01},
            "checkpoint": {"every_steps": 2},
        }
        teachers = [{"path": str(teacher), "weight": 0.75}, {"path": str(other), "weight": weight}]
        return settings(student, teacher, steps=steps, **sections) | {"teacher": teachers}

    pools(2).run(finished, tree("straight", 4), ROWS * 2)
    pools(2).run(finished, tree("resumed", 2), ROWS * 2)
    pools(1).run(finished, tree("resumed", 4), ROWS * 2)
    straight, resumed = metrics_of(tmp_path / "straight"), metrics_of(tmp_path / "resumed")

    assert [*straight] == [*resumed] == [1, 2, 3, 4]
    for step, numbers in straight.items():
        assert resumed[step] == pytest.approx(numbers, rel=1e-9), step
    for kind, message in pools(2).errors(finished, tree("resumed", 6, weight=0.25), ROWS * 2):
        assert kind == "CheckpointMismatch"
        assert "teacher" in message, message


@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0)])
def test_both_divergences_of_kullback_and_leibler(
    pools: Any, student: Path, teacher: Path, kind: str, beta: float
) -> None:
    texts = texts_of(ROWS, character_tokenizer())
    expected = by_hand(*both(), [texts[:4]], 0.5, beta=beta)

    (found,) = pools(1).run(train, settings(student, teacher, distill={"loss": kind}), ROWS, 1)

    assert_same(found, expected)


@pytest.mark.parametrize("kind", ["jsd", "sampled_reverse_kl"])
def test_on_its_own_texts_the_student_is_compared_where_it_wrote(
    pools: Any, student: Path, teacher: Path, kind: str
) -> None:
    prompts = [{"prompt": row["prompt"]} for row in ROWS]
    tree = settings(student, teacher, distill={"loss": kind}, rollout={"max_new_tokens": 9, "group_size": 2})
    sampled = kind == "sampled_reverse_kl"

    one, two = pools(1).run(train, tree, prompts)[0], pools(2).run(train, tree, prompts)[0]

    expected = by_hand(*both(), one["texts"], 0.5, sampled=sampled, **({} if sampled else {"beta": 0.5}))
    for found in (one, two):
        assert found["texts"] == one["texts"]
        assert_same(found, expected)
        np.testing.assert_allclose([line["divergence"] for line in found["lines"]], expected["divergences"], rtol=1e-9)
    tokenizer = character_tokenizer()
    for step, texts in enumerate(one["texts"]):
        asked = [tokenizer(row["prompt"])["input_ids"] for row in ROWS[4 * step : 4 * step + 4] for _ in range(2)]
        for (tokens, mask), prompt in zip(texts, asked, strict=True):
            assert tokens[: len(prompt)] == prompt
            assert mask == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))
            assert 1 <= len(tokens) - len(prompt) <= 9
    lengths = [sum(mask) for _, mask in one["texts"][-1]]
    assert one["lines"][-1]["completions/mean_length"] == np.mean(lengths)


def test_a_step_that_was_left_while_the_student_wrote_is_made_again(pools: Any, student: Path, teacher: Path) -> None:
    tree = settings(student, teacher, rollout={"max_new_tokens": 9})

    found = pools(2).run(abandoned, tree, ROWS)
    straight = pools(1).run(train, tree, ROWS, 1)[0]

    for before, after, loss in found:
        assert after == before
        assert loss == pytest.approx(straight["lines"][0]["loss"], rel=1e-10)


def test_with_a_share_of_rollouts_the_likelihood_of_rows_is_learned_on_rows_alone(
    pools: Any, student: Path, teacher: Path
) -> None:
    share = {"share": 0.5, "max_new_tokens": 9}
    tree = settings(student, teacher, distill=DISTILL, rollout=share, data={"batch_size": 2})
    rows = texts_of(ROWS, character_tokenizer())

    one, two = pools(1).run(train, tree, ROWS, 4)[0], pools(2).run(train, tree, ROWS, 4)[0]

    written = ["completions/mean_length" in line for line in one["lines"]]
    assert written.count(True) in {1, 2, 3}
    assert one["texts"] == two["texts"]
    models = both()
    for step, (line, other) in enumerate(zip(one["lines"], two["lines"], strict=True)):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-10)
        assert (one["texts"][step] == rows[2 * step : 2 * step + 2]) is not written[step]
        expected = by_hand(*models, [one["texts"][step]], 0.5, **(LOSS | ({"sft": 0.0} if written[step] else {})))
        assert line["loss"] == pytest.approx(expected["losses"][0], rel=1e-10)


def metrics_of(place: Path) -> dict[int, dict[str, float]]:
    lines = read_metrics(place / "r/metrics.jsonl")
    found: dict[int, dict[str, float]] = {}
    for line in lines:
        numbers = {name: value for name, value in line.items() if name.startswith("eval/") or name in {"loss", "nll"}}
        found.setdefault(line["step"], {}).update(numbers)
    return found


@pytest.mark.slow
def test_a_run_resumes_at_another_number_of_ranks_and_knows_its_teacher(
    pools: Any, student: Path, teacher: Path, tmp_path: Path
) -> None:
    def tree(place: str, steps: int, **sections: Any) -> dict[str, Any]:
        return settings(
            student,
            teacher,
            steps=steps,
            run={"dir": str(tmp_path / place), "name": "r"},
            model={"dtype": "float32"},
            rollout={"share": 0.5, "max_new_tokens": 9},
            optim={"kind": "adamw", "lr": 0.01},
            checkpoint={"every_steps": 2},
            evaluation={"sets": {"held": {"synthetic": {"task": "sort", "rows": 5}}}, "every_steps": 2},
            **sections,
        )

    pools(2).run(finished, tree("straight", 4), ROWS)
    pools(2).run(finished, tree("resumed", 2), ROWS)
    pools(1).run(finished, tree("resumed", 4), ROWS)
    straight, resumed = metrics_of(tmp_path / "straight"), metrics_of(tmp_path / "resumed")

    assert [*straight] == [*resumed] == [1, 2, 3, 4]
    for step, numbers in straight.items():
        assert resumed[step] == pytest.approx(numbers, rel=1e-4), step
    assert {"eval/held/loss", "eval/held/divergence", "eval/held/nll", "eval/held/teacher/nll"} <= {*straight[4]}
    place = tmp_path / "resumed/r/exports/final"
    assert {*load_file(place / "model.safetensors")} == {*load_file(student / "model.safetensors")}

    other = tiny_directory(tmp_path / "other", "starcoder2", **(TEACHER | {"seed": 6}))
    changed = tree("resumed", 6) | {"teacher": {"path": str(other)}}
    for kind, message in pools(2).errors(finished, changed, ROWS):
        assert kind == "CheckpointMismatch"
        assert "teacher" in message, message


def of_other_words(teacher: Path) -> None:
    file = teacher / "tokenizer.json"
    tree = json.loads(file.read_text())
    words = tree["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(tree))


def with_a_word_more(teacher: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(teacher)


def with_a_smaller_head(teacher: Path) -> None:
    tiny_directory(teacher, "starcoder2", **(TEACHER | {"vocab_size": 62}))


def without_weights(teacher: Path) -> None:
    (teacher / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "sections", "words"),
    [
        (of_other_words, {}, "has other tokens than the student (60 against 60; 2 differ: 'a' is token"),
        (with_a_word_more, {}, "differ: '<think>' is no token here and token 60 there)"),
        (
            None,
            {"teacher": {"path": "nowhere", "tokenizer": "builtin:what"}},
            "the key is teacher.tokenizer: its tokens",
        ),
        (without_weights, {}, "safetensors"),
        (with_a_smaller_head, {"rollout": {"max_new_tokens": 9}}, "may write a token that the teacher says nothing of"),
        (None, {"teacher": {"path": "nowhere"}}, "nowhere is no directory here"),
        (None, {"rollout": {"max_new_tokens": 9, "engine": "inprocess"}, "data": {"packing": "none"}}, "inprocess"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_before_anything_is_written(  # noqa: PLR0913, PLR0917
    pools: Any, student: Path, tmp_path: Path, spoil: Any, sections: dict[str, Any], words: str
) -> None:
    teacher = tiny_directory(tmp_path / "teacher", "starcoder2", **TEACHER)
    if spoil is not None:
        spoil(teacher)
    tree = settings(student, teacher, **sections, run={"dir": str(tmp_path / "runs")})

    errors = pools(2).errors(finished, tree, ROWS)

    assert errors[0] == errors[1]
    assert errors[0][0] in {"ModelError", "ConfigError"}
    assert words in errors[0][1]
    assert not (tmp_path / "runs").exists()


def test_one_of_two_teachers_with_other_tokens_is_refused_by_name(
    pools: Any, student: Path, teacher: Path, tmp_path: Path
) -> None:
    stranger = tiny_directory(tmp_path / "stranger", "starcoder2", **TEACHER)
    of_other_words(stranger)
    tree = settings(student, teacher, run={"dir": str(tmp_path / "runs")})
    tree["teacher"] = [{"path": str(teacher)}, {"path": str(stranger)}]

    errors = pools(2).errors(finished, tree, ROWS)

    assert errors[0] == errors[1]
    assert errors[0][0] == "ModelError"
    assert f"{stranger} has other tokens than the student (60 against 60" in errors[0][1]
    assert not (tmp_path / "runs").exists()


def test_prompts_that_leave_no_room_for_a_completion_are_left_out(pools: Any, student: Path, teacher: Path) -> None:
    rows = [*ROWS, {"prompt": "x" * 45, "completion": "y"}]
    tree = settings(
        student, teacher, rollout={"share": 0.5, "max_new_tokens": 9}, data={"batch_size": 9, "allow_partial": True}
    )

    (found,) = pools(1).run(train, tree, rows, 1)
    refused = pools(1).errors(train, tree | {"data": tree["data"] | {"overlong": "refuse"}}, rows, 1)

    assert found["lines"][0]["data/overlong_dropped"] >= 1
    assert "its prompt has 45 tokens, and data.max_length=48 less rollout.max_new_tokens leaves room" in refused[0][1]


def test_a_students_rollouts_without_room_are_refused_by_the_key_that_sets_it(
    pools: Any, student: Path, teacher: Path
) -> None:
    rollout = {"max_new_tokens": 4, "copy_gib": 1e-6}

    errors = pools(2).errors(train, settings(student, teacher, rollout=rollout), ROWS)

    assert {kind for kind, _ in errors} == {"ConfigError"}
    assert all("rank 0 may take 1e-06 GiB (rollout.copy_gib)" in message for _, message in errors)
