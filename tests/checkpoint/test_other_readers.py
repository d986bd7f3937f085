"""The files of a save are plain safetensors: torch's reader and safetensors' own read every tensor of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointCorrupt
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.place.hashing import hash_tensor
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import Block, contents, mixed_dtypes, optimizer_of, step
from tests.checkpoint.damage import SHARDS
from tests.checkpoint.quantised import built, steps
from tests.checkpoint.quantised import contents as quantised_contents
from tests.distributed.toys import Toy, shard

TRAP = -7
"""What tensors are filled with before they are read: it stays where a reader reads nothing."""
DTYPES = [
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e8m0fnu,
]
AS_BYTES = {torch.complex64, torch.complex128, torch.float8_e8m0fnu}
"""Dtypes that safetensors or its readers lack: an element is a row of bytes, in one more dimension."""

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process is meant


class Varied(Block):
    """A block with an uneven matrix, and with empty, scalar and oddly typed tensors that all ranks have whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scalar", torch.tensor(2.5, dtype=torch.float64))
        self.register_buffer("empty", torch.zeros(0, 3))
        for dtype in DTYPES:
            values = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype is torch.bool else 60)
            self.register_buffer(f"of_{str(dtype).removeprefix('torch.')}", values.view(dtype).reshape(2, 3))


def save(world: World, path: str, replicate: int = 1) -> dict[str, str]:
    """Train and save; return the hash of each tensor, whole, by its name in the manifest."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        toy = Toy(Varied(), Block())
    shard(world, toy, replicate=replicate, shard=world.size // replicate)
    optimizer = optimizer_of(toy)
    for number in range(2):
        step(world, toy, optimizer, number)
    mixed_dtypes(optimizer)
    checkpoint.save(path, toy, optimizer)
    return {key: found[0] for key, found in contents(toy, optimizer).items() if isinstance(found[0], str)}


def save_quantised(world: World, path: str, kind: str) -> dict[str, str]:
    toy, optimizer = built(world, kind)
    steps(world, toy, optimizer, range(2))
    checkpoint.save(path, toy, optimizer)
    found = quantised_contents(toy, optimizer)
    hashes = {key: value if isinstance(value, str) else value[0] for key, value in found.items()}
    # What is named after a class of torchao is the whole of which parts are stored.
    return {key.replace(" ", "/", 1): digest for key, digest in hashes.items() if not digest.startswith("OptimState")}


def by_torch(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return every tensor as torch's own loader and reader read it."""
    tensors = {}
    for key, entry in manifest.tensors.items():
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if dtype in AS_BYTES:
            tensors[key] = torch.full((*entry.shape, dtype.itemsize), TRAP % 256, dtype=torch.uint8)
        else:
            tensors[key] = torch.full(entry.shape, TRAP, dtype=torch.float32).to(dtype)
    load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder / "tensors")), no_dist=True)
    return {key: as_saved(tensor, manifest, key) for key, tensor in tensors.items()}


