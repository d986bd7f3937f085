"""Files and manifests that lie, each made to fit its hashes: named on all ranks, and nothing is loaded or renamed."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointCorrupt, CheckpointError
from holdfast.checkpoint.format.manifest import Manifest, parse
from holdfast.checkpoint.format.verification import check_headers
from holdfast.checkpoint.inspect.compare import differences
from holdfast.checkpoint.keep.find import one
from holdfast.checkpoint.place.hashing import hash_tensor
from holdfast.cli.commands.checkpoint.views import description
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, contents, optimizer_of, save_after
from tests.checkpoint.damage import SHARDS, Touch, edit_manifest, rewrite_manifest
from tests.checkpoint.mutations import bind

TRAINED = "model.blocks.0.trained.weight"
"""A matrix of 5 x 5, of which rank 0 has three rows and rank 1 two."""
GROWTH_MIB = 150
FAST, MANY = 60, 600
LOADS_A_CALL = 60

Lie = Callable[[Path], None]
Saved = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def saved(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a run with two checkpoints, and what the newer one holds."""
    run = tmp_path_factory.mktemp("saved")
    pools(2).run(save_after, str(run / "step-00000001"), 1)
    return run, pools(2).run(save_after, str(run / "step-00000002"), 2)[0]


def copied(saved: Saved, place: Path) -> Path:
    return Path(shutil.copytree(saved[0], place)) / "step-00000002"


def text_of(data: bytes) -> tuple[bytes, int]:
    """Return the text of a header, and where it ends in the file."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], end


def in_header(change: Callable[[dict[str, Any]], object]) -> Lie:
    """Return what changes the header of rank 1's file, in its length if the text is not longer."""

    def lie(folder: Path) -> None:
        data = (folder / SHARDS[1]).read_bytes()
        text, end = text_of(data)
        header = json.loads(text)
        change(header)
        changed = json.dumps(header, separators=(",", ":")).encode().ljust(len(text))
        (folder / SHARDS[1]).write_bytes(len(changed).to_bytes(8, "little") + changed + data[end:])
        rewrite_manifest(folder)

    return lie


def in_file(change: Callable[[bytes], bytes]) -> Lie:
    def lie(folder: Path) -> None:
        (folder / SHARDS[1]).write_bytes(change((folder / SHARDS[1]).read_bytes()))
        rewrite_manifest(folder)

    return lie


def in_manifest(change: Callable[[dict[str, Any]], object]) -> Lie:
    return lambda folder: edit_manifest(folder, change)


def in_tensor(**fields: Any) -> Lie:
    return in_manifest(lambda body: body["tensors"][TRAINED].update(fields))


def in_chunk(**fields: Any) -> Lie:
    return in_manifest(lambda body: body["tensors"][TRAINED]["chunks"][1].update(fields))


def in_place_of_a_file(make: Callable[[Path], object]) -> Lie:
    def lie(folder: Path) -> None:
        (folder / SHARDS[1]).unlink()
        make(folder / SHARDS[1])

    return lie


def first_two(header: dict[str, Any]) -> list[str]:
    return [name for name in header if name != "__metadata__"][:2]


def share_offsets(header: dict[str, Any]) -> None:
    first, second = first_two(header)
    header[second]["data_offsets"] = header[first]["data_offsets"]


def exchange_shapes(header: dict[str, Any]) -> None:
    header[TRAINED]["shape"].reverse()


def name_twice(data: bytes) -> bytes:
    """Give one of two names of one length twice."""
    return data.replace(b"blocks.1.trained.weight", b"blocks.0.trained.weight")


def ranks_exchanged(folder: Path) -> None:
    first, second = ((folder / file).read_bytes() for file in SHARDS[:2])
    (folder / SHARDS[0]).write_bytes(second)
    (folder / SHARDS[1]).write_bytes(first)
    rewrite_manifest(folder)


def steps_exchanged(folder: Path) -> None:
    shutil.copyfile(folder.with_name("step-00000001") / SHARDS[1], folder / SHARDS[1])
    rewrite_manifest(folder)


