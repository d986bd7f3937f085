"""Answers of servers with one change drawn at random: values, types, order, length and depth."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

_RAW = b"\x00raw\x00"


VALUES = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**70, 10**400, 0.5, -0.5, 1e-9, 7.0, 1e308, math.nan, math.inf, -math.inf,
    "", "abc", "7", "\x1b[31m", [], [None], {}, {"a": 1},
)  # fmt: skip


def mutated(tree: Any, draw: random.Random) -> tuple[bytes, str]:
    """Return an answer with one change drawn at random, as text, and the place of the change."""
    *way, last = where = draw.choice(list(_places(tree)))
    parent = tree
    for step in way:
        parent = parent[step]
    match draw.randrange(8):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        case 2 if isinstance(parent, list):
            draw.shuffle(parent)
        case 3:
            parent[last] = _RAW.decode()
        case 4:
            parent[last] = draw.choice([str(parent[last])[:80], [parent[last]], {"id": parent[last]}])
        case _:
            parent[last] = draw.choice(VALUES)
    depth = draw.choice([3, 400, 100_000])
    text = json.dumps(tree).encode().replace(json.dumps(_RAW.decode()).encode(), b"[" * depth + b"]" * depth)
    return text, ".".join(map(str, where))


def _places(tree: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in children:
        yield (*before, name)
        yield from _places(value, (*before, name))
