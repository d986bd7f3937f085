"""Cut a text to a length, with a mark where it was cut."""

from __future__ import annotations

from collections.abc import Callable

_MARK = "..."


def shortened(text: str, longest: int, *, keeps_end: bool = False, width: Callable[[str], int] = len) -> str:
    """Return a text that is no longer than `longest`, its mark included; a text that fits stays as it is.

    Args:
        text: Escaped, where it is printed: an escape sequence has more characters than what it stands for.
        longest: Largest width of what is returned, if it is 3 or more.
        keeps_end: Whether the beginning is cut.
        width: What measures a text: its characters, or the cells that it takes on a terminal.
    """
    if width(text) <= longest:
        return text
    room = max(longest - len(_MARK), 0)
    kept = text[len(text) - room :] if keeps_end else text[:room]
    while width(kept) > room:
        kept = kept[1:] if keeps_end else kept[:-1]
    return _MARK + kept if keeps_end else kept + _MARK
