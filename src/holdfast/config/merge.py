"""Several files as one document: a later file wins key by key, and every key keeps its file and line.

Lists are replaced whole, and so is a section whose kind a later file changes, since the keys of one kind say nothing of
another. Null takes back what an earlier file says, where the key itself has no meaning for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from holdfast.config.tree import KeyType, section_at, takes_null
from holdfast.config.yaml12 import Document, KeyPath


def merged(documents: Sequence[Document], root: type[BaseModel]) -> Document:
    """Return one document; the first one is changed."""
    first, *later_documents = documents
    for later in later_documents:
        merge = _Merge(replace(first, later_files=[*first.later_files, later.file]), later, root)
        merge.mappings(first.values, later.values, ())
        first = merge.into
        first.twice.extend(later.twice)
    return first


@dataclass(frozen=True)
class _Merge:
    """A file that goes into a document."""

    into: Document
    later: Document
    root: type[BaseModel]

    def mappings(self, values: dict[str, Any], later: Mapping[str, Any], path: KeyPath) -> None:
        """Put the keys of a mapping into another one."""
        for key, value in later.items():
            here = (*path, key)
            shape = section_at(self.root, here, self.into.values)[1]
            before: Any = shape.long_form(values.get(key)) if shape.is_union else values.get(key)
            after: Any = shape.long_form(value) if shape.is_union else value
            if _is_same_section(shape, before, after):
                values[key] = before
                self.mappings(before, after, here)
            elif value is None and key in values and not takes_null(self.root, here, self.into.values):
                del values[key]
                self._take_lines(here)
            else:
                values[key] = value
                self._take_lines(here)

    def _take_lines(self, path: KeyPath) -> None:
        """Replace the lines of a key and of all keys below it."""
        document, size = self.into, len(path)
        for key in [key for key in document.lines if key[:size] == path]:
            del document.lines[key]
            document.later_keys.pop(key, None)
        lines = {key: line for key, line in self.later.lines.items() if key[:size] == path}
        document.lines.update(lines)
        document.later_keys.update(dict.fromkeys(lines, self.later.file))


def _is_same_section(shape: KeyType, before: Any, after: Any) -> bool:
    """Say whether two values are mappings that can be merged: of one kind, where they have kinds."""
    if not isinstance(before, dict) or not isinstance(after, Mapping):
        return False
    kind = before.get("kind", shape.default_kind)
    return not shape.is_union or bool(after.get("kind", kind) == kind)
