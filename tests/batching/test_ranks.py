"""On real ranks: the samples of an update know nothing of ranks, budgets, or an earlier start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.batching.cases import Served, resumed, straight, swapped, tree

STEPS = 12
LETTERS = np.array(list("abcdefghij"))


def write(path: Path, count: int, *, seed: int = 0, longest: int = 40) -> str:
    """Write rows of uneven lengths; every seventh trains nothing."""
    generator = np.random.default_rng(seed)
    with path.open("w") as file:
        for index in range(count):
            length = 0 if index % 7 == 3 else int(generator.integers(1, longest))
            row = {"prompt": f"copy {index}=", "completion": "".join(generator.choice(LETTERS, length)), "index": index}
            file.write(json.dumps(row) + "\n")
    return str(path)


def write_broken(path: Path) -> str:
    """Write rows of which one in four cannot be read, the first one included."""
    bad = ['{"prompt": "a=", "completion": "b"', '{"prompt": null, "completion": "b"}', '{"prompt": "a="}', "[1]"]
    with path.open("w") as file:
        for index in range(61):
            row = {"prompt": f"copy {index}=", "completion": "ab" * (index % 9)}
            file.write((bad[index // 4 % 4] if index % 4 == 0 else json.dumps(row)) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "even.py").write_text("def even(row):\n    return row['index'] % 2 == 0\n")
    return {
        "rows": write(folder / "rows.jsonl", 61),
        "more": write(folder / "more.jsonl", 23, seed=1),
        "long": write(folder / "long.jsonl", 30, seed=2, longest=200),
        "broken": write_broken(folder / "broken.jsonl"),
        "even": f"{folder / 'even.py'}:even",
    }


SCENARIOS: dict[str, Callable[[dict[str, str]], dict[str, Any]]] = {
    "shuffled": lambda files: tree(data={"path": files["rows"]}),
    "in order, no packing": lambda files: tree(data={"path": files["rows"], "shuffle": False, "packing": "none"}),
    "filter": lambda files: tree(data={"path": files["rows"], "filter": files["even"]}),
    "bad rows skipped": lambda files: tree(
        data={"path": files["broken"], "on_bad_row": "skip", "rows": "prompt_completion"}
    ),
    "bad rows of a stream skipped": lambda files: tree(
        data={"path": files["broken"], "on_bad_row": "skip", "rows": "prompt_completion", "streaming": True}
        | {"shuffle_buffer": 9}
    ),
    "split rows": lambda files: tree(data={"path": files["long"], "overlong": "split"}),
    "weighted mixture": lambda files: tree(
        data={"sources": [{"path": files["rows"], "weight": 3}, {"path": files["more"], "weight": 1}]}
    ),
    "unweighted mixture": lambda files: tree(data={"sources": [{"path": files["rows"]}, {"path": files["more"]}]}),
    "mixture with a stream": lambda files: tree(
        data={
            "sources": [{"path": files["rows"], "weight": 1}, {"path": files["more"], "weight": 2, "streaming": True}],
            "shuffle_buffer": 5,
        }
    ),
    "stream in blocks": lambda files: tree(data={"path": files["rows"], "streaming": True, "shuffle_buffer": 9}),
    "wrapped": lambda files: tree(data={"path": files["long"], "packing": "wrapped", "max_length": 24}),
    "wrapped stream": lambda files: tree(
        data={"path": files["rows"], "packing": "wrapped", "max_length": 24, "streaming": True, "shuffle_buffer": 7}
    ),
    "validation split": lambda files: tree(data={"path": files["rows"], "validation_split": 0.3}),
    "validation split of a stream": lambda files: tree(
        data={"path": files["rows"], "validation_split": 0.3, "streaming": True, "shuffle_buffer": 6}
    ),
    "first rows": lambda files: tree(data={"path": files["rows"], "max_samples": 17}),
    "limited batches": lambda files: tree(data={"path": files["rows"]}, limit_batches=3),
    "overfitting": lambda files: tree(data={"path": files["rows"]}, overfit_batches=2),
    "batch size schedule": lambda files: tree(data={"path": files["rows"], "batch_size_schedule": {4: 5, 9: 16}}),
    "epochs": lambda files: tree(data={"path": files["rows"]}, epochs=2, steps=None),
}


def together(ranks: list[list[dict[str, Any]]]) -> Served:
    """Return every update's sequences over all ranks, and check what all ranks must agree on."""
    updates: Served = []
    for parts in zip(*ranks, strict=True):
        for shared in ("micro_batches", "count", "samples", "metrics", "epoch", "state"):
            assert all(part[shared] == parts[0][shared] for part in parts), shared
        found = sorted(sequence for part in parts for sequence in part["held"])
        assert len(found) == parts[0]["samples"]
        assert sum(part["loss_sum"] for part in parts) == pytest.approx(parts[0]["count"])  # token_mean
        assert max(part["largest"] for part in parts) <= 48
        updates.append(found)
    return updates


