"""One rank that computes in bfloat16 needs no FSDP2, and has its numbers: to the bit, through a kill and resumes.

`parallel.cpu_offload` keeps FSDP2 on one rank, and on a CPU moves nothing: it is what the numbers are compared with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.metrics.sink import last_rewind
from holdfast.models.names import named_parameters
from holdfast.parallel.copies import attach_copies, copies_of
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.parallel.stream import full_tensor
from holdfast.recipes.sft import sft_step
from holdfast.rollout.local.inprocess import InProcessEngine
from holdfast.training.engines import build_engine, give_weights
from holdfast.training.setup.begin import Live, build_run
from tests.crash.processes import run_doomed
from tests.crash.runs import log_of, saved_steps, state_differences, values_of
from tests.distributed.cases import rows_of, settings
from tests.tiny import tiny_directory
from tests.training.cases import run

UPDATES = 20
KINDS: dict[str, dict[str, Any]] = {
    "llama, tied": {"kind": "llama", "tie_word_embeddings": True},
    "qwen3": {"kind": "qwen3", "tie_word_embeddings": False},
    "mixtral": {"kind": "mixtral"},
}


def tree_of(directory: Path, **sections: Any) -> dict[str, Any]:
    """Return a run in bfloat16 whose updates take several micro-batches."""
    parallel = {"compute_dtype": "bfloat16"} | sections.pop("parallel", {})
    return settings(
        str(directory),
        steps=UPDATES,
        model={"dtype": "float32"} | sections.pop("model", {}),
        data={"tokens_per_micro_batch": 64},
        optim={"kind": "adamw", "lr": 0.01, "clip_norm": 1.0},
        parallel=parallel,
        **sections,
    )


def numbers(value: torch.Tensor) -> Any:
    """Return the numbers of a tensor; those of bfloat16 in float32, which has them all."""
    return full_tensor(value).float().numpy().copy()


def updated(world: World, tree: dict[str, Any], updates: int) -> dict[str, Any]:
    """Make updates; return what they are known by, and how the model was run."""
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows_of(24)))
    model = training.model.module
    made = [sft_step(training) for _ in range(updates)]
    lines = [update.read().metrics for update in made if update is not None]
    return {
        "lines": [(line["loss"], line["grad_norm"], line["data/micro_batches"]) for line in lines if line],
        "parameters": {name: numbers(value) for name, value in sharded_parameters(model).items()},
        "states": {
            (index, key): numbers(value)
            for index, state in enumerate(training.model.optimizer.state.values())
            for key, value in state.items()
        },
        "fsdp": isinstance(model, FSDPModule),
        "copied": copies_of(model) is not None,
    }


def assert_equal_bits(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one["lines"] == two["lines"]
    for kind in ("parameters", "states"):
        assert one[kind].keys() == two[kind].keys()
        for name, value in one[kind].items():
            np.testing.assert_array_equal(value, two[kind][name], err_msg=str(name))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "sections"),
    [
        pytest.param("llama, tied", {}, id="tied"),
        pytest.param("qwen3", {"parallel": {"recompute": "full"}}, id="recomputed"),
        pytest.param("mixtral", {"parallel": {"recompute": "selective", "blocks_per_unit": 2}}, id="experts"),
        pytest.param("qwen3", {"model": {"lora": {"rank": 4}, "frozen_dtype": "bfloat16"}}, id="LoRA"),
        pytest.param("qwen3", {"model": {"freeze": ["layers.0."]}}, id="a frozen block"),
        pytest.param("qwen3", {"metrics": {"entropy": True}, "neftune_alpha": 5.0}, id="noise"),
    ],
)
def test_twenty_updates_have_the_bits_of_fsdp2(pools: Any, tmp_path: Path, kind: str, sections: dict[str, Any]) -> None:
    model = dict(KINDS[kind])
    directory = tiny_directory(tmp_path / "model", model.pop("kind"), **model)
    parallel = sections.get("parallel", {})

    alone = pools(1).run(updated, tree_of(directory, **sections), UPDATES)[0]
    offloaded = sections | {"parallel": parallel | {"cpu_offload": True}}
    sharded = pools(1).run(updated, tree_of(directory, **offloaded), UPDATES)[0]

    assert (alone["fsdp"], alone["copied"]) == (False, True)
    assert (sharded["fsdp"], sharded["copied"]) == (True, False)
    assert min(line[2] for line in alone["lines"]) > 1
    assert_equal_bits(alone, sharded)


def test_float32_on_one_rank_has_no_copies(pools: Any, tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path / "model", "llama")

    found = pools(1).run(updated, tree_of(directory, parallel={"compute_dtype": "float32"}), 1)[0]

    assert (found["fsdp"], found["copied"]) == (False, False)


OBSERVERS = """
import os, pathlib, signal

