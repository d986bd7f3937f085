"""Rows with images: every way to write them gives the same sequence, and what does not fit is refused by name."""

from __future__ import annotations

import io
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig

from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.data.content.image_files import ImageFiles
from holdfast.data.tasks.synthetic import character_tokenizer, picture_tokenizer
from holdfast.data.tokens.chat import RowTokeniser, Tokenised
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import DataError
from holdfast.models.files.vision import image_side, load_image_processor
from holdfast.types import Example
from tests.vision import PROCESSORS, config_values, picture

KIND = "qwen2_5_vl"
FIRST, SECOND = (picture(np.random.default_rng(number), *size) for number, size in enumerate([(16, 24), (8, 8)]))
"""6 tokens and 1."""


@pytest.fixture(scope="module")
def side() -> ImageSide:
    config = AutoConfig.for_model(**config_values(KIND))
    settings = ModelConfig(config=config_values(KIND), tokenizer="x", image_processor=PROCESSORS[KIND])
    found = image_side(load_image_processor(settings, config, []), picture_tokenizer(), config)
    assert isinstance(found, ImageSide)
    return found


def tokenise(side: ImageSide | str, row: Any, base: Path = Path(), **data: Any) -> Tokenised[Example]:
    rows = RowTokeniser(picture_tokenizer(), DataConfig(path="rows", **data), base, side)
    return rows.examples(row, 3, "photos", row_name="photos row 3")


def encoded(image: Any) -> bytes:
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


TEXT = {"type": "text", "text": "see"}
ANSWER = turn("assistant", "ab")


def in_parts(first: Any, second: Any) -> dict[str, Any]:
    return {"messages": [turn("user", [first, TEXT, second]), ANSWER]}


WRITTEN: dict[str, Any] = {
    "image parts": in_parts({"type": "image", "image": FIRST}, {"type": "image", "image": SECOND}),
    "files": in_parts({"type": "image", "path": "first.png"}, {"type": "image", "url": "file://second.png"}),
    "OpenAI's parts": in_parts(
        {"type": "image_url", "image_url": {"url": "first.png"}}, {"type": "image_url", "image_url": "second.png"}
    ),
    "bytes": in_parts(
        {"type": "image", "bytes": encoded(FIRST)}, {"type": "image", "image": {"bytes": encoded(SECOND)}}
    ),
    "parts of arrow, with every key": in_parts(
        {"type": "image", "image": {"bytes": None, "path": "first.png"}, "text": None},
        {"type": "image", "image": {"bytes": encoded(SECOND), "path": None}, "text": None},
    ),
    "parts without an image, and a column": in_parts({"type": "image"}, {"type": "image"})
    | {"images": [FIRST, SECOND]},
    "placeholders in a string, and a column": {
        "messages": [turn("user", "<image>see<image>"), ANSWER],
        "images": ["first.png", encoded(SECOND)],
    },
    "placeholders in a part, and a column": {
        "messages": [turn("user", [{"type": "text", "text": "<image>see<image>"}]), ANSWER],
        "images": [FIRST, "second.png"],
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "<image>see<image>"}, {"from": "gpt", "value": "ab"}],
        "images": [FIRST, SECOND],
    },
    "prompt of messages": {
        "prompt": [turn("user", "<image>see<image>")],
        "completion": [ANSWER],
        "images": [FIRST, SECOND],
    },
}


