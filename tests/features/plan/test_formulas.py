"""Numbers of a plan by formulas, where no step is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.features.plan.counting.kinds import GATHERED, PARAMETERS
from holdfast.features.plan.formulas import known_size, parts_by_formulas
from holdfast.features.plan.records import RankSpec
from holdfast.features.plan.request import _by_formulas, planned, turns
from tests.fake_devices.cases import DENSE, EXPERTS, tree


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


@pytest.mark.parametrize(("model", "ranks"), [({"config": DENSE}, 8), ({"config": EXPERTS}, 1)])
def test_formulas_count_without_torch_what_they_count_of_a_model_that_is_built(
    tmp_path: Path, model: dict[str, Any], ranks: int
) -> None:
    config = from_mapping(tree(model=model), SFTConfig)
    size = known_size(config, tmp_path)
    assert size is not None

    at_once = parts_by_formulas(config, size, ranks, "cuda")

    built = _by_formulas(config, tmp_path, RankSpec(ranks), "there is no compiler").steady["backward", "cuda"].by_kind
    assert at_once == pytest.approx(built, rel=0.02)


def test_what_to_turn_ends_with_what_should_fit(tmp_path: Path) -> None:
    values = tree(data={"tokens_per_micro_batch": 4096})
    asked = {"verb": "sft", "config": values, "base": str(tmp_path), "ranks": 1, "device": "cpu", "memory": 2**34}
    peak = planned(asked, "there is no compiler")["peak_bytes"]

    short = planned(asked | {"memory": int(0.7 * peak)}, "there is no compiler")

    assert not short["fits"]
    assert [turn["fits"] for turn in short["turns"]] == [False] * (len(short["turns"]) - 1) + [True]
    peaks = [turn["peak_bytes"] for turn in short["turns"]]
    assert peaks == sorted(peaks, reverse=True)
    assert short["turns"][0]["key"] == "data.tokens_per_micro_batch"


def test_frozen_layers_in_four_bits_are_counted_with_their_scales(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    shape |= {"num_hidden_layers": 3, "vocab_size": 100, "tie_word_embeddings": True}
    lora: dict[str, Any] = {"rank": 4, "quantize": "nf4"}
    config = from_mapping(tree(model={"config": DENSE | shape, "lora": lora}), SFTConfig)
    size = known_size(config, tmp_path)
    assert size is not None

    counted = parts_by_formulas(config, size, 1, "cuda")

    adapters = 4 * 3 * (4 * (64 + 64) + 3 * (64 + 128))
    blocks, table = 3 * (4 * 64 * 64 + 3 * 64 * 128), 100 * 64
    assert counted[PARAMETERS] == 4 * adapters + 2 * table + blocks * (0.5 + 4 / 64)
