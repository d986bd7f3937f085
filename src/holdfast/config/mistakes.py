"""What is wrong with a tree: the place of each mistake, what is wrong, and what to write instead.

Rules between keys are looked at in a section whose own keys are right, and whose sections below are right.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from holdfast import registry
from holdfast.config.base import PATH, OneOrSeveral, Section, keys_of, kinds_of
from holdfast.config.tree import KeyType, all_keys, dotted, key_path, section_at
from holdfast.config.yaml12 import Document, KeyPath, Place, to_flow
from holdfast.text.shortening import shortened

_WANTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text; put it in quotes",
    "list_type": "a list, as in [a, b]",
    "tuple_type": "a list, as in [a, b]",
    "too_long": "shorter",
}
"""What a value should have been, by pydantic's name of the error."""


def explain(
    error: ValidationError, document: Document, root: type[BaseModel], missed: Sequence[KeyPath] = ()
) -> list[tuple[Place, str]]:
    """Return the place and the text of every mistake: `a.b: what is wrong; what to do`.

    Args:
        error: What pydantic found.
        document: The files.
        root: Their root model.
        missed: Keys with a mark in the place of their value, which is no mistake of its own.
    """
    grouped: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False):
        grouped.setdefault(key_path(root, item["loc"], document.values), []).append(item)
    return [
        (_place(key, items, document), f"{dotted(key)}: {text}")
        for path, items in grouped.items()
        for key, text in _described(path, items, document, root)
        if not any(key[: len(marked)] == marked for marked in missed)
    ]


def _place(key: KeyPath, items: Sequence[Any], document: Document) -> Place:
    """Return the place of a mistake; that of a kind that does not exist is where the kind is written."""
    kind = (*key, "kind")
    return document.place(kind if items[0]["type"] == "union_tag_invalid" and kind in document.places else key)


def _described(
    path: KeyPath, items: Sequence[Any], document: Document, root: type[BaseModel]
) -> Iterator[tuple[KeyPath, str]]:
    for item in items:
        if item["type"] == "rules":
            for key, text in item["ctx"]["mistakes"]:
                yield (*path, *(int(step) if step.isdecimal() else step for step in key.split("."))), text
            return
    yield path, _describe(path, items, document, root)


def _describe(path: KeyPath, items: Sequence[Any], document: Document, root: type[BaseModel]) -> str:
    first = items[0]
    match first["type"]:
        case "extra_forbidden":
            return _unknown_key(path, document, root)
        case "missing" if isinstance(first["loc"][-1], int):
            return f"{shortened(repr(first['input']), 60)} has too few values"
        case "missing":
            return f"required, and missing{example(path, document.values, root)}"
        case "union_tag_invalid":
            kinds = first["ctx"]["expected_tags"].split("'")[1::2]  # of pydantic's `'a', 'b' or 'c'`
            if instead := _instead_of_kind(first["ctx"]["tag"], path, document, root):
                return f"there is no kind {first['ctx']['tag']!r}: {instead}"
            return _no_such_kind(first["ctx"]["tag"], kinds) + path_of_default(path, document.values, root)
        case "value_error":
            return str(first["ctx"]["error"])
        case "too_short":
            least = first["ctx"]["min_length"]
            return f"this list has {first['ctx']['actual_length']} items, and needs at least {least}"
        case "model_type" | "model_attributes_type" | "dict_type" if first["input"] is None:
            remedy = example(path, document.values, root) or "; remove it, or give it keys"
            return f"this section is empty{remedy} ({{}} is a section with its defaults)"
        case "none_required":
            return f"{shortened(repr(first['input']), 60)} has no use for this command; remove it, or write null"
        case "model_type" | "model_attributes_type" | "dict_type":
            text = f"this is a section with keys of its own, not the value {shortened(repr(first['input']), 60)}"
            return text + written_as_section(path, first["input"], document.values, root)
    expected = [
        _WANTED.get(item["type"], str(item["msg"]).removeprefix("Value error, ").removeprefix("Input should be "))
        for item in items
    ]
    return f"{shortened(repr(items[0]['input']), 60)} should be {' or '.join(dict.fromkeys(expected))}"


