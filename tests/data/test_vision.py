"""Image tokens and positions are those of transformers' own processors and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import DataError, ModelError
from holdfast.models.check.forward import documents
from holdfast.models.files.vision import image_side, load_image_processor
from tests.models.test_selfcheck import policy_of
from tests.vision import KINDS, MARKS, MIXTURE, PATCH, PROCESSORS, config_values, picture, tokenizer_of, vision_model

GRIDS = [*(kind for kind in KINDS if "qwen" in kind), MIXTURE]


def side_of(kind: str, changes: dict[str, Any] | None = None, tokenizer: Any = None, **bounds: int) -> ImageSide:
    config = AutoConfig.for_model(**config_values(kind))
    settings = ModelConfig(
        config=config_values(kind), tokenizer="x", image_processor=PROCESSORS[kind] | (changes or {})
    )
    processor = load_image_processor(settings, config, [])
    if tokenizer is not None:
        config.text_config.vocab_size = len(tokenizer)
    found = image_side(processor, tokenizer or tokenizer_of(kind), config, **bounds)
    assert isinstance(found, ImageSide), found
    return found


def sequence(kind: str, text: str, images: list[Any], **bounds: int) -> Any:
    """Return the sequence of a prompt and no answer to speak of."""
    rows = RowTokeniser(tokenizer_of(kind), DataConfig(path="rows"), Path.cwd(), side_of(kind, **bounds))
    row = {"prompt": text, "completion": ".", "images": images}
    (example,) = rows.examples(row, 0, "rows").examples
    return example


@pytest.mark.parametrize("kind", [*KINDS, MIXTURE])
def test_tokens_are_those_of_the_upstream_processor(kind: str) -> None:
    import transformers

    pictures = [picture(np.random.default_rng(number), *size) for number, size in enumerate([(24, 33), (9, 40)])]
    tokenizer, side = tokenizer_of(kind), side_of(kind)
    name = {
        "llava": "LlavaProcessor",
        "gemma3": "Gemma3Processor",
        "qwen3_vl": "Qwen3VLProcessor",
        "qwen3_vl_moe": "Qwen3VLProcessor",
        "qwen2_vl": "Qwen2VLProcessor",
        "idefics3": "Idefics3Processor",
    }
    upstream = getattr(transformers, name.get(kind, "Qwen2_5_VLProcessor"))

    found = sequence(kind, "see <image> or <image>=", pictures)

    processor, mark = side.processor.upstream.image_processor, side.family.placeholder
    if kind == "llava":
        options = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        both = upstream(image_processor=processor, tokenizer=tokenizer, **options)
        asked = both(images=pictures, text=[f"see {mark} or {mark}="], return_tensors="np")
        expected = asked["input_ids"][0].tolist()
    elif kind == "gemma3":
        for role, token in zip(("boi_token", "image_token", "eoi_token"), MARKS[kind], strict=True):
            setattr(tokenizer, role, token)
            setattr(tokenizer, f"{role}_id", tokenizer.convert_tokens_to_ids(token))
        both = upstream(image_processor=processor, tokenizer=tokenizer, image_seq_length=4)
        asked = both(images=pictures, text=["see <start_of_image> or <start_of_image>="], return_tensors="np")
        expected = asked["input_ids"][0].tolist()
    elif kind == "idefics3":
        both = upstream(image_processor=processor, tokenizer=tokenizer, image_seq_len=4)
        asked = both(images=[pictures], text=["see <image> or <image>="], return_row_col_info=True)
        expected = asked["input_ids"][0]
        assert "<row_2_col_1>" in tokenizer.decode(expected)
    else:  # the whole processor wants torchvision for videos; its rule for images does not
        bare = upstream.__new__(upstream)
        bare.image_processor, bare.tokenizer, bare.image_token = processor, tokenizer, "<|image_pad|>"
        inputs = processor(images=pictures, return_tensors="np")
        first, second = (mark.replace("<|image_pad|>", bare.replace_image_token(inputs, number)) for number in (0, 1))
        expected = tokenizer(f"see {first} or {second}=", add_special_tokens=False)["input_ids"]
    assert found.tokens[:-2].tolist() == expected
    assert not found.loss_mask[:-2].any()


@pytest.mark.parametrize("expression", [False, True])
def test_a_template_of_gemma_writes_what_its_processor_puts_around_an_image(expression: bool) -> None:
    tokenizer = tokenizer_of("gemma3")
    if expression:  # as Gemma's own template has it
        tokenizer.chat_template = tokenizer.chat_template.replace("<start_of_image>", "{{ '<start_of_image>' }}")
    rows = RowTokeniser(tokenizer, DataConfig(path="rows"), Path.cwd(), side_of("gemma3"))
    asked = [{"type": "image", "image": picture(np.random.default_rng(0), 9, 9)}, {"type": "text", "text": "see="}]
    row = {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "a"}]}

    (found,) = rows.examples(row, 0, "rows").examples

    written = "<user>\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\nsee=<assistant>a<eos>"
    assert tokenizer_of("gemma3").decode(found.tokens) == written


@pytest.mark.parametrize("kind", GRIDS)
def test_positions_are_those_of_get_rope_index(kind: str) -> None:
    sizes = [(24, 33), (9, 40), (16, 16), (40, 8)]
    pictures = [picture(np.random.default_rng(number), *size) for number, size in enumerate(sizes)]

    found = sequence(kind, "<image>see <image><image>, or what is <image>=", pictures)

    tokens = torch.from_numpy(found.tokens)[None]
    types = (tokens == side_of(kind).image_id).long()
    grids = torch.from_numpy(found.model_inputs["image_grid_thw"])
    expected, _ = vision_model(kind).model.get_rope_index(tokens, image_grid_thw=grids, mm_token_type_ids=types)
    assert found.positions.tolist() == expected[:, 0].tolist()
    assert len({tuple(axis) for axis in found.positions.tolist()}) == 3  # the axes do differ


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_transformers_image_processor(kind: str) -> None:
    pictures = [picture(np.random.default_rng(number), *size) for number, size in enumerate([(24, 33), (9, 40)])]

    found = sequence(kind, "<image><image>", pictures)

    expected = side_of(kind).processor.upstream.image_processor(images=pictures, return_tensors="np")
    for name, values in found.model_inputs.items():
        theirs = np.asarray(expected[name])
        np.testing.assert_array_equal(values, theirs.swapaxes(0, 1) if kind == "idefics3" else theirs)


def test_bounds_of_pixels_set_how_many_tokens_an_image_takes() -> None:
    large = picture(np.random.default_rng(0), 64, 64)

    counts = [
        int((sequence("qwen2_5_vl", "<image>", [large], **bounds).tokens == side_of("qwen2_5_vl").image_id).sum())
        for bounds in ({}, {"max_pixels": 256}, {"max_pixels": 64}, {"min_pixels": 6400, "max_pixels": 8192})
    ]

    # A token is 8 x 8 pixels; the processor's own bound is 768, and 24 x 24 is the largest square below it.
    assert counts == [9, 4, 1, 100]


def test_bounds_are_refused_where_all_images_have_one_size() -> None:
    with pytest.raises(ModelError, match=r"data\.max_pixels do not apply to llava: .* one size"):
        side_of("llava", max_pixels=100)


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(ModelError, match=r"data\.min_pixels=1000 is above data\.max_pixels=768"):
        side_of("qwen2_5_vl", min_pixels=1000)


@pytest.mark.parametrize("setting", ["patch_size", "temporal_patch_size", "merge_size"])
def test_a_processor_that_cuts_other_patches_than_the_tower_takes_is_refused(setting: str) -> None:
    with pytest.raises(ModelError, match=rf"has {setting}=8, the model's vision tower [24]\."):
        side_of("qwen2_5_vl", {setting: 8})


def test_images_that_are_not_brought_to_one_size_are_refused_by_the_name_of_their_row(tmp_path: Path) -> None:
    side = side_of("llava", {"do_center_crop": False})
    rows = RowTokeniser(tokenizer_of("llava"), DataConfig(path="rows"), tmp_path, side)
    square, wide = (picture(np.random.default_rng(0), 16, width) for width in (16, 32))

    (found,) = rows.examples({"prompt": "<image>", "completion": "a", "images": [square]}, 0, "photos").examples

    assert found.model_inputs["pixel_values"].shape == (1, 3, 16, 16)
    words = "photos row 3, image 1 of 32x16 pixels becomes pixel_values of 3x16x32, and a square one 3x16x16; llava"
    with pytest.raises(DataError, match=words):
        row = {"prompt": "<image><image>", "completion": "a", "images": [square, wide]}
        rows.examples(row, 3, "photos", row_name="photos row 3")


def test_a_tokenizer_with_another_image_token_is_refused() -> None:
    config = AutoConfig.for_model(**config_values("qwen2_5_vl"))

    with pytest.raises(ModelError, match=r"marks images by token 61, and its tokenizer has '<\|image_pad\|>' at"):
        image_side(side_of("qwen2_5_vl").processor.upstream.image_processor, tokenizer_of("llava"), config)


def test_tokens_are_compared_with_the_features_the_model_makes(tmp_path: Path) -> None:
    side = side_of("qwen2_5_vl")
    side.processor.config.vision_config.spatial_merge_size = 1
    rows = RowTokeniser(tokenizer_of("qwen2_5_vl"), DataConfig(path="rows"), tmp_path, side)
    row = {"prompt": "<image>", "completion": "a", "images": [picture(np.random.default_rng(0), 16, 16)]}

    with pytest.raises(DataError, match=r"photos row 3, image 0 of 16x16 pixels has 4 tokens .* makes 16 features"):
        rows.examples(row, 3, "photos", row_name="photos row 3")


def test_of_the_documents_that_are_checked_before_step_1_two_have_an_image() -> None:
    first, changed, second = documents(policy_of(vision_model("qwen2_vl")), side_of("qwen2_vl"))

    assert [bool(document.model_inputs) for document in (first, changed, second)] == [True, True, False]
