"""Preferences over answers to pictures: loss, gradients and parameters are those of plain transformers, row by row."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.models.files.vision import FREEZE_PRESETS
from tests.distributed.preference_cases import Seen, by_hand, evaluate, kto_by_hand, settings, train
from tests.distributed.test_preference import assert_same
from tests.distributed.test_vision import directory, side_of, with_zeros  # noqa: F401 - directory is a fixture
from tests.oracle import preference as oracle
from tests.vision import picture, tokenizer_of, vision_model

MAX_LENGTH = 96
LETTERS = np.array(list("abcdefghij"))
KINDS = ["qwen2_5_vl", "llava"]
SHARED_PROMPT = 1e-6
"""Where a prompt is forwarded once, norms that are float32 in a float64 model round the sum of its answers' gradients;
where it is repeated, each gradient alone, as the oracle does."""


def pairs_of(count: int, images: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return pairs with so many pictures in their prompts, in turn; every third pair begins its answers alike."""
    generator = np.random.default_rng(3)

    def word(least: int, most: int) -> str:
        return "".join(generator.choice(LETTERS, generator.integers(least, most)))

    rows = []
    for number in range(count):
        pictures = [picture(generator, *generator.integers(8, 40, 2)) for _ in range(images[number % len(images)])]
        asked = [
            *({"type": "image", "image": held} for held in pictures),
            {"type": "text", "text": f"see {word(1, 9)}"},
        ]
        begin = word(2, 6) if number % 3 == 0 else ""
        rows.append(
            {
                "prompt": [{"role": "user", "content": asked}],
                "chosen": f"{begin}{word(1, 16)}a",
                "rejected": f"{begin}{word(1, 16)}b",
            }
        )
    return rows


def labelled(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [*pair["prompt"]],
            "completion": pair["chosen" if number % 3 else "rejected"],
            "label": number % 3 > 0,
        }
        for number, pair in enumerate(pairs)
    ]


ROWS = {
    "mixed": pairs_of(12, (1, 0, 2)),
    "a picture in one row of four": pairs_of(12, (1, 0, 0, 0)),
    "pictures in the first update alone": pairs_of(4, (2,)) + pairs_of(8, (0,)),
}


def seen_by(place: Path, kind: str) -> Seen:
    return Seen(side_of(place, kind), tokenizer_of(kind), MAX_LENGTH)


def expected_of(place: Path, kind: str, rows: list[dict[str, Any]], *, frozen: str | None = None) -> dict[str, Any]:
    model = vision_model(kind).double()
    tower = re.compile(FREEZE_PRESETS[frozen]) if frozen else None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(tower is None or not tower.search(name))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return with_zeros(by_hand(model, rows, oracle.dpo(0.3), lr=0.5, seen=seen_by(place, kind)), trained)


