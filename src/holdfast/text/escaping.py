"""Escape text that Holdfast did not write, before it is printed, logged or used as the name of a metric.

Rewards, observers, templates, rows and models may return any string: unpaired surrogates that cannot be encoded as
UTF-8, control characters that clear a terminal, marks that reverse the reading direction.
"""

from __future__ import annotations

_WAYS = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escaped(text: str, keep: str = "") -> str:
    r"""Return a text in which every character that cannot be printed stands as Python writes it, like \x1b.

    Control characters, line ends, halves of surrogate pairs, marks of direction, private and unassigned characters, and
    every blank but the space; the result can be encoded and is one line. Text that was escaped stays as it is.

    Args:
        text: Anything.
        keep: Characters that stay, such as the line end of a paragraph.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else _written(character) for character in text
    )


def escaped_paragraph(text: str) -> str:
    """Return a text as `escaped` does, with its line ends and tabs."""
    return escaped(text, "\n\t")


def with_whole_characters(text: str) -> str:
    """Return a text that any tokenizer takes: two halves of a pair are one character, a half alone is U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def error_words(error: BaseException) -> str:
    """Return an exception's class name and message as one escaped line.

    Never raises, although `str` of an exception class that a user wrote may.
    """
    try:
        text = str(error)
    except Exception as unprintable:  # noqa: BLE001 - one more thing that such a class can do
        text = f"(its text raises {type(unprintable).__name__})"
    text, name = escaped(" ".join(text.split())), escaped(type(error).__name__)
    return f"{name}: {text}" if text else name


def _written(character: str) -> str:
    number = ord(character)
    if character in _WAYS:
        return _WAYS[character]
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