def in_a_file_that_is_listed_and_absent(body: dict[str, Any]) -> None:
    body["files"][SHARDS[2]] = dict(body["files"][SHARDS[1]])
    body["tensors"][TRAINED]["chunks"][1]["file"] = SHARDS[2]


def two_in_one_file(body: dict[str, Any]) -> None:
    for chunk in body["tensors"][TRAINED]["chunks"]:
        chunk["file"] = SHARDS[0]


def without_elements(shape: list[int]) -> Lie:
    def add(body: dict[str, Any]) -> None:
        entry = {"shape": shape, "dtype": "float32", "chunks": [], "requires_grad": False}
        body["tensors"]["model.extra"] = entry

    return in_manifest(add)


def link_out(path: Path) -> None:
    outside = path.parents[3] / f"outside-{path.parents[2].name}"
    shutil.copyfile(path.with_name(Path(SHARDS[0]).name), outside)
    path.symlink_to(outside)


CONTRADICTS = r"manifest\.json contradicts itself, although its hash fits: "
OTHER_HEADER = rf"{SHARDS[1]} is damaged: its header does not list the tensors"
DAMAGED = r"manifest\.json is damaged: "

LIES: dict[str, tuple[Lie, str]] = {
    "a header with another shape": (in_header(exchange_shapes), OTHER_HEADER),
    "a header with a longer shape": (in_header(lambda h: h[TRAINED].update(shape=[2**40, 5])), CONTRADICTS),
    "a header with another dtype": (in_header(lambda h: h[TRAINED].update(dtype="I32")), OTHER_HEADER),
    "a header with shared offsets": (in_header(share_offsets), OTHER_HEADER),
    "a header with offsets outside": (in_header(lambda h: h[TRAINED].update(data_offsets=[0, 2**40])), CONTRADICTS),
    "a header with a name twice": (in_file(name_twice), OTHER_HEADER),
    "a header that lacks a name": (in_header(lambda h: h.pop(TRAINED)), OTHER_HEADER),
    "a header of 10 GB": (in_file(lambda data: (10**10).to_bytes(8, "little") + data[8:]), OTHER_HEADER),
    "a header of 0 bytes": (in_file(lambda data: bytes(8) + data[8:]), OTHER_HEADER),
    "nothing but a length": (in_file(lambda data: data[:8]), CONTRADICTS),
    "zeros of the same size": (in_file(lambda data: bytes(len(data))), OTHER_HEADER),
    "files of two ranks exchanged": (ranks_exchanged, rf"{CONTRADICTS}{SHARDS[0]} has \d+ bytes, its tensors make"),
    "the file of another step": (steps_exchanged, "is damaged: its bytes are not those that were saved"),
    "a chunk in a file that is not listed": (in_chunk(file=SHARDS[2]), rf"{CONTRADICTS}'{SHARDS[2]}' is no file of it"),
    "a chunk in a file that is not there": (in_manifest(in_a_file_that_is_listed_and_absent), CONTRADICTS),
    "two chunks in one file": (in_manifest(two_in_one_file), rf"two chunks of {TRAINED} are in one file"),
    "chunks that overlap": (in_chunk(offsets=[2, 0]), rf"{TRAINED}: two of its chunks share elements"),
    "chunks that leave a gap": (in_chunk(sizes=[1, 5]), rf"{TRAINED}: its chunks hold 20 elements of 25"),
    "a chunk outside": (in_chunk(offsets=[4, 0]), rf"{TRAINED}: a chunk at \[4, 0\] of \[2, 5\] lies outside"),
    "negative sizes": (in_chunk(sizes=[-2, -5]), rf"{TRAINED}: a chunk at"),
    "negative offsets": (in_chunk(offsets=[-1, 0]), rf"{TRAINED}: a chunk at"),
    "huge sizes": (in_chunk(sizes=[2**62, 2**62]), rf"{TRAINED}: a chunk at"),
    "a huge shape": (in_tensor(shape=[2**40, 5]), rf"{TRAINED}: its chunks hold"),
    "a shape of more dimensions": (in_tensor(shape=[5, 5, 1]), rf"{TRAINED}: a chunk at"),
    "a negative shape without elements": (without_elements([-2, 0]), r"model\.extra"),
    "a shape without elements beyond a tensor's": (without_elements([2**70, 0]), r"model\.extra"),
    "a shape without elements whose strides are a tensor's no more": (
        without_elements([2**40, 2**40, 0]),
        r"model\.extra",
    ),
    "boolean sizes": (in_chunk(sizes=[True, 5]), rf"{DAMAGED}a shape is not a list of integers"),
    "sizes with a fraction": (in_chunk(sizes=[2.0, 5]), rf"{DAMAGED}a shape is not a list of integers"),
    "a dtype that is none": (in_tensor(dtype="float31"), CONTRADICTS),
    "a dtype that is something else of torch": (in_tensor(dtype="Tensor"), rf"{TRAINED} has the dtype Tensor"),
    "a dtype that is a number": (in_tensor(dtype=32), rf"{DAMAGED}32 is not of the type str"),
    "a dtype of another size": (in_tensor(dtype="float64"), CONTRADICTS),
    "a dtype of the same size": (in_tensor(dtype="int32"), "its header does not list the tensors"),
    "a file that leads out": (in_chunk(file="../x"), rf"{CONTRADICTS}'\.\./x' is no file of it"),
    "an absolute file": (in_chunk(file="/etc/passwd"), rf"{CONTRADICTS}'/etc/passwd' is no file of it"),
    "a file that is a state": (in_chunk(file="trainer.json"), rf"{CONTRADICTS}'trainer.json' is no file of it"),
    "a file that is a list": (in_chunk(file=[]), rf"{DAMAGED}\[\] is not of the type str"),
    "a negative size of a file": (in_manifest(lambda b: b["files"][SHARDS[1]].update(size=-1)), CONTRADICTS),
    "a boolean size of a file": (in_manifest(lambda b: b["files"][SHARDS[1]].update(size=True)), DAMAGED),
    "a huge size of a file": (in_manifest(lambda b: b["files"][SHARDS[1]].update(size=10**30)), CONTRADICTS),
    "a hash that is none": (in_chunk(hash=None), rf"{DAMAGED}None is not of the type str"),
    "a hash of other bytes": (in_chunk(hash="0" * 32), "its bytes are not those that were saved"),
    "a link out": (in_place_of_a_file(link_out), rf"{SHARDS[1]} is no file: it is a link that leads out"),
    "a link to a device": (in_place_of_a_file(lambda f: f.symlink_to("/dev/zero")), rf"{SHARDS[1]} is no file"),
    "a pipe": (in_place_of_a_file(os.mkfifo), rf"{SHARDS[1]} is no file: it is a pipe"),
    "a socket": (in_place_of_a_file(bind), rf"{SHARDS[1]} is no file: it is a socket"),
    "a directory": (in_place_of_a_file(Path.mkdir), rf"lacks {SHARDS[1]}"),
}


