"""Ask a model's processor how it writes, counts and returns images, and compare its whole output with ours.

The questions are made-up images of several sizes, alone and two at a time, with text around them. Each rule that the
answers allow is derived once; then whole texts are compared, tokens and tensors, so that a processor that follows no
such rule, or answers differently from one call to the next, is refused before a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.content.vision_families import Features, VisionFamily, patch_features, rules_of
from holdfast.errors import ModelError

_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments that tell image tokens from text."""
_OF_TEXT = {*_TYPES, "input_ids", "attention_mask", "labels", "special_tokens_mask"}
"""What a processor returns of the text."""
_SIZES = ((48, 80), (80, 48), (64, 64), (36, 130), (600, 500), (48, 80))
"""(height, width) of the images that are asked for."""
_MARKS = (("vision_start_token_id", "vision_end_token_id"), ("image_start_token_id", "image_end_token_id"))
"""Fields of a configuration for the tokens around an image that are part of no processor's text, but of templates."""
FAILURES = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError),
    *(StopIteration, NotImplementedError, RuntimeError),
)
"""What processors raise where they cannot take something."""


class NoImageRules(ModelError):
    """Why images of a model cannot be trained on; its text can."""


@dataclass(frozen=True)
class Answer:
    """What a processor returns of one text with its images."""

    tokens: list[int]
    inputs: dict[str, NDArray[Any]]
    """As it returns them."""
    types: Mapping[str, list[int]]


@dataclass(frozen=True)
class ModelProcessor:
    """A processor, the tokenizer and the configuration of one model, and options of the image processor."""

    upstream: Any
    """transformers' processor."""
    tokenizer: Any
    config: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The model_type."""
        return str(self.config.model_type)

    @property
    def image_id(self) -> int:
        """The token at which the model puts features."""
        return int(self.config.image_token_id)

    def ask(self, images: Sequence[Any], text: str) -> Answer:
        """Return what the processor makes of a text and its PIL images."""
        made = self.upstream(
            images=list(images), text=[text], return_tensors="np", add_special_tokens=False, **self.options
        )
        names = [name for name in self.upstream.model_input_names if name in made and name not in _OF_TEXT]
        kinds = {name: np.asarray(made[name])[0].tolist() for name in _TYPES if name in made}
        of_text = self.tokenizer.model_input_names  # many tokenizers return token_type_ids, which are all 0
        types = {name: values for name, values in kinds.items() if name not in of_text or any(values)}
        inputs = {name: np.asarray(made[name]) for name in names}
        return Answer(np.asarray(made["input_ids"])[0].tolist(), inputs, types)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of text alone."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@dataclass(frozen=True)
class Expected:
    """What a processor should return of one text."""

    tokens: list[int]
    inputs: Mapping[str, NDArray[Any]]


def made_up_images() -> list[Any]:
    """Return images of noise, in which no two patches are alike."""
    from PIL import Image

    generator = np.random.default_rng(0)
    noise = (generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in _SIZES)
    return [Image.fromarray(pixels) for pixels in noise]


def derived(processor: ModelProcessor) -> VisionFamily:
    """Return the family that a processor's answers describe.

    Raises:
        NoImageRules: It does not answer, or its answers do not belong together.
        ModelError: The tokenizer is another model's.
    """
    mark = getattr(processor.upstream, "image_token", None)
    if mark is None:
        raise NoImageRules(f"the processor of {processor.name} names no token for an image")
    images, token = made_up_images(), processor.tokenizer.convert_ids_to_tokens(processor.image_id)
    answers = _answers(processor, mark, images)
    if token is None or not answers:
        raise ModelError(
            f"{processor.name} marks images by token {processor.image_id}, and its tokenizer has {mark!r} at "
            f"{processor.tokenizer.convert_tokens_to_ids(mark)}. Use the model's own tokenizer."
        )
    _refuse_tokens_of_its_own(processor, answers)
    before, after = _around(processor, mark, [answer.tokens for answer in answers])
    axes, ragged = _joins(processor, mark, images, answers)
    token_types, type_tokens = _types(processor, answers)
    rules, features = rules_of(processor.config), _feature_rule(processor.config, answers)
    return VisionFamily(
        placeholder=_placeholder(processor, token, answers[0].tokens, before, after),
        image_token=token,
        processor_token=mark,
        before=before,
        after=after,
        inputs=tuple(answers[0].inputs),
        axes=axes,
        ragged=ragged,
        token_types=token_types,
        type_tokens=type_tokens,
        turns_by_grid=_turns_by_grid(processor.config),
        takes_pixel_budget={"shortest_edge", "longest_edge"} <= _bounds_of(processor.upstream.image_processor),
        features=rules.features or features,
        video=rules.video,
    )


def _answers(processor: ModelProcessor, mark: str, images: Sequence[Any]) -> list[Answer]:
    """Return what the processor makes of each image; nothing if the tokenizer lacks its mark or the model's token.

    Raises:
        NoImageRules: It takes no image.
    """
    try:
        answers = [_asked(processor, image, mark) for image in images]
    except NoImageRules:
        if mark in processor.tokenizer.get_vocab():
            raise
        return []
    return answers if all(processor.image_id in answer.tokens for answer in answers) else []


def _feature_rule(config: Any, answers: Sequence[Answer]) -> Features | None:
    """Return how the features of an image are counted, if the processor returns a grid of patches.

    Raises:
        NoImageRules: It returns none, and positions need one.
    """
    merges = getattr(config.vision_config, "spatial_merge_size", None) is not None
    has_grid = merges and "image_grid_thw" in answers[0].inputs
    if _turns_by_grid(config) and not has_grid:
        raise NoImageRules(f"positions of {config.model_type} have several axes, and its processor returns no grid")
    rows_are_patches = has_grid and all(
        len(answer.inputs.get("pixel_values", ())) == answer.inputs["image_grid_thw"].prod() for answer in answers
    )
    return patch_features if rows_are_patches else None


def _asked(processor: ModelProcessor, image: Any, text: str) -> Answer:
    try:
        return processor.ask([image], text)
    except FAILURES as error:
        raise NoImageRules(f"the processor of {processor.name} takes no image of noise: {error!r:.300}") from None


def _refuse_tokens_of_its_own(processor: ModelProcessor, answers: Sequence[Answer]) -> None:
    """Refuse tokens that a processor adds to a tokenizer that lacks them; the model has no embeddings for them.

    Raises:
        NoImageRules: There are some.
    """
    vocabulary = set(processor.tokenizer.get_vocab().values())
    added = sorted({token for answer in answers for token in answer.tokens} - vocabulary)
    if added:
        names = ", ".join(map(str, processor.upstream.tokenizer.convert_ids_to_tokens(added)))
        raise NoImageRules(f"the processor of {processor.name} writes {names}, which the model's tokenizer lacks")


def _bounds_of(image_processor: Any) -> set[str]:
    return {name for name, value in dict(getattr(image_processor, "size", None) or {}).items() if value is not None}


def _turns_by_grid(config: Any) -> bool:
    text = config.get_text_config()
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return "mrope_section" in rotary


def _around(
    processor: ModelProcessor, mark: str, texts: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before and after the image's own that a template has to write.

    Where the processor reads the model's token, its whole text for an image stands between special tokens, and takes
    the place of that token. Where it reads another, a template is rewritten, and may write what is always around.
    """
    runs = [_run(tokens, processor.image_id) for tokens in texts]
    if processor.tokenizer.convert_tokens_to_ids(mark) != processor.image_id and None not in runs:
        edges = {
            (tuple(tokens[: run.start]), tuple(tokens[run.stop :]))
            for tokens, run in zip(texts, runs, strict=True)
            if run is not None
        }
        if len(edges) == 1:
            return edges.pop()
    special = set(processor.tokenizer.get_added_vocab().values())
    first, last = ({tuple(_outside(list(tokens)[::step], special))[::step] for tokens in texts} for step in (1, -1))
    if (
        len(first) > 1
        or len(last) > 1
        or (mark == processor.tokenizer.convert_ids_to_tokens(processor.image_id) and (first | last) != {()})
    ):
        raise NoImageRules(
            f"the processor of {processor.name} writes text around an image that depends on the image, or that no "
            "template can write"
        )
    return first.pop(), last.pop()


