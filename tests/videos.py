"""Rows with videos, a tokenizer that marks them, and what plain transformers gets of the same frames."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.data.tasks.synthetic import VISION, character_tokenizer, picture_tokenizer
from holdfast.types import Example
from tests.vision import PROCESSORS, config_values, picture, vision_model

KINDS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
MARK = "<|video_pad|>"
FPS = 3.0


def video_tokenizer() -> Any:
    """Return the tokenizer of pictures with one more token, for videos."""
    found = character_tokenizer((*VISION, MARK))
    pictures = picture_tokenizer().chat_template
    written = "{% elif part.type == 'video' %}<|vision_start|>" + MARK + "<|vision_end|>{% else %}{{ part.text }}"
    found.chat_template = pictures.replace("{% else %}{{ part.text }}", written)
    return found


def video_config(kind: str) -> dict[str, Any]:
    values = config_values(kind) | {"video_token_id": video_tokenizer().convert_tokens_to_ids(MARK)}
    if kind == "qwen2_5_vl":
        values["vision_config"] = values["vision_config"] | {"tokens_per_second": 4}
    return values


def video_model(kind: str) -> Any:
    """Return the model of pictures, which knows the token of videos."""
    model = vision_model(kind)
    model.config.video_token_id = video_tokenizer().convert_tokens_to_ids(MARK)
    return model


def video_directory(path: Path, kind: str) -> Path:
    """Save model, tokenizer, and the files of its processors; frames have bounds of their own."""
    video_model(kind).save_pretrained(path)
    video_tokenizer().save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))
    size = {"shortest_edge": 128, "longest_edge": 640}
    (path / "video_preprocessor_config.json").write_text(json.dumps({"size": size}))
    return path


def clip(generator: np.random.Generator, frames: int, height: int, width: int) -> list[Any]:
    return [picture(generator, height, width) for _ in range(frames)]


def video_rows(count: int, *, seen: Sequence[str] = ("v", "", "iv", "vi"), seed: int = 0) -> list[dict[str, Any]]:
    """Return conversations with videos (v) and images (i) in turn, of uneven sizes and lengths."""
    generator = np.random.default_rng(seed)
    letters = np.array(list("abcdefghij"))
    rows = []
    for index in range(count):
        asked: list[dict[str, Any]] = []
        for mark in seen[index % len(seen)]:
            sides = generator.integers(8, 24, 2)
            if mark == "i":
                asked.append({"type": "image", "image": picture(generator, *sides)})
            else:
                asked.append({"type": "video", "video": clip(generator, int(generator.integers(2, 6)), *sides)})
        said, answer = ("".join(generator.choice(letters, generator.integers(1, size))) for size in (9, 20))
        asked.append({"type": "text", "text": f"see {said}="})
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
    return rows


def upstream_inputs(kind: str, example: Example) -> dict[str, Any]:
    """Take a sequence's images and videos apart, as transformers' own forward wants them."""
    if not example.model_inputs:
        return {}
    ids = {"image": video_config(kind)["image_token_id"], "video": video_config(kind)["video_token_id"]}
    tokens, found = example.tokens, {"image": [], "video": []}  # type: ignore[var-annotated]
    marks = np.flatnonzero(np.isin(tokens, list(ids.values())))
    mark = patch = 0
    for grid in example.model_inputs["image_grid_thw"]:
        size = int(grid.prod())
        which = "image" if tokens[marks[mark]] == ids["image"] else "video"
        found[which].append((grid, example.model_inputs["pixel_values"][patch : patch + size]))
        mark, patch = mark + size // 4, patch + size
    assert mark == len(marks)
    types = (tokens == ids["image"]) + 2 * (tokens == ids["video"])
    inputs = {"mm_token_type_ids": torch.from_numpy(types.astype(np.int64))[None]}
    for which, (pixels, grids) in {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    }.items():
        if found[which]:
            inputs[grids] = torch.from_numpy(np.stack([grid for grid, _ in found[which]]))
            inputs[pixels] = torch.from_numpy(np.concatenate([values for _, values in found[which]]))
    if found["video"] and kind == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = [2 / FPS] * len(found["video"])  # type: ignore[assignment]
    return inputs
