"""Prompts with images: what a server is sent, and what it may not make of them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.data.content.image_files import ImageFiles, png_url
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.errors import DataError, RunStopped
from holdfast.features.vllm.prompts import ServedPrompt
from holdfast.features.vllm.servers import VLLMServer
from holdfast.http import EndpointMistaken, EndpointRefuses
from holdfast.models.files.processors import write_processor
from holdfast.rollout.engine import Request, RequestImages
from holdfast.training.policy.ahead import _digest
from tests.data.test_vision import side_of
from tests.features.vllm.served import ServedModel, serving
from tests.vision import picture, tokenizer_of

SAMPLING = {"max_tokens": 2, "temperature": 1.0, "logprobs": 1}


class Recorder(ServedModel):
    """Answers a completion of two tokens, and says which tokens it made of the prompt."""

    def __init__(self, prompt_tokens: Sequence[int] | None) -> None:
        super().__init__()
        self.prompt_tokens, self.asked = prompt_tokens, list[Any]()

    def post(self, path: str, query: Any, asked: Any) -> Any:
        self.asked.append(asked)
        content: list[Any] = [{"token_id": token, "logprob": -1.0, "top_logprobs": []} for token in (4, 5)]
        spans = [{"version": "a", "start": 0, "end": 2}]
        choice = {"token_ids": [4, 5], "finish_reason": "length", "weight_versions": spans}
        told: dict[str, Any] = {"model": "m", "choices": [choice | {"logprobs": {"content": content}}]}
        return told if self.prompt_tokens is None else told | {"prompt_token_ids": list(self.prompt_tokens)}


@contextmanager
def client(served: ServedModel) -> Iterator[VLLMServer]:
    with serving(served) as url, closing(VLLMServer.of(url, VLLMEngineConfig(url=[url], model="policy"))) as server:
        yield server


def request_of(kind: str, folder: Path, count: int) -> Request:
    """Return a prompt whose row names pictures of several sizes, one of them turned by its camera."""
    draw, names = np.random.default_rng(0), []
    for number in range(count):
        names.append(str(folder / f"{number}.png"))
        exif = Image.Exif()
        exif[274] = 6 if number == 1 else 1  # orientation: turned by 90 degrees
        picture(draw, 24 + 9 * number, 33).save(names[-1], exif=exif)
    rows = RowTokeniser(tokenizer_of(kind), DataConfig(path="rows"), folder, side_of(kind))
    opening = rows.opening({"prompt": f"see {'<image>' * count}=", "images": names}, "row 0")
    assert opening.images is not None
    images = RequestImages(0, opening.images, ImageFiles(None, folder))
    return Request(0, np.asarray(opening.laid.tokens, np.int64), (7,), {"pixel_values": np.zeros(1)}, None, images)


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen2_5_vl"])
def test_a_server_is_sent_a_mark_and_the_pixels_of_each_image(kind: str, tmp_path: Path) -> None:
    request = request_of(kind, tmp_path, 2)
    tokenizer, family = tokenizer_of(kind), side_of(kind).family

    with client(served := Recorder(request.prompt.tolist())) as server:
        reply = server.complete("a", ServedPrompt.of(request), SAMPLING)

    assert reply.tokens.tolist() == [4, 5]
    (asked,) = served.asked
    # The text that the model's own processor reads, whose tokens are vLLM's beginning.
    text = f"see {family.for_processor(family.placeholder) * 2}="
    assert asked["token_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert asked["return_token_ids"] is True
    assert [sorted(image) for image in asked["content_parts"]] == [["type", "url"]] * 2
    for number, image in enumerate(asked["content_parts"]):
        head, _, file = image["url"].partition(",")
        assert (image["type"], head) == ("image_url", "data:image/png;base64")
        told = np.asarray(Image.open(io.BytesIO(base64.b64decode(file))))
        saved = np.asarray(Image.open(tmp_path / f"{number}.png"))
        assert np.array_equal(told, np.rot90(saved, -1) if number == 1 else saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tokens: tokens[:-1], "as 20 tokens, the trainer as 21, and they differ from token 20 on"),
        (lambda tokens: [*tokens, 3], "as 22 tokens, the trainer as 21, and they differ from token 21 on"),
        (
            lambda tokens: [*tokens[:3], 9, *tokens[4:]],
            "as 21 tokens, the trainer as 21, and they differ from token 3 on",
        ),
    ],
)
def test_a_server_that_makes_other_tokens_of_a_prompt_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    request = request_of("llava", tmp_path, 1)
    assert request.prompt.size == 4 + 16 + 1
    prompt = ServedPrompt.of(request)

    with client(Recorder(change(request.prompt.tolist()))) as server, pytest.raises(EndpointRefuses) as error:
        server.complete("a", prompt, SAMPLING)

    assert words in str(error.value)
    assert "reads a prompt with images" in str(error.value)


def test_a_server_that_does_not_say_what_it_read_is_mistaken(tmp_path: Path) -> None:
    prompt = ServedPrompt.of(request_of("llava", tmp_path, 1))

    with client(Recorder(None)) as server, pytest.raises(EndpointMistaken, match="prompt_token_ids"):
        server.complete("a", prompt, SAMPLING)


def test_images_without_their_files_are_not_left_out(tmp_path: Path) -> None:
    request = Request(0, np.arange(4), (7,), {"pixel_values": np.zeros(1)})

    with pytest.raises(RunStopped, match="not their files, which servers are sent"):
        ServedPrompt.of(request)


@pytest.mark.parametrize(("kind", "bounds"), [("llava", {}), ("gemma3", {}), ("qwen2_5_vl", {"max_pixels": 512})])
def test_the_processor_that_is_written_for_servers_makes_the_same_pixels(
    kind: str, bounds: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoImageProcessor

    side, image = side_of(kind, **bounds), picture(np.random.default_rng(1), 40, 57)

    write_processor(tmp_path, side.processor.upstream, side.processor.options)

    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    loaded = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    expected = side.prepare(image, "an image").inputs["pixel_values"]
    assert np.array_equal(loaded(images=[image], return_tensors="np")["pixel_values"], expected)
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    assert settings["processor_class"] == type(side.processor.upstream).__name__


def with_runs_of_line_breaks(tokenizer: Any) -> Any:
    """Return a tokenizer of characters to which two, three or four line breaks are one token, as to Gemma's."""
    vocabulary = tokenizer.get_vocab()
    size = len(vocabulary)
    runs = {"\n" * count: size + count - 2 for count in (2, 3, 4)}
    model = Tokenizer(models.WordLevel({**vocabulary, **runs}, unk_token=tokenizer.unk_token))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n{1,4}|[\s\S]"), behavior="isolated")
    model.decoder = decoders.Fuse()
    own = {"pad_token": tokenizer.pad_token, "eos_token": tokenizer.eos_token, "unk_token": tokenizer.unk_token}
    special = [token for token in vocabulary if len(token) > 1 and token not in own.values()]
    return PreTrainedTokenizerFast(tokenizer_object=model, additional_special_tokens=special, **own)