def _run(tokens: Sequence[int], token: int) -> range | None:
    """Return where a token stands, if all its copies stand side by side."""
    indices = [index for index, other in enumerate(tokens) if other == token]
    return range(indices[0], indices[-1] + 1) if indices[-1] - indices[0] + 1 == len(indices) else None


def _outside(tokens: Sequence[int], special: set[int]) -> list[int]:
    first = next((index for index, token in enumerate(tokens) if token in special), 0)
    return list(tokens[:first])


def _placeholder(
    processor: ModelProcessor, token: str, tokens: Sequence[int], before: tuple[int, ...], after: tuple[int, ...]
) -> str:
    if before or after:
        first, last = (processor.tokenizer.decode(list(ids), skip_special_tokens=False) for ids in (before, after))
        return f"{first}{token}{last}"
    for names in _MARKS:
        ids = [getattr(processor.config, name, None) for name in names]
        marks = [None if mark is None else processor.tokenizer.convert_ids_to_tokens(mark) for mark in ids]
        if None not in marks and not set(ids) & set(tokens):
            return f"{marks[0]}{token}{marks[1]}"
    return token


def _joins(
    processor: ModelProcessor, mark: str, images: Sequence[Any], answers: Sequence[Answer]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return along which dimension the processor joins each input, and which inputs it fills up."""
    axes = dict.fromkeys(answers[0].inputs, 0)
    ragged: set[str] = set()
    for (first, second), (one, other) in zip(pairwise(images), pairwise(answers), strict=True):
        try:
            joint = processor.ask([first, second], f"{mark}{mark}").inputs
        except FAILURES as error:
            if any(one.inputs[name].shape[1:] != other.inputs[name].shape[1:] for name in axes):
                continue  # it takes images of one size
            raise NoImageRules(f"the processor of {processor.name} takes no two images: {error!r:.300}") from None
        for name, values in joint.items():
            if name not in axes:
                continue  # the comparison of whole outputs names it
            pair = (one.inputs[name], other.inputs[name])
            axes[name] = next((axis for axis in (0, 1) if _joined_length(pair, axis) == _length(values, axis)), 0)
            moved = [np.moveaxis(value, axes[name], 0) for value in pair]
            if moved[0].shape[1:] != moved[1].shape[1:]:
                ragged.add(name)
    return axes, tuple(name for name in axes if name in ragged)


def _length(values: NDArray[Any], axis: int) -> int:
    return values.shape[axis] if values.ndim > axis else -1


def _joined_length(pair: Sequence[NDArray[Any]], axis: int) -> int:
    return sum(_length(values, axis) for values in pair)


def _types(processor: ModelProcessor, answers: Sequence[Answer]) -> tuple[str | None, tuple[int, ...]]:
    """Return the argument for token types, and the tokens that it marks.

    Raises:
        NoImageRules: It does not mark the tokens at which features go.
    """
    names = list(answers[0].types)
    if not names:
        return None, ()
    pairs = {pair for answer in answers for pair in zip(answer.tokens, answer.types[names[0]], strict=False)}
    marked = {token for token, kind in pairs if kind == 1}
    if processor.image_id not in marked or marked & {token for token, kind in pairs if kind != 1}:
        raise NoImageRules(
            f"the processor of {processor.name} returns {names[0]} that do not mark the image token "
            f"{processor.image_id} wherever it stands; it is not the model's own"
        )
    return names[0], tuple(sorted(marked))


def first_difference(family: VisionFamily, expected: Expected, answer: Answer) -> str:
    """Return how a processor's whole output differs from ours; "" where it does not.

    Args:
        family: What was derived.
        expected: Ours, with the inputs of all images as the processor returns them.
        answer: The processor's.
    """
    if answer.tokens != expected.tokens:
        pairs = enumerate(zip(answer.tokens, expected.tokens, strict=False))
        at = next((index for index, (theirs, ours) in pairs if theirs != ours), "the end")
        return f"its {len(answer.tokens)} tokens are not the {len(expected.tokens)} that follow, from token {at} on"
    if family.token_types is not None:
        marked = np.isin(answer.tokens, family.type_tokens).astype(np.int64).tolist()
        if answer.types.get(family.token_types) != marked:
            return f"its {family.token_types} do not mark the image tokens"
    if set(answer.inputs) != set(family.inputs):
        return f"it returns {', '.join(sorted(answer.inputs))} for these images, and {', '.join(family.inputs)} alone"
    for name, values in expected.inputs.items():
        theirs = answer.inputs[name]
        if theirs.shape != values.shape:
            return f"its {name} have the shape {list(theirs.shape)}, where {list(values.shape)} follows"
        if not np.array_equal(theirs, values):
            return f"its {name} are not those of the images one by one, in their order"
    return ""


def contradiction(name: str, subject: str, difference: str) -> str:
    """Return the sentences about a processor whose whole output for a subject differs from ours."""
    return (
        f"the processor of {name} contradicts itself for {subject}: {difference}. Its output for a whole text has to "
        "be its output for the images one by one, in the place of their tokens. The processor's files are not this "
        "model's, or transformers changed it"
    )


def refuse_other_patches(family: VisionFamily, name: str, processor: Any, config: Any) -> None:
    """Compare what the image processor cuts with what the tower takes.

    Raises:
        ModelError: They differ.
    """
    if not family.turns_by_grid:
        return
    vision = config.vision_config
    pairs = {
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "merge_size": "spatial_merge_size",
    }
    for setting, field_name in pairs.items():
        ours, theirs = getattr(processor, setting, None), getattr(vision, field_name, None)
        if None not in (ours, theirs) and ours != theirs:
            raise ModelError(
                f"The image processor of {name} has {setting}={ours}, the model's vision tower {theirs}. The model's "
                "preprocessor_config.json and config.json do not belong together."
            )


def pixel_bounds(family: VisionFamily, name: str, processor: Any, low: int | None, high: int | None) -> dict[str, int]:
    """Return the image processor's `size` within the bounds of `data`.

    Raises:
        ModelError: The family takes none, or they cross.
    """
    if not family.takes_pixel_budget:
        raise ModelError(
            f"data.min_pixels and data.max_pixels do not apply to {name}: its images are all brought to one size. "
            "Remove them."
        )
    size = dict(processor.size)
    bounds = {
        "shortest_edge": size["shortest_edge"] if low is None else low,
        "longest_edge": size["longest_edge"] if high is None else high,
    }
    if bounds["shortest_edge"] > bounds["longest_edge"]:
        raise ModelError(
            f"data.min_pixels={bounds['shortest_edge']} is above data.max_pixels={bounds['longest_edge']} (one of them "
            "may be the image processor's own). Set both."
        )
    return bounds
