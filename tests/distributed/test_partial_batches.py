"""The last mini-batch of an epoch, with fewer rows than ranks: ranks without a row change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.packing import unpack
from holdfast.parallel.mesh import World
from holdfast.training.setup.begin import Live, build_run
from tests.distributed.cases import reference, settings, train
from tests.distributed.test_split_invariance import ROWS, assert_same, by_hand, examples
from tests.tiny import tiny_directory, tiny_model

BATCH = 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


def oracle(rows: int, average: str) -> dict[str, Any]:
    """Train on two whole batches and the rest, in one process with plain transformers."""
    whole = examples()[:rows]
    batches = [whole[start : start + BATCH] for start in range(0, rows, BATCH)]
    model = tiny_model("llama", tie_word_embeddings=True).double()
    return reference(model, batches, by_hand(average), lr=0.1)


def rows_per_rank(world: World, tree: dict[str, Any], rows: int) -> list[int]:
    """Return how many sequences this rank trains in each of the first three updates."""
    run = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=ROWS[:rows]))
    held = []
    for step in range(3):
        mini_batch = run.stream.next(step)
        assert mini_batch is not None
        held.append(sum(len(unpack(micro_batch)) for micro_batch in mini_batch.micro_batches))
    return held


@pytest.mark.cases(4)
@pytest.mark.parametrize("average", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(
    ("ranks", "rows", "data", "parallel"),
    [
        pytest.param(2, 17, {}, {}, id="2 ranks, 1 row"),
        pytest.param(2, 17, {"packing": "none"}, {}, id="2 ranks, 1 row, padded"),
        pytest.param(3, 17, {}, {}, id="3 ranks, 1 row"),
        pytest.param(3, 18, {"tokens_per_micro_batch": 48}, {}, id="3 ranks, 2 rows, small packs"),
        pytest.param(4, 17, {}, {}, id="4 ranks, 1 row"),
        pytest.param(4, 19, {}, {}, id="4 ranks, 3 rows"),
        pytest.param(4, 17, {}, {"replicate": 2}, id="2 copies of 2 ranks, 1 row"),
        pytest.param(4, 18, {}, {"recompute": "full"}, id="4 ranks, 2 rows, recomputed"),
    ],
)
def test_ranks_without_a_row_leave_loss_norm_gradients_and_parameters_as_one_process_has_them(
    pools: Any, llama: Path, ranks: int, rows: int, data: dict[str, Any], parallel: dict[str, Any], average: str
) -> None:
    tree = settings(str(llama), data=data | {"average": average}, parallel=parallel)

    found = pools(ranks).run(train, tree, ROWS[:rows])

    expected = oracle(rows, average)
    for outcome in found:
        assert_same(outcome, expected, 1e-10)


@pytest.mark.parametrize(("ranks", "rows"), [(2, 17), (3, 18), (4, 17)])
def test_every_row_of_the_last_batch_is_trained_once_and_the_other_ranks_stand_idle(
    pools: Any, llama: Path, ranks: int, rows: int
) -> None:
    held = pools(ranks).run(rows_per_rank, settings(str(llama)), rows)

    assert [sum(of_step) for of_step in zip(*held, strict=True)] == [8, 8, rows - 16]
    assert sorted(of_rank[2] for of_rank in held) == [0] * (ranks - (rows - 16)) + [1] * (rows - 16)