def _unknown_key(path: KeyPath, document: Document, root: type[BaseModel]) -> str:
    """Say which key was meant: of another kind, in another place, or spelled otherwise."""
    name = str(path[-1])
    section, choice = section_at(root, path[:-1], document.values)
    assert section is not None, "pydantic finds unknown keys in sections only"
    if issubclass(section, Section) and name in section.removed:
        return f"there is no such key: {section.removed[name]}"
    if belonging := belongs_to_sibling(path, document.values, root):
        return belonging
    kinds = [kinds_of(member)[0] for member in choice.sections if name in keys_of(member)]
    if kinds:
        kind = " or ".join(kinds_of(section))
        # `reward` and `rewards` are two sections, and a key of one is easily written into the other.
        plural = f"{path[0]}s.{name}"
        meant = f"; did you mean {plural}?" if plural in all_keys(root) else ""
        return f"kind {kind} has no such key; it belongs to kind {' and '.join(kinds)}{meant}"
    return _misplaced_or_misspelt(name, list(keys_of(section)), sorted(set(all_keys(root))))


def _misplaced_or_misspelt(name: str, siblings: Sequence[str], everywhere: Sequence[str]) -> str:
    above, dot, last = name.rpartition(".")
    if dot and name in everywhere:
        return f"dots are for the command line; in a file write {last} inside {above}"
    elsewhere = _with_last_word(name, everywhere)
    if explanation := _of_other_system(name, elsewhere, everywhere):
        return f"unknown key; {explanation}"
    begun = [sibling for sibling in siblings if sibling.startswith(f"{name}_")]
    if begun:
        return f"unknown key; did you mean {' or '.join(begun[:3])}?"
    if elsewhere and not _close(name, siblings, 0.85):
        return f"unknown key here; it belongs elsewhere: did you mean {' or '.join(elsewhere[:3])}?"
    by_last_word = {dotted.split(".")[-1]: dotted for dotted in sorted(everywhere, key=lambda key: "*" not in key)}
    close = _close(name, siblings) or by_last_word.get(_close(name, list(by_last_word), 0.8) or "")
    return f"unknown key; did you mean {close}?" if close else f"unknown key; this section has {', '.join(siblings)}"


def _of_other_system(name: str, elsewhere: Sequence[str], everywhere: Sequence[str]) -> str:
    """Say what a key of another system is here, and what differs; "" for one of ours, and where no system has it."""
    return "" if elsewhere else str(registry.load(registry.KEY_HINT)(name, everywhere))


def _with_last_word(name: str, everywhere: Sequence[str]) -> list[str]:
    """Return the keys that end so; those under names of the user's (`*`) only if there is no other."""
    matches = [dotted for dotted in everywhere if dotted.split(".")[-1] == name]
    return [dotted for dotted in matches if "*" not in dotted] or matches


def _instead_of_kind(kind: str, path: KeyPath, document: Document, root: type[BaseModel]) -> str:
    """Say what to write instead of a kind that people look for; "" for any other."""
    members = [one for one in section_at(root, path, document.values)[1].sections if issubclass(one, Section)]
    return next((member.removed_kinds[kind] for member in members if kind in member.removed_kinds), "")


def _no_such_kind(kind: str, kinds: Sequence[str]) -> str:
    close = _close(kind, kinds)
    meant = f" Did you mean {close}?" if close else ""
    return f"there is no kind {kind!r}.{meant} Kinds: {', '.join(kinds)}"


def _close(typed: str, candidates: Sequence[str], cutoff: float = 0.75) -> str | None:
    exchanged = [name for name in candidates if sorted(name) == sorted(typed)]
    if exchanged:
        return exchanged[0]
    return next(iter(difflib.get_close_matches(typed, candidates, n=1, cutoff=cutoff)), None)


_LONGEST = 200
"""Characters of a line that is shown; a longer section is named alone."""


def example(path: KeyPath, values: Any, root: type[BaseModel]) -> str:
    """Return `; for example KEY: ...` of a required key that its section gives an example of; else ""."""
    section = section_at(root, path[:-1], values)[0]
    field = None if section is None else keys_of(section).get(str(path[-1]))
    if field is None or not field.is_required() or not field.examples:
        return ""
    return f"; for example {to_flow({str(path[-1]): field.examples[0]})}"


