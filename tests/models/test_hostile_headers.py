"""Safetensors headers and indexes of others' making: refused by name, whatever is in them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ModelError
from holdfast.models.files.origin import refuse_others_than_files
from holdfast.models.files.safetensors_files import (
    INDEX,
    SINGLE,
    StoredTensors,
    read_header,
    weight_files,
)
from tests.checkpoint.mutations import bind

DATA = bytes(64)


def tensor(shape: Any = (16,), offsets: Any = (0, 64), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def written(path: Path, header: Any, data: bytes = DATA) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


HEADERS: dict[str, tuple[Any, str]] = {
    "brackets": (b"[" * 200_000, "its brackets are nested too deeply"),
    "braces": (b'{"a":' * 100_000, "its brackets are nested too deeply"),
    "a list": ([1, 2], "it is no object"),
    "shared bytes": ({"a": tensor(), "b": tensor()}, "b shares bytes with the tensor before it"),
    "a hole at the start": ({"b": tensor((8,), (32, 64))}, "b has bytes of no tensor before it"),
    "a hole between": ({"a": tensor((4,), (0, 16)), "b": tensor((8,), (32, 64))}, "b has bytes of no tensor before it"),
    "negative sizes": ({"b": tensor((-1, -16))}, "b has no dtype, a negative or odd size"),
    "a negative place": ({"b": tensor((16,), (-64, 0))}, "b has no dtype, a negative or odd size"),
    "an end before its start": ({"b": tensor((0,), (64, 0))}, "b has no dtype, a negative or odd size"),
    "a fraction": ({"b": tensor((16.5,))}, "b has no dtype, a negative or odd size"),
    "a truth for a size": ({"b": tensor((True, 16))}, "b has no dtype, a negative or odd size"),
    "a number for a dtype": ({"b": tensor(dtype=7)}, "b has no dtype, a negative or odd size"),
    "three places": ({"b": tensor((16,), (0, 64, 64))}, "b has no dtype, a negative or odd size"),
    "nothing of a tensor": ({"b": 5}, "b has no dtype, a negative or odd size"),
    "an endless number": (b'{"b":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,64]}}', "digits"),
    "sizes whose product overflows": ({"b": tensor((2**62, 2**62))}, "b has 64 bytes"),
    "a name twice": (b'{"b":' + json.dumps(tensor()).encode() + b',"b":' + json.dumps(tensor((8, 2))).encode() + b"}",
                     "b stands twice"),
    "a key twice": (b'{"b":{"dtype":"F32","dtype":"F16","shape":[16],"data_offsets":[0,64]}}', "dtype stands twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_no_writer_makes_is_refused_with_its_file_and_cause(tmp_path: Path, name: str) -> None:
    header, cause = HEADERS[name]
    path = written(tmp_path / "a.safetensors", header)

    with pytest.raises(ModelError, match=cause) as refused:
        read_header(path)

    assert str(path) in str(refused.value)


def test_a_header_of_a_length_that_no_file_has_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**35))
        file.truncate(2**36)

    with pytest.raises(ModelError, match="announces a header of 34,359,738,368 bytes"):
        read_header(path)


def test_tensors_without_a_byte_and_in_any_order_are_no_mistake(tmp_path: Path) -> None:
    header = {"b": tensor((8,), (32, 64)), "none": tensor((0, 4), (32, 32)), "a": tensor((8,), (0, 32))}

    assert list(read_header(written(tmp_path / "a.safetensors", header))) == ["b", "none", "a"]


@pytest.mark.parametrize(
    ("index", "cause"),
    [
        ({"weight_map": {"b": "../outside.safetensors"}}, "it names ../outside.safetensors, which lies outside"),
        ({"weight_map": {"b": "sub/../../outside.safetensors"}}, "which lies outside of its directory"),
        ({"weight_map": {"b": "/etc/passwd"}}, "it names /etc/passwd, which lies outside"),
        ({"weight_map": {"b": ""}}, "which lies outside of its directory"),
        ({"weight_map": {"b": 5}}, "it has no weight_map of tensors to files"),
        ({"weight_map": [["b", 1]]}, "it has no weight_map of tensors to files"),
        ([["weight_map", 1]], "it has no weight_map of tensors to files"),
        (b"[" * 100_000, "its brackets are nested too deeply"),
        (b"\xff\xfe{}", "is damaged"),
    ],
)
def test_an_index_that_leads_out_or_is_none_is_refused_by_name(tmp_path: Path, index: Any, cause: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    written(tmp_path / "outside.safetensors", {"b": tensor()})
    (model / INDEX).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())

    with pytest.raises(ModelError, match=cause) as refused:
        StoredTensors(model)

    assert INDEX in str(refused.value)


@pytest.mark.parametrize("name", [SINGLE, INDEX, "config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [(os.mkfifo, "a pipe"), (bind, "a socket"), (Path.mkdir, "a directory")],
    ids=["pipe", "socket", "directory"],
)
def test_what_is_no_file_in_a_model_directory_is_named_before_a_library_opens_it(
    tmp_path: Path, name: str, make: Callable[[Path], None], kind: str
) -> None:
    make(tmp_path / name)

    with pytest.raises(ModelError, match=f"{name} is {kind}, not a regular file"):
        refuse_others_than_files(tmp_path)


def test_weights_that_are_a_pipe_are_named_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SINGLE)

    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: it is a pipe, not a regular file"):
        weight_files(tmp_path)


def test_links_into_a_cache_and_folders_beside_the_files_are_no_mistake(tmp_path: Path) -> None:
    """The hub's cache keeps its files elsewhere and links to them."""
    written(tmp_path / "blob", {"b": tensor()})
    model = tmp_path / "model"
    (model / "images").mkdir(parents=True)
    (model / SINGLE).symlink_to(tmp_path / "blob")

    refuse_others_than_files(model)

    assert list(StoredTensors(model).headers) == ["b"]


@pytest.mark.parametrize(
    ("names", "reason"), [({}, "no weight_map"), ({"a": "b" * 5000}, "a file of 5,000 characters")]
)
def test_an_index_without_tensors_or_with_an_endless_name_is_damaged(
    tmp_path: Path, names: dict[str, str], reason: str
) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))

    with pytest.raises(ModelError, match=reason):
        weight_files(tmp_path)
