"""Ranks of one machine decode over one copy of the weights: the bits that are gathered, in memory that goes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases import rows_of, settings
from tests.distributed.host_copy_cases import foreign, seen_by_others, whole, with_small_files
from tests.tiny import tiny_directory

ROWS = rows_of(8)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        pytest.param(2, {}, id="2 ranks"),
        pytest.param(3, {}, id="3 ranks, shards of unequal length"),
        pytest.param(4, {"replicate": 2}, id="2 copies of 2 ranks"),
    ],
)
def test_shared_tensors_have_the_bits_of_gathered_ones_and_exist_once(
    pools: Any, llama: Path, ranks: int, parallel: dict[str, Any]
) -> None:
    tree = settings(str(llama), parallel=parallel)

    told = pools(ranks).run(whole, tree, ROWS)

    size = sum(8 * tensor.numel() for name, tensor in told[0]["gathered"].items())
    for each in told:
        assert each["shared"].keys() == each["gathered"].keys()
        assert all(torch.equal(each["shared"][name], tensor) for name, tensor in each["gathered"].items())
        assert each["common"] == size
        assert size <= each["mapped"] < size + 64 * len(each["gathered"]) + 8192
        assert each["cast"] == 0, "weights that are cast are gathered"
        assert each["left"] == 0


def test_copies_that_every_rank_has_whole_are_read_where_they_are(pools: Any, llama: Path) -> None:
    for each in pools(2).run(whole, settings(str(llama), parallel={"replicate": 2}), ROWS):
        assert each["mapped"] == each["common"] == 0
        assert each["own"] == len(each["gathered"])


def test_a_rank_without_rows_of_a_tensor_reads_those_of_others(pools: Any, tmp_path: Path) -> None:
    """Of two rows the third and the fourth rank have none."""
    flat = tiny_directory(tmp_path, "llama", num_attention_heads=1, num_key_value_heads=1, head_dim=2, hidden_size=2)

    told = pools(4).run(whole, settings(str(flat)), ROWS)

    assert min(len(tensor) for tensor in told[0]["gathered"].values()) == 2
    for each in told:
        assert each["mapped"] > 0
        assert all(torch.equal(each["shared"][name], tensor) for name, tensor in each["gathered"].items())


def test_memory_that_rank_0_may_not_make_is_shared_by_none(pools: Any) -> None:
    assert pools(2).run(with_small_files, 2**20) == [[False, True]] * 2


def test_where_one_rank_cannot_look_all_gather(pools: Any, llama: Path) -> None:
    tree = settings(str(llama))

    told = pools(2).run(with_rank_1_blind, tree, ROWS)

    for each in told:
        assert each["mapped"] == each["common"] == 0
        assert all(torch.equal(each["shared"][name], tensor) for name, tensor in each["gathered"].items())


def with_rank_1_blind(world: Any, tree: dict[str, Any], rows: Any) -> dict[str, Any]:
    """Let rank 1 be without a descriptor."""
    return whole(world, tree, rows, blind=1)


def test_what_one_rank_writes_all_ranks_read(pools: Any) -> None:
    assert pools(3).run(seen_by_others) == [[1, 2, 3]] * 3


def test_memory_that_is_not_what_a_rank_expects_is_shared_by_none(pools: Any) -> None:
    assert pools(2).run(foreign) == [[False, True]] * 2