died = pathlib.Path("PLACE/died")

def dies_once_at_five(event):
    if event.step == 5 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_kill_and_resumes_on_two_ranks_and_back_give_the_checkpoints_of_fsdp2(pools: Any, tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("alone", "fsdp2")}
    for name, place in places.items():
        place.mkdir()
        (place / "observers.py").write_text(OBSERVERS.replace("PLACE", str(place)))
        values = {
            "parallel": {"compute_dtype": "bfloat16", "cpu_offload": name == "fsdp2"},
            "data": {"tokens_per_micro_batch": 96},
            "observers": ["observers.py:dies_once_at_five"],
            "checkpoint": {"background": False},  # the kill finds the save of step 4 whole, however busy the machine is
            "dropout": False,
        }

        ended = run_doomed(run, 1, values_of(place, steps=6, **values), str(place))
        pools(2).run(run, values_of(place, steps=12, **values), str(place))
        pools(1).run(run, values_of(place, steps=20, **values), str(place))

        assert ended[0].was_killed
        assert last_rewind(place / "r" / "metrics.jsonl") == 12
        assert saved_steps(place) == list(range(4, 22, 2))

    assert len(log_of(places["alone"])) == 20
    assert log_of(places["alone"]) == log_of(places["fsdp2"])
    # The run of FSDP2 has no copies to compute from.
    assert state_differences(places["alone"], places["fsdp2"]) == ["trainer.json: state.forms.copies differs"]


def sampled_from(world: World, tree: dict[str, Any]) -> list[tuple[bool, bool]]:
    """Return whether an engine reads what passes read, and whether that is of the present weights, twice."""
    training = build_run(from_mapping(tree, SFTConfig), Path.cwd(), world, Live(rows=rows_of(24)))
    engine, found = build_engine(training.model, "inprocess"), []
    for _ in range(2):
        sft_step(training)
        give_weights(engine, training.model)
        copies = copies_of(training.model.module)
        assert copies is not None and isinstance(engine, InProcessEngine)
        read = named_parameters(engine._replica.model)
        masters = sharded_parameters(training.model.module)
        shares = {value.data_ptr() for value in read.values()} == {value.data_ptr() for value in copies.tensors}
        present = all(torch.equal(value, masters[name].to(torch.bfloat16)) for name, value in read.items())
        found.append((shares, present))
    return found


def test_an_engine_reads_the_copies_that_passes_read(pools: Any, tmp_path: Path) -> None:
    assert pools(1).run(sampled_from, tree_of(tiny_directory(tmp_path / "model", "llama"))) == [[(True, True)] * 2]


def test_a_pass_reads_copies_again_after_one_that_found_no_memory_for_them() -> None:
    class Layer(torch.nn.Linear):
        def stored(self) -> torch.dtype:
            return self.weight.dtype

    layer = Layer(4, 4, bias=False)
    right, endless = layer.weight, torch.nn.Parameter(torch.ones(1, 1).expand(2**30, 2**30))
    attach_copies(layer, torch.bfloat16, [("weight",)], ["stored"])
    layer.weight = endless
    with pytest.raises(RuntimeError, match="allocate"):
        layer.stored()
    with pytest.raises(RuntimeError, match="allocate"):
        layer(torch.ones(1, 4))

    layer.weight = right
    assert layer.stored() is torch.bfloat16
    assert layer.weight is right
    with torch.no_grad():
        assert layer(torch.ones(1, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert layer.weight is right
