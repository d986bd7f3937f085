"""A rank that would leave a collective alone: every rank raises its error, or the run ends and names the rank.

Rank 1 of two fails where rank 0 waits for it. What can be agreed on is one error on all ranks (`AGREED`). What happens
between two collectives cannot be: rank 1 raises it as it is, and rank 0 is ended with its cause (`TOLD`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from holdfast.checkpoint.place.layout import REHEARSAL, TENSORS
from holdfast.checkpoint.place.storage import LocalStorage
from holdfast.checkpoint.saving.rehearsal import run_rehearsal
from holdfast.config.load import from_mapping
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.tokens.vision import ImageSide
from holdfast.errors import RunStopped
from holdfast.features.vllm.proof import Prover
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.failure.reports import Failure
from holdfast.parallel.mesh import World, agree_on_device
from holdfast.recipes.grpo import grpo
from holdfast.recipes.sft import sft_step
from holdfast.training.evaluate import evaluate
from holdfast.training.fit import fit
from holdfast.training.setup.begin import Live, build_run
from holdfast.training.setup.model import check_model, image_side_of
from tests.checkpoint.cases import build
from tests.crash.runs import saved_steps, values_of
from tests.distributed.cases import settings
from tests.distributed.compile_cases import compiled_by
from tests.failures.lab import doomed
from tests.features.vllm.served import REWARD, ServedModel, served_tree, serving
from tests.optim.test_user_optimizers import try_to_make
from tests.rollout.test_user_engine import tree as engine_tree
from tests.training.cases import run, tree
from tests.vision import picture_rows, vision_directory

SECONDS = 120.0
"""Within which all ranks must have answered: most of it is for building a model on a busy machine."""


def write_rows(folder: Path, count: int) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": f"copy {number % 7}=", "completion": str(number % 7)}) for number in range(count)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def device_of_the_machine(world: World, place: str) -> None:
    """A driver is broken on rank 1's machine, where torch finds no GPU."""
    store = PrefixStore(place, _get_default_store())
    device = torch.device("cpu") if world.rank else torch.device("cuda", 0)
    agree_on_device(store, f"rank {world.rank} on node{world.rank}", world.size, device)


def rows_of_the_machine(world: World, place: str) -> None:
    """Each machine has a file of its own under the path, and one lacks the last rows."""
    base = Path(place) / f"machine-{world.rank}"
    write_rows(base, 24 - 8 * world.rank)
    run(world, tree(place, data={"synthetic": None, "path": "rows.jsonl", "batch_size": 8}, epochs=2), str(base))


def engine_file_of_the_machine(world: World, place: str) -> None:
    """The file of the user's engine is on rank 0's machine alone."""
    values, base = engine_tree(Path(place)), Path(place) / f"machine-{world.rank}"
    if world.rank:
        base.mkdir()
        (base / "reward.py").write_text(REWARD)
    grpo(from_mapping(values, GRPOConfig), base if world.rank else Path(place), world)


STOPS_ALONE = """
import torch.distributed as dist
from holdfast.errors import RunStopped
from my_engine_file import Engine


class Stopping(Engine):
    def update_weights(self, tensors, version):
        next(iter(tensors))
        if dist.get_rank() == 1:
            raise RunStopped("The engine of this rank has gone.")
        super().update_weights(tensors, version)


def make(words):
    return Stopping(words)
"""


def weights_that_one_engine_refuses(world: World, place: str) -> None:
    values = engine_tree(Path(place))
    sys.path.insert(0, place)
    try:
        (Path(place) / "my_engine_file.py").write_text((Path(place) / "my_engine.py").read_text())
        (Path(place) / f"engine_{world.rank}.py").write_text(STOPS_ALONE)
        values["rollout"]["engine"]["path"] = f"engine_{world.rank}.py:make"
        grpo(from_mapping(values, GRPOConfig), Path(place), world)
    finally:
        sys.path.remove(place)
        sys.modules.pop("my_engine_file", None)


EXITS = """
import sys

def observer(event):
    sys.exit(0)

def accept(row):
    if row["prompt"].startswith("copy 3"):
        sys.exit(0)
    return True
"""


