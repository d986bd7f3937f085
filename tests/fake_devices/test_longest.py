"""`holdfast plan --longest`: what it tells fits when it is planned, and hardly a longer row does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fake_devices.conftest import needs_guard
from tests.fake_devices.test_command import plan, run_file, without_news

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__), pytest.mark.timeout(900)]

TIGHT = ("--ranks", "2", "--memory", "2200MiB")
"""The stated allowance leaves about 480 MiB to tensors."""


def test_the_longest_row_of_every_context_fits_and_hardly_a_longer_one_does(tmp_path: Path) -> None:
    needs_guard()
    file = run_file(tmp_path, parallel={"compile": "off"})

    done = plan(file, *TIGHT, "--longest", "--json")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    everything = ["activations", "optimizer", "parameters"]
    cells = [(answer["offload"], answer["context"]) for answer in found["longest"]]
    assert cells == [(offload, context) for offload in ([], ["activations"], everything) for context in (1, 2)]
    assert found["executions"] <= 3 * len(cells)
    assert found["cpu_seconds"] > 0
    # Parameters are sharded over all ranks whatever the context: a rank has room for as many tokens, less what it has
    # of the whole row, which in so small a model is a share.
    rows = [answer["tokens"] for answer in found["longest"]]
    for one, two in (rows[:2], rows[2:4], rows[4:]):
        assert 1.8 * one < two < 2 * one
    assert rows[:2] < rows[2:4] <= rows[4:]
    for length, code in ((rows[3], 0), (round(1.03 * rows[3]), 1)):
        options = ("parallel.context=2", f"data.max_length={length}", f"data.tokens_per_micro_batch={-(-length // 2)}")
        planned = plan(file, *TIGHT, *options, "parallel.offload=[activations]")
        assert planned.returncode == code, (length, planned.stdout, planned.stderr)


def test_the_table_of_a_policy_says_why_a_context_is_refused_and_where_positions_end(tmp_path: Path) -> None:
    needs_guard()
    from tests.fake_devices.cases import DENSE, policy

    model = {"config": DENSE | {"num_attention_heads": 2, "num_key_value_heads": 2}, "tokenizer": "builtin:characters"}
    file = run_file(tmp_path, **policy(model=model, parallel={"compile": "off"}))

    done = plan(file, "--ranks", "4", "--longest")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "the longest row that fits, on 4 ranks of h100 with 79.00 GiB each; planned, one row to a micro-batch"
    )
    assert "s of CPU" in lines[1]
    assert lines[3] == "parallel.offload: []"
    assert lines[5].split()[:3] == ["1", "512", "512"]
    assert lines[6].split()[:3] == ["2", "512", "256"], done.stdout
    assert "parallel.context: 4 gives each rank as many attention heads, and llama has 2" in lines[7]
    assert "note: completions end at the model's 512 positions (max_position_embeddings)" in lines


@pytest.mark.cases("all")
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (
            ["--ranks", "2", "--memory", "1741MiB"],
            1,
            ["No row fits: rows of 64 tokens take", "What to turn: parallel.recompute: full"],
        ),
        (["--ranks", "2", "--save"], 2, ["--save keeps the plan of one run"]),
        (["--ranks", "4", "data.packing=none", "data.batch_size=2"], 2, ["4 ranks share data.batch_size=2 rows"]),
    ],
    ids=["no room", "nothing to save", "no context at all"],
)
def test_what_has_no_answer_is_told_in_one_paragraph(
    tmp_path: Path, options: list[str], code: int, words: list[str]
) -> None:
    needs_guard()

    done = plan(run_file(tmp_path, parallel={"compile": "off"}), "--longest", *options)

    assert done.returncode == code, done.stderr
    assert len(without_news(done.stderr)) == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert done.stdout == ""
