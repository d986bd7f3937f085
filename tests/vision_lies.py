"""Processors that lie: their output is changed on its way out, as a broken version or another model's files would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from holdfast.parallel.mesh import World
from tests.training.cases import run

IMAGE_ID = 61
"""Of `tests.vision.picture_tokenizer`."""

Change = Callable[[dict[str, Any], int], None]
"""(output, number of images) -> None; it changes the output."""


class Lying:
    """A processor whose output is changed while it is `awake`."""

    def __init__(self, processor: Any, change: Change, *, awake: bool = True) -> None:
        self._processor, self._change, self.awake = processor, change, awake

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, images: Any, **arguments: Any) -> Any:
        made = dict(self._processor(images=images, **arguments))
        if self.awake:
            self._change(made, len(images))
        return made


def drop_patches(made: dict[str, Any], _: int) -> None:
    made["pixel_values"] = made["pixel_values"][:-8]


def drop_patches_of_two(made: dict[str, Any], images: int) -> None:
    if images > 1:
        made["pixel_values"] = made["pixel_values"][:-8]


def shift_tokens(made: dict[str, Any], _: int) -> None:
    made["input_ids"] = np.roll(made["input_ids"], 1, axis=1)


def swap_images(made: dict[str, Any], images: int) -> None:
    if images > 1:
        count = int(made["image_grid_thw"][0].prod())
        made["pixel_values"] = np.roll(made["pixel_values"], count, axis=0)


def repeat_the_first(made: dict[str, Any], images: int) -> None:
    if images > 1:
        count = int(made["image_grid_thw"][0].prod())
        made["pixel_values"][count : 2 * count] = made["pixel_values"][:count]


def forget_types(made: dict[str, Any], _: int) -> None:
    made["mm_token_type_ids"] = np.zeros_like(made["mm_token_type_ids"])


def one_token_less(made: dict[str, Any], _: int) -> None:
    tokens = made["input_ids"][0].tolist()
    tokens.remove(IMAGE_ID)
    made["input_ids"] = np.asarray([tokens])
    made["mm_token_type_ids"] = (made["input_ids"] == IMAGE_ID).astype(np.int64)


def open_with_a_token(made: dict[str, Any], images: int) -> None:
    if images > 1:
        made["input_ids"] = np.concatenate([[[1]], made["input_ids"]], axis=1)
        made["mm_token_type_ids"] = np.concatenate([[[0]], made["mm_token_type_ids"]], axis=1)


def other_grids(made: dict[str, Any], images: int) -> None:
    if images > 1:
        made["image_grid_thw"] = made["image_grid_thw"][::-1]


def forget_grids(made: dict[str, Any], images: int) -> None:
    if images > 1:
        made.pop("image_grid_thw")


def darker_together(made: dict[str, Any], images: int) -> None:
    made["pixel_values"] = made["pixel_values"] * (0.99 if images > 1 else 1.0)


LIES: dict[str, Change] = {
    change.__name__: change
    for change in (
        *(drop_patches, drop_patches_of_two, shift_tokens, swap_images, repeat_the_first, forget_types),
        *(one_token_less, open_with_a_token, other_grids, forget_grids, darker_together),
    )
}
"""Of processors that return `image_grid_thw` and `mm_token_type_ids`."""


def forget_position_ids(made: dict[str, Any], images: int) -> None:
    if images > 1:
        made["image_position_ids"] = np.zeros_like(made["image_position_ids"])


def forget_pixel_mask(made: dict[str, Any], images: int) -> None:
    if images > 1:
        made["pixel_attention_mask"] = np.ones_like(made["pixel_attention_mask"])
        made["pixel_attention_mask"][..., -2:] = 0


def double_image_sizes(made: dict[str, Any], images: int) -> None:
    made["image_sizes"] = made["image_sizes"] * images


def forget_a_tile(made: dict[str, Any], images: int) -> None:
    if images > 1:
        made["pixel_values"] = made["pixel_values"][:-1]


LIES_OF_OTHERS: dict[str, Change] = {
    "gemma4": forget_position_ids,
    "idefics3": forget_pixel_mask,
    "llava_next": double_image_sizes,
    "internvl": forget_a_tile,
}
"""By model_type."""


@contextmanager
def told_by(processor_class: Any, change: Change) -> Iterator[None]:
    """Change what a class of transformers returns within the block."""
    original = processor_class.__call__

    def lying(self: Any, images: Any = None, **arguments: Any) -> Any:
        made = original(self, images=images, **arguments)
        if images is not None:
            change(made, len(images))
        return made

    processor_class.__call__ = lying
    try:
        yield
    finally:
        processor_class.__call__ = original


def run_with_lies(world: World, lie: str, tree: dict[str, Any], base: str) -> None:
    """Run a case whose processor lies, in a process of a pool."""
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    with told_by(Qwen2_5_VLProcessor, LIES[lie]):
        run(world, tree, base)
