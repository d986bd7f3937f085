"""Texts that are cut to a length."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from holdfast.text.shortening import shortened


@pytest.mark.parametrize(
    ("text", "longest", "beginning", "end"),
    [
        ("abcdefgh", 8, "abcdefgh", "abcdefgh"),
        ("abcdefghi", 8, "abcde...", "...efghi"),
        ("abcdefghi", 3, "...", "..."),
        ("東京" * 4, 8, "東京...", "...東京"),
    ],
)
def test_a_text_takes_no_more_than_its_room(text: str, longest: int, beginning: str, end: str) -> None:
    assert shortened(text, longest, width=cell_len) == beginning
    assert shortened(text, longest, keeps_end=True, width=cell_len) == end


def test_characters_are_counted_where_no_width_is_given() -> None:
    assert shortened("東京" * 4, 8) == "東京" * 4
    assert shortened("東京" * 4, 7) == "東京東京..."
