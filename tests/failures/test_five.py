"""Five failures that runs were lost to: each is made to happen in the naive way, and does not happen in ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.failures.lab import Lab, Observed
from tests.failures.optimizer_state import UNSAVABLE, VALUES
from tests.failures.table import FAILURES

Both = Callable[[str], tuple[Observed, Observed]]


def test_every_failure_has_a_number_and_a_row() -> None:
    assert [failure.number for failure in FAILURES] == [*"12345", *(f"6.{number}" for number in range(1, 16))]


def test_entries_that_a_loop_made_for_frozen_parameters_keep_no_state_from_being_saved(both: Both) -> None:
    naive, ours = both("1")

    (first, second) = naive.numbers["errors"]
    assert (first[0], second[0]) == ("RuntimeError", "AssertionError")
    assert first[1].startswith(
        "ProcessGroupGloo::allgather: invalid tensor type at index 0 (expected TensorOptions(dtype=c10::BFloat16"
    )
    assert second[1].startswith(
        "Manually calculated _sharded_numel_padded is incorrect. _shard_numel_padded=0, shard_numel_padded=272"
    )
    assert naive.numbers["steps"] == dict.fromkeys(["used.weight", "used.bias", "never.weight", "never.bias"], 1.0)
    assert (ours.numbers["empty"], ours.numbers["untouched"]) == (2, True)  # the frozen matrix of each of two blocks
    slots = {"exp_avg", "exp_avg_sq", "note", "step"}
    parameters = {"trained.weight", "trained.bias", "unused.weight", "single.weight"}
    expected = {f"blocks.{block}.{name}/{slot}" for block in (0, 1) for name in parameters for slot in slots}
    assert set(ours.numbers["state"]) == expected
    assert ours.numbers["equal"] == [True] * 3  # on each of 2 ranks, and on 1


def test_every_value_in_a_group_and_in_state_comes_back_with_its_type_or_is_refused_before_step_1(both: Both) -> None:
    naive, ours = both("2")

    for form in ("cpu_offload", "cpu_offload, strict=False", "full_state_dict"):
        said = naive.numbers["said"][form]
        assert (said["dtype"], said["Size"]) == ("Unexpected value type <class 'torch.dtype'>", "tuple")
        assert naive.numbers["refused"][form] == ["Enum", "complex", "device", "dtype", "function", "set"]
    assert naive.numbers["refused"]["sharded"] == []
    assert not naive.numbers["kept"]
    assert set(ours.numbers["same"]) == {*VALUES, "my average", *(f"my {kind}" for kind in VALUES if kind != "tensor")}
    assert ours.numbers["lr"] == 0.05  # the checkpoint's, as asked for
    for said in ours.numbers["said"]:
        assert [words.count("which has no written form") for words in said.values()] == [1] * len(UNSAVABLE)


def test_recomputation_gives_the_gradients_of_transformers_whatever_is_cached(both: Both) -> None:
    naive, ours = both("3")

    assert re.search(
        r"have different metadata .*saved metadata: \{'shape': torch\.Size\(\[1, 1, 25, 16\]\)"
        r".*recomputed metadata: \{'shape': torch\.Size\(\[1, 1, 50, 16\]\)",
        naive.numbers["error"],
        re.DOTALL,
    )
    assert naive.numbers["norm"] > 100 > naive.numbers["reentrant"] == 0.0
    layers = [f"model.layers.{layer}.self_attn.{matrix}_proj.weight" for layer in (0, 1) for matrix in "kv"]
    assert naive.numbers["zero"] == layers
    assert naive.numbers["padded"].startswith("The size of tensor a (50) must match the size of tensor b (25)")
    assert naive.numbers["gate"] > 1e-3
    assert set(ours.numbers["errors"]) == {"packed", "sdpa", "mixtral"}
    assert max(ours.numbers["errors"].values()) < 1e-10 < 1e-4 < ours.numbers["smallest"]
    assert ours.numbers["gates"] == [f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)]


@pytest.mark.slow
def test_a_checkpoint_of_weights_is_refused_as_a_whole_run_before_anything_is_touched(both: Both) -> None:
    naive, ours = both("4")

    assert naive.numbers["error"] == "RuntimeError: Missing key in checkpoint state_dict: optim.state.weight.step."
    assert naive.numbers["overwritten"]
    assert naive.numbers["steps"] == [1.0, 1.0]
    assert naive.numbers["trainer"]["global_step"] == 4
    assert naive.numbers["trainer"]["optimizer_steps"] == 2.0
    assert naive.numbers["trainer"]["gap"] > 1e-3
    assert "does not fit this run: the checkpoint has no optimizer state (it holds model" in ours.numbers["error"]
    assert ours.numbers["error"].endswith("set init_from instead of resuming. Nothing was changed.")
    assert ours.numbers["untouched"]
    assert ours.numbers["loaded"]


@pytest.mark.filterwarnings("ignore")
def test_the_reference_is_sharded_like_the_policy_and_starts_as_its_equal(both: Both) -> None:
    naive, ours = both("5")

    assert naive.numbers["units"] == 1
    assert naive.numbers["during"] == 1.0
    assert not naive.numbers["frozen"]
    assert 1e-4 < naive.numbers["gap"] < 0.1
    block, root, ends = 9_280, 32, 96 * 32  # elements of one of two blocks, the final norm, embedding and head each
    for found in ours.numbers.values():
        assert found["units"] == 5
        assert found["during"] == pytest.approx((root + block) / (root + 2 * block + 2 * ends), rel=1e-12)
        assert found["gap"] == 0.0
    assert ours.numbers["sharded"]["after"] == 0.0


@pytest.mark.cases("all")
@pytest.mark.parametrize("number", ["1", "2", "3", "5"])
def test_a_report_ends_where_it_was_made_by_an_import_or_a_check(number: str, pools: Any, tmp_path: Path) -> None:
    """The plug-in's row, 4, needs Lightning: tests/features/trainers asks it."""
    failure = next(each for each in FAILURES if each.number == number)
    assert failure.rescued is not None

    observed = failure.rescued(Lab(pools, tmp_path))

    assert observed.holds, observed.words
