"""The sizes by which a pickle is refused are those of what it holds."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest

from holdfast.features.rescue.reading.modest_pickles import Immodest, PickleInstructions, names_in


def size(value: Any) -> int:
    """Return the elements of a value: of tuples and lists those in them; dictionaries and sets are one."""
    if isinstance(value, tuple | list):
        return 1 + sum(map(size, value))
    return 1


def drawn(chance: random.Random, depth: int, made: list[Any]) -> Any:
    """Return a value that holds some of those that were made before it."""
    kind = chance.randrange(7) if depth else chance.randrange(3)
    if kind == 0 and made:
        return chance.choice(made)
    inner = [drawn(chance, depth - 1, made) for _ in range(chance.randrange(5))] if kind > 2 else []
    value = {
        3: lambda: tuple(inner),
        4: lambda: tuple(inner),
        5: lambda: inner,
        6: lambda: {f"{number}": each for number, each in enumerate(inner)},
    }.get(kind, lambda: chance.choice([chance.random(), chance.randrange(10**12), "word", None, True]))()
    made.append(value)
    return value


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_value_has_as_many_elements_as_its_instructions_say(protocol: int) -> None:
    chance = random.Random(protocol)
    for _ in range(300):
        value = drawn(chance, 5, [])
        instructions = PickleInstructions(pickle.dumps(value, protocol))

        assert instructions.names() == frozenset()
        assert instructions.size == size(value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_names_that_a_pickle_asks_for_are_told(protocol: int) -> None:
    data = pickle.dumps({"here": Fraction, "there": [random.Random, random.Random]}, protocol)

    assert names_in(data) == {"fractions.Fraction", "random.Random"}


def test_a_tuple_that_holds_the_one_before_it_twice_is_refused() -> None:
    value: Any = ("x",)
    for _ in range(40):
        value = (value, value)

    with pytest.raises(Immodest, match="more memory or time"):
        names_in(pickle.dumps([value], 2))


def test_a_machine_without_memory_for_a_large_pickle_is_no_fault_of_the_pickle() -> None:
    script = """
import pickle, resource
from holdfast.checkpoint.errors import CheckpointUnreadable
from holdfast.features.rescue.reading.pickles import unpickled
data = pickle.dumps("x" * 200_000_000, 2)
size = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (size + 50_000_000,) * 2)
try:
    unpickled(data)
except CheckpointUnreadable:
    print("no memory")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert done.stdout == "no memory\n", done.stderr
