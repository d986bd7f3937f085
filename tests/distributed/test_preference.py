"""A step on preferences is the paper's, whatever the split; the reference is asked once, or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.preference_cases import (
    by_hand,
    evaluate,
    kto_by_hand,
    labelled_of,
    pairs_of,
    scored_while_training,
    settings,
    train,
)
from tests.oracle import preference as oracle
from tests.tiny import tiny_directory, tiny_model

ROWS, LABELLED = pairs_of(12), labelled_of(12)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose norms compute in float64 where the model does, so that shared prompts are exact too."""
    return tiny_directory(tmp_path_factory.mktemp("model"), "starcoder2", tie_word_embeddings=True)


def fresh() -> Any:
    return tiny_model("starcoder2", tie_word_embeddings=True).double()


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose([line["loss"] for line in found["lines"]], expected["losses"], rtol=tolerance)
    for step, gradients in enumerate(expected["gradients"]):
        assert set(found["gradients"][step]) == set(gradients)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(
                found["gradients"][step][name], gradient, rtol=tolerance, atol=tolerance, err_msg=f"{name} at {step}"
            )
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], parameter, rtol=0, atol=tolerance, err_msg=name)


SPLITS = [
    pytest.param(1, {}, {}, id="1 rank"),
    pytest.param(1, {"tokens_per_micro_batch": 96}, {}, id="1 rank, packs of 96 tokens"),
    pytest.param(1, {"shared_prompt": "off"}, {}, id="1 rank, prompts repeated"),
    pytest.param(1, {"shared_prompt": "off", "tokens_per_micro_batch": 96}, {}, id="1 rank, repeated, packs of 96"),
    pytest.param(1, {"packing": "none"}, {}, id="1 rank, padded"),
    pytest.param(2, {}, {}, id="2 ranks"),
    pytest.param(2, {"tokens_per_micro_batch": 96}, {}, id="2 ranks, packs of 96 tokens"),
    pytest.param(2, {"shared_prompt": "off", "tokens_per_micro_batch": 128}, {}, id="2 ranks, repeated, packs of 128"),
    pytest.param(2, {"packing": "none", "tokens_per_micro_batch": 96}, {}, id="2 ranks, padded, a pair at a time"),
    pytest.param(4, {}, {}, id="4 ranks"),
    pytest.param(4, {"tokens_per_micro_batch": 96}, {"replicate": 2}, id="2 copies of 2 ranks"),
    pytest.param(4, {"packing": "none"}, {"replicate": 2}, id="2 copies of 2 ranks, padded"),
]


@pytest.fixture(scope="module")
def dpo() -> dict[str, Any]:
    return by_hand(fresh(), ROWS, oracle.dpo(0.3), lr=0.5)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("ranks", "data", "parallel"), SPLITS)
def test_every_split_makes_the_updates_of_the_paper(
    pools: Any, directory: Path, dpo: dict[str, Any], ranks: int, data: dict[str, Any], parallel: dict[str, Any]
) -> None:
    found = pools(ranks).run(train, settings(str(directory), data=data, parallel=parallel), ROWS)

    for outcome in found:
        assert_same(outcome, dpo)
        margins = [line["rewards/margins"] for line in outcome["lines"]]
        np.testing.assert_allclose(margins, 0.3 * np.array(dpo["margins"]), rtol=1e-8, atol=1e-10)


LOSSES: dict[str, tuple[dict[str, Any], oracle.Loss]] = {
    "cdpo": ({"loss": {"beta": 0.3, "label_smoothing": 0.1}}, oracle.dpo(0.3, 0.1)),
    "normalised": ({"loss": {"beta": 3.0, "lengths": "mean"}}, oracle.dpo(3.0, mean=True)),
    "robust": ({"loss": {"kind": "robust", "beta": 0.3, "label_smoothing": 0.1}}, oracle.robust(0.3, 0.1)),
    "ipo": ({"loss": {"kind": "ipo", "beta": 0.5}}, oracle.ipo(0.5)),
    "ipo, mean": ({"loss": {"kind": "ipo", "beta": 0.5, "lengths": "mean"}}, oracle.ipo(0.5, mean=True)),
    "hinge": ({"loss": {"kind": "hinge", "beta": 0.3}}, oracle.hinge(0.3)),
    "apo_zero": ({"loss": {"kind": "apo_zero", "beta": 0.3}}, oracle.apo_zero(0.3)),
    "apo_down": ({"loss": {"kind": "apo_down", "beta": 0.3}}, oracle.apo_down(0.3)),
    "simpo": ({"loss": "simpo"}, oracle.simpo(2.0, 1.0)),
    "orpo": ({"loss": {"kind": "orpo", "beta": 0.4}}, oracle.orpo(0.4)),
    "several, and likelihood": (
        {"loss": [{"kind": "dpo", "beta": 0.3, "weight": 0.7}, {"kind": "simpo", "weight": 0.2}], "sft": 0.5},
        oracle.summed((0.7, oracle.dpo(0.3)), (0.2, oracle.simpo(2.0, 1.0)), sft=0.5),
    ),
}