def tree_of(place: Path, data: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return settings(str(place), data={"max_length": MAX_LENGTH} | data, **sections)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ranks", "rows", "data"),
    [
        pytest.param(1, "mixed", {}, id="1 rank, prompts shared"),
        pytest.param(1, "mixed", {"shared_prompt": "off"}, id="1 rank, prompts repeated"),
        pytest.param(1, "mixed", {"packing": "none"}, id="1 rank, padded"),
        pytest.param(2, "mixed", {"tokens_per_micro_batch": 192}, id="2 ranks, small packs"),
        pytest.param(2, "a picture in one row of four", {}, id="2 ranks, images on one"),
        pytest.param(
            2,
            "mixed",
            {"packing": "none", "tokens_per_micro_batch": 192},
            id="2 ranks, padded, a pair at a time",
            marks=pytest.mark.slow,
        ),
        pytest.param(2, "pictures in the first update alone", {}, id="2 ranks, no image later"),
    ],
)
def test_updates_are_those_of_transformers(
    pools: Any,
    directory: Callable[[str], Path],  # noqa: F811
    kind: str,
    ranks: int,
    rows: str,
    data: dict[str, Any],
) -> None:
    expected = expected_of(directory(kind), kind, ROWS[rows])

    for found in pools(ranks).run(train, tree_of(directory(kind), data), ROWS[rows]):
        repeated = data.get("packing") == "none" or data.get("shared_prompt") == "off"
        assert_same(found, expected, 1e-10 if repeated else SHARED_PROMPT)
        assert found["forwards"][0]["policy"] == found["forwards"][0]["reference"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_rows_make_the_updates_of_transformers(
    pools: Any,
    directory: Callable[[str], Path],  # noqa: F811
    kind: str,
) -> None:
    expected = expected_of(directory(kind), kind, ROWS["mixed"])
    tree = tree_of(directory(kind), {"tokens_per_micro_batch": 96}, parallel={"context": 2})

    for found in pools(2).run(train, tree, ROWS["mixed"]):
        assert_same(found, expected, SHARED_PROMPT)


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_tower_changes_no_other_gradient(
    pools: Any,
    directory: Callable[[str], Path],  # noqa: F811
    kind: str,
    ranks: int,
) -> None:
    expected = expected_of(directory(kind), kind, ROWS["mixed"], frozen="vision_tower")
    tree = tree_of(directory(kind), {"shared_prompt": "off"})
    tree["model"] |= {"freeze": ["vision_tower"]}

    for found in pools(ranks).run(train, tree, ROWS["mixed"]):
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("ranks", "data"), [(1, {}), pytest.param(2, {"tokens_per_micro_batch": 128}, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_kto_puts_answers_behind_the_pictures_of_other_rows(
    pools: Any,
    directory: Callable[[str], Path],  # noqa: F811
    kind: str,
    ranks: int,
    data: dict[str, Any],
) -> None:
    rows = labelled(ROWS["mixed"])
    model = vision_model(kind).double()
    names = [name for name, _ in model.named_parameters()]
    expected = with_zeros(kto_by_hand(model, rows, 0.3, lr=2.0, seen=seen_by(directory(kind), kind)), names)
    preference = {"loss": {"kind": "kto", "beta": 0.3}}

    for found in pools(ranks).run(
        train, tree_of(directory(kind), data, optim={"lr": 2.0}, preference=preference), rows
    ):
        assert_same(found, expected)
        np.testing.assert_allclose([line["kto/kl"] for line in found["lines"]], expected["kl"], rtol=1e-9, atol=1e-12)
    assert expected["kl"][0] == 0.0 < max(expected["kl"]), "some step must have a divergence to subtract"


@pytest.mark.slow
def test_what_the_reference_said_is_kept_by_picture_and_not_by_text_alone(
    pools: Any,
    directory: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    """All rows have the same words; with one number for all of them, the losses would be others."""
    generator = np.random.default_rng(0)
    rows = [
        {"prompt": "<image>what=", "chosen": "abc", "rejected": "bcd", "images": [picture(generator, 16, 16)]}
        for _ in range(12)
    ]
    place = directory("qwen2_5_vl")
    live, kept = (
        tree_of(place, {}, run={"dir": str(tmp_path), "name": "kept"}, reference={"precompute": precompute})
        for precompute in (False, True)
    )

    expected, found = (pools(2).run(train, tree, rows)[0] for tree in (live, kept))

    losses = [[line["loss"] for line in outcome["lines"]] for outcome in (expected, found)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-10)
    assert found["forwards"][0]["reference"] == 0


def test_a_set_with_pictures_is_measured(pools: Any, directory: Callable[[str], Path]) -> None:  # noqa: F811
    shapes = {"task": "shapes", "rows": 10, "min_length": 1, "max_length": 2}
    tree = tree_of(directory("qwen2_5_vl"), {}, evaluation={"sets": {"held": {"synthetic": shapes}}})

    one, two = (pools(ranks).run(evaluate, tree, ROWS["mixed"], 1)[0] for ranks in (1, 2))

    assert one.keys() == two.keys() >= {"eval/held/loss", "eval/held/rewards/margins"}
    np.testing.assert_allclose([*one.values()], [two[name] for name in one], rtol=1e-7)