@pytest.mark.parametrize("form", WRITTEN)
def test_every_way_to_write_a_row_gives_the_same_sequence(side: ImageSide, tmp_path: Path, form: str) -> None:
    (tmp_path / "pictures").mkdir()
    FIRST.save(tmp_path / "pictures/first.png")
    SECOND.save(tmp_path / "pictures/second.png")

    (found,) = tokenise(side, WRITTEN[form], tmp_path, image_dir="pictures").examples

    vocabulary = picture_tokenizer().get_vocab()
    start, pad, end = (vocabulary[mark] for mark in ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"))
    said = [vocabulary[mark] for mark in ("s", "e", "e")]
    asked = [vocabulary["<user>"], start, *[pad] * 6, end, *said, start, pad, end, vocabulary["<assistant>"]]
    answered = [vocabulary["a"], vocabulary["b"], vocabulary["<eos>"]]
    assert found.tokens.tolist() == asked + answered
    assert found.loss_mask.tolist() == [False] * len(asked) + [True] * len(answered)
    assert found.model_inputs["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 2]]
    expected = np.concatenate([side.prepare(image, "").inputs["pixel_values"] for image in (FIRST, SECOND)])
    np.testing.assert_array_equal(found.model_inputs["pixel_values"], expected)


def test_a_single_image_column_and_plain_text_will_do(side: ImageSide) -> None:
    (found,) = tokenise(side, {"prompt": "<image>see=", "completion": "ab", "image": SECOND}).examples

    text = picture_tokenizer().decode(found.tokens)
    assert text == "<|vision_start|><|image_pad|><|vision_end|>see=ab<eos>"
    assert found.loss_mask.tolist() == [False] * 7 + [True] * 3


def test_a_photo_is_turned_upright_and_loses_its_transparency(side: ImageSide, tmp_path: Path) -> None:
    photo = Image.new("RGB", (24, 16), (255, 0, 0))
    marks = photo.getexif()
    marks[0x0112] = 6  # the camera was turned by a quarter
    photo.save(tmp_path / "photo.jpg", exif=marks)
    Image.new("RGBA", (8, 8), (0, 255, 0, 9)).save(tmp_path / "glass.png")
    row = {"prompt": "<image><image>", "completion": "a", "images": ["photo.jpg", "glass.png"]}

    (found,) = tokenise(side, row, tmp_path).examples

    assert found.model_inputs["image_grid_thw"].tolist() == [[1, 6, 4], [1, 2, 2]]


def test_rows_without_images_stay_as_they_are(side: ImageSide) -> None:
    row = {"prompt": "is <image> a tag?", "completion": "ab"}

    (found,) = tokenise(side, row).examples

    assert not found.model_inputs
    assert found.positions is None
    assert picture_tokenizer().decode(found.tokens) == "is <image> a tag?ab<eos>"


LONG = {"prompt": "abcd<image>", "completion": "ef<image>ghij", "images": [FIRST, FIRST]}
"""4 characters, 8 tokens of an image and its marks, 2 characters, 8 tokens, 4 characters and an end: 27 in all."""


@pytest.mark.parametrize(
    ("limit", "length", "images"),
    [(27, 27, 2), (26, 26, 2), (21, 21, 2), (20, 15, 1), (15, 15, 1), (14, 14, 1), (12, 0, 0), (6, 0, 0)],
)
def test_a_cut_leaves_out_whole_images(side: ImageSide, limit: int, length: int, images: int) -> None:
    found = tokenise(side, LONG, max_length=limit)

    lengths = [example.tokens.size for example in found.examples]
    assert lengths == [length] * bool(length)
    for example in found.examples:
        assert len(example.model_inputs["image_grid_thw"]) == images
        assert (example.tokens == side.image_id).sum() == 6 * images


def test_a_row_is_split_between_images_and_each_piece_has_its_own(side: ImageSide) -> None:
    found = tokenise(side, LONG, max_length=14, overlong="split")

    assert [example.tokens.size for example in found.examples] == [14, 13]
    assert [len(example.model_inputs["image_grid_thw"]) for example in found.examples] == [1, 1]
    for example in found.examples:
        assert example.positions is not None
        assert example.positions[:, 0].tolist() == [0, 0, 0]
    assert sum((example.tokens == side.image_id).sum() for example in found.examples) == 12


def test_an_image_longer_than_the_limit_cannot_be_split(side: ImageSide) -> None:
    with pytest.raises(DataError, match=r"photos row 3 has an image of 6 tokens, more than data\.max_length=5"):
        tokenise(side, LONG, max_length=5, overlong="split")


def test_the_limit_counts_expanded_tokens(side: ImageSide) -> None:
    with pytest.raises(DataError, match=r"photos row 3 has 27 tokens, more than data\.max_length=26"):
        tokenise(side, LONG, max_length=26, overlong="refuse")


def with_broken_marks(entry: bytes) -> bytes:
    """Return a photo in whose EXIF one tag is said to be made of bytes."""
    photo = Image.new("RGB", (24, 16), (255, 0, 0))
    marks = photo.getexif()
    marks[0x0112], marks[0x0100], marks[0x011A] = 6, 7, 72.0
    held = io.BytesIO()
    photo.save(held, "JPEG", exif=marks)
    assert held.getvalue().count(entry) == 1
    return held.getvalue().replace(entry, entry[:-1] + b"\x01")


REFUSED: dict[str, tuple[Any, str]] = {
    "no such file": (
        {"prompt": "<image>", "completion": "a", "images": ["gone.png"]},
        r"photos row 3, image 0: there is no file .*/gone\.png or .*/base/gone\.png",
    ),
    "no image": (
        {"prompt": "<image>", "completion": "a", "images": [b"not a picture"]},
        r"photos row 3, image 0 \(13 bytes\) cannot be read as an image: cannot identify",
    ),
    "torn": (
        {"prompt": "<image><image>", "completion": "a", "images": [SECOND, encoded(FIRST)[:200]]},
        r"photos row 3, image 1 \(200 bytes\) cannot be read as an image: .*truncated",
    ),
    "a size of bytes": (
        {"prompt": "<image>", "completion": "a", "images": [with_broken_marks(b"\x01\x00\x00\x04")]},
        r"photos row 3, image 0 \(\d+ bytes\) cannot be read as an image: required argument is not an integer",
    ),
    "a resolution of bytes": (
        {"prompt": "<image>", "completion": "a", "images": [with_broken_marks(b"\x01\x1a\x00\x05")]},
        r"photos row 3, image 0 \(\d+ bytes\) cannot be read as an image: bad operand type",
    ),
    "from the web": (
        {"prompt": "<image>", "completion": "a", "images": ["https://example.org/a.png"]},
        r"image 0 is https://example\.org/a\.png; images and films are read from files",
    ),
    "a number": (
        {"prompt": "<image>", "completion": "a", "images": [7]},
        r"photos row 3, image 0 is a int; an image is a path",
    ),
    "more places": (
        {"prompt": "<image><image>", "completion": "a", "images": [FIRST]},
        r"photos row 3 has 1 image and places for 2\. Every image needs one <image>",
    ),
    "more images": (
        {"messages": [turn("user", "<image>see"), ANSWER], "images": [FIRST, SECOND]},
        r"photos row 3 has 2 images and places for 1",
    ),
    "parts without images": (
        {"messages": [turn("user", [{"type": "image"}]), ANSWER]},
        r"photos row 3 has 0 images and places for 1",
    ),
    "in both places": (
        in_parts({"type": "image", "image": FIRST}, {"type": "image", "image": SECOND}) | {"images": [FIRST, SECOND]},
        r"has a column of 2 images, and its messages hold 2 themselves",
    ),
    "two columns": (
        {"prompt": "<image>", "completion": "a", "images": [FIRST], "image": FIRST},
        r"has both a column 'images' and a column 'image'",
    ),
    "too many": (
        {"prompt": "<image>" * 4, "completion": "a", "images": [SECOND] * 4},
        r"photos row 3 has 4 images, more than data\.max_images=3",
    ),
    "a film": (
        {"messages": [turn("user", [{"type": "video", "video": "a.mp4"}]), ANSWER]},
        r"photos row 3 has a video, and the tokenizer has no <\|video_pad\|>",
    ),
    "the model's own token in a text": (
        {"prompt": "<|image_pad|>", "completion": "a"},
        r"photos row 3 has 0 images, and its text as tokens has 1 times <\|image_pad\|>",
    ),
    "a thread": (
        {"prompt": "<image>", "completion": "a", "images": [Image.new("RGB", (300, 1))]},
        r"photos row 3, image 0 of 300x1 pixels: absolute aspect ratio",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(side: ImageSide, tmp_path: Path, case: str) -> None:
    row, message = REFUSED[case]

    with pytest.raises(DataError, match=message):
        tokenise(side, row, tmp_path / "base", max_images=3)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "see", "completion": "a", "images": [FIRST]},
        {"messages": [turn("user", [{"type": "image", "image": FIRST}]), ANSWER]},
    ],
)
def test_a_model_that_reads_text_alone_does_not_train_on_rows_with_images(row: Any) -> None:
    with pytest.raises(DataError, match=r"photos row 3 has images\. Reads text\. Remove them; .*data\.columns=\{other"):
        tokenise("Reads text", row)


def test_a_template_that_writes_no_images_is_refused(side: ImageSide) -> None:
    template = "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    template += "{{ m.content[-1].text }}{% endif %}{{ eos_token }}{% endfor %}"
    rows = RowTokeniser(picture_tokenizer(), DataConfig(path="rows", chat_template=template), Path(), side)
    row = {"messages": [turn("user", [{"type": "image", "image": FIRST}, TEXT]), ANSWER]}

    with pytest.raises(DataError, match=r"Row 0 of photos"):
        rows.examples(row, 0, "photos")


def test_prompts_with_images_are_refused_where_they_are_not_trained_on() -> None:
    rows = RowTokeniser(character_tokenizer(), DataConfig(path="rows"), Path(), "Not by this verb")

    with pytest.raises(DataError, match=r"photos row 3 has images\. Not by this verb\."):
        rows.opening({"prompt": "<image>see=", "images": [FIRST]}, "photos row 3")


def test_images_that_threads_open_leave_the_filters_of_warnings_as_they_were(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    files, before, interval = ImageFiles(None, tmp_path), list(warnings.filters), sys.getswitchinterval()

    sys.setswitchinterval(1e-5)  # threads take turns within the block that sets filters
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: files.open(str(tmp_path / "a.png"), "it"), range(400)))
    finally:
        sys.setswitchinterval(interval)

    assert list(warnings.filters) == before
