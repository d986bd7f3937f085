"""Directories of plain transformers come in and go out byte by byte, and damaged ones are refused by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from holdfast.models.files.conversion import Conversion, plan_incoming, plan_outgoing
from holdfast.models.files.loading import StoredSource
from holdfast.models.files.safetensors_files import (
    StoredTensors,
    index_json,
    plan_files,
    write_file,
)
from holdfast.models.names import tied_names
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.stream import Holding, converted_tensors, headers_of, held_tensors
from tests.models.cases import import_and_export
from tests.models.directories import KINDS, filled, model_of, tensors_in, write_directory


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def whole(held: Mapping[str, Holding], conversions: Sequence[Conversion], dtype: Any = None) -> dict[str, torch.Tensor]:
    """Join the pieces of each tensor."""
    with converted_tensors(held.__getitem__, conversions, dtype, RankGroup()) as tensors:
        found = {name: list(pieces) for name, pieces in tensors}
    return {name: torch.cat(pieces) if len(pieces) > 1 else pieces[0] for name, pieces in found.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_fills_the_model_that_transformers_saved(tmp_path: Path, kind: str) -> None:
    saved = write_directory(tmp_path, kind)

    policy, _ = filled(tmp_path)

    assert_same_tensors(policy.language_model.state_dict(), saved.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_in_goes_out_byte_by_byte(tmp_path: Path, kind: str) -> None:
    write_directory(tmp_path, kind)
    policy, origin = filled(tmp_path)

    held = held_tensors(policy)
    conversions = plan_outgoing(origin.skeleton, headers_of(held, None), origin.used_conversions)
    found = whole(held, conversions)

    assert_same_tensors(found, tensors_in(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_no_directory_goes_out_under_the_names_transformers_uses(tmp_path: Path, kind: str) -> None:
    saved = write_directory(tmp_path, kind)
    others = {name for names in tied_names(saved).values() for name in names}
    held = {name: value for name, value in saved.state_dict().items() if name not in others}

    conversions = plan_outgoing(saved, headers_of(held, None), None)

    assert_same_tensors(whole(held, conversions), tensors_in(tmp_path))


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gemma3"])
def test_two_ranks_hold_half_each_and_export_what_they_were_given(pools: Any, tmp_path: Path, kind: str) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    write_directory(source, kind, max_shard_size=20_000)

    found = pools(2).run(import_and_export, str(source), str(target), 20_000)

    assert_same_tensors(tensors_in(target), tensors_in(source))
    assert sum(rank["held"] for rank in found) == found[0]["whole"]
    for rank in found:
        assert 0.4 * found[0]["whole"] < rank["held"] < 0.6 * found[0]["whole"]


def test_an_export_of_several_files_has_an_index_that_transformers_reads(pools: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, target = tmp_path / "in", tmp_path / "out"
    saved = write_directory(source, "mixtral", max_shard_size=20_000)

    pools(2).run(import_and_export, str(source), str(target), 20_000)

    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_in(target).values())
    for name, file in index["weight_map"].items():
        with safe_open(str(target / file), "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 - not a dictionary
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert_same_tensors(loaded.state_dict(), saved.state_dict())


def test_files_hold_at_most_what_is_asked_unless_one_tensor_is_larger() -> None:
    headers = headers_of({name: torch.empty(size) for name, size in {"a": 10, "b": 15, "c": 60, "d": 5}.items()}, None)

    files = plan_files(headers, largest_bytes=100)

    assert files == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d"],
    }
    assert json.loads(index_json(files, headers))["metadata"] == {"total_parameters": 90, "total_size": 360}


def test_our_files_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.arange(5),
        "c": torch.tensor(2.5, dtype=torch.bfloat16),
        "d": torch.randn(4, 3).t(),
        "e": torch.zeros(0, 7, dtype=torch.float16),
        "f": torch.tensor([True, False]),
    }
    with (tmp_path / "ours.safetensors").open("wb") as file:
        write_file(file, headers_of(tensors, None), ((name, iter([tensor])) for name, tensor in tensors.items()))

    assert_same_tensors(tensors_in(tmp_path), tensors)
    assert int.from_bytes((tmp_path / "ours.safetensors").read_bytes()[:8], "little") % 8 == 0  # as the format advises


def test_a_rank_reads_only_the_experts_it_keeps(tmp_path: Path) -> None:
    saved = write_directory(tmp_path / "whole", "mixtral")
    files = {name: f"{index}.safetensors" for index, name in enumerate(tensors_in(tmp_path / "whole"))}
    for name, tensor in tensors_in(tmp_path / "whole").items():
        save_file({name: tensor}, tmp_path / files[name])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    stored = StoredTensors(tmp_path)
    incoming = plan_incoming(saved, stored.headers, "")
    for name, file in files.items():
        if any(f"experts.{index}." in name for index in (2, 3)):
            (tmp_path / file).unlink()

    loaded = 0
    for group in StoredSource(stored, incoming.conversions, {}).groups():
        for name in (name for name in group.targets if "experts" in name):
            loaded += 1
            assert torch.equal(group.load({name: slice(0, 2)})[name], saved.state_dict()[name][:2])
            assert group.load({name: slice(4, 4)})[name].shape == (0, *group.targets[name].shape[1:])
    assert loaded == 4  # two tensors of experts in each of two layers


MEASURE = """
import sys, threading, time, torch
from pathlib import Path
from holdfast.config.sections.model import ModelConfig
from holdfast.models.setup.model import blueprint
from holdfast.models.heads.policy import PolicyModel
from holdfast.parallel.shards import materialise

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if "RssAnon" in line)

