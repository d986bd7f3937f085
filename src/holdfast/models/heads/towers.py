"""Which features of images a forward pass puts into a row, where that is not all of what its tower makes.

Ranks call a tower equally often, or FSDP2 waits for ever: those without an image run it on one that stands in, and
those that share a row run it on all images of the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from holdfast.data.content.model_inputs import tensor_arguments
from holdfast.types import Batch

_FEATURES = ("pooler_output", "deepstack_features")
"""What of a tower's output transformers' models put into hidden states."""


@contextmanager
def idle_tower(backbone: Any, batch: Batch) -> Iterator[None]:
    """Run the tower on inputs that belong to no sequence, and add its features times zero to tokens' embeddings.

    The tower then runs backwards too, as on ranks with images. The model reads tokens, of which Gemma 4 wants more.
    """
    features = backbone.get_image_features(**tensor_arguments(batch.model_inputs))
    # What a forward pass uses and no more: a block whose output LLaVA leaves out must stay left out here too.
    used = [features[name] for name in _FEATURES if name in features] if isinstance(features, Mapping) else features
    zero = torch.as_tensor(sum(leaf.sum() * 0.0 for leaf in tree_leaves(used) if isinstance(leaf, Tensor)))
    embeddings = backbone.get_input_embeddings()
    with embeddings.register_forward_hook(lambda _, __, embedded: embedded + zero.to(embedded.dtype)):
        yield


@contextmanager
def features_of_span(backbone: Any, is_image: Tensor, span: tuple[int, int]) -> Iterator[None]:
    """Let a model see the features that belong to a span of its row alone.

    The gradients of the tower are then those of this rank's features, and FSDP2 adds up those of the group.

    Args:
        backbone: Calls its own `get_image_features`.
        is_image: [1, T] whether a position of the whole row has a feature.
        span: First position, and the one behind the last.
    """
    start, end = span
    first, count = torch.stack([is_image[:, :start].sum(), is_image[:, start:end].sum()]).tolist()
    features_of = backbone.get_image_features
    # The instance's attribute hides the method of its class.
    backbone.get_image_features = lambda *args, **kwargs: _between(features_of(*args, **kwargs), first, first + count)
    try:
        yield
    finally:
        del backbone.get_image_features


def _between(output: Any, start: int, end: int) -> Any:
    """Return a tower's output, with the features `start` to `end` alone.

    Args:
        output: Features [N, H], [images, n, H] or one tensor an image; or an output that has these as `pooler_output`,
            and as `deepstack_features` of each of several layers.
        start: Among the features of all images.
        end: Of the same.
    """
    if isinstance(output, Tensor):
        part = output.flatten(0, -2)[start:end]
        return part if output.ndim == 2 else part[None]
    if isinstance(output, list | tuple):
        return [torch.cat(list(output))[start:end]]
    output.pooler_output = _between(output.pooler_output, start, end)
    if layers := output.get("deepstack_features"):
        output.deepstack_features = [_between(layer, start, end) for layer in layers]
    return output