def written_as_section(path: KeyPath, value: Any, values: Any, root: type[BaseModel]) -> str:
    """Return what a text in the place of a section may have meant: a kind of one of its keys, or its path; else ""."""
    section = section_at(root, path, values)[0]
    if section is None or not isinstance(value, str):
        return ""
    kinds = (name for name, shape in _unions(section) if shape.of_kind(value).sections)
    key = next(kinds, PATH if PATH in keys_of(section) else None)
    return "" if key is None else f"; write {to_flow({str(path[-1]): {key: value}})}"


def path_of_default(path: KeyPath, values: Any, root: type[BaseModel]) -> str:
    """Return how a path is written where it stands in the place of a kind; "" where it is none, or takes none."""
    choice = section_at(root, path, values)[1]
    value = _at(path, values)
    default = choice.of_kind(choice.default_kind).section
    if not isinstance(value, str) or "/" not in value or default is None or PATH not in keys_of(default):
        return ""
    return f". A path is written {to_flow({str(path[-1]): {PATH: value}})}"


def belongs_to_sibling(path: KeyPath, values: Any, root: type[BaseModel]) -> str:
    """Say of an unknown key that it belongs to an alternative that is chosen beside it; "" if it does not.

    `{loss: dpo, beta: 0.1}` becomes `loss: {kind: dpo, beta: 0.1}`, with all other keys that belong there.
    """
    name, section = str(path[-1]), section_at(root, path[:-1], values)[0]
    written = _at(path[:-1], values)
    if section is None or not isinstance(written, Mapping):
        return ""
    strangers = {key: value for key, value in written.items() if key not in keys_of(section)}
    written_unions = [(key, shape) for key, shape in _unions(section) if key in written]
    # The default of a list has no dotted name that could be written.
    absent = [
        (key, shape)
        for key, shape in _unions(section)
        if key not in written and shape.default_kind != PATH and _takes_one_or_several(section, key)
    ]
    for key, shape in [*written_unions, *absent]:
        form = _with_strangers(shape, written.get(key), strangers, name)
        if form is not None:
            line = to_flow({key: form})
            return f"unknown key here; it belongs to {key}: write {line if len(line) <= _LONGEST else 'it inside'}"
    return _of_kind_not_chosen(path, written_unions, written, root)


def _of_kind_not_chosen(
    path: KeyPath, written_unions: list[tuple[str, KeyType]], written: Mapping[str, Any], root: type[BaseModel]
) -> str:
    """Say that another kind of a section beside the key has it, where no other section of the tree does."""
    name, above = str(path[-1]), [str(step) for step in path[:-1]]
    elsewhere = [dotted.split(".") for dotted in all_keys(root) if dotted.split(".")[-1] == name]
    for key, shape in written_unions:
        if isinstance(written[key], list) or any(dotted[: len(above) + 1] != [*above, key] for dotted in elsewhere):
            continue
        kinds = [kinds_of(member)[0] for member in shape.sections if name in keys_of(member)]
        if kinds:
            kind = shape.long_form(written[key]).get("kind", shape.default_kind)
            return f"unknown key here, and {key} of kind {kind} has none; it belongs to kind {' and '.join(kinds)}"
    return ""


def _unions(section: type[BaseModel]) -> Iterator[tuple[str, KeyType]]:
    """Yield the keys of a section that hold alternatives, one or several."""
    for key in keys_of(section):
        shape = KeyType((section,)).below(key)
        if shape.default_kind is not None:
            yield key, shape


def _takes_one_or_several(section: type[BaseModel], key: str) -> bool:
    return any(isinstance(mark, OneOrSeveral) for mark in keys_of(section)[key].metadata)


def _with_strangers(shape: KeyType, value: Any, strangers: Mapping[str, Any], name: str) -> Any:
    """Return a value with the keys that belong into it; None where `name` is not one of them."""
    items = value if isinstance(value, list) else [value]
    for index, item in enumerate(items):
        long = {"kind": shape.default_kind} if item is None else shape.long_form(item)
        if not isinstance(long, Mapping):
            continue
        member = shape.of_kind(str(long.get("kind", shape.default_kind))).section
        if member is not None and name in keys_of(member) and name not in long:
            form = {**long, **{key: stranger for key, stranger in strangers.items() if key in keys_of(member)}}
            return [*items[:index], form, *items[index + 1 :]] if isinstance(value, list) else form
    return None


def _at(path: KeyPath, values: Any) -> Any:
    for key in path:
        values = values[key]
    return values
