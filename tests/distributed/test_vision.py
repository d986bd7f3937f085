"""Images on some rows or some ranks: loss, gradients and parameters are those of plain transformers, row by row."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.vision import ImageSide
from holdfast.models.files.vision import FREEZE_PRESETS, image_side
from holdfast.models.setup.model import configured
from tests.distributed.cases import reference, settings, train
from tests.distributed.context_cases import train_without_float32
from tests.distributed.test_split_invariance import assert_same, by_hand
from tests.vision import KINDS, MIXTURE, PROCESSORS, picture_rows, tokenizer_of, vision_directory, vision_model

MAX_LENGTH = 128
TOLERANCE = dict.fromkeys(KINDS, 1e-10) | {"gemma3": 1e-6}
"""Gemma's norms round to float32 in a float64 model; in rows of another width some values round the other way."""
ROWS = {
    "mixed": picture_rows(24),
    "a picture in one row of eight": picture_rows(24, images=(1, 0, 0, 0, 0, 0, 0, 0)),
    "pictures in the first update alone": picture_rows(8, images=(2,)) + picture_rows(16, images=(0,), seed=1),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = vision_directory(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return of


def side_of(directory: Path, kind: str) -> ImageSide:
    raw_config, processor = configured(ModelConfig(path=str(directory)), Path.cwd())
    side = image_side(processor, tokenizer_of(kind), raw_config)
    assert isinstance(side, ImageSide)
    return side


def oracle(directory: Path, kind: str, rows: str, freeze: Callable[[str], bool] = lambda _: False) -> dict[str, Any]:
    """Train with plain transformers: its own forward with pixel values, one row at a time, in float64."""
    side = side_of(directory, kind)
    tokeniser = RowTokeniser(tokenizer_of(kind), DataConfig(path="rows", max_length=MAX_LENGTH), Path.cwd(), side)
    examples = [tokeniser.examples(row, index, "rows").examples[0] for index, row in enumerate(ROWS[rows])]
    model = vision_model(kind).double()
    if kind == MIXTURE:  # the grouped product of experts knows no float64
        model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not freeze(name))

    def inputs_of(example: Any) -> dict[str, Any]:
        if not example.model_inputs:
            return {}
        given = side.upstream_inputs(example.tokens, example.model_inputs)
        return {name: torch.as_tensor(values) for name, values in given.items()}

    batches = [examples[start : start + 8] for start in (0, 8, 16)]
    return reference(model, batches, by_hand("token_mean"), 0.1, inputs_of)


def with_zeros(expected: dict[str, Any], trained: list[str]) -> dict[str, Any]:
    """Return the oracle with a zero gradient where transformers has none: ours gives every trained weight one."""
    shapes = {name: expected["parameters"][name].shape for name in trained}
    for gradients in expected["gradients"]:
        for name in trained:
            gradients.setdefault(name, torch.zeros(shapes[name], dtype=torch.float64).numpy())
    return expected


def tree(directory: Path, data: dict[str, Any], parallel: dict[str, Any], **model: Any) -> dict[str, Any]:
    found = settings(str(directory), data={"max_length": MAX_LENGTH} | data, parallel=parallel)
    if "gemma3" in directory.name:  # its images are refused in packs
        found["data"] |= {"packing": "none", "tokens_per_micro_batch": 512}
    if MIXTURE in directory.name:  # the oracle has none
        model["router_loss"] = "off"
    return found | {"model": found["model"] | model}


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ranks", "rows", "data", "parallel"),
    [
        pytest.param(1, "mixed", {}, {}, id="1 rank, packed"),
        pytest.param(1, "mixed", {"packing": "none"}, {}, id="1 rank, padded"),
        pytest.param(2, "mixed", {"tokens_per_micro_batch": 160}, {}, id="2 ranks, small packs"),
        pytest.param(
            2,
            "mixed",
            {"packing": "none", "tokens_per_micro_batch": 256},
            {},
            id="2 ranks, padded",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2, "a picture in one row of eight", {"tokens_per_micro_batch": 128}, {}, id="2 ranks, images on one"
        ),
        pytest.param(2, "pictures in the first update alone", {}, {"recompute": "full"}, id="2 ranks, no image later"),
    ],
)
def test_loss_norm_gradients_and_parameters_are_those_of_transformers(
    pools: Any,
    directory: Callable[[str], Path],
    kind: str,
    ranks: int,
    rows: str,
    data: dict[str, Any],
    parallel: dict[str, Any],
) -> None:
    expected = oracle(directory(kind), kind, rows)
    expected = with_zeros(expected, list(expected["parameters"]))

    for found in pools(ranks).run(train, tree(directory(kind), data, parallel), ROWS[rows]):
        assert found["padded"] == (kind == "gemma3" or data.get("packing") == "none")
        assert_same(found, expected, TOLERANCE[kind])


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "llava", "idefics3"])
@pytest.mark.parametrize(
    ("ranks", "rows", "data", "parallel"),
    [
        pytest.param(2, "mixed", {"tokens_per_micro_batch": 80}, {"context": 2}, id="2"),
        pytest.param(
            4, "a picture in one row of eight", {"tokens_per_micro_batch": 64}, {"context": 2}, id="context 2 x shard 2"
        ),
        pytest.param(4, "mixed", {}, {"context": 4, "recompute": "full"}, id="4, recomputed"),
    ],
)
def test_ranks_that_share_rows_with_images_train_as_one_rank(
    pools: Any,
    directory: Callable[[str], Path],
    kind: str,
    ranks: int,
    rows: str,
    data: dict[str, Any],
    parallel: dict[str, Any],
) -> None:
    """Spans end anywhere in an image, and in some rows every span but one has no image at all."""
    (expected,) = pools(1).run(train_without_float32, tree(directory(kind), {}, {}), ROWS[rows])

    for found in pools(ranks).run(train_without_float32, tree(directory(kind), data, parallel), ROWS[rows]):
        assert not found["padded"]
        assert_same(found, expected, 1e-10)


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mixture_of_experts_that_sees_is_trained_as_transformers_trains_it(
    pools: Any, directory: Callable[[str], Path], ranks: int
) -> None:
    expected = oracle(directory(MIXTURE), MIXTURE, "mixed")
    expected = with_zeros(expected, list(expected["parameters"]))
    settings = tree(directory(MIXTURE), {"tokens_per_micro_batch": 160}, {"recompute": "full"})

    for found in pools(ranks).run(train, settings, ROWS["mixed"]):
        assert not found["padded"]
        assert_same(found, expected, 1e-9)
    assert any("mlp.experts" in name for name in expected["gradients"][0])


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_frozen_tower_changes_no_other_gradient(
    pools: Any, directory: Callable[[str], Path], kind: str, ranks: int
) -> None:
    tower = re.compile(FREEZE_PRESETS["vision_tower"])
    expected = oracle(directory(kind), kind, "mixed", freeze=lambda name: tower.search(name) is not None)
    trained = [name for name in expected["parameters"] if not tower.search(name)]
    expected = with_zeros(expected, trained)

    settings = tree(directory(kind), {"tokens_per_micro_batch": 160}, {}, freeze=["vision_tower"])
    for found in pools(ranks).run(train, settings, ROWS["mixed"]):
        assert_same(found, expected, 1e-10)
    assert 0 < len(trained) < len(expected["parameters"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_frozen_tower_is_kept_in_bfloat16_beside_a_model_in_float32(
    pools: Any, directory: Callable[[str], Path], ranks: int
) -> None:
    tower = re.compile(FREEZE_PRESETS["vision_tower"])
    expected = oracle(directory("qwen2_5_vl"), "qwen2_5_vl", "mixed", lambda name: tower.search(name) is not None)
    settings = tree(directory("qwen2_5_vl"), {}, {}, freeze=["vision_tower"], dtype="float32", frozen_dtype="bfloat16")

    for found in pools(ranks).run(train, settings, ROWS["mixed"]):
        assert found["losses"] == pytest.approx(expected["losses"], rel=2e-3)
        for name, value in found["parameters"].items():
            start = torch.from_numpy(expected["parameters"][name])
            if tower.search(name):  # rounded once, and never moved
                assert torch.equal(torch.from_numpy(value), start.float().bfloat16().double()), name


CASTS = ("idefics3", "smolvlm")
"""Families whose model casts images by itself, to what it is stored in."""
STORED_OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "frozen tower in bfloat16": ({"freeze": ["vision_tower"], "frozen_dtype": "bfloat16"}, {}, 5e-3),
    "bfloat16 beside float32 masters": ({}, {"compute_dtype": "bfloat16"}, 2e-2),
}


@pytest.mark.parametrize("stored", STORED_OTHERWISE)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in {"idefics3", "smolvlm"} else pytest.mark.slow) for kind in PROCESSORS],
)
def test_images_pass_a_tower_that_is_stored_in_another_dtype_than_it_computes_in(
    pools: Any, directory: Callable[[str], Path], kind: str, stored: str
) -> None:
    model, parallel, tolerance = STORED_OTHERWISE[stored]
    settings = tree(directory(kind), {}, parallel, dtype="float32", **model)

    (found,) = pools(1).run(train, settings, ROWS["mixed"], 1)

    assert found["losses"] == pytest.approx(oracle(directory(kind), kind, "mixed")["losses"][:1], rel=tolerance)
    tower = re.compile(FREEZE_PRESETS["vision_tower"])
    assert any(tower.search(name) for name in found["gradients"][0]) == ("freeze" not in model)