def load_each(world: World, paths: list[str], expected: dict[str, Any]) -> tuple[list[tuple[str, str, bool]], int]:
    """Load one after the other.

    Returns:
        What each raised, and whether the model was as before then, or else as `expected`; growth of memory in MiB.
    """
    found, toy = [], None
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in paths:
        if toy is None:
            toy = build(world, seed=1)
            optimizer = optimizer_of(toy)
            before = contents(toy, optimizer)
        try:
            checkpoint.load(path, toy, optimizer)
        except Exception as error:  # noqa: BLE001 - which one it is, is the question
            found.append((type(error).__name__, str(error), contents(toy, optimizer) == before))
        else:
            found.append(("loaded", "", contents(toy, optimizer) == expected))
            toy = None
    return found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) // 1024


def looked_at(path: Path, whole: Path) -> dict[str, str]:
    """Return what each way of looking at a checkpoint alone raises, by its name; "" where it raises nothing."""

    def read() -> None:
        damaged, sound = one(str(path)), one(str(whole))
        for key, entry in damaged.manifest.tensors.items():
            tensor = damaged.read(key)
            if key in sound.manifest.tensors:
                same = hash_tensor(tensor) == hash_tensor(sound.read(key))
                assert same, f"{key} is read as other numbers"
            assert tuple(tensor.shape) == entry.shape

    def differ() -> None:
        both = one(str(path)), one(str(whole))
        for stored in both:
            check_headers(stored.storage, stored.name, stored.manifest)
        list(differences(*both))

    ways: dict[str, Callable[[], object]] = {
        "verify": lambda: checkpoint.verify(str(path)),
        "show": lambda: list(description(str(path))),
        "read": read,
        "diff": differ,
    }
    found = {}
    for name, look in ways.items():
        found[name] = ""
        try:
            look()
        except CheckpointError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_lie_is_named_on_all_ranks_and_nothing_is_loaded_or_renamed(
    pools: Any, saved: Saved, tmp_path: Path, ranks: int
) -> None:
    copies = {}
    for number, (name, (lie, _)) in enumerate(LIES.items()):
        copies[name] = copied(saved, tmp_path / f"{number}")
        lie(copies[name])
    before = names_below(tmp_path)

    outcomes = pools(ranks).run(load_each, [str(copy) for copy in copies.values()], saved[1])

    assert names_below(tmp_path) == before
    for found, grown in outcomes:
        assert found == outcomes[0][0]
        assert grown < GROWTH_MIB
    for name, (kind, said, untouched) in zip(LIES, outcomes[0][0], strict=True):
        assert untouched, name
        if name == "a dtype of the same size":  # that the model has another is known before anything is read
            assert (kind, TRAINED.removeprefix("model.") in said) == ("CheckpointMismatch", True)
            continue
        assert kind in {"CheckpointCorrupt", "TensorsDiffer"}, (name, kind, said)
        assert kind == "TensorsDiffer" or re.search(LIES[name][1], said), (name, said)


