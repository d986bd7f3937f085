"""What was saved by two ranks is what any number of ranks loads, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.cases import load_into_other, save_after


@pytest.fixture(scope="module")
def saved(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    path = str(tmp_path_factory.mktemp("run") / "step-00000003")
    return path, pools(2).run(save_after, path, 3)[0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_bit_arrives_at_any_number_of_ranks_with_gradients_live(
    pools: Any, saved: tuple[str, dict[str, Any]], ranks: int
) -> None:
    path, expected = saved

    found = pools(ranks).run(load_into_other, path)

    for rank, values in enumerate(found):
        assert values.pop("extra") == {"steps": 3}
        assert values.pop("rank_extra") == (("rank", rank) if ranks == 2 else None)
        assert values == expected


def test_the_saved_state_has_the_dtypes_it_was_given(saved: tuple[str, dict[str, Any]]) -> None:
    import torch

    _, expected = saved

    assert expected["blocks.0.trained.weight/exp_avg"][1] == "torch.bfloat16"
    assert expected["blocks.0.trained.weight/exp_avg_sq"][1] == "torch.float64"
    assert expected["blocks.0.trained.weight/note"] == (torch.bfloat16, 3, "text")


def test_what_has_no_state_is_given_none(saved: tuple[str, dict[str, Any]]) -> None:
    _, expected = saved

    assert not [name for name in expected if name.startswith("blocks.0.frozen.weight/")]
    assert expected["blocks.0.calls"][1:] == ("torch.int64", ())


def test_before_the_first_step_there_is_no_state_and_none_is_made(pools: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "step-00000000")

    expected = pools(2).run(save_after, path, 0)[0]
    found = pools(3).run(load_into_other, path)[0]

    assert not [name for name in expected if "/" in name]
    assert {name: value for name, value in found.items() if "extra" not in name} == expected
