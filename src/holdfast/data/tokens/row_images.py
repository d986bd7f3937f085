"""Process the images of a row: find their positions, open and prepare them, and insert their tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.config.sections.data import TextConfig
from holdfast.data.content.formats import Conversation, PlainText
from holdfast.data.content.image_files import ImageFiles, pixel_digest
from holdfast.data.content.images import PLACEHOLDERS, C, Content, Frames, Video, images_up_to, place_images
from holdfast.data.content.lengths import Stretch
from holdfast.data.content.model_inputs import PreparedImage
from holdfast.data.rows.rows import Row
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import DataError
from holdfast.types import PromptImages

_COMPARED = 16
"""Rows with images whose sequences are compared with the processor's whole output, at every start."""


@dataclass(frozen=True)
class PreparedImages:
    """The images of one row."""

    images: tuple[PreparedImage, ...]
    opened: tuple[Any, ...]
    """The same as PIL images; None in the place of a video."""
    may_be: Collection[int]
    """How many of them a sequence of the row may hold: a template that writes one sequence per turn leaves out those
    of later turns."""


class RowImages:
    """Finds, opens and prepares the images of rows, as one model and one `data` section say.

    Args:
        side: Turns images into tokens; or a sentence that says why none can be trained on.
        text: The section.
        base: The YAML's directory.
    """

    def __init__(self, side: ImageSide | str, text: TextConfig, base: Path) -> None:
        self._side, self._text = side, text
        self._files = ImageFiles(text.image_dir, base)
        self._last: tuple[tuple[Any, ...], tuple[PreparedImage, ...], tuple[Any, ...]] = ((), (), ())
        self._left_to_compare = _COMPARED

    def placed(self, content: C, row: Row, row_name: str) -> C:
        """Return the content with its images found.

        Raises:
            DataError: Places and images differ in number, there are too many, or the model sees none.
        """
        content = place_images(content, row, row_name, self._side if isinstance(self._side, str) else None)
        most, videos = self._text.max_images, [image for image in content.images if isinstance(image, Video)]
        images = len(content.images) - len(videos)
        if most is not None and images > most:
            raise DataError(
                f"{row_name} has {images} images, more than data.max_images={most}. Raise it, or remove the row."
            )
        longest, limit = max((len(video.frames) for video in videos), default=0), self._text.max_frames
        if limit is not None and longest > limit:
            raise DataError(
                f"{row_name} has a video of {longest} frames, more than data.max_frames={limit}. Raise it, or take "
                "fewer frames out of the video and lower data.video_fps with them."
            )
        if videos and not isinstance(self._side, str) and isinstance(self._side.videos, str):
            raise DataError(f"{row_name} has a video, and {self._side.videos}. Remove the row.")
        return content

    def prepared(self, content: Content, row_name: str, *, one_sequence: bool = False) -> PreparedImages:
        """Open the content's images and prepare them for the model; once for contents of one row that share them.

        Args:
            content: With its images placed.
            row_name: What an error calls it.
            one_sequence: All of it is one sequence, whoever speaks last.

        Raises:
            DataError: An image cannot be read, or the model cannot take it.
        """
        if isinstance(self._side, str):
            return PreparedImages((), (), {0})
        images, opened = self._opened(content.images, row_name, self._side)
        may_be = {len(images)}
        if isinstance(content, Conversation) and not one_sequence:
            may_be = {images_up_to(content, turn + 1) for turn in content.assistant_turns} or may_be
        return PreparedImages(images, opened, may_be)

    def _opened(
        self, images: tuple[Any, ...], row_name: str, side: ImageSide
    ) -> tuple[tuple[PreparedImage, ...], tuple[Any, ...]]:
        before = self._last[0]
        if len(before) == len(images) and all(_is_same(old, new) for old, new in zip(before, images, strict=True)):
            return self._last[1:]
        prepared: list[PreparedImage] = []
        opened: list[Any] = []
        for number, image in enumerate(images):
            name = f"{row_name}, {'video' if isinstance(image, Video) else 'image'} {number}"
            if isinstance(image, Video):
                prepared.append(side.prepare_video(self._frames(image, name, side), name))
                opened.append(None)
            else:
                opened.append(self._files.open(image, name))
                prepared.append(side.prepare(opened[-1], name))
        self._last = (images, tuple(prepared), tuple(opened))
        return self._last[1:]

    def _frames(self, video: Video, name: str, side: ImageSide) -> Frames:
        fps = side.video_fps if video.fps is None else video.fps
        if video.film is not None:
            return self._files.film(video, name).frames(fps, self._text.max_frames)
        opened = [self._files.open(frame, f"{name}, frame {count}") for count, frame in enumerate(video.frames)]
        return Frames(opened, fps)

    def unread(self, tokens: Sequence[int], content: Content, row_name: str) -> PromptImages | None:
        """Return the images of a sequence, not yet expanded, as a processor elsewhere gets them; None for none.

        Raises:
            DataError: As `prepared` and `ImageSide.marked`.
        """
        if isinstance(self._side, str) or not content.images:
            return None
        _, opened = self._opened(content.images, row_name, self._side)
        marked = np.asarray(self._side.marked(tokens, row_name), dtype=np.int64)
        digests = tuple("" if image is None else pixel_digest(image) for image in opened)
        return PromptImages(marked, tuple(content.images), digests)

    def in_text(self, content: C) -> C:
        """Return plain text with the placeholders that the family's tokenizer knows."""
        if isinstance(self._side, str) or not content.images or isinstance(content, Conversation):
            return content
        are_videos = [isinstance(image, Video) for image in content.images]
        marks = {} if all(are_videos) else {PLACEHOLDERS["image"]: self._side.family.placeholder}
        if any(are_videos):
            assert not isinstance(self._side.videos, str)
            marks = {PLACEHOLDERS["video"]: self._side.videos.family.placeholder} | marks
        if isinstance(content, PlainText):
            return replace(content, text=_written(content.text, marks))
        return replace(content, prompt=_written(content.prompt, marks), completion=_written(content.completion, marks))

    def laid_in(self, stretches: Sequence[Stretch], prepared: PreparedImages, row_name: str) -> list[Stretch]:
        """Return the sequences with each image's tokens in the place of its placeholder.

        Raises:
            DataError: The text has another number of placeholders than the row has images.
            ModelError: The processor's whole output for the row differs; the first rows are compared.
        """
        if isinstance(self._side, str):
            return list(stretches)
        laid = []
        for stretch in stretches:
            placeholder_count = self._side.places(stretch.tokens)
            if placeholder_count not in prepared.may_be:
                raise DataError(
                    f"{row_name} has {len(prepared.images)} images, and its text as tokens has {placeholder_count} "
                    f"times {self._side.family.image_token}. Its chat template must write that once for each part "
                    "{type: image}, and no text of a row may hold it."
                    + (" A video counts like an image, and has a token of its own." if self._side.video_id else "")
                )
            try:
                laid.append(self._side.expanded(stretch, prepared.images))
            except DataError as error:
                raise DataError(f"{row_name}: {error}.") from None
            if self._left_to_compare and placeholder_count and None not in prepared.opened:
                images, opened = prepared.images[:placeholder_count], prepared.opened[:placeholder_count]
                self._left_to_compare -= self._side.compare(stretch.tokens, opened, images, row_name)
        return laid

    def positions(self, stretch: Stretch) -> NDArray[np.int64] | None:
        """Return [A, L] positions of a sequence; None where they are 0, 1, 2, ..."""
        return None if isinstance(self._side, str) else self._side.positions(stretch)


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Video) and isinstance(second, Video):
        return first.original is second.original and first.fps == second.fps
    return first is second


def _written(text: str, marks: Mapping[str, str]) -> str:
    for placeholder, mark in marks.items():
        text = text.replace(placeholder, mark)
    return text
