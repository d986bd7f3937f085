"""Marks of images: what a sample of rows holds, wherever in a row it stands."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from PIL import Image

from holdfast.data.content.image_files import IMAGES_OF_A_ROW, SAMPLED_ROWS, ImageFiles, images_fingerprint
from holdfast.data.rows.rows import from_rows
from holdfast.errors import DataError


def mark_of(rows: Any, folder: Path) -> str | None:
    return images_fingerprint(from_rows(rows, "rows"), ImageFiles(str(folder), folder))


def by_hand(*contents: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(b"%d:" % len(content) + content for content in contents))


def test_images_are_found_in_columns_parts_and_videos(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_bytes(name.encode() * 3)
    picture = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    parts = [{"type": "text", "text": "a"}, {"type": "image", "path": "b"}]
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "images": ["a", b"bytes"], "url": "a", "path": "~no-such-user/a"},
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "image"}]},
        {"videos": [["c", {"path": "d"}]], "prompt": "x"},
        {"image": picture, "prompt": "x"},
        {"image": {"bytes": b"held", "path": "a"}, "prompt": "x"},
        {"image": "nowhere", "prompt": "x"},
        {"image": "~no-such-user/a", "prompt": "x"},
        {"image": "a", "images": ["b"], "prompt": "both, which training refuses"},
    ]

    pixels = b"RGB (2, 2) " + bytes(range(12))
    assert mark_of(rows, tmp_path) == by_hand(
        b"aaa", b"bytes", b"bbb", b"ccc", b"ddd", pixels, b"held", b"unreadable", b"unreadable"
    )


def test_pictures_of_the_same_pixels_and_other_shape_have_other_marks(tmp_path: Path) -> None:
    pixels = np.arange(36, dtype=np.uint8)
    marks = {
        mark_of([{"prompt": "x", "image": Image.fromarray(pixels.reshape(shape))}], tmp_path)
        for shape in ((3, 4, 3), (4, 3, 3), (2, 6, 3), (6, 6))
    }

    assert len(marks) == 4


def test_of_a_row_with_many_images_the_first_are_read(tmp_path: Path) -> None:
    frames = [b"%d" % number for number in range(20)]

    assert mark_of([{"prompt": "x", "images": frames}], tmp_path) == by_hand(*frames[:IMAGES_OF_A_ROW])


def test_rows_without_images_have_no_mark(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b", "url": "https://x"}, {"prompt": "image", "completion": "", "path": "a"}]

    assert mark_of(rows, tmp_path) is None


@pytest.mark.parametrize("size", [1, 5, SAMPLED_ROWS, SAMPLED_ROWS + 1, 1000])
def test_the_sample_is_spread_over_all_rows_and_holds_both_ends(size: int, tmp_path: Path) -> None:
    read: list[int] = []

    class Rows:
        def __len__(self) -> int:
            return size

        def __getitem__(self, index: int) -> dict[str, Any]:
            read.append(index)
            return {"prompt": "x", "image": str(index).encode()}

    source = from_rows(Rows(), "rows")
    read.clear()
    images_fingerprint(source, ImageFiles(None, tmp_path))

    assert (read[0], read[-1], len(read)) == (0, size - 1, min(size, SAMPLED_ROWS))
    assert max(np.diff(read), default=0) <= size / (SAMPLED_ROWS - 1) + 1


def test_of_a_stream_the_first_rows_are_read(tmp_path: Path) -> None:
    class Rows:
        def __iter__(self) -> Any:
            return iter([{"prompt": "x", "image": b"%d" % number} for number in range(100)])

    assert mark_of(Rows(), tmp_path) == by_hand(*(b"%d" % number for number in range(SAMPLED_ROWS)))


def test_rows_and_images_that_cannot_be_read_are_no_error_here(tmp_path: Path) -> None:
    """They may be left out by a filter, or never be reached; training names the row."""
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "png")
    cut = file.getvalue()[:900]

    class Rows:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 1:
                raise OSError("this row's own trouble")
            images: list[Any] = [b"0", None, Image.open(io.BytesIO(cut)), "~no-such-user/a"]
            return {"prompt": "x", "image": images[index]}

    assert mark_of(Rows(), tmp_path) == by_hand(b"0", b"unreadable", b"unreadable")
    with pytest.raises(DataError, match=r"row 3: there is no file .*~no-such-user/a"):
        ImageFiles(str(tmp_path), tmp_path).open("~no-such-user/a", "row 3")
