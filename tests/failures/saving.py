"""Cases about what a checkpoint holds, when it is taken, and who can read it."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

from holdfast import checkpoint
from holdfast.checkpoint.errors import CheckpointMismatch
from holdfast.parallel.mesh import World
from tests.checkpoint.cases import build, contents, load_into_other, optimizer_of, save_after, step
from tests.checkpoint.test_background import FIRST, mutate_after_the_copy
from tests.failures.lab import Lab, Observed, alone, last_words
from tests.failures.optimizer_state import adamw, resume_like_the_tutorial, sharded_linear, update
from tests.tiny import tiny_model

# 4: a checkpoint of weights alone


def resume_from_weights(world: World, path: str) -> dict[str, Any]:
    """Save a model without its optimizer, then resume model first and optimizer second, as sharded strategies do."""
    model = sharded_linear()
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    other = sharded_linear(seed=1)
    optimizer = adamw(other)
    before = [value.to_local().clone() for value in other.parameters()]
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state["model"])
    try:
        resume_like_the_tutorial(path, other, optimizer)
        error = ""
    except BaseException as raised:  # noqa: BLE001 - DCP's error is no Exception
        error = last_words(raised)
    overwritten = any(
        not torch.equal(then, now.to_local()) for then, now in zip(before, other.parameters(), strict=True)
    )
    return {
        "error": error,
        "overwritten": overwritten,
        "steps": [float(state["step"]) for state in optimizer.state.values()],
    }


def resume_a_trainer(folder: str) -> dict[str, Any]:
    """Train four steps with transformers' Trainer; then two, saved as weights, and resume to four."""
    from transformers import Trainer, TrainingArguments

    warnings.simplefilter("ignore")

    def trainer(where: str, **options: Any) -> Trainer:
        arguments = TrainingArguments(
            output_dir=f"{folder}/{where}",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            learning_rate=0.01,
            lr_scheduler_type="constant",
            per_device_train_batch_size=1,
            save_strategy="steps",
            save_steps=2,
            **({"max_steps": 4} | options),
        )
        rows = [
            {"input_ids": torch.arange(2 + row, 18 + row), "labels": torch.arange(2 + row, 18 + row)}
            for row in range(4)
        ]
        return Trainer(tiny_model("llama"), arguments, train_dataset=rows)

    ends: dict[bool, list[torch.Tensor]] = {}
    for weights_only in (False, True):
        where = f"weights-{weights_only}"
        trainer(where, save_only_model=weights_only, max_steps=2).train()
        resumed = trainer(where, save_only_model=weights_only)
        resumed.train(resume_from_checkpoint=f"{folder}/{where}/checkpoint-2")
        ends[weights_only] = [value.detach() for value in resumed.model.parameters()]
        steps = [float(state["step"]) for state in resumed.optimizer.state.values()]
    gap = max(float((one - two).abs().max()) for one, two in zip(ends[False], ends[True], strict=True))
    return {"gap": gap, "global_step": resumed.state.global_step, "optimizer_steps": max(steps)}


def naive_weights(lab: Lab) -> Observed:
    found = lab.pool(2).run(resume_from_weights, lab.path("weights"))[0]
    trainer = alone(resume_a_trainer, lab.path("trainer"))
    words = (
        f"DCP: {found['error'][:84]!r} after the weights were overwritten and the optimizer's step became "
        f"{found['steps'][0]:.0f}; transformers' Trainer resumes without a word at step 2 with a new optimizer, and "
        f"ends {trainer['gap']:.3f} beside the run that kept it"
    )
    return Observed(not found["error"] and not found["overwritten"], words, found | {"trainer": trainer})


def resume_weights_with_ours(world: World, path: str) -> dict[str, Any]:
    """Save a model alone; load it as a whole run, then as weights."""
    toy = build(world)
    checkpoint.save(path, toy)
    saved = contents(toy)
    other = build(world, seed=1)
    optimizer = optimizer_of(other)
    step(world, other, optimizer, 0)
    other(torch.ones(2, 5)).sum().backward()
    before = contents(other, optimizer)
    try:
        checkpoint.load(path, other, optimizer)
        error = ""
    except CheckpointMismatch as raised:
        error = str(raised)
    untouched = contents(other, optimizer) == before
    checkpoint.load(path, other)
    return {"error": error, "untouched": untouched, "loaded": contents(other) == saved}


