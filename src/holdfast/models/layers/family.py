"""The particulars of an architecture as data: scale and cap of logits, image tokens, whether packing is exact.

The defaults serve any causal language model of transformers that has a backbone and an output layer. Exceptions are
read from the model's own configuration where it states them. The check before step 1 (`models/check/forward.py`)
compares our forward pass with transformers', so that an unknown exception stops the run instead of training on wrong
numbers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from torch import Tensor, nn

from holdfast.data.tokens.processor import attends_both_ways, may_see
from holdfast.data.tokens.videos import video_token
from holdfast.data.tokens.vision import image_marks
from holdfast.errors import ModelError
from holdfast.models.layers.rotary import angle_changes
from holdfast.models.support import Support


@dataclass(frozen=True)
class HeadSpec:
    """How logits follow from hidden states: `softcap * tanh(scale * (W h + b) / softcap) / temperature`."""

    scale: float = 1.0
    softcap: float | None = None
    """Gemma 2 (arXiv:2408.00118, section 2)."""
    float32_product: bool = False
    """Multiply in float32 even when hidden states are bfloat16."""
    chunk_tokens: int | None = None
    kernel_tokens: int | None = None
    """Tokens whose logits Triton kernels sweep at once; None where torch's operations do."""
    support: Support | None = None
    """Renormalise log-probabilities over these tokens and the drawn one; None: over the whole vocabulary."""


TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names of the argument that tells image tokens from text."""


@dataclass(frozen=True)
class Family:
    """The particulars of one architecture."""

    name: str
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    why_not_packed: str = ""
    """Why packed rows would not be exact, such as recurrent layers or angles by length; "" if they are."""
    recurrent: bool = False
    """Whether layers carry a state from token to token, as state-space and convolutional ones do."""
    image_token_id: int | None = None
    """The token whose embeddings are replaced by image features; None if images of the family are not supported."""
    video_token_id: int | None = None
    """The token whose embeddings are replaced by video features."""
    image_marks: tuple[int, ...] = ()
    """All tokens whose embeddings are replaced where there are images; a policy that samples one ends its text."""
    token_types: str | None = None
    """The model's argument that tells image tokens from text; None if it has none."""
    image_tokens: tuple[str, int] | None = None
    """The backbone's argument that marks image tokens, and their id, where attention depends on it."""

    def head_spec(self, *, float32_product: bool, chunk_tokens: int | None) -> HeadSpec:
        """Return how this architecture's logits follow from hidden states."""
        return HeadSpec(self.logit_scale, self.logit_softcap, float32_product, chunk_tokens)

    def with_one_image_token(self, tokens: Tensor) -> Tensor:
        """Return tokens with the image token in the place of the video token: the tower runs once over both."""
        if self.image_token_id is None or self.video_token_id is None:
            return tokens
        return tokens.masked_fill(tokens == self.video_token_id, self.image_token_id)


_PACKED_KINDS = {"full_attention", "sliding_attention", "attention"}
"""Layer types (transformers' `config.layer_types`) whose attention is computed per document."""

_RECURRENT_KINDS = ("mamba", "recurrent", "rwkv", "linear_attention", "conv", "lstm")
_RECURRENT_CLASSES = ("Mamba", "Rwkv", "RWKV", "Recurrent", "SSM", "DeltaNet", "LSTM", "ShortConv", "LinearAttention")


_SCALES: dict[str, Callable[[float], float]] = {
    "lm_head_multiplier": float,  # Falcon-H1
    "logits_scaling": lambda divisor: 1.0 / divisor,  # Granite divides logits, and MiniCPM3 hidden states
    "logit_scale": float,  # Cohere
}
"""Fields that name a factor of logits, and the factor of what they name."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Fields that name a soft cap of logits: Gemma's and RecurrentGemma's."""


def _number_read(model: nn.Module, text: Any, name: str) -> float:
    """Return a number of a configuration, 0 where there is none or the model's code does not read it.

    MPT's configuration has a `logit_scale`, which transformers' model leaves out, and Aya Vision's text always has one,
    for a class that Aya Vision does not use. A cap is there only if somebody set it: it counts where any class of the
    same file reads it, so that the check before step 1 refuses one that the model's own class leaves out.
    """
    value = getattr(text, name, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return 0.0
    kinds = {type(submodule) for submodule in model.modules() if hasattr(submodule, "base_model_prefix")}
    classes = {base_class for kind in kinds for base_class in kind.__mro__ if "forward" in vars(base_class)}
    code = [sys.modules[base_class.__module__] if name in _CAPS else base_class for base_class in classes]
    return float(value) if any(name in _source_of(reader, otherwise=name) for reader in code) else 0.0


def _source_of(code: type | ModuleType, *, otherwise: str) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):  # of a class that was made in a session
        return otherwise


def family_of(model: nn.Module) -> Family:
    """Read the particulars of a transformers model from its configuration and layers."""
    config: Any = model.config
    text: Any = config.get_text_config()
    numbers = {name: _number_read(model, text, name) for name in (*_SCALES, *_CAPS)}
    scale = next((invert(numbers[name]) for name, invert in _SCALES.items() if numbers[name]), 1.0)
    softcap = next((numbers[name] for name in _CAPS if numbers[name]), None)
    return Family(
        name=str(config.model_type),
        logit_scale=scale,
        logit_softcap=softcap,
        why_not_packed=_why_not_packed(model, text),
        recurrent=bool(_recurrent_layers(model, text)),
        **_image_fields(model),
    )


