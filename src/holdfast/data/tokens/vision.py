"""Turn images into tokens and model inputs, by the rules of a model's own processor.

The processor is asked for each image alone, with nothing but the image's mark for a text. What it writes replaces that
mark in a row's tokens. Two things are proved before a row is trained on:

- the processor's whole output for a text with several images is its output for the images one by one, in the place of
  their tokens: at the start for images of noise, then for the first rows with images;
- the tower makes as many features of an image as it has tokens: by the check before step 1 (`models/check/tower.py`),
  and for each image where the processor returns a grid of patches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.data.content.images import Frames
from holdfast.data.content.lengths import ImageSpan, Stretch, example_of, joined_inputs
from holdfast.data.content.model_inputs import Inputs, PreparedImage, array_arguments, flattened, grid_positions
from holdfast.data.tokens.processor import (
    FAILURES,
    ModelProcessor,
    NoImageRules,
    derived,
    made_up_images,
    pixel_bounds,
    refuse_other_patches,
)
from holdfast.data.tokens.videos import VideoOptions, video_side, video_token
from holdfast.errors import DataError, ModelError
from holdfast.types import Example

PROBES = ((48, 80), (80, 48), (56, 112))
"""(height, width) of the images of noise that a model is checked with."""


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
        self.processor = ModelProcessor(processor, tokenizer, config)
        self.name, self.family = self.processor.name, derived(self.processor)
        self.image_id = self.processor.image_id
        refuse_other_patches(self.family, self.processor)
        options = videos or VideoOptions()
        self.video_fps = options.fps
        """Frames that belong to one second where a row does not say."""
        self.videos = video_side(self.processor, options)
        """Turns frames into tokens; or a clause that says why no row may have a video."""
        self.video_id = None if isinstance(self.videos, str) else self.videos.token_id
        self.marks = image_marks(config)
        self.on_image: Callable[[Any, int, str], None] | None = None
        """Called with every image of a row, in PIL, its number of tokens and its name."""
        self.on_video: Callable[[Sequence[Any], int, str], None] | None = None
        """Called with the frames of every video of a row, in PIL, its number of tokens and its name."""
        self._compare_made_up()
        if min_pixels is not None or max_pixels is not None:
            size = pixel_bounds(self.family, self.processor, min_pixels, max_pixels)
            self.processor = replace(self.processor, options={"size": size})

    def described(self) -> list[str]:
        """Return sentences about what the processor was found to do with images."""
        family, processor = self.family, type(self.processor.upstream).__name__
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

    @cached_property
    def placeholder_ids(self) -> list[int]:
        """The tokens of `placeholder`, the image token once among them."""
        return self.processor.ids(self.family.placeholder)

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

    def prepare_video(self, frames: Frames, video_name: str) -> PreparedImage:
        """Return the tokens and inputs of one video.

        Raises:
            DataError: The model takes none, or not this one.
        """
        if isinstance(self.videos, str):
            raise DataError(f"{video_name}: {self.videos}. Remove the row.")
        made = self.videos.prepare(frames, video_name)
        if self.on_video is not None:
            self.on_video(frames.images, len(made.tokens), video_name)
        return made

    def _prepared(self, image: Any, image_name: str) -> PreparedImage:
        """Return the tokens and inputs of one image, of any size."""
        family, image_name = self.family, f"{image_name} of {image.width}x{image.height} pixels"
        try:
            answer = self.processor.ask([image], family.processor_token)
            moved = {name: np.moveaxis(answer.inputs[name], family.axes[name], 0) for name in family.inputs}
        except FAILURES as error:
            raise DataError(f"{image_name}: {error}.") from None
        first, end = len(family.before), len(answer.tokens) - len(family.after)
        tokens = tuple(answer.tokens[first:end])
        if (*family.before, *tokens, *family.after) != tuple(answer.tokens):
            raise DataError(
                f"{image_name}: the processor writes other text around it than around other images, as {self.name} "
                "does for images cut into pieces. Turn that off in the model's preprocessor_config.json."
            )
        features = count = tokens.count(self.image_id)
        if family.counts_by_grid:
            features = len(moved["pixel_values"]) // self.processor.config.vision_config.spatial_merge_size**2
        if count != features or count < 1:
            raise DataError(
                f"{image_name} has {count} tokens to stand for it, and {self.name} makes {features} features of it. "
                "The model's preprocessor_config.json and config.json do not belong together."
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
            tokens, pair = self.processor.ids(text), ([images[n] for n in chosen], [prepared[n] for n in chosen])
            contradiction = self._contradiction(text, tokens, *pair, "images of noise")
            if contradiction:
                raise NoImageRules(contradiction)

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
        text = self.processor.decode(tokens)
        if self.processor.ids(text) != list(tokens):
            return False
        contradiction = self._contradiction(text, tokens, images, prepared, row_name)
        if contradiction:
            raise ModelError(f"Images cannot be trained on: {contradiction}.")
        return True

    def _contradiction(
        self, text: str, tokens: Sequence[int], images: Sequence[Any], prepared: Sequence[PreparedImage], subject: str
    ) -> str:
        """Return sentences about a processor whose whole output for a text differs from ours; "" where it does not."""
        try:
            difference = self._difference(text, tokens, images, prepared)
        except FAILURES as error:
            difference = f"it fails: {error!r:.300}"
        return difference and (
            f"the processor of {self.name} contradicts itself for {subject}: {difference}. Its output for a whole text "
            "has to be its output for the images one by one, in the place of their tokens. The processor's files are "
            "not this model's, or transformers changed it"
        )

    def _difference(
        self, text: str, tokens: Sequence[int], images: Sequence[Any], prepared: Sequence[PreparedImage]
    ) -> str:
        family = self.family
        answer = self.processor.ask(images, family.for_processor(text))
        laid = self.expanded(Stretch(list(tokens), [False] * len(tokens)), prepared)
        if answer.tokens != laid.tokens:
            pairs = enumerate(zip(answer.tokens, laid.tokens, strict=False))
            at = next((index for index, (theirs, ours) in pairs if theirs != ours), "the end")
            return f"its {len(answer.tokens)} tokens are not the {len(laid.tokens)} that follow, from token {at} on"
        if family.token_types is not None:
            marked = np.isin(answer.tokens, family.type_tokens).astype(np.int64).tolist()
            if answer.types.get(family.token_types) != marked:
                return f"its {family.token_types} do not mark the image tokens"
        if set(answer.inputs) != set(family.inputs):
            return (
                f"it returns {', '.join(sorted(answer.inputs))} for these images, and {', '.join(family.inputs)} alone"
            )
        arguments = array_arguments(joined_inputs(laid))
        for name in family.inputs:
            theirs, ours = answer.inputs[name], np.moveaxis(arguments[name], 0, family.axes[name])
            if theirs.shape != ours.shape:
                return f"its {name} have the shape {list(theirs.shape)}, where {list(ours.shape)} follows"
            if not np.array_equal(theirs, ours):
                return f"its {name} are not those of the images one by one, in their order"
        return ""

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

    def marked(self, tokens: Sequence[int], name: str) -> list[int]:
        """Return tokens, not yet expanded, with the mark that the processor reads in the place of each placeholder.

        A placeholder may have grown together with its text: where it ends in a line break, a vocabulary that has runs
        of them makes one token of both. The text is then tokenised anew with its marks.

        Raises:
            DataError: The number of marks would be another than that of images.
        """
        family, images = self.family, list(tokens).count(self.image_id)
        if family.processor_token == family.image_token:
            return list(tokens)
        mark = int(self.processor.tokenizer.convert_tokens_to_ids(family.processor_token))
        placeholder, marked = [*family.before, self.image_id, *family.after], list(tokens)
        for start in range(len(marked) - len(placeholder), -1, -1):
            if marked[start : start + len(placeholder)] == placeholder:
                marked[start : start + len(placeholder)] = [mark]
        if self.image_id in marked:
            marked = self.processor.ids(family.for_processor(self.processor.decode(tokens)))
        if self.image_id in marked or marked.count(mark) != images:
            raise DataError(
                f"{name} has {images} images, and {marked.count(mark)} times {family.processor_token} in its text as "
                "its processor reads it. No text of a row may hold that token, and the chat template must write the "
                f"whole placeholder {family.placeholder!r} for each image. Remove the row."
            )
        return marked

    def positions(self, stretch: Stretch) -> NDArray[np.int64] | None:
        """Return [3, L] positions of a sequence with images, where the family turns by grid."""
        if not self.family.turns_by_grid or not stretch.images:
            return None
        merge = self.processor.config.vision_config.spatial_merge_size
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


def image_marks(config: Any) -> list[int]:
    """Return the tokens whose embeddings a model replaces where there are images: of features, and Ovis2's of edges."""
    marks = (config.image_token_id, video_token(config), *(getattr(config, "visual_indicator_token_ids", None) or ()))
    return [int(token) for token in marks if token is not None]


def probe_images(count: int, sample_id: int) -> list[Any]:
    """Return the pictures of noise, in PIL, that `ImageSide.probe` puts into a sequence."""
    from PIL import Image

    size = PROBES[sample_id % len(PROBES)]
    noise = np.random.default_rng(sample_id).integers(0, 256, (count, *size, 3), dtype=np.uint8)
    return [Image.fromarray(pixels) for pixels in noise]


def _words(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)