def test_updates_1_to_20_are_the_same_on_1_2_and_4_ranks_and_over_a_resume_from_2_to_3_at_7(
    pools: Any, files: dict[str, str]
) -> None:
    settings = SCENARIOS["shuffled"](files)

    runs = {ranks: [of_rank[0] for of_rank in pools(ranks).run(straight, settings, 20)] for ranks in (1, 2, 4)}
    state = json.loads(json.dumps(runs[2][0][6]["state"]))
    after = pools(3).run(resumed, settings, [(state, 7, 20)])

    expected = together(runs[1])
    assert len(expected) == 20
    assert together(runs[2]) == together(runs[4]) == expected
    assert together([of_rank[0] for of_rank in after]) == expected[7:]


@pytest.mark.parametrize("name", SCENARIOS)
def test_samples_and_tokens_are_the_same_for_any_number_of_ranks_and_from_any_step(
    pools: Any, files: dict[str, str], name: str
) -> None:
    settings = SCENARIOS[name](files)

    one, two = ([of_rank[0] for of_rank in pools(ranks).run(straight, settings, STEPS)] for ranks in (1, 2))

    expected = together(one)
    assert together(two) == expected
    assert [step["metrics"] for step in two[0]] == [step["metrics"] for step in one[0]]

    # Started again on three ranks after every update that two ranks made.
    states = [json.loads(json.dumps(step["state"])) for step in two[0]]
    starts = [(state, number, number + 1) for number, state in enumerate(states[: STEPS - 1], start=1)]
    continued = pools(3).run(resumed, settings, starts)
    for number, _ in enumerate(starts):
        assert together([of_rank[number] for of_rank in continued]) == expected[number + 1 : number + 2]


def test_each_rank_makes_tokens_of_its_share_of_the_rows(pools: Any, files: dict[str, str]) -> None:
    settings = tree(data={"path": files["more"], "batch_size": 20})

    for ranks in (1, 2, 4):
        run = pools(ranks).run(straight, settings, 1)
        tokenised = [rows for _, rows in run]
        # 20 rows, and one for each that trains nothing: of 23, rows 3, 10 and 17.
        assert sum(tokenised) == 23
        assert max(tokenised) - min(tokenised) <= 2


def test_idle_ranks_take_part_in_the_last_partial_batch(pools: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "a=", "completion": "b"}) + "\n" for _ in range(9)))

    run = pools(4).run(straight, tree(data={"path": str(rows), "shuffle": False}), 2)

    last = [of_rank[0][1] for of_rank in run]
    assert [part["samples"] for part in last] == [1, 1, 1, 1]
    assert sorted(len(part["held"]) for part in last) == [0, 0, 0, 1]
    assert [part["micro_batches"] for part in last] == [1, 1, 1, 1]
    assert [part["largest"] for part in sorted(last, key=lambda part: len(part["held"]))] == [1, 1, 1, 3]


@pytest.mark.parametrize("where", [0, 1, 6])
def test_an_error_on_one_ranks_row_is_the_same_error_on_all(pools: Any, tmp_path: Path, where: int) -> None:
    lines = [{"prompt": "a=", "completion": "b"} for _ in range(8)]
    del lines[where]["completion"]
    lines[7] = {"prompt": 5, "completion": "b"}  # later, so not the one that is told
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))

    errors = pools(3).errors(straight, tree(data={"path": str(rows), "shuffle": False, "rows": "prompt_completion"}), 1)

    assert len(set(errors)) == 1
    kind, message = errors[0]
    assert kind == "DataError"
    assert message.startswith(
        f"rows row {where}: data.rows=prompt_completion needs the column completion, but the rows"
    )


def test_a_filter_that_raises_is_told_with_its_row_on_all_ranks(pools: Any, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", 9)
    (tmp_path / "bad.py").write_text("def keep(row):\n    return row['indx'] > 2\n")

    errors = pools(2).errors(straight, tree(data={"path": rows, "filter": f"{tmp_path / 'bad.py'}:keep"}), 1)

    assert len(set(errors)) == 1
    assert errors[0][0] == "DataError"
    assert f"data.filter {tmp_path / 'bad.py'}:keep raised KeyError: 'indx' on the row" in errors[0][1]


def test_a_set_without_a_trainable_row_is_refused_on_all_ranks(pools: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "a=", "completion": ""}) + "\n" for _ in range(9)))

    settings = tree(data={"path": str(rows)})
    errors = pools(2).errors(straight, settings, 1)

    said = (
        "No row of rows can be trained on (counted: untrained: 9). Look at one with `holdfast data preview RUN.yaml`."
    )
    assert errors == [("DataError", said)] * 2


def test_what_is_swapped_arrives_bit_for_bit_from_whom_it_came(pools: Any) -> None:
    sizes = [[0, 3, 1000], [70_000, 0, 1], [5, 0, 0]]

    arrived = pools(3).run(swapped, sizes)

    for target, items in enumerate(arrived):
        assert [sender for sender, _ in items] == [0, 1, 2]
        for sender, found in items:
            generator = np.random.default_rng([sender, target])
            size = sizes[sender][target]
            for name, sent in (
                ("numbers", generator.integers(0, 2**60, size)),
                ("bits", generator.random(size).astype(np.float32)),
            ):
                assert found[name].dtype == sent.dtype
                np.testing.assert_array_equal(found[name], sent)
