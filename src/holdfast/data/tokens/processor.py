"""Ask a model's processor how it writes, counts and returns images.

The questions are made-up images of several sizes, alone and two at a time. Each rule that the answers allow is derived
once, as an `ImageFamily`. `ImageSide` (vision.py) then compares whole texts, tokens and tensors, so that a processor
that follows no such rule, or answers differently from one call to the next, is refused before a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ModelError

_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments that tell image tokens from text."""
_OF_TEXT = {*_TYPES, "input_ids", "attention_mask", "labels", "special_tokens_mask"}
"""What a processor returns of the text."""
GRID = "image_grid_thw"
"""The input that has the frames, rows and columns of an image's patches."""
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


def may_see(config: Any) -> bool:
    """Whether a configuration has a vision tower and a token for its features."""
    return getattr(config, "vision_config", None) is not None and getattr(config, "image_token_id", None) is not None


def attends_both_ways(config: Any) -> bool:
    """Whether image tokens see later ones of their image, which packed attention does not have.

    Gemma 4 says so in its configuration; Gemma 3 says it nowhere.
    """
    declared = getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"
    return declared or str(config.model_type) == "gemma3"


@dataclass(frozen=True)
class ImageFamily:
    """How one model writes and counts images."""

    placeholder: str
    """Stands for one image in plain text; it holds `image_token` once."""
    image_token: str
    """The token at which the model puts features. In text without features it marks an image."""
    processor_token: str
    """What the processor reads as the mark of an image, and what the family's chat template writes."""
    before: tuple[int, ...]
    """Tokens of the processor's text for an image that `placeholder` has before `image_token`."""
    after: tuple[int, ...]
    """Tokens of the processor's text for an image that `placeholder` has after `image_token`."""
    inputs: tuple[str, ...]
    """Arguments of the model that the processor makes of images."""
    axes: Mapping[str, int]
    """The dimension along which the processor joins images, by input."""
    ragged: tuple[str, ...]
    """Inputs whose images differ in further dimensions; the processor fills the smaller ones up with zeros."""
    token_types: str | None
    """The model's argument that tells image tokens from text."""
    type_tokens: tuple[int, ...]
    """Tokens that `token_types` marks by 1."""
    turns_by_grid: bool
    """Whether positions of image tokens have three axes: time, row and column (M-RoPE, arXiv:2409.12191)."""
    takes_pixel_budget: bool
    """Whether the size an image is brought to depends on its own, between two bounds."""
    counts_by_grid: bool
    """Whether the processor returns a grid whose patches are the rows of `pixel_values`, which counts the features."""

    @property
    def record(self) -> dict[str, Any]:
        """What the identity of a run has of it, as JSON."""
        return {name: value for name, value in asdict(self).items() if name != "counts_by_grid"}

    def for_processor(self, text: str) -> str:
        """Return a text with the marks of images that the processor reads."""
        if self.processor_token == self.image_token:
            return text
        return text.replace(self.placeholder, self.processor_token)


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

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def made_up_images() -> list[Any]:
    """Return images of noise, in which no two patches are alike."""
    from PIL import Image

    generator = np.random.default_rng(0)
    noise = (generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in _SIZES)
    return [Image.fromarray(pixels) for pixels in noise]


def derived(processor: ModelProcessor) -> ImageFamily:
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
    return ImageFamily(
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
        turns_by_grid=_turns_by_grid(processor.config, answers),
        takes_pixel_budget={"shortest_edge", "longest_edge"} <= _bounds_of(processor.upstream.image_processor),
        counts_by_grid=_has_grid(processor.config, answers)
        and all(len(answer.inputs.get("pixel_values", ())) == answer.inputs[GRID].prod() for answer in answers),
    )


def _answers(processor: ModelProcessor, mark: str, images: Sequence[Any]) -> list[Answer]:
    """Return what the processor makes of each image; nothing if the tokenizer lacks its mark or the model's token.

    Raises:
        NoImageRules: It takes no image.
    """
    try:
        answers = [processor.ask([image], mark) for image in images]
    except FAILURES as error:
        if mark not in processor.tokenizer.get_vocab():
            return []
        raise NoImageRules(f"the processor of {processor.name} takes no image of noise: {error!r:.300}") from None
    return answers if all(processor.image_id in answer.tokens for answer in answers) else []


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


def _has_grid(config: Any, answers: Sequence[Answer]) -> bool:
    return getattr(config.vision_config, "spatial_merge_size", None) is not None and GRID in answers[0].inputs


def _turns_by_grid(config: Any, answers: Sequence[Answer]) -> bool:
    """Return whether positions have three axes.

    Raises:
        NoImageRules: They have, and the processor returns no grid for them.
    """
    text = config.get_text_config()
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if "mrope_section" not in rotary:
        return False
    if not _has_grid(config, answers):
        raise NoImageRules(f"positions of {config.model_type} have several axes, and its processor returns no grid")
    return True


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
        return f"{processor.decode(before)}{token}{processor.decode(after)}"
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
            lengths = {axis: sum(_length(value, axis) for value in pair) for axis in (0, 1)}
            axes[name] = next((axis for axis in (0, 1) if lengths[axis] == _length(values, axis)), 0)
            moved = [np.moveaxis(value, axes[name], 0) for value in pair]
            if moved[0].shape[1:] != moved[1].shape[1:]:
                ragged.add(name)
    return axes, tuple(name for name in axes if name in ragged)


def _length(values: NDArray[Any], axis: int) -> int:
    return values.shape[axis] if values.ndim > axis else -1


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


def refuse_other_patches(family: ImageFamily, processor: ModelProcessor) -> None:
    """Compare what the image processor cuts with what the tower takes.

    Raises:
        ModelError: They differ.
    """
    if not family.turns_by_grid:
        return
    for setting in ("patch_size", "temporal_patch_size", "merge_size"):
        ours = getattr(processor.upstream.image_processor, setting, None)
        theirs = getattr(processor.config.vision_config, setting.replace("merge", "spatial_merge"), None)
        if None not in (ours, theirs) and ours != theirs:
            raise ModelError(
                f"The image processor of {processor.name} has {setting}={ours}, the model's vision tower {theirs}. The "
                "model's preprocessor_config.json and config.json do not belong together."
            )


def pixel_bounds(family: ImageFamily, processor: ModelProcessor, low: int | None, high: int | None) -> dict[str, int]:
    """Return the image processor's `size` within the bounds of `data`.

    Raises:
        ModelError: The family takes none, or they cross.
    """
    if not family.takes_pixel_budget:
        raise ModelError(
            f"data.min_pixels and data.max_pixels do not apply to {processor.name}: its images are all brought to one "
            "size. Remove them."
        )
    size = dict(processor.upstream.image_processor.size)
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
