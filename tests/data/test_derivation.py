"""What a processor says of images is asked for once and compared with its whole output; one that lies is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoProcessor

from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.data.content.model_inputs import array_arguments
from holdfast.data.tasks.synthetic import character_tokenizer
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.processor import NoImageRules
from holdfast.data.tokens.vision import PROBES, ImageSide
from holdfast.errors import DataError, ModelError
from holdfast.models.check.tower import check_tower
from holdfast.models.files.processors import processor_settings, whole_processor
from holdfast.models.files.vision import image_side, load_image_processor
from tests.models.directories import filled
from tests.vision import PROCESSORS, config_values, picture, picture_rows, tokenizer_of, vision_directory
from tests.vision_derived import KINDS, derived_directory, parts_of
from tests.vision_lies import LIES, LIES_OF_OTHERS, Lying, told_by
from tests.vision_table import in_page, processor_of, tables


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("derived")


@pytest.fixture(scope="module")
def directories(place: Path) -> dict[str, Path]:
    return {kind: derived_directory(place / kind, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", [*PROCESSORS, *KINDS])
def test_fifty_rows_are_what_the_processor_makes_of_the_whole_text(directories: dict[str, Path], kind: str) -> None:
    processor, tokenizer, side = processor_of(kind, directories.get(kind, Path()))
    rows = RowTokeniser(tokenizer, DataConfig(path="rows", max_length=4096), Path(), side)

    for index, row in enumerate(picture_rows(50, images=(1, 2, 3), seed=4)):
        (example,) = rows.examples(row, index, "rows").examples
        images = [part["image"] for part in row["messages"][0]["content"] if part["type"] == "image"]
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        expected = processor(images=images, text=[text], return_tensors="np", add_special_tokens=False)
        ours = array_arguments(example.model_inputs)
        assert example.tokens.tolist() == expected["input_ids"][0].tolist()
        assert set(ours) == set(expected) - {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
        for name, values in ours.items():
            theirs = np.asarray(expected[name])
            np.testing.assert_array_equal(
                values, theirs.swapaxes(0, 1) if "idefics" in kind or "smol" in kind else theirs
            )


@pytest.mark.parametrize("lie", LIES)
def test_a_processor_that_lies_is_refused_before_a_row_is_read(directories: dict[str, Path], lie: str) -> None:
    processor, tokenizer, config = parts_of(directories["qwen3_5"])
    ImageSide(processor, tokenizer, config)

    with pytest.raises(NoImageRules):
        ImageSide(Lying(processor, LIES[lie]), tokenizer, config)


@pytest.mark.parametrize("kind", LIES_OF_OTHERS)
def test_a_processor_that_forgets_a_mask_a_size_or_a_tile_is_refused(directories: dict[str, Path], kind: str) -> None:
    processor, tokenizer, _ = processor_of(kind, directories.get(kind, Path()))
    config = AutoConfig.for_model(**config_values(kind)) if kind in PROCESSORS else parts_of(directories[kind])[2]

    with pytest.raises(NoImageRules, match="contradicts itself for images of noise"):
        ImageSide(Lying(processor, LIES_OF_OTHERS[kind]), tokenizer, config)


@pytest.mark.parametrize("lie", LIES)
def test_a_processor_that_lies_about_rows_alone_is_refused_at_the_first(directories: dict[str, Path], lie: str) -> None:
    """A processor that answers every question rightly and a row of the data wrongly."""
    processor, tokenizer, config = parts_of(directories["qwen3_5"])
    lying = Lying(processor, LIES[lie], awake=False)
    rows = RowTokeniser(tokenizer, DataConfig(path="rows"), Path(), ImageSide(lying, tokenizer, config))
    pictures = [picture(np.random.default_rng(seed), 24, 33 + 20 * seed) for seed in (0, 1)]
    row = {"prompt": "<image>a<image>b", "completion": "a", "images": pictures}
    assert rows.examples(row, 2, "photos", "photos row 2").examples

    lying.awake = True

    row["images"] = [image.rotate(180) for image in pictures]
    with pytest.raises((ModelError, DataError), match="photos row 3"):
        rows.examples(row, 3, "photos", "photos row 3")


def test_a_processor_that_writes_tokens_which_the_tokenizer_lacks_is_refused() -> None:
    """The class adds them to its tokenizer, with ids for which the model has no embeddings."""
    tokenizer, config = character_tokenizer(("<image>",)), AutoConfig.for_model(**config_values("idefics3"))
    config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    section = ModelConfig(config=config_values("idefics3"), tokenizer="x", image_processor=PROCESSORS["idefics3"])
    image_processor = load_image_processor(section, config, [])

    refused = image_side(image_processor, tokenizer, config)

    assert isinstance(refused, str)
    assert "writes <fake_token_around_image>, which the model's tokenizer lacks" in refused


def test_token_types_are_the_processor_s_where_the_tokenizer_returns_some_too() -> None:
    tokenizer, config = tokenizer_of("gemma3"), AutoConfig.for_model(**config_values("gemma3"))
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    section = ModelConfig(config=config_values("gemma3"), tokenizer="x", image_processor=PROCESSORS["gemma3"])

    side = image_side(load_image_processor(section, config, []), tokenizer, config)

    assert isinstance(side, ImageSide)
    assert (side.family.token_types, side.family.type_tokens) == ("token_type_ids", (side.image_id,))


def test_text_trains_where_images_cannot_and_their_rows_are_refused_with_the_reason(
    directories: dict[str, Path],
) -> None:
    processor, tokenizer, config = parts_of(directories["qwen3_5"])
    with told_by(type(processor).__mro__[1], LIES["swap_images"]):
        side = image_side(processor.image_processor, tokenizer, config)
    rows = RowTokeniser(tokenizer, DataConfig(path="rows"), Path(), side)

    assert rows.examples({"prompt": "a", "completion": "b"}, 0, "rows").examples
    with pytest.raises(
        DataError, match=r"^row 3 has images\. Images of qwen3_5 cannot be trained on: the processor of"
    ):
        row = {"prompt": "<image>", "completion": "a", "images": [picture(np.random.default_rng(0), 24, 33)]}
        rows.examples(row, 3, "rows", "row 3")


OF_ANOTHER = {
    ("qwen3_5", "gemma4"): "the processor of qwen3_5 takes no image of noise",
    ("llava_next", "internvl"): "the processor of llava_next takes no image of noise",
    ("internvl", "qwen3_5"): "the processor of internvl takes no image of noise",
    ("aya_vision", "pixtral"): r"its tokenizer has '\[IMG\]' at 2\. Use the model's own tokenizer",
}


@pytest.mark.parametrize(("kind", "other"), OF_ANOTHER)
def test_a_processor_of_another_model_is_refused(directories: dict[str, Path], kind: str, other: str) -> None:
    _, tokenizer, config = parts_of(directories[kind])
    section, settings = ModelConfig(path="x"), processor_settings([directories[other]])
    image_processor = load_image_processor(section, config, [directories[other]])

    with pytest.raises((DataError, ModelError), match=OF_ANOTHER[kind, other]):
        side = image_side(image_processor, tokenizer, config, settings=settings)
        row = {"prompt": "<image>", "completion": "a", "images": [picture(np.random.default_rng(0), 24, 33)]}
        RowTokeniser(tokenizer, DataConfig(path="rows"), Path(), side).examples(row, 3, "rows", "row 3")


def test_rows_with_images_are_refused_where_there_is_no_processor(directories: dict[str, Path], tmp_path: Path) -> None:
    _, tokenizer, config = parts_of(directories["qwen3_5"])
    image_processor = load_image_processor(ModelConfig(path="x"), config, [tmp_path])
    side = image_side(image_processor, tokenizer, config, settings=processor_settings([tmp_path]))
    rows = RowTokeniser(tokenizer, DataConfig(path="rows"), Path(), side)

    assert rows.examples({"prompt": "a", "completion": "b"}, 0, "rows").examples
    words = r"^row 3 has images\. The directory of the qwen3_5 model has no preprocessor_config\.json"
    with pytest.raises(DataError, match=words):
        row = {"prompt": "<image>", "completion": "a", "images": [picture(np.random.default_rng(0), 24, 33)]}
        rows.examples(row, 3, "rows", "row 3")


@pytest.mark.parametrize("kind", ["qwen3_5", "internvl", "glm4v", "llava_onevision"])
def test_transformers_still_builds_no_processor_without_torchvision(directories: dict[str, Path], kind: str) -> None:
    """Once this fails, the classes need no subclass that accepts None for the part for videos."""
    processor, tokenizer, _ = parts_of(directories[kind])
    upstream: Any = type(processor).__mro__[1]

    with pytest.raises(AttributeError, match="VIDEO_PROCESSOR_MAPPING"):
        upstream(processor.image_processor, tokenizer, None)
    with pytest.raises((ImportError, ValueError), match=r"(?i)torchvision"):
        AutoProcessor.from_pretrained(directories[kind])


def square_features(config: Any, inputs: Any) -> int:
    """Count patches; LLaVA's "default" leaves out the one token of CLIP that stands for the whole image."""
    height, width = inputs["pixel_values"].shape[-2:]
    return (height // config.vision_config.patch_size) * (width // config.vision_config.patch_size)


def tile_features(config: Any, inputs: Any) -> int:
    tiles, patch = inputs["pixel_values"], config.vision_config.patch_size
    return len(tiles) * (tiles.shape[-2] // patch) * (tiles.shape[-1] // patch) // config.scale_factor**2


FEATURES: dict[str, Any] = {
    "llava": square_features,
    "gemma3": lambda config, inputs: config.mm_tokens_per_image * len(inputs["pixel_values"]),
    "idefics3": tile_features,
    "smolvlm": tile_features,
}
"""How many features the towers of some families make, by their papers; nothing at run time has these rules."""


@pytest.mark.parametrize("kind", FEATURES)
def test_an_image_has_as_many_tokens_as_the_family_s_rule_makes_features(kind: str) -> None:
    _, _, side = processor_of(kind, Path())

    for number, size in enumerate([(24, 33), (9, 40), (64, 64), (120, 50)]):
        made = side.prepare(picture(np.random.default_rng(number), *size), "an image")
        expected = FEATURES[kind](side.processor.config, array_arguments(made.inputs))
        assert made.tokens.count(side.image_id) == expected


OTHER_NUMBERS = {"internvl": "image_seq_length", "gemma3": "image_seq_length", "idefics3": "image_seq_len"}
"""Settings of processors for the tokens of an image or tile, which are 4 in the tiny models."""


@pytest.mark.parametrize("kind", OTHER_NUMBERS)
def test_features_are_counted_before_step_1_where_a_processor_says_the_same_each_time(
    directories: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    device = torch.device("cpu")
    policy = filled(vision_directory(tmp_path, kind) if kind in PROCESSORS else directories[kind])[0]
    processor, tokenizer, honest = processor_of(kind, directories.get(kind, Path()))

    counted = check_tower(policy, honest, device)
    config = honest.processor.config
    lying = whole_processor(processor.image_processor, tokenizer, config, {OTHER_NUMBERS[kind]: 3})
    other = ImageSide(lying, tokenizer, config)

    sizes = [picture(np.random.default_rng(0), *size) for size in PROBES]
    assert counted == tuple(
        4 * array_arguments(honest.prepare(image, "").inputs)["pixel_values"].shape[0] for image in sizes
    )
    fewer = ", ".join(str(3 * count // 4) for count in counted)
    with pytest.raises(ModelError, match=rf"writes {fewer} tokens .* features of them") as caught:
        check_tower(policy, other, device)
    (features,) = re.findall(r"vision tower makes ([\d, ]+) features", str(caught.value))
    assert sum(map(int, features.split(", "))) == sum(counted)


def odd_images() -> dict[str, Any]:
    """Return images of unusual sizes and modes, as a row has them in memory."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (24, 33, 3), dtype=np.uint8)
    whole = Image.fromarray(pixels)
    deep = Image.fromarray(generator.integers(0, 65536, (24, 33)).astype(np.uint16))
    return {
        "one pixel": Image.new("RGB", (1, 1), (9, 8, 7)),
        "one column": Image.new("RGB", (1, 90)),
        "10,000 x 10": Image.new("RGB", (10_000, 10), (50, 60, 70)),
        "palette": whole.quantize(16),
        "CMYK": whole.convert("CMYK"),
        "grey": whole.convert("L"),
        "with transparency": whole.convert("RGBA"),
        "16 bit": deep,
        "1 bit": whole.convert("1"),
    }


@pytest.mark.parametrize("kind", [*PROCESSORS, *KINDS])
def test_odd_images_are_what_the_processor_makes_of_them_or_refused_by_name(
    directories: dict[str, Path], kind: str
) -> None:
    _, tokenizer, side = processor_of(kind, directories.get(kind, Path()))
    rows = RowTokeniser(tokenizer, DataConfig(path="rows", max_length=4096), Path(), side)
    taken = 0

    for name, image in odd_images().items():
        row = {"prompt": "<image>a=", "completion": "b", "images": [image]}
        try:  # the first rows are compared with the processor's whole output
            (example,) = rows.examples(row, 0, "rows", row_name=name).examples
        except DataError as error:
            assert str(error).startswith(f"{name}, image 0 of "), error  # noqa: PT017 - some are refused, some not
            continue
        assert (example.tokens == side.image_id).sum() >= 1
        taken += 1

    assert taken >= 7


@pytest.mark.usefixtures("directories")
def test_what_processors_were_found_to_do_is_documented(place: Path) -> None:
    assert in_page() == tables(place)
