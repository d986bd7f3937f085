"""Numbers of a plan by formulas, where no step is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.features.plan.counting.kinds import GATHERED
from holdfast.features.plan.records import RankSpec
from holdfast.features.plan.request import _by_formulas, planned, turns
from tests.fake_devices.cases import DENSE, tree


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 2}}])
def test_one_rank_has_copies_of_what_is_not_stored_in_the_compute_dtype(tmp_path: Path, model: dict[str, Any]) -> None:
    config = from_mapping(tree(model={"config": DENSE, "tokenizer": "builtin:characters"} | model), SFTConfig)

    made = _by_formulas(config, tmp_path, RankSpec(), "there is no compiler")

    assert made.plan.copied
    assert made.steady["backward", "cuda"].by_kind[GATHERED] == 2 * made.plan.trainable


@pytest.mark.parametrize(("device", "frozen_dtype", "same"), [("h100", "bfloat16", False), ("cpu", "same", True)])
def test_a_plan_stores_what_adapters_leave_frozen_as_a_run_on_that_device(
    tmp_path: Path, device: str, frozen_dtype: str, same: bool
) -> None:
    def plan(**model: Any) -> dict[str, Any]:
        values = tree(model={"lora": {"rank": 2}} | model)
        asked = {"verb": "sft", "config": values, "base": str(tmp_path), "ranks": 1, "device": device}
        return planned(asked | {"memory": 2**34}, "there is no compiler")

    by_default, explicit, wide = (plan(), plan(frozen_dtype=frozen_dtype), plan(frozen_dtype="float32"))

    assert by_default["phases"] == explicit["phases"]
    assert by_default["checkpoint_bytes"] == explicit["checkpoint_bytes"]
    assert (by_default["checkpoint_bytes"] == wide["checkpoint_bytes"]) is same
    assert [note for note in by_default["notes"] if "model.frozen_dtype" in note] != [] or same


@pytest.mark.parametrize(("loss", "sequences"), [("kto", 1), ("dpo", 2)])
def test_a_pass_takes_at_least_one_row_which_is_one_sequence_of_kto_and_two_of_pairs(loss: str, sequences: int) -> None:
    data = {"max_length": 128, "tokens_per_micro_batch": 1024}
    config = from_mapping(tree(preference={"loss": loss}, data=data), DPOConfig)

    assert {turn.key: turn.value for turn in turns(config, RankSpec())}["data.tokens_per_micro_batch"] == str(
        128 * sequences
    )


@pytest.mark.parametrize(("ranks", "parameters", "noted"), [(1, "host", 1), (2, "host", 0), (1, "stay", 0)])
def test_a_residency_that_moves_nothing_is_noted(tmp_path: Path, ranks: int, parameters: str, noted: int) -> None:
    policy = {"steps": 1, "rollout": {"max_new_tokens": 8}, "reward": "exact", "residency": {"parameters": parameters}}
    values = {**tree(), **policy}
    asked = {"verb": "grpo", "config": values, "base": str(tmp_path), "ranks": ranks, "device": "cpu", "memory": 2**34}

    notes = planned(asked, "there is no compiler")["notes"]

    assert sum("residency.parameters" in note for note in notes) == noted
