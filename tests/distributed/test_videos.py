"""Videos on some rows or some ranks: loss, gradients and parameters are those of plain transformers, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.vision import ImageSide
from holdfast.models.files.vision import image_side, video_options
from holdfast.models.setup.model import configured
from tests.distributed import preference_cases
from tests.distributed.cases import reference, settings, train
from tests.distributed.test_preference import assert_same as assert_same_pairs
from tests.distributed.test_split_invariance import assert_same, by_hand
from tests.distributed.test_vision import with_zeros
from tests.oracle import preference as oracle
from tests.videos import FPS, KINDS, upstream_inputs, video_directory, video_model, video_rows, video_tokenizer

DATA = {"max_length": 160, "video_fps": FPS}
ROWS = {"mixed": video_rows(16), "one row of eight": video_rows(16, seen=("v", *[""] * 7))}
"""Of two ranks, one alone has a video in the second set; in the first, ranks have videos, images or both."""


def side_of(directory: Path) -> ImageSide:
    raw_config, processor = configured(ModelConfig(path=str(directory)), Path.cwd())
    options = video_options(DataConfig(path="rows", **DATA), directory)
    side = image_side(processor, video_tokenizer(), raw_config, videos=options)
    assert isinstance(side, ImageSide)
    return side


@pytest.mark.parametrize(
    ("kind", "ranks", "rows"),
    [
        *((kind, 1, "mixed") for kind in KINDS),
        ("qwen2_5_vl", 2, "one row of eight"),
        ("qwen2_5_vl", 2, "mixed"),
        ("qwen3_vl", 2, "one row of eight"),
        ("qwen3_vl", 2, "mixed"),
    ],
)
def test_gradients_of_rows_with_videos_are_those_of_transformers(
    pools: Any, tmp_path: Path, kind: str, ranks: int, rows: str
) -> None:
    directory = video_directory(tmp_path, kind)
    tokeniser = RowTokeniser(video_tokenizer(), DataConfig(path="rows", **DATA), Path.cwd(), side_of(directory))
    examples = [tokeniser.examples(row, index, "rows").examples[0] for index, row in enumerate(ROWS[rows])]
    model = video_model(kind).double()
    batches = [examples[:8], examples[8:]]
    expected = reference(model, batches, by_hand("token_mean"), 0.1, lambda example: upstream_inputs(kind, example))
    expected = with_zeros(expected, list(expected["parameters"]))

    tree = settings(str(directory), data=DATA | {"tokens_per_micro_batch": 320})
    for found in pools(ranks).run(train, tree, ROWS[rows], 2):
        assert_same(found, expected, 1e-10)
    assert any("visual.blocks.0" in name and value.any() for name, value in expected["gradients"][0].items())


def pairs_with_videos() -> list[dict[str, Any]]:
    return [
        {"prompt": row["messages"][:1], "chosen": f"ab{number}", "rejected": f"a{number}c"}
        for number, row in enumerate(video_rows(8, seen=("v", "", "", "")))
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_preferences_over_answers_to_videos_are_those_of_transformers(pools: Any, tmp_path: Path, ranks: int) -> None:
    kind, rows = "qwen2_5_vl", pairs_with_videos()
    directory = video_directory(tmp_path, kind)
    seen = preference_cases.Seen(side_of(directory), video_tokenizer(), 160, lambda it: upstream_inputs(kind, it))
    expected = preference_cases.by_hand(video_model(kind).double(), rows, oracle.dpo(0.3), lr=0.5, seen=seen)
    expected = with_zeros(expected, list(expected["parameters"]))

    tree = preference_cases.settings(str(directory), data=DATA | {"shared_prompt": "off"}, steps=2)
    for found in pools(ranks).run(preference_cases.train, tree, rows, 2):
        assert_same_pairs(found, expected)
