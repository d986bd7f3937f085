"""Count the features that a vision tower makes of images of noise, and compare them with the image tokens.

A processor writes tokens by a rule of its own, and the tower is built from another file. transformers finds a
difference in the forward pass of a batch; here it is found before step 1, for images of several sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.data.batches.packing import Share, pack, to_device
from holdfast.data.content.model_inputs import tensor_arguments
from holdfast.data.tokens.vision import PROBES, ImageSide
from holdfast.errors import ModelError
from holdfast.models.check.agreement import Agreement
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.family import backbone_of


@dataclass
class _Count:
    """What the tower returned."""

    features: list[int] = field(default_factory=list)
    """One number for each image where the tower returns them apart, else one for all of them."""


@torch.no_grad()
def check_tower(
    policy: PolicyModel,
    images: ImageSide,
    device: torch.device,
    agreement: Agreement = Agreement(),  # noqa: B008 - frozen
) -> tuple[int, ...]:
    """Run the tower on images of several sizes, and return the number of features of each.

    All ranks call this together; what fails on one of them alone says nothing of the model, and is raised as it is.

    Returns:
        () where the model does not show what its tower returns; then its own forward pass compares the numbers.

    Raises:
        ModelError: There are more or fewer features than tokens, or the tower does not take what the processor makes.
    """
    examples = [images.probe(np.asarray([images.image_id]), number) for number in range(len(PROBES))]
    tokens = [int((example.tokens == images.image_id).sum()) for example in examples]
    batch = to_device(pack(examples, [Share(1.0, 1.0)] * len(examples), padded=policy.padded), device)
    count = _Count()
    sizes = ", ".join(f"{width}x{height}" for height, width in PROBES)
    try:
        with _counted(policy, count):
            policy.predicting_states(batch)
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        raise  # they say nothing of the model
    except (RuntimeError, ValueError, IndexError) as error:
        if not agreement.all_raise():
            raise
        if not count.features or sum(count.features) == sum(tokens):
            raise ModelError(
                f"The vision tower of {images.name} does not take what the processor makes of images of {sizes} "
                f"pixels: {error}. The model's preprocessor_config.json and config.json do not belong together."
            ) from error
    if count.features and sum(count.features) != sum(tokens):
        raise ModelError(
            f"The processor of {images.name} writes {_words(tokens)} tokens for images of {sizes} pixels, and the "
            f"vision tower makes {_words(count.features)} features of them. The model's preprocessor_config.json and "
            "config.json do not belong together."
        )
    return tuple(tokens) if count.features else ()


@torch.no_grad()
def count_features(policy: PolicyModel, images: ImageSide) -> tuple[list[int], list[int]]:
    """Return the tokens and the features of images of several sizes, by a tower whose parameters are whole.

    Args:
        policy: A small model like the one of the images; its tokens may be others.
        images: Of the model itself.
    """
    backbone: Any = backbone_of(policy.language_model)
    tokens, features = [], []
    for number in range(len(PROBES)):
        example, count = images.probe(np.asarray([images.image_id]), number), _Count()
        tensors = {name: torch.as_tensor(values) for name, values in example.model_inputs.items()}
        with _counted(policy, count):
            backbone.get_image_features(**tensor_arguments(tensors))
        tokens.append(int((example.tokens == images.image_id).sum()))
        features.append(sum(count.features))
    return tokens, features


def _words(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)


@contextmanager
def _counted(policy: PolicyModel, count: _Count) -> Iterator[None]:
    """Note what a backbone's `get_image_features` returns within the block."""
    backbone: Any = backbone_of(policy.language_model)
    original = backbone.get_image_features

    def counting(*args: Any, **kwargs: Any) -> Any:
        returned = original(*args, **kwargs)
        features = returned.get("pooler_output") if isinstance(returned, Mapping) else returned
        members = features if isinstance(features, list | tuple) else [features]
        count.features += [member.shape[:-1].numel() for member in members if isinstance(member, Tensor)]
        return returned

    backbone.get_image_features = counting
    try:
        yield
    finally:
        del backbone.get_image_features
