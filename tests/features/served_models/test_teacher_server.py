"""A teacher behind a server makes the updates of the same teacher in memory; what is wrong with it is an error."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.data.tasks.synthetic import character_tokenizer
from tests.distributed.cases import rows_of
from tests.distributed.distill_cases import (
    evaluated_twice,
    finished,
    idle,
    measured,
    settings,
    spoiled_after_a_step,
    texts_of,
)
from tests.features.served_models.test_reference_server import fewer_tokens, other_words
from tests.logprob_server import LONGEST, Served, served
from tests.oracle import distillation as oracle
from tests.tiny import tiny_directory, tiny_model

ROWS = rows_of(8)
HELD = rows_of(5, seed=7)
TEACHER: dict[str, Any] = {"seed": 5, "hidden_size": 48, "num_hidden_layers": 1}
SAMPLED = {
    "distill": {"loss": "sampled_reverse_kl"},
    "rollout": {"max_new_tokens": 9, "group_size": 2},
    "model": {"dtype": "float32"},
}

OF_START = 2 * 4
"""Requests of two ranks before step 1."""

MEASURED = ("loss", "grad_norm", "divergence", "teacher/nll", "nll")


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("models") / "student", "llama")


@pytest.fixture(scope="module")
def teacher(student: Path) -> Path:
    return tiny_directory(student.with_name("teacher"), "llama", **TEACHER)


@pytest.fixture(scope="module")
def process(student: Path, teacher: Path) -> Iterator[Served]:
    for make in (fewer_tokens, other_words):
        make(student.with_name(make.__name__))
    moved, renamed = (shutil.copytree(teacher, student.with_name(name)) for name in ("moved", "renamed"))
    (renamed / "served_as").write_text("large")
    names = [student.with_name(make.__name__) for make in (fewer_tokens, other_words)]
    with served(sys.executable, student.with_name("fault"), teacher, moved, renamed, *names) as server:
        yield server


@pytest.fixture
def server(process: Served) -> Iterator[Served]:
    """Return the server, and mend it afterwards."""
    yield process
    process.spoil("")


def asking(student: Path, server: Served, name: str = "teacher", /, **sections: Any) -> dict[str, Any]:
    """Return the tree of a distillation whose teacher is behind the server."""
    tree = settings(student, Path("unused"), **(SAMPLED | sections))
    return tree | {"teacher": {"kind": "server", "url": server.url(name), **sections.get("teacher", {})}}


@pytest.mark.cases(1)
@pytest.mark.parametrize("data", [{}, {"packing": "none"}], ids=["packs", "padded"])
@pytest.mark.parametrize(("ranks", "answers"), [(1, "prompt_logprobs"), (2, "prompt_logprobs"), (2, "echo")])
def test_it_makes_the_updates_that_the_same_teacher_in_memory_makes(  # noqa: PLR0913, PLR0917 - a split and its parts
    pools: Any, student: Path, teacher: Path, server: Served, ranks: int, answers: str, data: dict[str, Any]
) -> None:
    beside = settings(student, teacher, **SAMPLED, data=data)
    asked = asking(student, server, teacher={"answers": answers, "requests": 3}, data=data)

    expected = pools(ranks).run(measured, beside, ROWS, 3)[0]["lines"]
    outcomes = pools(ranks).run(measured, asked, ROWS, 3)

    for found in outcomes:
        for name in MEASURED:
            values = [line[name] for line in expected]
            assert [line[name] for line in found["lines"]] == pytest.approx(values, rel=1e-5, abs=1e-5), name
            assert min(map(abs, values)) > 1e-2, name
        assert found["mark"] == "server tiny"


def test_evaluation_sets_tell_the_likelihoods_of_both_and_no_divergence(
    pools: Any, student: Path, server: Served, tmp_path: Path
) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text("".join(f'{{"prompt": "{row["prompt"]}", "completion": "{row["completion"]}"}}\n' for row in HELD))
    sets = {"sets": {"held": {"path": str(held)}}}
    tree = asking(student, server, evaluation=sets, model={"dtype": "float64"})

    one, two = (pools(ranks).run(measured, tree, ROWS, 0)[0]["evaluated"] for ranks in (1, 2))

    texts = texts_of(HELD, character_tokenizer())
    own, theirs = (nll_of(model.double(), texts) for model in (tiny_model("llama"), tiny_model("llama", **TEACHER)))
    for found in (one, two):
        assert {name.removeprefix("eval/held/") for name in found} == {
            "loss", "nll", "teacher/nll", "mean_token_accuracy",
        }  # fmt: skip
        assert found["eval/held/loss"] == pytest.approx(own, rel=1e-9)
        assert found["eval/held/nll"] == pytest.approx(own, rel=1e-9)
        assert found["eval/held/teacher/nll"] == pytest.approx(theirs, rel=1e-9)
    assert abs(own - theirs) > 1e-2


def test_rows_of_evaluation_sets_are_asked_for_once_and_what_is_sampled_every_time(
    pools: Any, student: Path, server: Served, tmp_path: Path
) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text("".join(f'{{"prompt": "{row["prompt"]}", "completion": "{row["completion"]}"}}\n' for row in HELD))
    tree = asking(student, server, evaluation={"sets": {"held": {"path": str(held)}}})
    before = len(server.asked())

    first, second = pools(2).run(evaluated_twice, tree, ROWS)[0]

    batches, completions = 2, 4 * 2
    of_evaluations = len(HELD) + batches + batches
    assert len(server.asked()) - before == OF_START + of_evaluations + completions + 1
    assert second["eval/held/teacher/nll"] == first["eval/held/teacher/nll"]
    assert second["eval/held/nll"] != first["eval/held/nll"]


def nll_of(model: Any, texts: Any) -> float:
    """Return the mean negative log-likelihood of trained tokens, from plain transformers."""
    found = []
    for tokens, mask in texts:
        ids, trained = torch.tensor(tokens), torch.tensor(mask[1:])
        with torch.no_grad():
            logprobs = oracle.logits_of(model, ids)[trained].log_softmax(-1)
        found += logprobs.gather(1, ids[1:][trained][:, None]).squeeze(1).tolist()
    return -float(np.mean(found))


ECHO = {"teacher": {"answers": "echo"}}
REFUSED = [
    ("other_words", "", {}, "ModelError", "teacher: tiny at http", "has another tokenizer than the trained model: of "),
    ("fewer_tokens", "", {}, "ModelError", "does not know all 96 tokens that the trained model may use", ""),
    ("teacher", "names-no-tokens", ECHO, "ModelError", "does not say which tokens it makes of a text", ""),
    ("teacher", "nan", {}, "ConfigError", "teacher.url: http", " NaN, where the logarithm of a probability"),
    ("teacher", "infinite", {}, "ConfigError", "teacher.url: http", " -9999.0, where the logarithm of a probability"),
    ("teacher", "500", {"teacher": {"attempts": 1}}, "ConfigError", "answers 500", "(teacher.answers)"),
    (
        "teacher",
        "",
        {"teacher": {"url": "http://127.0.0.1:9/v1", "attempts": 1}},
        "ConfigError",
        "teacher.url: http://127.0.0.1:9/v1 cannot be reached",
        "",
    ),
    ("teacher", "", {"teacher": {"model": "large"}}, "ConfigError", "teacher.model: no large is served there", ""),
    ("teacher", "", {"data": {"max_length": LONGEST}}, "ConfigError", f"and data.max_length is {LONGEST}", ""),
    (
        "teacher",
        "",
        {"teacher": {"api_key_variable": "NOT_SET_ANYWHERE"}},
        "ConfigError",
        "teacher.api_key_variable: the environment variable NOT_SET_ANYWHERE is not set",
        "",
    ),
]


@pytest.mark.parametrize(("name", "fault", "sections", "kind", "words", "more"), REFUSED)
def test_a_server_that_cannot_teach_is_refused_before_anything_is_written(  # noqa: PLR0913, PLR0917 - a case's parts
    pools: Any,
    student: Path,
    server: Served,
    tmp_path: Path,
    name: str,
    fault: str,
    sections: dict[str, Any],
    kind: str,
    words: str,
    more: str,
) -> None:
    server.spoil(fault)
    tree = asking(student, server, name, **sections, run={"dir": str(tmp_path / "runs")})

    first, second = pools(2).errors(finished, tree, ROWS)

    assert first == second
    assert first[0] == kind
    assert words in first[1]
    assert more in first[1]
    assert "reference" not in first[1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("500", "answers 500"),
        ("other-model", "is another model than it was before step 1: what it says of one text differs by 0.5 nats"),
    ],
)
def test_a_failure_in_the_middle_of_a_run_is_one_error_on_all_ranks(
    pools: Any, student: Path, server: Served, fault: str, words: str
) -> None:
    tree = asking(student, server, teacher={"attempts": 1})

    (kind, message), second = pools(2).errors(spoiled_after_a_step, tree, ROWS, str(server.faults), fault)

    assert kind == "RunStopped"
    assert message.startswith(f"The teacher at {server.url('teacher')} ")
    assert words in message
    assert second == (kind, message)


def test_every_batch_asks_whether_the_model_is_still_the_same_also_one_without_texts(
    pools: Any, student: Path, server: Served
) -> None:
    before = len(server.asked())

    pools(2).run(idle, asking(student, server), ROWS)

    assert len(server.asked()) - before == OF_START + 1


@pytest.mark.slow
def test_a_run_goes_on_with_its_teacher_at_another_address(
    pools: Any, student: Path, server: Served, tmp_path: Path
) -> None:
    def metrics(steps: int, at: str, run: str) -> dict[str, float]:
        tree = asking(student, server, at, run={"dir": str(tmp_path), "name": run}, steps=steps)
        return dict(pools(2).run(finished, tree, ROWS)[0])

    metrics(1, "teacher", "moves")
    moved = metrics(2, "moved", "moves")
    straight = metrics(2, "teacher", "straight")

    assert {name: moved[name] for name in MEASURED} == {name: straight[name] for name in MEASURED}


@pytest.mark.cases(1)
@pytest.mark.parametrize("other", ["in memory", "under another name"])
@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_teacher_unless_that_is_declared(  # noqa: PLR0913, PLR0917 - a case's parts
    pools: Any, student: Path, teacher: Path, server: Served, tmp_path: Path, other: str
) -> None:
    def tree(steps: int, **sections: Any) -> dict[str, Any]:
        return asking(student, server, run={"dir": str(tmp_path), "name": "r"}, steps=steps, **sections)

    renamed = {"kind": "server", "url": server.url("renamed")}
    another = {"teacher": {"path": str(teacher)} if other == "in memory" else renamed}
    pools(2).run(finished, tree(1), ROWS)
    errors = pools(2).errors(finished, tree(2) | another, ROWS)
    declared = {"checkpoint": {"resume": {"changed": ["model"]}}}
    metrics = pools(2).run(finished, tree(2, **declared) | another, ROWS)[0]

    for kind, message in errors:
        assert kind == "CheckpointMismatch"
        assert "model: teacher server tiny -> " in message
    assert metrics["teacher/nll"] > 0
