"""Image processors of the sizes that released models have: what is derived holds for images of all sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.config.sections.data import DataConfig
from holdfast.data.content.model_inputs import array_arguments
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.vision import ImageSide
from holdfast.models.files.processors import whole_processor
from tests.vision import picture
from tests.vision_released import FAMILIES, parts

SIZES = [(480, 640), (900, 300), (64, 64)]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind == "smolvlm" else []) for kind in FAMILIES]
)
def test_rows_are_what_the_processor_makes_of_the_whole_text(kind: str, tmp_path: Path) -> None:
    image_processor, tokenizer, config = parts(kind, tmp_path)
    processor: Any = whole_processor(image_processor, tokenizer, config, FAMILIES[kind].settings)
    side = ImageSide(processor, tokenizer, config)
    rows = RowTokeniser(tokenizer, DataConfig(path="rows", max_length=100_000, append_eos=False), Path(), side)
    images = [picture(np.random.default_rng(0), *size) for size in SIZES]
    mark = side.family.for_processor(side.family.placeholder)

    (example,) = rows.examples(
        {"prompt": "a<image>b<image><image>", "completion": "c", "images": images}, 0, "rows"
    ).examples

    expected = processor(images=images, text=[f"a{mark}b{mark}{mark}c"], return_tensors="np", add_special_tokens=False)
    assert example.tokens.tolist() == expected["input_ids"][0].tolist()
    for name, values in array_arguments(example.model_inputs).items():
        theirs = np.asarray(expected[name])
        np.testing.assert_array_equal(values, theirs if values.shape == theirs.shape else theirs.swapaxes(0, 1))