def by_safetensors(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return every tensor, put together of what `safe_open` gives of each file."""
    tensors = {
        key: torch.full((*entry.shape, getattr(torch, entry.dtype).itemsize), TRAP % 256, dtype=torch.uint8)
        for key, entry in manifest.tensors.items()
    }
    for path in sorted((folder / "tensors").iterdir()):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                (chunk,) = (each for each in manifest.tensors[key].chunks if folder / each.file == path)
                read = as_saved(file.get_tensor(key), manifest, key)
                assert tuple(read.shape) == chunk.sizes
                where = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
                tensors[key][where] = read.contiguous().unsqueeze(-1).view(torch.uint8)
    return {
        key: tensor.view(getattr(torch, manifest.tensors[key].dtype)).squeeze(-1) for key, tensor in tensors.items()
    }


def as_saved(tensor: Tensor, manifest: Manifest, key: str) -> Tensor:
    """Return a tensor in its own dtype: bytes are viewed, and the dimension that they are in ends."""
    dtype: torch.dtype = getattr(torch, manifest.tensors[key].dtype)
    return tensor.view(dtype).squeeze(-1) if dtype in AS_BYTES else tensor


def hashes_by_live_name(tensors: dict[str, Tensor]) -> dict[str, str]:
    found = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        parameter, _, slot = rest.rpartition(".")
        found[rest if kind == "model" else f"{parameter}/{slot}"] = hash_tensor(tensor)
    return found


def compare(folder: Path, saved: dict[str, str]) -> Manifest:
    manifest = checkpoint.verify(str(folder))
    for read in (by_torch, by_safetensors):
        tensors = read(folder, manifest)
        assert {key: (tuple(tensor.shape), str(tensor.dtype)) for key, tensor in tensors.items()} == {
            key: (entry.shape, f"torch.{entry.dtype}") for key, entry in manifest.tensors.items()
        }
        assert hashes_by_live_name(tensors) == saved
    return manifest


@pytest.mark.parametrize(("ranks", "replicate"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_other_readers_read_every_tensor(pools: Any, tmp_path: Path, ranks: int, replicate: int) -> None:
    saved = pools(ranks).run(save, str(tmp_path / "step-2"), replicate)[0]

    manifest = compare(tmp_path / "step-2", saved)

    assert len(manifest.tensors) > 30
    assert {entry.dtype for entry in manifest.tensors.values()} >= {str(dtype)[len("torch.") :] for dtype in DTYPES}
    chunks = manifest.tensors["model.blocks.0.trained.weight"].chunks
    assert len(chunks) == ranks // replicate  # of 5 rows: 3 and 2, or 2, 2 and 1


@pytest.mark.parametrize("kind", ["8bit", "4bit", "fp8"])
def test_other_readers_read_quantised_state(pools: Any, tmp_path: Path, kind: str) -> None:
    saved = pools(2).run(save_quantised, str(tmp_path / "step-2"), kind)[0]

    manifest = compare(tmp_path / "step-2", saved)

    assert any("/codes" in key for key in manifest.tensors)


def load_it(world: World, path: str) -> None:
    toy = Toy(Varied(), Block())
    shard(world, toy)
    checkpoint.load(path, toy, optimizer_of(toy))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_missing_file_that_torch_s_reader_does_not_notice_is_named_here(
    pools: Any, tmp_path: Path, number: int
) -> None:
    folder = tmp_path / "step-2"
    saved = pools(3).run(save, str(folder))[0]
    manifest = checkpoint.verify(str(folder))
    (folder / SHARDS[number]).unlink()

    errors = pools(3).errors(load_it, str(folder))

    assert errors == [errors[0]] * 3
    assert errors[0][0] == "CheckpointCorrupt"
    assert f"lacks {SHARDS[number]}" in errors[0][1]
    with pytest.raises(CheckpointCorrupt, match=f"lacks {SHARDS[number]}"):
        checkpoint.verify(str(folder))
    if number == 1:
        only = {key: entry for key, entry in manifest.tensors.items() if len(entry.chunks) == 3}
        stale = {
            key: torch.full(entry.shape, TRAP, dtype=torch.float32).to(getattr(torch, entry.dtype))
            for key, entry in only.items()
        }
        load(dict(stale), storage_reader=HuggingFaceStorageReader(str(folder / "tensors")), no_dist=True)
        weight = stale["model.blocks.0.trained.weight"]
        assert (weight[2:4] == TRAP).all(), "torch's reader fails here, so that the check by name could go"
        assert hashes_by_live_name(stale).items().isdisjoint(saved.items())


def test_a_tensor_of_bytes_is_one_more_dimension_in_the_file(tmp_path: Path) -> None:
    module = nn.Module()
    module.register_buffer("odd", torch.view_as_complex(torch.arange(12.0).reshape(2, 3, 2)))
    checkpoint.save(str(tmp_path / "step-00000001"), module)

    with safe_open(tmp_path / "step-00000001" / SHARDS[0], framework="pt") as file:
        found = file.get_tensor("model.odd")

    assert (found.dtype, tuple(found.shape)) == (torch.uint8, (2, 3, 8))
    assert torch.equal(found.view(torch.complex64).squeeze(-1), module.odd)
