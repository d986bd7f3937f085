"""The sizes by which a pickle is refused are those of what it holds."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from typing import Any

import pytest

from holdfast.features.rescue.reading.modest_pickles import Sizes, differ_where_it_matters, is_modest


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
        data = pickle.dumps(value, protocol)

        assert Sizes(data, 2**62).follow() == size(pickle.loads(data))
        assert is_modest(data)


def test_a_pickle_that_differs_in_constants_alone_has_the_sizes_of_the_other() -> None:
    chance, alike = random.Random(21), 0
    for _ in range(600):
        data = pickle.dumps(drawn(chance, 5, []), chance.choice([2, 4]))
        before = Sizes(data, 2**62, marks_constants=True)
        size_before = before.follow()
        free = [at for at, matters in enumerate(before.matters) if not matters]
        changed = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.choice(free) if free and chance.random() < 0.9 else chance.randrange(len(data))] ^= 1
        if differ_where_it_matters(bytes(changed), data, bytes(before.matters)):
            continue
        alike += bytes(changed) != data

        assert Sizes(bytes(changed), 2**62).follow() == size_before
    assert alike > 200


def test_a_bomb_as_long_as_the_pickle_before_it_is_refused() -> None:
    value: Any = ("x",)
    for _ in range(40):
        value = (value, value)
    bomb = pickle.dumps([value], 2)
    length = len(bomb) - 8
    benign = b"\x80\x02X" + length.to_bytes(4, "little") + b"x" * length + b"."
    assert len(pickle.loads(benign)) == length

    assert is_modest(benign)
    assert not is_modest(bomb)
    assert is_modest(benign)
    assert not is_modest(bomb)


def test_a_machine_without_memory_for_a_large_pickle_is_no_fault_of_the_pickle() -> None:
    script = """
import pickle, resource
from holdfast.features.rescue.reading.modest_pickles import is_modest
data = pickle.dumps(b"x" * 200_000_000, 4)
size = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (size + 50_000_000,) * 2)
assert is_modest(data)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