def observer_that_exits(world: World, place: str) -> None:
    (Path(place) / "exits.py").write_text(EXITS)
    run(world, tree(place, observers=["exits.py:observer"]), place)


def filter_that_exits(world: World, place: str) -> None:
    if world.rank == 0:
        write_rows(Path(place), 24)
        (Path(place) / "exits.py").write_text(EXITS)
    dist.barrier()
    data = {"synthetic": None, "path": "rows.jsonl", "batch_size": 2, "filter": "exits.py:accept", "shuffle": False}
    run(world, tree(place, data=data), place)


def head_of_other_numbers(world: World, place: str) -> None:
    """Rank 1's device scales what the output layer gives."""
    built = build_run(from_mapping(tree(place), SFTConfig), Path(place), world)
    if world.rank == 1:
        layer: Any = built.model.module.language_model
        layer.lm_head.register_forward_hook(lambda _, __, output: output * 1.5)
        layer.register_forward_hook(scaled_logits)
    check_model(built.model, None)


def scaled_logits(_: nn.Module, __: Any, output: Any) -> Any:
    output.logits = output.logits * 1.5
    return output


class WithoutDeletion(LocalStorage):
    """A place that takes files and gives those of some paths not up, as by the rights of an object store."""

    def __init__(self, root: Path, kept: str) -> None:
        super().__init__(root)
        self._kept = kept

    def remove(self, path: str) -> None:
        if self._kept in path:
            raise PermissionError(13, "Permission denied", path)
        super().remove(path)


def place_without_deletion(world: World, place: str, kept: str) -> None:
    run_rehearsal(WithoutDeletion(Path(place), kept), build(world), None, RankGroup(1.0))


def description_that_cannot_be_written(world: World, place: str) -> None:
    """Something else stands where rank 0 describes a run that goes on."""
    values = values_of(Path(place), steps=2)
    run(world, values)
    if world.rank == 0:
        (Path(place) / "r/config.resolved.yaml").unlink()
        (Path(place) / "r/config.resolved.yaml").mkdir()
    dist.barrier()
    run(world, values | {"steps": 4})


def completions_that_cannot_be_written(world: World, place: str) -> None:
    """Rank 0 cannot write the completions of the evaluation at the end."""
    (Path(place) / "r").mkdir(exist_ok=True)
    (Path(place) / "r/completions").touch()
    sets = {"held": {"synthetic": {"task": "sort", "rows": 8, "seed": 9}}}
    evaluation = {"sets": sets, "completions": {"samples": 2, "max_new_tokens": 2}}
    run(world, values_of(Path(place), steps=3, evaluation=evaluation, checkpoint={"every_steps": 2}))


def proof_whose_look_fails(world: World, place: str) -> None:
    """A server says other numbers, and rank 0 cannot write what it is to be asked for."""
    built = build_run(from_mapping(tree(place), SFTConfig), Path(place), world)

    def inspect(_: Any) -> Any:
        if world.rank == 0:
            raise RunStopped("weights could not be written to /nowhere")
        return {}

    Prover(1e-9, 16, 32).prove(built.model, [OtherNumbers()], inspect)  # type: ignore[list-item]  # asked for numbers alone


class OtherNumbers:
    """A server of a model whose next tokens are all alike."""

    url = "http://127.0.0.1:1"

    def tops(self, prompt: Any, count: int, adapter: str = "") -> list[dict[int, float]]:  # noqa: ARG002 - the client's
        return [dict.fromkeys(range(count), -1.0) for _ in prompt.tokens]


