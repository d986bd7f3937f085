"""Write a prompt for a processor elsewhere: with one mark in the place of each image, as its own text would have it."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import DataError


def with_marks(side: ImageSide, tokens: Sequence[int], name: str) -> list[int]:
    """Return tokens, not yet expanded, with the mark that the processor reads in the place of each placeholder.

    A placeholder may have grown together with its text: where it ends in a line break, a vocabulary that has runs of
    them makes one token of both. The text is then tokenised anew with its marks.

    Raises:
        DataError: The number of marks would be another than that of images.
    """
    family, images = side.family, list(tokens).count(side.image_id)
    if family.processor_token == family.image_token:
        return list(tokens)
    mark = side.token_id(family.processor_token)
    marked = _replaced(tokens, [*family.before, side.image_id, *family.after], mark)
    if side.image_id in marked:
        marked = side.ids(family.for_processor(side.decode(tokens)))
    if side.image_id in marked or marked.count(mark) != images:
        raise DataError(
            f"{name} has {images} images, and {marked.count(mark)} times {family.processor_token} in its text as its "
            "processor reads it. No text of a row may hold that token, and the chat template must write the whole "
            f"placeholder {family.placeholder!r} for each image. Remove the row."
        )
    return marked


def _replaced(tokens: Sequence[int], placeholder: Sequence[int], mark: int) -> list[int]:
    replaced = list(tokens)
    for start in range(len(replaced) - len(placeholder), -1, -1):
        if replaced[start : start + len(placeholder)] == placeholder:
            replaced[start : start + len(placeholder)] = [mark]
    return replaced
