"""Files with any value at any key: what is written reads back, and no key of it is unknown here."""

from __future__ import annotations

import random
from typing import Any

import pytest

from holdfast.config.load import from_mapping
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.yaml12 import Document, parse_text
from holdfast.errors import ConfigError
from holdfast.features.rescue.config_import import run_yaml
from holdfast.features.rescue.configuration.convert import convert
from holdfast.features.rescue.systems.table import READABLE, VERBS, load_key_table

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 0.5, -0.5, "", "x", "no", "1e-5", [], [1], ["a:b.py"], {}, {"a": 1}, [{"path": "p"}],
    [{"x": 1}], "\x1b[2J\nq: 1", "a.py:f", "${seed}", "#x", "- y", '"', "'", 10**30, float("inf"), "\u00e9",
]  # fmt: skip


def drawn(keys: list[str], draws: random.Random) -> dict[str, Any]:
    """Return a tree with some of a system's keys and any values."""
    values: dict[str, Any] = {}
    for key in draws.sample(keys, draws.randint(1, 8)):
        *above, last = key.split(".")
        place = values
        for part in above:
            below = place.setdefault(part, {})
            place = below if isinstance(below, dict) else {}
        place.setdefault(last, draws.choice(VALUES))
    return values


@pytest.mark.parametrize("system", READABLE)
def test_any_value_at_any_key_is_converted_or_left_to_a_person(system: str) -> None:
    draws = random.Random(0)
    keys = list(load_key_table(system).entries)
    for _ in range(200):
        verb = draws.choice([None, *VERBS])
        try:
            conversion = convert(Document("theirs.yaml", drawn(keys, draws)), system, verb, draws.choice([1, 8]))
        except ConfigError:
            continue

        ours = parse_text(run_yaml(conversion, "theirs.yaml"), "ours.yaml").values

        assert ours == conversion.values()
        try:
            from_mapping(ours, ROOTS[conversion.verb])
        except ConfigError as error:
            assert "unknown key" not in str(error)
