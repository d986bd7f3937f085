"""The sizes by which a pickle is refused are those of what it holds."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.features.rescue.reading.dcp_metadata import read_dcp_metadata
from holdfast.features.rescue.reading.modest_pickles import Immodest, PickleInstructions, names_in
from holdfast.features.rescue.reading.pickles import unpickled
from holdfast.features.rescue.reading.record import DamagedFile
from holdfast.features.rescue.reading.torch_file import TorchFile


def size(value: Any) -> int:
    """Return the elements of a value and of all that it holds, each as often as it is held."""
    if isinstance(value, tuple | list):
        return 1 + sum(map(size, value))
    if isinstance(value, dict):
        return 1 + sum(map(size, value.keys())) + sum(map(size, value.values()))
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


def _put(number: int) -> bytes:
    return b"r" + number.to_bytes(4, "little")


def _text(text: str) -> bytes:
    return b"X" + len(text.encode()).to_bytes(4, "little") + text.encode()


def _numbers(count: int) -> bytes:
    return b"".join(b"J" + number.to_bytes(4, "little") for number in range(count))


_DICTIONARY = b"}" + _put(0) + b"(" + _numbers(10_000) + b"u0"
_ORDERED, _RECORDED = b"ccollections\nOrderedDict\n" + _put(1), b"cnumpy\ndtype\n" + _put(1)
_STORAGE, _ENCODE = b"ctorch.storage\nUntypedStorage\n", b"c_codecs\nencode\n"
_REBUILD = b"ctorch._tensor\n_rebuild_from_type_v2\n("

HOSTILE = {
    "a key that is nested so deep that its hash ends the process": (b"})" + b"\x85" * 300_000 + b"Ns", "deep"),
    "a list that is nested deep": (b"]" * 300 + b"a" * 299, "deep"),
    "an object that is nested deep": ((_RECORDED + b")R") * 300 + b"b" * 299, "deep"),
    "dictionaries in dictionaries": (b"}N" * 300 + b"N" + b"s" * 300, "deep"),
    "text that becomes longer": (_ENCODE + _text("x") + _text("utf-16") + b"\x86R", "encodes text"),
    "text of which nobody knows the length": (_ENCODE + b"N" + _text("latin1") + b"\x86R", "encodes text"),
    "arguments for the encoding in a list": (_ENCODE + b"](" + _text("x") + _text("latin1") + b"eR", "encodes text"),
    "one long text many times": (
        _ENCODE + _put(0) + _text("x" * 100_000) + _put(1) + _text("latin1") + _put(2) + b"\x86R"
        + (b"h\x00h\x01h\x02\x86R" * 1000),
        "more memory",
    ),
    "a storage of any size": (_STORAGE + b"J\x00\x00\x00\x40\x85R", "makes memory"),
    "a new storage": (_STORAGE + b"J\x00\x00\x00\x40\x85\x81", "makes memory"),
    "a storage by torch's function": (
        _REBUILD + _STORAGE + _put(0) + b"h\x00J\x00\x00\x00\x40\x85NtR",
        "makes a tensor with a function",
    ),
    "a function in a function": (_REBUILD + _REBUILD[:-1] + b"N)NtR", "makes a tensor with a function"),
    "copies of a dictionary": (_DICTIONARY + _ORDERED + b"0" + b"h\x01h\x00\x85R" * 2000, "more memory"),
    "copies of a dictionary that grew in its tuple": (
        b"}" + _put(0) + b"\x85" + _put(2) + b"0h\x00(" + _numbers(10_000) + b"u0" + _ORDERED + b"0"
        + b"h\x01h\x02R" * 2000,
        "more memory",
    ),
    "copies of a tuple": (
        b"(" + _numbers(20_000) + b"t" + _put(0) + b"0" + _RECORDED + b"0" + b"h\x01h\x00R" * 5000,
        "more memory",
    ),
    "copies of a state": (_DICTIONARY + _RECORDED + b"0" + b"h\x01)Rh\x00b" * 2000, "more memory"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_takes_more_than_goes_with_its_length_is_refused(name: str) -> None:
    body, words = HOSTILE[name]

    with pytest.raises(Immodest, match=words):
        names_in(b"\x80\x02" + body + b".")


def test_a_nested_key_is_damage_and_no_end_of_the_process(tmp_path: Path) -> None:
    data = b"\x80\x02" + HOSTILE["a key that is nested so deep that its hash ends the process"][0] + b"."
    actor = tmp_path / "global_step_1" / "actor"
    actor.mkdir(parents=True)
    with zipfile.ZipFile(actor / "model_world_size_1_rank_0.pt", "w") as archive:
        archive.writestr("x/data.pkl", data)
        archive.writestr("x/version", "3")

    command = [sys.executable, "-m", "holdfast.cli.main", "checkpoint", "check", actor]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 1, done
    assert "nests values more than 200 deep" in done.stdout
    with pytest.raises(CheckpointCorrupt, match="deep"):
        read_dcp_metadata(data, "here")


def test_objects_that_are_filled_after_they_became_parts_are_not_hashed() -> None:
    """The hash of each asks for the hash of the next one twice."""
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    made = b"".join(index + b")\x81" + _put(number) + b"0" for number in range(21))
    filled = b"".join(
        b"h%c}(" % number + _text("fqn") + b"h%c" % (number + 1) + _text("offset") + b"h%c" % (number + 1) + b"ub0"
        for number in range(20)
    )

    with pytest.raises(CheckpointCorrupt, match="part of another"):
        read_dcp_metadata(b"\x80\x02" + made + filled + b"}h\x00Ns.", "here")


def test_a_tensor_that_repeats_its_numbers_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"small": torch.ones(1).expand(2**22), "large": torch.ones(1).expand(2**22 + 1)}, file)
    opened = TorchFile(file)
    value = opened.value()

    opened.check(value["small"])
    with pytest.raises(DamagedFile, match="repeats the numbers of file/data/1"):
        opened.check(value["large"])


def test_names_of_other_libraries_outlive_two_loads_at_once() -> None:
    def load(_: int) -> object:
        return unpickled(data)

    data = pickle.dumps([{"number": number} for number in range(300)], 2)
    others = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([Fraction]), ThreadPoolExecutor(4) as pool:
        list(pool.map(load, range(200)))
        assert set(torch.serialization.get_safe_globals()) == {*others, Fraction}


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