@pytest.mark.cases("all")
@pytest.mark.parametrize(("preference", "loss"), LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"tokens_per_micro_batch": 96}, id="shared"),
        pytest.param({"packing": "none"}, id="padded", marks=pytest.mark.slow),
    ],
)
def test_every_loss_makes_the_updates_of_its_paper(
    pools: Any, directory: Path, preference: dict[str, Any], loss: oracle.Loss, data: dict[str, Any]
) -> None:
    expected = by_hand(fresh(), ROWS, loss, lr=0.1)
    tree = settings(str(directory), data=data, optim={"lr": 0.1}) | {"preference": preference}

    found = pools(2).run(train, tree, ROWS)[0]

    assert_same(found, expected)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("ranks", "data"),
    [
        (1, {}),
        (1, {"tokens_per_micro_batch": 48}),
        (2, {}),
        (2, {"packing": "none"}),
        (4, {"tokens_per_micro_batch": 64}),
    ],
)
def test_kto_measures_its_divergence_over_the_whole_update(
    pools: Any, directory: Path, ranks: int, data: dict[str, Any]
) -> None:
    expected = kto_by_hand(fresh(), LABELLED, 0.3, lr=2.0)
    tree = settings(str(directory), data=data, optim={"lr": 2.0}, preference={"loss": {"kind": "kto", "beta": 0.3}})

    for found in pools(ranks).run(train, tree, LABELLED):
        assert_same(found, expected)
        np.testing.assert_allclose([line["kto/kl"] for line in found["lines"]], expected["kl"], rtol=1e-9, atol=1e-12)
        assert {"reference", "divergence"} <= found["timed"]
    assert expected["kl"][0] == 0.0 < max(expected["kl"]), "some step must have a divergence to subtract"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["sharded", "offloaded"])
def test_at_step_0_margins_are_0_and_the_loss_is_ln_2(pools: Any, directory: Path, dtype: str, kind: str) -> None:
    tree = settings(str(directory), model={"dtype": dtype}, reference={"kind": kind})

    for found in pools(2).run(train, tree, ROWS, 2):
        first, second = found["lines"]
        assert first["rewards/margins"] == first["rewards/chosen"] == first["rewards/rejected"] == 0.0
        assert first["loss"] == math.log(2)
        assert second["loss"] < math.log(2)


@pytest.mark.parametrize(
    ("sections", "rows", "policy", "reference"),
    [
        ({}, ROWS, 1, 1),
        ({"preference": {"loss": "orpo"}}, ROWS, 1, 0),
        ({"preference": {"loss": "simpo"}}, ROWS, 1, 0),
        ({"preference": {"loss": "kto"}}, LABELLED, 2, 2),
    ],
    ids=["dpo", "orpo", "simpo", "kto: again with other rows' answers"],
)
def test_forward_passes_are_those_the_loss_needs(
    pools: Any, directory: Path, sections: dict[str, Any], rows: Any, policy: int, reference: int
) -> None:
    for found in pools(2).run(train, settings(str(directory), **sections), rows, 2):
        assert found["forwards"] == [{"policy": policy, "reference": reference}] * 2


def test_a_reference_asked_before_the_run_is_the_live_one(
    pools: Any, directory: Path, dpo: dict[str, Any], tmp_path: Path
) -> None:
    tree = settings(str(directory), reference={"precompute": True, "cache": str(tmp_path / "said")})

    made = pools(2).run(train, tree, ROWS)[0]
    found = pools(1).run(train, tree | {"data": tree["data"] | {"packing": "none"}}, ROWS)[0]

    for outcome in (made, found):
        assert_same(outcome, dpo)
        assert [calls["reference"] for calls in outcome["forwards"]] == [0] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["said"]


def damaged(place: Path) -> None:
    content = bytearray(place.read_bytes())
    content[-3] ^= 4
    place.write_bytes(bytes(content))