def rise(work):
    before = peak = anonymous()
    done = threading.Event()
    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return (peak - before) * 1024

def read():
    for group in origin.source.groups():
        group.load({name: slice(0, header.shape[0]) for name, header in group.targets.items()})

torch.set_num_threads(1)
origin = blueprint(ModelConfig(path=sys.argv[1]), Path.cwd(), seed=0)
policy = PolicyModel(origin.model, origin.family, origin.family.head_spec(float32_product=False, chunk_tokens=None))
reading = rise(read)
filling = rise(lambda: materialise(policy, origin.source, origin.buffers, torch.device("cpu")))
sizes = [value.nbytes for value in policy.parameters()]
print(sum(sizes), max(sizes), reading, filling - sum(sizes))
"""


@pytest.mark.slow
def test_filling_a_model_takes_the_memory_of_the_model_and_one_tensor(tmp_path: Path) -> None:
    # Where experts are stacked, the rows of the target and one expert's sources and copies are alive at once; where a
    # tensor is only renamed, its rows alone. File pages are not counted: the kernel takes them back when it likes.
    sizes = {"hidden_size": 1024, "num_key_value_heads": 1, "num_local_experts": 8, "intermediate_size": 1024}
    write_directory(tmp_path, "mixtral", **sizes)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"}

    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    model, largest, reading, beyond_the_model = (int(word) for word in text.split()[-4:])
    print(f"in units of the largest tensor: reading {reading / largest:.2f}, filling {beyond_the_model / largest:.2f}")
    assert model > 170e6
    assert largest > 60e6
    assert reading < 1.35 * largest
    assert beyond_the_model < 1.35 * largest


def test_the_names_of_one_directory_do_not_leak_into_the_next(tmp_path: Path) -> None:
    old_names, new_names = tmp_path / "old", tmp_path / "new"
    saved = write_directory(old_names, "llava")  # transformers saves llava under the names of its first releases
    shutil.copytree(old_names, new_names)
    save_file(saved.state_dict(), new_names / "model.safetensors", metadata={"format": "pt"})
    assert set(tensors_in(old_names)) != set(tensors_in(new_names))

    for directory in (old_names, new_names, old_names):
        policy, origin = filled(directory)
        held = held_tensors(policy)
        conversions = plan_outgoing(origin.skeleton, headers_of(held, None), origin.used_conversions)
        assert_same_tensors(whole(held, conversions), tensors_in(directory))


def test_float32_weights_are_exported_in_the_dtype_asked_for(tmp_path: Path) -> None:
    saved = model_of("mixtral")
    held = dict(saved.state_dict())

    conversions = plan_outgoing(saved, headers_of(held, torch.bfloat16), None)
    found = whole(held, conversions, torch.bfloat16)

    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    half = held["model.layers.0.mlp.experts.gate_up_proj"][1, : found[name].shape[0]]
    assert torch.equal(found[name], half.to(torch.bfloat16))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