def ours_weights(lab: Lab) -> Observed:
    ranks = lab.pool(2).run(resume_weights_with_ours, lab.path("ours/step-00000001"))
    said = ranks[0]["error"].split("this run: ")[-1].split(" (")[0]
    words = f"refused on both ranks, not a bit touched: {said!r}; as weights it loads, bit for bit"
    holds = all(rank == ranks[0] for rank in ranks) and ranks[0]["untouched"] and ranks[0]["loaded"]
    return Observed(holds and "init_from" in ranks[0]["error"], words, ranks[0])


# 6.13: a save in the background, and the step after it


def save_while_training(world: World, path: str) -> dict[str, Any]:
    """Take a state dict for the host, write it on a thread, and let the next step come first."""
    model = fully_shard(nn.Linear(64, 64))
    group = dist.new_group(backend="gloo")
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(1.0)
    state = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    stepped = threading.Event()

    def write() -> None:
        stepped.wait()
        dcp.save(state, checkpoint_id=path, process_group=group)

    thread = threading.Thread(target=write)
    thread.start()
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(2.0)
    stepped.set()
    thread.join()
    loaded = {name: torch.zeros_like(value) for name, value in get_model_state_dict(model).items()}
    dcp.load(loaded, checkpoint_id=path)
    return {"values": sorted({float(each) for value in loaded.values() for each in value.to_local().unique()})}


def naive_background(lab: Lab) -> Observed:
    found = lab.pool(2).run(save_while_training, lab.path("background"))[0]
    words = (
        f"a state dict taken with cpu_offload shares memory with weights on the CPU: taken at 1.0, stored as "
        f"{found['values'][0]}"
    )
    return Observed(found["values"] == [1.0], words, found)


def ours_background(lab: Lab) -> Observed:
    expected = lab.pool(2).run(mutate_after_the_copy, lab.folder)[0]
    found = lab.pool(2).run(load_into_other, lab.path(FIRST))[0]
    same = {name: value for name, value in found.items() if "extra" not in name} == expected
    words = f"{len(expected)} tensors, all zeroed while the save was in flight, come back as they were"
    return Observed(same and len(expected) > 10, words, {"same": same, "tensors": len(expected)})


# 6.14: another number of ranks


def save_by_rank(world: World, folder: str) -> None:
    """Save each rank's state in a file of its own, named by rank and number of ranks."""
    model = sharded_linear()
    optimizer = adamw(model)
    update(model, optimizer)
    state = [value.to_local().clone() for value in model.parameters()]
    Path(folder).mkdir(exist_ok=True)
    torch.save(state, f"{folder}/model_world_size_{world.size}_rank_{world.rank}.pt")
    dist.barrier()


def load_by_rank(world: World, folder: str) -> str:
    """Load this rank's file; return the error."""
    try:
        torch.load(f"{folder}/model_world_size_{world.size}_rank_{world.rank}.pt")
    except FileNotFoundError as error:
        return f"FileNotFoundError: {Path(str(error.filename)).name}"
    return ""


def naive_ranks(lab: Lab) -> Observed:
    folder = lab.path("by-rank")
    lab.pool(2).run(save_by_rank, folder)
    error = lab.pool(1).run(load_by_rank, folder)[0]
    return Observed(not error, f"one file per rank: {error!r} on one rank", {"error": error})


def ours_ranks(lab: Lab) -> Observed:
    path = lab.path("ranks/step-00000002")
    saved = lab.pool(2).run(save_after, path, 2)[0]
    found = {ranks: lab.pool(ranks).run(load_into_other, path)[0] for ranks in (1, 2)}
    again = lab.path("ranks/step-00000003")
    lab.pool(1).run(save_again, path, again)
    back = lab.pool(2).run(load_into_other, again)[0]
    same = [
        {name: value for name, value in each.items() if "extra" not in name} == saved
        for each in (*found.values(), back)
    ]
    words = f"2 -> 1 -> 2 ranks: {len(saved)} tensors and values equal bit for bit each time"
    return Observed(all(same), words, {"same": same, "saved": len(saved)})


def save_again(world: World, path: str, target: str) -> None:
    """Load a checkpoint and save what was loaded."""
    toy = build(world, seed=1)
    optimizer = optimizer_of(toy)
    checkpoint.load(path, toy, optimizer)
    checkpoint.save(target, toy, optimizer, extra={})
