"""Builds HTML elements. No other module turns text into markup; text is made printable and then escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from holdfast.text.escaping import escaped_paragraph


def text(value: object) -> str:
    """Return foreign text as markup that shows it and does nothing."""
    return escape(escaped_paragraph(str(value)), quote=True)


def tag(name: str, *content: str, **attributes: str | bool | None) -> str:
    """Return an element around markup; of its attributes, `_` at the end is cut and elsewhere becomes `-`."""
    markup = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        written = key.rstrip("_").replace("_", "-")
        markup.append(written if value is True else f'{written}="{text(value)}"')
    return f"<{' '.join(markup)}>{''.join(content)}</{name}>"


def html_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), caption: str
) -> str:
    """Return a table that scrolls by itself where it is too wide.

    Args:
        heads: Of the columns, as text.
        rows: Cells as markup.
        numbers: Columns whose cells are aligned at their right.
        caption: For those who hear the page.
    """

    def classes(column: int) -> str | None:
        return "number" if column in numbers else None

    head = "".join(tag("th", text(name), scope="col", class_=classes(column)) for column, name in enumerate(heads))
    body = "\n".join(
        tag("tr", *(tag("td", cell, class_=classes(column)) for column, cell in enumerate(row))) for row in rows
    )
    table = tag("table", tag("caption", text(caption)), tag("thead", tag("tr", head)), tag("tbody", body))
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def section(identity: str, title: str, *content: str) -> str:
    """Return a section with its heading."""
    return tag("section", tag("h2", text(title), id=f"{identity}-title"), *content, id=identity)