AGREED: dict[str, tuple[Callable[[World, str], None], str, str]] = {
    "device": (
        device_of_the_machine,
        "ConfigError",
        "ranks have a GPU, and torch finds none for rank 1 on node1",
    ),
    "rows": (rows_of_the_machine, "DataError", "rank 1"),
    "engine's file": (engine_file_of_the_machine, "ConfigError", "rollout.engine.path"),
    "engine's weights": (weights_that_one_engine_refuses, "RunStopped", "The engine of this rank has gone."),
    "observer": (observer_that_exits, "ObserverFailed", "exits.py:observer failed at step 1: SystemExit"),
    "filter": (filter_that_exits, "DataError", "data.filter exits.py:accept raised SystemExit"),
    "head": (head_of_other_numbers, "ModelError", "follow from its output layer by another rule"),
    "deletion of the nonce": (
        partial(place_without_deletion, kept=f"{REHEARSAL}0"),
        "RehearsalFailed",
        f"({REHEARSAL}0-",
    ),
    "deletion of tensors": (partial(place_without_deletion, kept=TENSORS), "RehearsalFailed", f"/{TENSORS})"),
    "description": (description_that_cannot_be_written, "ConfigError", "config.resolved.yaml"),
    "completions": (completions_that_cannot_be_written, "RunStopped", "completions"),
    "proof": (proof_whose_look_fails, "RunStopped", "could not be written to /nowhere"),
}


def started(world: World) -> None:
    """Nothing: that the ranks live is enough."""


@pytest.mark.cases("all")
@pytest.mark.parametrize("name", AGREED)
def test_what_fails_on_one_rank_is_the_same_error_on_all(pools: Any, tmp_path: Path, name: str) -> None:
    function, kind, words = AGREED[name]
    pools(2).run(started)  # imports are not what is timed
    began = time.monotonic()

    errors = pools(2).errors(function, str(tmp_path), timeout_seconds=SECONDS)

    assert time.monotonic() - began < SECONDS
    assert errors[0] == errors[1]
    assert errors[0][0] == kind, errors
    assert words in errors[0][1]
    if name == "completions":
        assert saved_steps(tmp_path) == [2, 3], "what was trained before the evaluation is saved behind its error"


def guarded(world: World, name: str, place: str) -> None:
    """Do what a case says as a run does, and write down what rank 0 is told of rank 1."""

    def listen(_: str, failure: Failure) -> None:
        (Path(place) / "told.json").write_text(failure.sentence())

    world.failure.listener = listen
    with world.failure.guard(exit_seconds=0.5):
        TOLD[name][0](world, place)


