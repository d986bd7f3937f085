"""Videos as lists of frames: sizes, patches, tokens and positions are those of transformers.

Files of videos are in tests/features/video; all else is refused.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from holdfast.config.sections.data import DataConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.data.content.images import Frames
from holdfast.data.tokens.chat import RowTokeniser
from holdfast.data.tokens.videos import VIDEO_FAMILIES, VideoOptions, frame_size, seconds_of
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import DataError
from holdfast.models.files.vision import image_side, load_image_processor, video_options
from tests.videos import FPS, KINDS, MARK, clip, upstream_inputs, video_config, video_model, video_tokenizer
from tests.vision import PATCH, PROCESSORS, config_values, picture, tokenizer_of

# A from-import of its package says that torchvision is missing; what is asked of it here needs none.
qwen3 = import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
UNIT = 2 * PATCH
SIZE = {"shortest_edge": 128, "longest_edge": 640}


def side_of(kind: str, tokenizer: Any = None) -> ImageSide:
    values = video_config(kind) if "qwen" in kind else config_values(kind)
    config = AutoConfig.for_model(**values)
    settings = ModelConfig(config=values, tokenizer="x", image_processor=PROCESSORS[kind])
    processor = load_image_processor(settings, config, [])
    known = tokenizer or (video_tokenizer() if "qwen" in kind else tokenizer_of(kind))
    found = image_side(processor, known, config, videos=VideoOptions(FPS, size=SIZE))
    assert isinstance(found, ImageSide)
    return found


def sequence(kind: str, row: dict[str, Any], tokenizer: Any = None, **data: Any) -> Any:
    rows = RowTokeniser(video_tokenizer(), DataConfig(path="rows", **data), Path.cwd(), side_of(kind, tokenizer))
    (example,) = rows.examples(row, 3, "clips", row_name="clips row 3").examples
    return example


def test_sizes_of_frames_are_those_of_transformers() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        count, height, width = (int(side) for side in generator.integers([2, 5, 5], [12, 90, 90]))
        low, high = (int(generator.integers(64, 900)), int(generator.integers(900, 20000)))
        each = smart_resize(height, width, UNIT, low, high)
        both = qwen3.smart_resize(count, height, width, 2, UNIT, low, high)

        families = [VIDEO_FAMILIES[kind] for kind in ("qwen2_5_vl", "qwen3_vl")]
        found = [frame_size(family, count, width, height, UNIT, (low, high)) for family in families]

        assert found == [each, both], (count, height, width, low, high)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [4, 3])
def test_patches_reach_over_neighbouring_frames(kind: str, count: int) -> None:
    frames = clip(np.random.default_rng(1), count, 17, 30)
    processor: Any = side_of(kind).processor.upstream.image_processor

    found = side_of(kind).prepare_video(Frames(frames, FPS), "a clip").inputs

    resize = {"qwen3_vl": lambda: qwen3.smart_resize(count, 17, 30, 2, UNIT, 128, 640)}
    height, width = resize.get(kind, lambda: smart_resize(17, 30, UNIT, 128, 640))()
    pixels = np.stack([np.asarray(frame.resize((width, height), resample=3), dtype=np.float64) for frame in frames])
    normal = (pixels / 255 - processor.image_mean) / processor.image_std
    video = torch.from_numpy(normal.transpose(0, 3, 1, 2))[None].contiguous()
    patches, *grid = qwen3.Qwen3VLVideoProcessor.patchify(  # Qwen2's file has the same, and wants torchvision
        SimpleNamespace(), video, PATCH, 2, 2
    )
    assert found["image_grid_thw"].tolist() == [grid]
    np.testing.assert_allclose(found["pixel_values"], patches[0].numpy(), atol=2e-6)
    assert grid[0] == 2


def test_two_equal_frames_are_the_patches_of_an_image() -> None:
    image = picture(np.random.default_rng(2), 24, 16)
    side = side_of("qwen2_5_vl")

    found, expected = side.prepare_video(Frames([image, image], FPS), "a clip"), side.prepare(image, "an image")

    for name, values in expected.inputs.items():
        np.testing.assert_array_equal(found.inputs[name], values)


def both_videos() -> tuple[list[Any], list[Any]]:
    generator = np.random.default_rng(4)
    return clip(generator, 5, 24, 16), clip(generator, 2, 9, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_upstream_processor(kind: str) -> None:
    import transformers

    videos, tokenizer = both_videos(), video_tokenizer()
    name = {"qwen2_vl": "Qwen2VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}.get(kind, "Qwen2_5_VLProcessor")
    upstream: Any = getattr(transformers, name)
    bare = upstream.__new__(upstream)  # the whole processor wants torchvision; its rule for tokens does not
    bare.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    bare.tokenizer, bare.video_token = tokenizer, MARK
    bare.vision_start_token, bare.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    grids = [side_of(kind).prepare_video(Frames(frames, FPS), "").inputs["image_grid_thw"][0] for frames in videos]
    metadata = [SimpleNamespace(fps=FPS, frames_indices=list(range(len(frames)))) for frames in videos]
    made = {"video_grid_thw": grids, "video_metadata": metadata}
    first, second = (f"<|vision_start|>{bare.replace_video_token(made, n)}<|vision_end|>" for n in (0, 1))
    expected = tokenizer(f"see {first} or {second}=", add_special_tokens=False)["input_ids"]

    found = sequence(kind, {"prompt": "see <video> or <video>=", "completion": ".", "videos": [*videos]})

    assert found.tokens[:-2].tolist() == expected
    assert not found.loss_mask[:-2].any()


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_those_of_get_rope_index(kind: str) -> None:
    generator = np.random.default_rng(5)
    row = {
        "prompt": "<video>see <image><video>, or what is <image>=",
        "completion": ".",
        "videos": [clip(generator, 9, 24, 16), clip(generator, 3, 9, 33)],
        "images": [picture(generator, 24, 33), picture(generator, 9, 9)],
    }

    found = sequence(kind, row)

    given = upstream_inputs(kind, found)
    given = {name: value for name, value in given.items() if not name.startswith("pixel")}
    expected, _ = video_model(kind).model.get_rope_index(torch.from_numpy(found.tokens)[None], **given)
    assert found.positions.tolist() == expected[:, 0].tolist()
    if kind == "qwen2_5_vl":  # 4 positions in a second, 2/3 of a second in a patch: 0, 2.67, 5.33, ...
        begin = found.positions[0, 1]
        assert sorted({int(time) for time in found.positions[0, 1 : 1 + 5 * 4 - 4]})[:3] == [
            begin,
            begin + 2,
            begin + 5,
        ]


def test_times_stand_between_the_frames_of_a_patch() -> None:
    assert seconds_of(5, 2.0, 2) == [0.25, 1.25, 2.0]


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_every_way_to_write_a_row_gives_the_same_sequence(tmp_path: Path) -> None:
    frames, image = clip(np.random.default_rng(6), 3, 16, 16), picture(np.random.default_rng(7), 16, 24)
    for number, frame in enumerate(frames):
        frame.save(tmp_path / f"{number}.png")
    paths, answer = [f"{number}.png" for number in range(3)], turn("assistant", "ab")
    text = {"type": "text", "text": "see"}
    held = [{"type": "image", "image": image}, text]
    rows: list[dict[str, Any]] = [
        {"messages": [turn("user", [{"type": "video", "video": frames}, *held]), answer]},
        {"messages": [turn("user", [{"type": "video", "video": frames, "fps": FPS}, *held]), answer]},
        {"messages": [turn("user", "<video><image>see"), answer], "videos": [paths], "images": [image]},
        {"messages": [turn("user", "<video><image>see"), answer], "videos": [{"frames": paths}], "images": [image]},
        {"messages": [turn("user", [{"type": "video"}, *held]), answer], "videos": [paths]},
    ]

    found = [sequence("qwen2_5_vl", row, image_dir=str(tmp_path)) for row in rows]
    other = sequence(
        "qwen2_5_vl",
        {**rows[0], "messages": [turn("user", [{"type": "video", "video": frames, "fps": 1.0}, *held]), answer]},
    )

    for example in found:
        assert example.tokens.tolist() == found[0].tokens.tolist()
        assert example.positions.tolist() == found[0].positions.tolist()
        for name, values in found[0].model_inputs.items():
            np.testing.assert_array_equal(example.model_inputs[name], values)
    assert found[0].model_inputs["image_grid_thw"].tolist() == [[2, 4, 4], [1, 4, 6]]
    assert other.tokens.tolist() == found[0].tokens.tolist()
    assert other.positions.tolist() != found[0].positions.tolist()


FRAMES, SMALL = clip(np.random.default_rng(8), 3, 16, 16), picture(np.random.default_rng(0), 8, 9)
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a file": ("qwen3_vl", {"videos": ["clip.mp4"]}, {}, r"clips row 3, video 0: there is no file /"),
    "bytes": ("qwen3_vl", {"videos": [b"1234"]}, {}, r"video 0 \(4 bytes\) cannot be read as a film"),
    "no frames": ("qwen3_vl", {"videos": [[]]}, {}, r"video 0 has no frames"),
    "a rate of 0": ("qwen3_vl", {"videos": [{"frames": FRAMES, "fps": 0}]}, {}, r"video 0 has fps=0; it is the num"),
    "two sizes": ("qwen3_vl", {"videos": [[FRAMES[0], SMALL]]}, {}, r"frames of 9x8 and of 16x16 pixels"),
    "one frame": ("qwen3_vl", {"videos": [FRAMES[:1]]}, {}, r"video 0 of 16x16 pixels: it has 1 frame"),
    "too many": ("qwen2_vl", {"videos": [FRAMES]}, {"max_frames": 2}, r"a video of 3 frames, more than data\.max_fra"),
    "no place": ("qwen2_vl", {"videos": [FRAMES, FRAMES]}, {}, r"has 2 videos and places for 1\. Every video needs"),
    "a family of images": ("llava", {"videos": [FRAMES]}, {}, r"llava is trained on text and images, and on no videos"),
    "a frame": ("qwen2_vl", {"videos": [["a.png"]]}, {}, r"clips row 3, video 0, frame 0: there is no file"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_list_of_frames_is_refused_by_name(name: str) -> None:
    kind, columns, data, said = REFUSED[name]

    with pytest.raises(DataError, match=said):
        sequence(kind, {"prompt": "<video>", "completion": "a", **columns}, **data)


def test_a_tokenizer_without_the_token_takes_images_and_no_videos() -> None:
    with pytest.raises(DataError, match=r"has no <\|video_pad\|> with the id that the model marks videos by"):
        sequence("qwen2_vl", {"prompt": "<video>", "completion": "a", "videos": [FRAMES]}, tokenizer_of("qwen2_vl"))


def test_prompts_have_no_videos_where_no_engine_could_show_them() -> None:
    rows = RowTokeniser(video_tokenizer(), DataConfig(path="rows"), Path.cwd(), side_of("qwen2_vl"))
    row = {"prompt": "<video>", "videos": [FRAMES]}

    with pytest.raises(DataError, match=r"row 1 has a video, and nobody shows it\. Remove the row, or use another eng"):
        rows.opening(row, "row 1", "nobody shows it")

    assert rows.opening(row, "row 1").laid.tokens.count(video_config("qwen2_vl")["video_token_id"]) > 1


def test_sizes_come_from_the_model_s_file_for_videos_unless_the_run_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"size": SIZE}))
    data = DataConfig(path="rows", video_max_pixels=256, video_fps=1.0)

    assert video_options(data, tmp_path) == VideoOptions(1.0, None, 256, SIZE)
    assert video_options(data, tmp_path / "none").size is None
