"""Show an image small in a terminal, two pixels in each character."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

COLUMNS, ROWS = 40, 20
"""Characters that an image takes at most."""


def half_blocks(image: Any) -> Text:
    """Return a PIL image in RGB as upper halves of blocks: a colour and a background are two pixels."""
    from rich.text import Text

    scale = min(COLUMNS / image.width, 2 * ROWS / image.height, 1.0)
    width, height = (max(1, round(side * scale)) for side in (image.width, image.height))
    small = image.resize((width, height))
    text = Text()
    for row in range(0, height, 2):
        for column in range(width):
            above = "#{:02x}{:02x}{:02x}".format(*small.getpixel((column, row)))
            below = row + 1 < height and "#{:02x}{:02x}{:02x}".format(*small.getpixel((column, row + 1)))
            text.append("▀", style=f"{above} on {below}" if below else above)
        text.append("\n")
    return text
