"""Turn images into tokens and model inputs, by the rules of a model's own processor.

The processor is asked for each image alone, with nothing but the image's mark for a text. What it writes replaces that
mark in a row's tokens. The number of image tokens is compared with the number of features that the vision tower will
compute where a rule for that is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.content.grids import grid_positions
from holdfast.data.content.lengths import Grid, ImageSpan, Stretch, example_of, joined_inputs
from holdfast.data.content.model_inputs import array_arguments, flattened
from holdfast.data.content.vision_families import Inputs, VideoFamily, VisionFamily, image_marks, video_token
from holdfast.data.tokens.derivation import (
    FAILURES,
    Expected,
    ModelProcessor,
    NoImageRules,
    contradiction,
    derived,
    first_difference,
    made_up_images,
    pixel_bounds,
    refuse_other_patches,
)
from holdfast.data.tokens.videos import VideoOptions, frame_size, patches_of, seconds_of
from holdfast.errors import DataError, ModelError
from holdfast.types import Example

PROBES = ((48, 80), (80, 48), (56, 112))
"""(height, width) of the images of noise that a model is checked with."""


@dataclass(frozen=True)
class PreparedImage:
    """One image, ready for the model."""

    tokens: tuple[int, ...]
    """What stands in the place of its placeholder: image tokens, and between tiles what tells them apart."""
    inputs: Inputs
    grids: tuple[Grid, ...] = ()
    """Grids of a video; empty for an image."""


class ImageSide:
    """Turns images into tokens and model inputs, as one model and one `data` section say."""

    def __init__(  # noqa: PLR0913 - the parts of a processor, and its limits
        self,
        processor: Any,
        tokenizer: Any,
        config: Any,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        videos: VideoOptions | None = None,
    ) -> None:
        """Ask a model's processor for its rules.

        Args:
            processor: transformers' processor, without its part for videos.
            tokenizer: Knows the model's image token.
            config: The model's configuration.
            min_pixels, max_pixels: Bounds of the size an image is brought to; None keeps the processor's.
            videos: What holds for videos.

        Raises:
            NoImageRules: The processor answers no questions, or contradicts itself.
            ModelError: Processor, tokenizer and model do not belong together.
        """
        asked = ModelProcessor(processor, tokenizer, config)
        self.name, self.family = asked.name, derived(asked)
        self._processor, self._tokenizer, self._config = processor.image_processor, tokenizer, config
        self.image_id = asked.image_id
        refuse_other_patches(self.family, self.name, self._processor, config)
        self._videos = videos or VideoOptions()
        self.video_id = _video_id(self.family, tokenizer, config)
        self.marks = image_marks(config)
        self.on_image: Callable[[Any, int, str], None] | None = None
        """Called with every image of a row, in PIL, its number of tokens and its name."""
        self.on_video: Callable[[Sequence[Any], int, str], None] | None = None
        """Called with the frames of every video of a row, in PIL, its number of tokens and its name."""
        self._asked = asked
        self._compare_made_up()
        if min_pixels is not None or max_pixels is not None:
            size = pixel_bounds(self.family, self.name, self._processor, min_pixels, max_pixels)
            self._asked = replace(asked, options={"size": size})

    def described(self) -> list[str]:
        """Return sentences about what the processor was found to do with images."""
        family, processor = self.family, type(self._asked.upstream).__name__
        joined = [f"{name} (filled up)" if name in family.ragged else name for name in family.inputs]
        sentences = [
            f"{processor} was asked: {family.placeholder!r} stands for one, {', '.join(joined)} go to the model",
            "its whole output for texts with images of noise is its output for the images one by one",
        ]
        if family.token_types is not None:
            sentences[0] += f", {family.token_types} mark its tokens"
        if family.turns_by_grid:
            sentences[0] += ", positions have a time, a row and a column"
        return sentences

    @property
    def processor(self) -> ModelProcessor:
        """The processor, with the options of this run."""
        return self._asked

    @cached_property
    def placeholder_ids(self) -> list[int]:
        """The tokens of `placeholder`, the image token once among them."""
        return self._asked.ids(self.family.placeholder)

    @cached_property
    def stand_in(self) -> dict[str, NDArray[Any]]:
        """The inputs of a small grey image."""
        from PIL import Image

        return dict(self._prepared(Image.new("RGB", (32, 32), (128, 128, 128)), "the image that stands in").inputs)

    def prepare(self, image: Any, image_name: str) -> PreparedImage:
        """Return the tokens and inputs of one image.

        Raises:
            DataError: The processor refuses it, the model would make another number of features of it, or it has
                another size than all images of this model.
        """
        made = self._prepared(image, image_name)
        for name, values in made.inputs.items():
            shape, usual = values.shape[1:], self.stand_in[name].shape[1:]
            if shape != usual:  # those of a batch are laid side by side
                raise DataError(
                    f"{image_name} of {image.width}x{image.height} pixels becomes {name} of {_words(shape)}, and a "
                    f"square one {_words(usual)}; {self.name} takes images of one size. Let the model's "
                    "preprocessor_config.json bring all to one (do_resize, do_center_crop, crop_size), or remove the "
                    "row."
                )
        if self.on_image is not None:
            self.on_image(image, len(made.tokens), image_name)
        return made

    def _prepared(self, image: Any, image_name: str) -> PreparedImage:
        """Return the tokens and inputs of one image, of any size."""
        family = self.family
        try:
            answer = self._asked.ask([image], family.processor_token)
            moved = {name: np.moveaxis(answer.inputs[name], family.axes[name], 0) for name in family.inputs}
        except FAILURES as error:
            raise DataError(f"{image_name} of {image.width}x{image.height} pixels: {error}.") from None
        first, end = len(family.before), len(answer.tokens) - len(family.after)
        tokens = tuple(answer.tokens[first:end])
        if (*family.before, *tokens, *family.after) != tuple(answer.tokens):
            raise DataError(
                f"{image_name} of {image.width}x{image.height} pixels: the processor writes other text around it than "
                f"around other images, as {self.name} does for images cut into pieces. Turn that off in the model's "
                "preprocessor_config.json."
            )
        count, features = tokens.count(self.image_id), tokens.count(self.image_id)
        if family.features is not None:
            features = family.features(self._config, moved)
        if count != features or count < 1:
            raise DataError(
                f"{image_name} of {image.width}x{image.height} pixels has {count} tokens to stand for it, and "
                f"{self.name} makes {features} features of it. The model's preprocessor_config.json and config.json do "
                "not belong together."
            )
        inputs: dict[str, NDArray[Any]] = {}
        for name, values in moved.items():
            inputs |= flattened(name, values) if name in family.ragged else {name: values}
        return PreparedImage(tokens, inputs)

    def _compare_made_up(self) -> None:
        """Compare the processor's whole output with ours for texts with made-up images.

        Raises:
            NoImageRules: They differ.
        """
        mark, images = self.family.placeholder, made_up_images()
        try:
            prepared = [self._prepared(image, "an image of noise") for image in images]
        except DataError as error:
            raise NoImageRules(str(error).rstrip(".")) from None
        shapes = [{name: values.shape[1:] for name, values in made.inputs.items()} for made in prepared]
        alike = [index for index, shape in enumerate(shapes) if shape == shapes[0]]  # others cannot stand in one row
        for text, chosen in (
            (f"see {mark} or\n{mark}.", alike[:2]),
            (f"{mark}{mark}\n\nis\n" + mark * (len(alike) - 2), alike[::-1]),
        ):
            difference = self._difference(
                text, self._asked.ids(text), [images[n] for n in chosen], [prepared[n] for n in chosen]
            )
            if difference:
                raise NoImageRules(contradiction(self.name, "images of noise", difference))

    def compare(
        self, tokens: Sequence[int], images: Sequence[Any], prepared: Sequence[PreparedImage], row_name: str
    ) -> bool:
        """Compare the processor's whole output for a row with ours.

        Args:
            tokens: Of the row, with one image token for each image.
            images: PIL images.
            prepared: The same, in the same order.
            row_name: What an error calls it.

        Returns:
            Whether that could be done: the tokens have to be those of their own text.

        Raises:
            ModelError: They differ.
        """
        text = self.decode(tokens)
        if self.ids(text) != list(tokens):
            return False
        difference = self._difference(text, tokens, images, prepared)
        if difference:
            raise ModelError(f"Images cannot be trained on: {contradiction(self.name, row_name, difference)}.")
        return True

    def _difference(
        self, text: str, tokens: Sequence[int], images: Sequence[Any], prepared: Sequence[PreparedImage]
    ) -> str:
        """Return how the processor's whole output for a text differs from ours; "" where it does not."""
        try:
            answer = self._asked.ask(images, self.family.for_processor(text))
            return first_difference(self.family, self._expected(tokens, prepared), answer)
        except FAILURES as error:
            return f"it fails: {error!r:.300}"

    def _expected(self, tokens: Sequence[int], prepared: Sequence[PreparedImage]) -> Expected:
        laid = self.expanded(Stretch(list(tokens), [False] * len(tokens)), prepared)
        arguments = array_arguments(joined_inputs(laid))
        return Expected(
            laid.tokens, {name: np.moveaxis(arguments[name], 0, self.family.axes[name]) for name in self.family.inputs}
        )

    @property
    def video_fps(self) -> float:
        """Frames that belong to one second where a row does not say."""
        return self._videos.fps

    def prepare_video(self, frames: Sequence[Any], fps: float | None, video_name: str) -> PreparedImage:
        """Return the tokens and inputs of one video.

        Raises:
            DataError: The model takes none, or not this one.
        """
        video = self.family.video
        if video is None or self.video_id is None:
            raise DataError(f"{video_name}: {self.why_no_videos()}. Remove the row.")
        sizes = sorted({(frame.width, frame.height) for frame in frames})
        if len(sizes) > 1:
            (first_size, second_size) = (f"{width}x{height}" for width, height in sizes[:2])
            raise DataError(
                f"{video_name} has frames of {first_size} and of {second_size} pixels. Bring all of them to one size."
            )
        unit = self._processor.patch_size * self._processor.merge_size
        try:
            size = frame_size(video, len(frames), *sizes[0], unit, self._video_bounds())
        except ValueError as error:
            raise DataError(f"{video_name} of {sizes[0][0]}x{sizes[0][1]} pixels: {error}.") from None
        inputs = patches_of(frames, self._processor, size)
        tokens, grids = self._video_tokens(video, inputs, len(frames), self._videos.fps if fps is None else fps)
        if self.on_video is not None:
            self.on_video(frames, len(tokens), video_name)
        return PreparedImage(tokens, inputs, grids)

    def _video_tokens(
        self, video: VideoFamily, inputs: Inputs, frames: int, fps: float
    ) -> tuple[tuple[int, ...], tuple[Grid, ...]]:
        """Return what stands for a video, and where the features in it lie."""
        merge, span = self._processor.merge_size, self._processor.temporal_patch_size
        count, rows, columns = (int(side) for side in inputs["image_grid_thw"][0] // [1, merge, merge])
        assert self.video_id is not None
        if not video.written_times:
            pace = self._config.vision_config.tokens_per_second * span / fps if video.in_seconds else 1.0
            return (self.video_id,) * (count * rows * columns), (Grid(0, count, rows, columns, pace),)
        written = video.placeholder.replace(video.token, video.token * (rows * columns))
        text = "".join(video.written_times.format(time) + written for time in seconds_of(frames, fps, span))
        tokens = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        starts = [index for index, token in enumerate(tokens) if token == self.video_id][:: rows * columns]
        return tokens, tuple(Grid(start, 1, rows, columns, 1.0) for start in starts)

    def why_no_videos(self) -> str:
        """Return why no row may have a video; "" where it may."""
        if self.video_id is not None:
            return ""
        if self.family.video is None:
            return f"{self.name} is trained on text and images, and on no videos"
        return f"the tokenizer has no {self.family.video.token} with the id that the model marks videos by"

    def _video_bounds(self) -> tuple[int, int]:
        options = self._videos
        size = dict(self._processor.size) if options.size is None else options.size
        low = size["shortest_edge"] if options.min_pixels is None else options.min_pixels
        return low, size["longest_edge"] if options.max_pixels is None else options.max_pixels

    def rewritten(self, template: Any) -> Any:
        """Return the source of a chat template that writes the family's whole placeholder for an image."""
        mark, token = self.family.processor_token, self.family.image_token
        if mark == token or not isinstance(template, str) or token in template:
            return template
        written = self.family.placeholder.replace("\n", "\\n")

        def rewrite(match: re.Match[str]) -> str:
            quote = match["quote"]
            # Outside of an expression, jinja would drop the first newline behind a block.
            return f"{quote}{written}{quote}" if quote else f"{{{{ '{written}' }}}}"

        mark = re.escape(mark)
        return re.sub(rf"(?P<quote>['\"]){mark}(?P=quote)|{mark}", rewrite, template)

    def places(self, tokens: Sequence[int]) -> int:
        """Return how many images and videos these tokens, not yet expanded, have a place for."""
        return sum(token in (self.image_id, self.video_id) for token in tokens)

    def token_id(self, token: str) -> int:
        """Return the id of a token of the processor's."""
        return int(self._tokenizer.convert_tokens_to_ids(token))

    def ids(self, text: str) -> list[int]:
        """Return the tokens of text alone."""
        return self._asked.ids(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def expanded(self, stretch: Stretch, images: Sequence[PreparedImage]) -> Stretch:
        """Put each image's tokens in the place of its placeholder; none of them is trained."""
        tokens: list[int] = []
        trained: list[bool] = []
        spans: list[ImageSpan] = []
        following = iter(images)
        for token, is_trained in zip(stretch.tokens, stretch.trained, strict=True):
            if token not in (self.image_id, self.video_id):
                tokens.append(token)
                trained.append(is_trained)
                continue
            image = next(following)
            if (token == self.image_id) == bool(image.grids):
                raise DataError(
                    "images and videos stand in the text in another order than in the row; the chat template has to "
                    "keep theirs"
                )
            spans.append(ImageSpan(len(tokens), len(tokens) + len(image.tokens), image.inputs, image.grids))
            tokens.extend(image.tokens)
            trained.extend([False] * len(image.tokens))
        return Stretch(tokens, trained, tuple(spans))

    def positions(self, stretch: Stretch) -> NDArray[np.int64] | None:
        """Return [3, L] positions of a sequence with images, where the family turns by grid."""
        if not self.family.turns_by_grid or not stretch.images:
            return None
        merge = self._config.vision_config.spatial_merge_size
        return grid_positions(len(stretch.tokens), stretch.images, merge)

    def probe(self, tokens: NDArray[np.int64], sample_id: int) -> Example:
        """Return a trained sequence of these tokens, with a picture of noise in each place that they have for one."""
        noise = probe_images(self.places(tokens.tolist()), sample_id)
        images = [self.prepare(image, "an image of noise") for image in noise]
        stretch = Stretch(tokens.tolist(), [True] * tokens.size)
        laid = self.expanded(stretch, images)
        return example_of(laid, sample_id, "", self.positions(laid))

    def upstream_inputs(self, tokens: NDArray[np.int64], inputs: Inputs) -> dict[str, NDArray[Any]]:
        """Return what transformers' own forward wants of a sequence besides its tokens."""
        arguments = array_arguments(inputs)
        if self.family.token_types is None:
            return arguments
        return {**arguments, self.family.token_types: np.isin(tokens, self.family.type_tokens).astype(np.int64)[None]}


def probe_images(count: int, sample_id: int) -> list[Any]:
    """Return the pictures of noise, in PIL, that `ImageSide.probe` puts into a sequence."""
    from PIL import Image

    size = PROBES[sample_id % len(PROBES)]
    noise = np.random.default_rng(sample_id).integers(0, 256, (count, *size, 3), dtype=np.uint8)
    return [Image.fromarray(pixels) for pixels in noise]


def _words(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)


def _video_id(family: VisionFamily, tokenizer: Any, config: Any) -> int | None:
    """Return the token that marks videos; None where model and tokenizer have none in common."""
    model_token = video_token(config)
    tokenizer_token = None if family.video is None else tokenizer.convert_tokens_to_ids(family.video.token)
    return tokenizer_token if tokenizer_token is not None and tokenizer_token == model_token else None