@pytest.mark.parametrize(
    "text", ["a<image>b", "<image>\nwhat", "look:\n<image>", "<image><image>", "\n<image>\n\n<image>\n"]
)
def test_a_mark_beside_line_breaks_is_written_where_they_are_one_token_with_the_placeholder_s(
    text: str, tmp_path: Path
) -> None:
    tokenizer = with_runs_of_line_breaks(tokenizer_of("gemma3"))
    side = side_of("gemma3", tokenizer=tokenizer)
    picture(np.random.default_rng(0), 24, 33).save(tmp_path / "0.png")
    rows = RowTokeniser(tokenizer, DataConfig(path="rows"), tmp_path, side)

    opening = rows.opening({"prompt": text, "images": ["0.png"] * text.count("<image>")}, "row 0")

    assert opening.images is not None
    expected = text.replace("<image>", side.family.processor_token)
    assert opening.images.tokens.tolist() == tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_a_row_whose_text_holds_the_mark_of_an_image_is_refused_by_name(tmp_path: Path) -> None:
    picture(np.random.default_rng(0), 24, 33).save(tmp_path / "0.png")
    side = side_of("gemma3")
    rows = RowTokeniser(tokenizer_of("gemma3"), DataConfig(path="rows"), tmp_path, side)
    for number in range(16):  # these are compared with the processor's whole output
        rows.opening({"prompt": "a<image>b", "images": ["0.png"]}, f"row {number}")

    with pytest.raises(DataError, match=r"row 16 has 1 images, and 2 times <start_of_image>"):
        rows.opening({"prompt": "a<start_of_image>b<image>", "images": ["0.png"]}, "row 16")


def test_an_image_whose_file_changes_between_reading_and_sending_is_refused(tmp_path: Path) -> None:
    request = request_of("llava", tmp_path, 2)
    saved = Image.open(tmp_path / "0.png").convert("RGB")
    Image.new("RGB", saved.size, (255, 0, 0)).save(tmp_path / "0.png")

    with pytest.raises(DataError, match=r"An image of prompt 0 \(.*0\.png\) has other pixels than when"):
        ServedPrompt.of(request)


def test_files_for_servers_have_pixels_alone() -> None:
    transparent = Image.new("1", (8, 8), 1)
    transparent.info["transparency"] = 0
    profiled = picture(np.random.default_rng(0), 8, 8)
    profiled.info["icc_profile"] = np.random.default_rng(0).bytes(2 << 20)

    for image in (transparent.convert("RGB"), profiled):
        read = Image.open(io.BytesIO(base64.b64decode(png_url(image).partition(",")[2])))
        assert np.array_equal(np.asarray(read), np.asarray(image))
        assert read.info == {}


def test_completions_of_another_picture_of_the_same_size_are_not_taken_for_these() -> None:
    requests = [
        Request(0, np.arange(4), (7,), {"pixel_values": np.full((2, 3), value, np.float32)}) for value in (0, 0, 1)
    ]

    same, again, other = map(_digest, requests)

    assert same == again != other