def test_packs_of_a_family_that_looks_both_ways_take_no_images(pools: Any, directory: Callable[[str], Path]) -> None:
    settings = tree(directory("gemma3"), {}, {})
    settings["data"]["packing"] = "best_fit"

    for kind, message in pools(2).errors(train, settings, ROWS["mixed"]):
        assert kind == "DataError"
        assert "gemma3 attends within an image in both directions, and packs do not; packing: none does" in message


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_language_model_trains_in_bfloat16_beside_a_frozen_tower(
    pools: Any, directory: Callable[[str], Path], ranks: int
) -> None:
    settings = tree(
        directory("qwen2_5_vl"),
        {"tokens_per_micro_batch": 160},
        {},
        dtype="bfloat16",
        frozen_dtype="bfloat16",
        freeze=["vision_tower"],
    ) | {"optim": {"kind": "adamw_bf16", "lr": 0.01, "schedule": "constant"}}

    found = pools(ranks).run(train, settings, ROWS["a picture in one row of eight"])

    # bfloat16 has 8 bits: the mean loss of 8 rows is within half a per cent of that in float64.
    expected = oracle(directory("qwen2_5_vl"), "qwen2_5_vl", "a picture in one row of eight")
    assert found[0]["losses"][0] == pytest.approx(expected["losses"][0], rel=5e-3)
    assert found[0]["losses"][2] < found[0]["losses"][0]
    for rank in found:
        assert rank["losses"] == found[0]["losses"]
        for name, gradient in rank["gradients"][0].items():
            assert gradient.any() or name.endswith("k_proj.bias"), name
