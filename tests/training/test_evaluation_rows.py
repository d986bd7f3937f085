"""Rows of evaluation sets: read before step 1, in their own format, filtered and cut as documented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.keep import find
from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.parallel.mesh import World
from holdfast.training.setup.begin import build_run
from tests.training.cases import run, tree

GOOD = {"prompt": "ab=", "completion": "c"}
"""Five tokens: one a character, and the end of the sequence."""
BAD = {"prompt": "ab="}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def on_rows(place: Path, data: dict[str, Any], **sections: Any) -> dict[str, Any]:
    values = tree(str(place / "runs"), **sections)
    values["data"] = {"batch_size": 16, "max_length": 32, **data}
    return values


def batches(world: World, values: dict[str, Any], base: str) -> dict[str, list[int]]:
    """Return sequences and tokens, over all ranks, of the first batch to train, and of every evaluation set."""
    run = build_run(from_mapping(values, SFTConfig), Path(base), world)
    streams = {"training": run.stream} | {held_out.name: held_out.open_stream() for held_out in run.evaluation.sets}
    found = {}
    for name, stream in streams.items():
        batch = stream.next(0)
        assert batch is not None
        found[name] = [batch.samples, batch.tokens]
    return found


@pytest.mark.parametrize("at_start", [False, True])
def test_a_set_whose_first_row_cannot_be_read_is_refused_before_anything_is_written(
    pools: Any, tmp_path: Path, at_start: bool
) -> None:
    write(tmp_path / "good.jsonl", [GOOD] * 32)
    write(tmp_path / "exam.jsonl", [{"question": "a", "answer": "b"}] * 4)
    evaluation = {"sets": {"exam": {"path": "exam.jsonl"}}, "at_start": at_start}
    values = on_rows(tmp_path, {"path": "good.jsonl"}, evaluation=evaluation)

    errors = pools(2).errors(run, values, str(tmp_path))

    assert errors[0] == errors[1]
    assert errors[0][0] == "DataError"
    assert errors[0][1].startswith("exam row 0: ")
    assert not (tmp_path / "runs").exists()


def test_an_evaluation_that_fails_at_the_end_costs_no_step(pools: Any, tmp_path: Path) -> None:
    write(tmp_path / "good.jsonl", [GOOD] * 32)
    write(tmp_path / "exam.jsonl", [GOOD] * 20 + [BAD])
    values = on_rows(tmp_path, {"path": "good.jsonl"}, evaluation={"sets": {"exam": {"path": "exam.jsonl"}}}, steps=3)

    errors = pools(2).errors(run, values, str(tmp_path))
    saved = find.one(str(tmp_path / "runs" / "r")).manifest.step
    write(tmp_path / "exam.jsonl", [GOOD] * 21)
    outcome = pools(2).run(run, values, str(tmp_path))[0]

    assert errors[0] == errors[1]
    assert errors[0][1].startswith("exam row 20: ")
    assert saved == 3
    assert outcome.step == 3
    assert (Path(outcome.export) / "model.safetensors").exists()


def test_an_evaluation_file_called_like_the_training_file_has_its_own_format(pools: Any, tmp_path: Path) -> None:
    row = GOOD | {"text": "abcdefgh"}
    for place in ("train", "exam"):
        write(tmp_path / place / "same.jsonl", [row] * 16)
    source = {"path": str(tmp_path / "exam" / "same.jsonl")}
    sets = {"plain": source | {"rows": "text"}, "pairs": source | {"rows": "prompt_completion"}}
    data = {"path": str(tmp_path / "train" / "same.jsonl"), "rows": "prompt_completion", "validation_split": 0.4}
    values = on_rows(tmp_path, data | {"batch_size": 4}, evaluation={"sets": sets})

    found = pools(1).run(batches, values, str(tmp_path))[0]

    tokens_per_row = {name: tokens / rows for name, (rows, tokens) in found.items()}
    assert tokens_per_row == {"training": 5, "validation": 5, "pairs": 5, "plain": 9}


def test_the_filter_holds_for_the_validation_split_and_not_for_named_sets(pools: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "ab=", "completion": None if number % 2 else "c"} for number in range(60)]
    write(tmp_path / "rows.jsonl", rows)
    write(tmp_path / "exam.jsonl", [GOOD, {"prompt": "ab=", "completion": "odd"}])
    (tmp_path / "keep.py").write_text("def keep(row):\n    return row['completion'] == 'c'\n")
    evaluation = {"sets": {"exam": {"path": "exam.jsonl"}}, "completions": {"samples": 40, "max_new_tokens": 1}}
    data = {"path": "rows.jsonl", "validation_split": 0.3, "filter": "keep.py:keep", "allow_partial": True}
    values = on_rows(tmp_path, data | {"batch_size": 60}, evaluation=evaluation, steps=1)

    found = pools(2).run(batches, values, str(tmp_path))[0]
    outcome = pools(2).run(run, values, str(tmp_path))[0]

    assert found["training"][0] + found["validation"][0] == 30
    assert found["validation"][0] > 3
    assert found["exam"] == [2, 5 + 7]
    assert outcome.step == 1
    written = (tmp_path / "runs" / "r" / "completions" / "step-00000001.validation.jsonl").read_text()
    assert len(written.splitlines()) == found["validation"][0]


@pytest.mark.parametrize("budget", [64, 4096])
@pytest.mark.cases(1)
def test_windows_in_training_leave_evaluation_documents_of_at_most_max_length(
    pools: Any, tmp_path: Path, budget: int
) -> None:
    """Documents of 240 characters and an end: seven pieces of 32 tokens and one of 17."""
    letters = "abcdefgh"
    documents = [{"text": (letters[number % 8 :] + letters) * 30} for number in range(16)]
    write(tmp_path / "text.jsonl", [{"text": row["text"][:240]} for row in documents])
    sets = {"exam": {"path": "text.jsonl", "max_samples": 4}}
    data = {"path": "text.jsonl", "packing": "wrapped", "validation_split": 0.2, "tokens_per_micro_batch": budget}
    values = on_rows(tmp_path, data | {"batch_size": 4}, evaluation={"sets": sets}, steps=1)

    found = pools(1).run(batches, values, str(tmp_path))[0]
    outcome = pools(2).run(run, values, str(tmp_path))[0]

    assert found["exam"] == [32, 4 * 241]
    assert found["training"][1] == 4 * 32
    assert {"eval/exam/loss", "eval/validation/loss"} <= set(outcome.metrics)