def fails_when_run(graph: Any, inputs: Any) -> Any:  # noqa: ARG001 - a compiler's
    """Compile a graph to code that has no memory left."""

    def code(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for a kernel's scratch")

    return code


def compiled_code_that_fails(world: World, place: str) -> None:
    with compiled_by(fails_when_run if world.rank == 1 else "aot_eager"):
        run(world, tree(place, parallel={"compile": "blocks"}))


def tower_without_memory(world: World, place: str) -> None:
    """Rank 1's vision tower fails in the middle of a pass that all ranks gather for."""
    path = Path(place) / "model"
    if world.rank == 0:
        vision_directory(path, "qwen2_5_vl")
    dist.barrier()
    values = settings(str(path), data={"max_length": 128})
    built = build_run(from_mapping(values, SFTConfig), Path(place), world, Live(rows=picture_rows(16)))
    side = image_side_of(built.run.config, built.model.blueprint)
    assert isinstance(side, ImageSide)
    if world.rank == 1:
        blocks = [module for name, module in built.model.module.named_modules() if name.endswith("visual.blocks.1")]
        blocks[0].register_forward_pre_hook(no_memory)
    check_model(built.model, side)


def no_memory(*_: Any) -> None:
    raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")


OPTIMIZER = """
import torch
from torch.distributed.tensor import DTensor
from holdfast.parallel.shards import local_part


class FirstRows(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                own, norm = local_part(parameter.grad), parameter.grad.norm()
                if isinstance(norm, DTensor):
                    if own.shape[:1] == (1,) != parameter.shape:
                        raise ZeroDivisionError("one row has no spread")
                    norm = norm.full_tensor()
                local_part(parameter.data).sub_(own, alpha=group["lr"] / float(norm))
"""


def optimizer_that_needs_two_rows(world: World, place: str) -> None:
    """Shards of three rows are two and one, and rank 0 adds norms up over ranks."""
    path = Path(place) / f"own_{world.rank}.py"
    path.write_text(OPTIMIZER)
    try_to_make(world, f"{path}:FirstRows", {}, {})


def rows_that_a_thread_cannot_read(world: World, place: str) -> None:
    """Rank 1's tokenizer fails in the thread that reads the next batch, whose partner waits for its rows."""
    built = build_run(from_mapping(tree(place), SFTConfig), Path(place), world)
    built.stream.read_ahead(0)
    if world.rank == 1:
        reader: Any = built.stream._stream.rows
        reader._tokenise = no_memory
    fit(built, partial(sft_step, built), partial(evaluate, built.evaluation))


def step_before_step_1(world: World, place: str) -> None:
    """Rank 1 has no memory in the walk, behind which servers on the ranks' GPUs are asked to sleep."""
    (Path(place) / "reward.py").write_text(REWARD)
    (Path(place) / f"loss_{world.rank}.py").write_text(LOSS)
    values = served_tree([(Path(place) / "url").read_text()], place)
    values["rollout"]["engine"]["start"] = {"share": True}
    values["objective"] = {"kind": "path", "path": f"loss_{world.rank}.py:make"}
    grpo(from_mapping(values, GRPOConfig), Path(place), world)


LOSS = """
import torch
import torch.distributed as dist
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.surrogates import Reinforce


class Loss(PolicyGradient):
    def token_terms(self, logprobs, entropy, tokens):
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("no memory for the loss")
        return super().token_terms(logprobs, entropy, tokens)


def make():
    return Loss(Reinforce())
"""

TOLD: dict[str, tuple[Callable[[World, str], None], str, str]] = {
    "compiled code": (compiled_code_that_fails, "OutOfMemoryError", "no memory for a kernel's scratch"),
    "tower": (tower_without_memory, "RuntimeError", "CUBLAS_STATUS_ALLOC_FAILED"),
    "optimizer": (optimizer_that_needs_two_rows, "ZeroDivisionError", "one row has no spread"),
    "thread": (rows_that_a_thread_cannot_read, "RuntimeError", "CUBLAS_STATUS_ALLOC_FAILED"),
    "walk": (step_before_step_1, "ModelError", "has no memory left where it updates: no memory for the loss"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", TOLD)
def test_what_fails_between_two_collectives_of_one_rank_is_told_to_the_others(tmp_path: Path, name: str) -> None:
    _, kind, words = TOLD[name]

    with serving(ServedModel()) as url:
        (tmp_path / "url").write_text(url)
        outcomes = doomed(guarded, name, str(tmp_path), seconds=30.0)

    assert outcomes[1][0] == kind, outcomes
    assert words in outcomes[1][1]
    assert outcomes[0][0] in {"exits", "RankFailed"}, outcomes
    files = [tmp_path / "told.json", tmp_path / "r/events.jsonl"]
    told = outcomes[0][1] + "".join(file.read_text() for file in files if file.exists())
    assert kind in told
    assert words in told


READS_ON_RANK_0 = """
import torch.distributed as dist
from my_engine import Engine


class Alone(Engine):
    def update_weights(self, tensors, version):
        if dist.get_rank() == 0:
            super().update_weights(tensors, version)
        self.version = version


def make(words):
    return Alone(words)
"""


def engine_that_reads_on_rank_0(world: World, values: dict[str, Any], place: str) -> int:
    sys.path.insert(0, place)
    try:
        return grpo(from_mapping(values, GRPOConfig), Path(place), world).step
    finally:
        sys.path.remove(place)
        sys.modules.pop("my_engine", None)


def test_an_engine_of_the_users_own_may_take_weights_on_one_rank_alone(pools: Any, tmp_path: Path) -> None:
    values = engine_tree(tmp_path)
    (tmp_path / "alone.py").write_text(READS_ON_RANK_0)
    values["rollout"]["engine"]["path"] = "alone.py:make"

    steps = pools(2).run(engine_that_reads_on_rank_0, values, str(tmp_path), timeout_seconds=SECONDS)

    assert steps == [4, 4]