def cut(place: Path) -> None:
    place.write_bytes(place.read_bytes()[:200])


SPOILED: list[tuple[Any, dict[str, Any], Any, str]] = [
    (damaged, {}, ROWS, "is not a whole file of reference log-probabilities (its hash is not that of its content)"),
    (cut, {}, ROWS, "is not a whole file of reference log-probabilities ("),
    (
        None,
        {"seed": 0},
        pairs_of(12, seed=1),
        "holds log-probabilities of a reference that this run does not have: rows",
    ),
    (None, {"data": {"max_length": 40}}, ROWS, "that this run does not have: data differ. Delete it"),
    (None, {"model": {"head": {"dtype": "float32"}}}, ROWS, "that this run does not have: model differ. Delete it"),
]


@pytest.mark.parametrize(("spoil", "sections", "rows", "words"), SPOILED)
@pytest.mark.cases(1)
def test_a_file_of_another_reference_is_refused(
    pools: Any, directory: Path, tmp_path: Path, spoil: Any, sections: dict[str, Any], rows: Any, words: str
) -> None:
    place = tmp_path / "said"
    kept = {"precompute": True, "cache": str(place)}
    pools(2).run(train, settings(str(directory), reference=kept), ROWS, 1)
    if spoil is not None:
        spoil(place)

    errors = pools(2).errors(train, settings(str(directory), reference=kept, **sections), rows, 1)

    for kind, message in errors:
        assert kind == "ConfigError"
        assert words in message


class Stream:
    """Rows that are read in turn."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def test_rows_that_changed_in_the_middle_are_not_found_in_the_file(pools: Any, directory: Path, tmp_path: Path) -> None:
    """The fingerprint of a stream covers its first row; what a sequence is looked up by covers all of it."""
    tree = settings(str(directory), reference={"precompute": True, "cache": str(tmp_path / "said")})
    pools(1).run(train, tree, Stream(ROWS), 1)
    changed = [row | {"chosen": "zzz"} if number == 2 else row for number, row in enumerate(ROWS)]

    ((kind, message),) = pools(1).errors(train, tree, Stream(changed), 1)

    assert kind == "ConfigError"
    assert "does not hold the reference log-probability of rows row 2" in message


@pytest.mark.cases(1)
@pytest.mark.parametrize("loss", ["dpo", "kto"])
@pytest.mark.parametrize("data", [{}, pytest.param({"packing": "none"}, marks=pytest.mark.slow)])
def test_evaluation_does_not_depend_on_the_split(
    pools: Any, directory: Path, tmp_path: Path, loss: str, data: dict[str, Any]
) -> None:
    held_out = {"held": {"synthetic": {"task": "sort", "rows": 11}}}
    tree = settings(str(directory), data=data, preference={"loss": loss}, evaluation={"sets": held_out})
    rows = ROWS if loss == "dpo" else LABELLED

    one, four = (pools(ranks).run(evaluate, tree, rows, 2)[0] for ranks in (1, 4))

    assert one.keys() == four.keys()
    for name, value in one.items():
        assert four[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert {"eval/held/loss", "eval/held/rewards/margins", "eval/held/rewards/accuracies"} <= one.keys()


@pytest.mark.slow
def test_pairs_are_told_apart_better_and_better(pools: Any, directory: Path) -> None:
    tree = settings(str(directory), steps=30, preference={"loss": "dpo"}, optim={"lr": 0.5})

    lines = pools(2).run(train, tree, ROWS, 30)[0]["lines"]

    assert np.mean([line["rewards/accuracies"] for line in lines[-3:]]) == 1.0
    assert lines[-1]["loss"] < 0.3


def test_a_reference_without_adapters_says_the_same_with_dropout_as_without(pools: Any, directory: Path) -> None:
    model = {"lora": {"rank": 2}, "config_override": {"residual_dropout": 0.5}}
    trees = {
        dropout: settings(str(directory), model=model | {"dropout": dropout}, reference={"kind": "adapter_off"})
        for dropout in (False, True)
    }

    plain, noisy = (pools(1).run(scored_while_training, trees[dropout], ROWS)[0] for dropout in (False, True))

    assert np.abs(noisy["policy"] - noisy["again"]).max() > 0.01, "there is no dropout, so the test shows nothing"
    assert np.array_equal(noisy["reference"], plain["reference"])
    assert np.array_equal(plain["reference"], plain["policy"])