def test_each_lie_is_named_by_every_way_of_looking(saved: Saved, tmp_path: Path) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, (name, (lie, words)) in enumerate(LIES.items()):
        copy = copied(saved, tmp_path / f"{number}")
        lie(copy)
        before = names_below(copy)

        found = looked_at(copy, saved[0] / "step-00000002")

        assert found["verify"].startswith("CheckpointCorrupt: "), (name, found)
        assert re.search(words, found["verify"]), (name, found)
        if words not in {"its bytes are not those that were saved", LIES["the file of another step"][1]}:
            assert found["show"] == found["verify"] == found["diff"], name
        else:
            assert "its bytes are not those that were saved" in found["read"], name
        assert names_below(copy) == before
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) // 1024 < GROWTH_MIB


@pytest.mark.parametrize("file", ["trainer.json", "rank/shard-1.json"])
def test_a_hostile_pickle_in_the_place_of_a_state_is_never_run(
    pools: Any, saved: Saved, tmp_path: Path, file: str
) -> None:
    copy, target = copied(saved, tmp_path / "run"), tmp_path / "executed"
    (copy / file).write_bytes(pickle.dumps(Touch(target)))
    rewrite_manifest(copy)

    outcomes = pools(2).run(load_each, [str(copy)], saved[1])

    assert outcomes[0][0] == outcomes[1][0]
    assert [(kind, untouched) for kind, _, untouched in outcomes[0][0]] == [("CheckpointCorrupt", True)]
    assert not target.exists()


NASTY: list[Any] = [
    -1,
    0,
    1,
    2,
    True,
    None,
    2**31,
    2**63,
    10**30,
    1.5,
    "",
    "x",
    "../x",
    "tensors",
    [],
    {},
    [1],
    [-1, 0],
]


def lie_in_header(copy: Path, chance: random.Random) -> str:
    """Change bytes of a header, its length, or where it ends; most of the damage keeps the size of the file."""
    file = copy / chance.choice(SHARDS[:2])
    data = bytearray(file.read_bytes())
    _, end = text_of(bytes(data))
    at, kind = chance.randrange(end), chance.choice(["digit", "flip", "length", "cut", "longer", "turned"])
    if kind == "digit":
        at = chance.choice([place for place in range(8, end) if chr(data[place]).isdigit()])
        data[at] = ord(chance.choice("0123456789"))
    elif kind == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "length":
        data[:8] = chance.choice([0, 1, end, len(data), 10**10, 2**63, 2**64 - 1]).to_bytes(8, "little")
    elif kind == "cut":
        del data[at:]
    elif kind == "longer":
        data[at:at] = chance.randbytes(chance.randrange(1, 50))
    else:
        data = data[at:] + data[:at]
    file.write_bytes(data)
    rewrite_manifest(copy)
    return f"{kind} at {at} of {file.name}"