def _image_fields(model: nn.Module) -> dict[str, Any]:
    """Return what a family that sees has besides."""
    config: Any = model.config
    # Janus' and DeepSeek-VL's are not methods of the outer class.
    if not may_see(config) or not any(hasattr(module, "get_image_features") for module in model.modules()):
        return {}
    image, video = int(config.image_token_id), video_token(config)
    arguments = inspect.signature(type(model).forward).parameters
    argument = next((name for name in TOKEN_TYPES if name in arguments), None)
    return {
        "image_token_id": image,
        "video_token_id": None if video is None else int(video),
        "image_marks": tuple(image_marks(config)),
        "token_types": argument,
        "image_tokens": (argument, image) if argument is not None and attends_both_ways(config) else None,
    }


def _why_not_packed(model: Any, text: Any) -> str:
    if not model._can_set_attn_implementation():  # noqa: SLF001 - transformers' own test before it sets one
        return "its attention does not go through transformers' interface"
    if recurrent := _recurrent_layers(model, text):
        return f"its {recurrent[0]} layers carry state across documents"
    if angle_changes(text):
        return "its rotary angles depend on the length of a text"
    kinds = _kinds(text)
    return f"its {kinds[0]} layers see tokens by a rule of their own" if kinds else ""


def _kinds(text: Any) -> list[str]:
    """Return the types of layers that are none of attention within documents."""
    return sorted({str(kind) for kind in getattr(text, "layer_types", None) or []} - _PACKED_KINDS)


def _recurrent_layers(model: Any, text: Any) -> list[str]:
    """Return the types, or else the class names, of layers that mix tokens otherwise than by attention."""
    if named := [kind for kind in _kinds(text) if any(mark in kind for mark in _RECURRENT_KINDS)]:
        return named
    classes = {
        type(module).__name__
        for module in model.get_decoder().modules()
        if any(mark in type(module).__name__ for mark in _RECURRENT_CLASSES) or isinstance(module, nn.Conv1d)
    }
    return sorted(classes)


def backbone_of(model: nn.Module) -> nn.Module:
    """Return the part of a language model that ends in hidden states.

    It is what the model announces as its base model. Some announce a name that they do not use (Llama 4 does, twice):
    then it is the child that has the input embeddings, or the backbone of that child if it has an output layer too.

    Raises:
        ModelError: The model has none.
    """
    prefix = getattr(model, "base_model_prefix", "")
    backbone = getattr(model, prefix, None) if prefix else None
    if isinstance(backbone, nn.Module):
        return backbone
    inner = _reader_in(model)
    if inner is None:
        raise ModelError(
            f"{type(model).__name__} has no backbone under {prefix!r}; only models made of a backbone and an output "
            "layer can be trained."
        )
    return inner if _output_layer(inner) is None else backbone_of(inner)


def reader_of(model: nn.Module) -> nn.Module:
    """Return the part of a model that makes logits of text alone: the model, or the language model inside one.

    BLIP-2 runs only with an image; the language model in it is a whole one, which reads its text.
    """
    pixels = inspect.signature(model.forward).parameters.get("pixel_values")
    if pixels is None or pixels.default is not inspect.Parameter.empty:
        return model
    inner = _reader_in(model)
    return model if inner is None or _output_layer(inner) is None else inner


def _reader_in(model: Any) -> nn.Module | None:
    """Return the child that has the input embeddings, if it is a model."""
    embeddings = model.get_input_embeddings()
    for child in model.children():
        if hasattr(child, "get_input_embeddings") and any(descendant is embeddings for descendant in child.modules()):
            return cast(nn.Module, child)
    return None


def _output_layer(model: Any) -> nn.Module | None:
    layer: nn.Module | None = model.get_output_embeddings()
    return layer


def output_layer_of(model: nn.Module) -> nn.Module:
    """Return the layer that turns hidden states into logits.

    Raises:
        ModelError: The model has no such layer, or it is not a matrix product.
    """
    layer: Any = model.get_output_embeddings()  # type: ignore[operator]  # transformers' method
    if not isinstance(layer, nn.Module) or not hasattr(layer, "weight"):
        raise ModelError(f"{type(model).__name__} has no output layer with a weight matrix.")
    return layer


def blocks_of(model: nn.Module) -> list[str]:
    """Return the paths of the transformer blocks: list members of the classes the model says must not be split."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    blocks = [
        f"{path}.{index}"
        for path, members in lists
        for index, member in enumerate(members)
        if type(member).__name__ in classes
    ]
    if blocks or not lists:
        return blocks
    path, members = max(lists, key=lambda item: sum(value.numel() for value in item[1].parameters()))
    return [f"{path}.{index}" for index in range(len(members))]


_TABLES = ("wpe.weight", "embed_positions.weight", "embed_positions", "pos_encoding")
"""Ends of the names of tensors with a row per position: GPT-2's, OPT's, GPT-J's, CTRL's."""
_OFFSET = 2
"""OPT and its kin keep so many rows in front of the first position."""


@dataclass(frozen=True)
class Positions:
    """The number of positions that a model's configuration names, and whether it is a hard limit."""

    count: int
    in_a_table: bool
    """Whether positions are rows of a table, so that longer texts fail; rotary angles continue beyond `count`."""


def positions_of(model: Any) -> Positions | None:
    """Return the positions that a model's configuration names; None where it names none."""
    count = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if count is None:
        return None
    tensors = (*model.named_parameters(), *model.named_buffers())
    rows = [tensor.shape[0] for name, tensor in tensors if name.endswith(_TABLES)]
    return Positions(count, any(count <= number <= count + _OFFSET for number in rows))