def lie_in_manifest(copy: Path, chance: random.Random) -> str:
    """Put another value in the place of one of a tensor or of a file, or leave it out."""
    told = []

    def change(body: dict[str, Any]) -> None:
        place: Any = body[chance.choice(["tensors", "tensors", "tensors", "files"])]
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = chance.choice(keys)
            told.append(str(key))
            if isinstance(place[key], dict | list) and place[key] and chance.random() < 0.9:
                place = place[key]
                continue
            value = chance.choice([*NASTY, "leave out", "another's"])
            if value == "leave out":
                del place[key]
            else:
                place[key] = place[chance.choice(keys)] if value == "another's" else value
            told.append(repr(value))
            return

    edit_manifest(copy, change)
    return " ".join(told)


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", [FAST, pytest.param(MANY, marks=pytest.mark.slow)])
def test_whatever_is_changed_is_named_or_changes_no_number(
    pools: Any, saved: Saved, tmp_path: Path, count: int
) -> None:
    seen: Counter[str] = Counter()
    for first in range(0, count, LOADS_A_CALL):
        copies, told = [], []
        for number in range(first, min(first + LOADS_A_CALL, count)):
            copy, chance = copied(saved, tmp_path / f"{number}"), random.Random(number)
            told.append((lie_in_header if number % 3 == 0 else lie_in_manifest)(copy, chance))
            copies.append(copy)

        outcomes = pools(2).run(load_each, [str(copy) for copy in copies], saved[1])

        assert outcomes[0][0] == outcomes[1][0]
        assert max(grown for _, grown in outcomes) < GROWTH_MIB
        for copy, what, (kind, said, right) in zip(copies, told, outcomes[0][0], strict=True):
            assert right, (what, kind, said)
            verified = looked_at(copy, saved[0] / "step-00000002")["verify"]
            if kind in {"CheckpointCorrupt", "TensorsDiffer"}:
                assert verified, (what, kind, said)
            else:
                assert kind in {"CheckpointMismatch", "loaded"}, (what, kind, said)
                # A load compares headers and chunks, which are all bytes of a file; its own hash is verified alone.
                assert kind != "loaded" or not verified or "its hash is not the manifest's" in verified, (
                    what,
                    verified,
                )
            seen[kind] += 1
            shutil.rmtree(copy.parent)
    assert seen["CheckpointCorrupt"] > count // 2, seen


@pytest.mark.slow
def test_a_header_that_is_cut_at_any_byte_is_named(saved: Saved, tmp_path: Path) -> None:
    copy = copied(saved, tmp_path / "run")
    data = (copy / SHARDS[1]).read_bytes()
    _, end = text_of(data)
    for at in range(0, end, 7):
        (copy / SHARDS[1]).write_bytes(data[:at] + data[end:].rjust(len(data) - at))
        rewrite_manifest(copy)
        with pytest.raises(CheckpointCorrupt, match=OTHER_HEADER):
            checkpoint.verify(str(copy))


@pytest.mark.parametrize(
    "values",
    [
        {"mesh": {"shard": "2"}},
        {"mesh": []},
        {"metrics": []},
        {"metrics": {"loss": "low"}},
        {"versions": {"torch": 2}},
        {"seconds": "1"},
        {"finite": "no"},
        {"step": "1"},
        {"run_id": 3},
        {"parent_step": "1"},
        {"contents": [1]},
        {"optimizer": []},
        {"format": "3"},
        {"format": True},
    ],
    ids=str,
)
def test_a_field_of_another_type_is_damage_although_the_hash_fits(values: dict[str, Any]) -> None:
    manifest = Manifest("run", 1, ("model",), {}, {})
    assert parse(manifest.to_json(), "m").step == 1

    with pytest.raises(CheckpointCorrupt, match="^m is damaged: "):
        parse(replace(manifest, **values).to_json(), "m")
