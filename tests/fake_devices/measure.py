"""What torch's profiler says of a step that runs: the most that the CPU's allocator had out.

The profiler hears of every allocation and release of torch's allocator; it knows nothing of the plan's ledger.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from holdfast.checkpoint.keep.retention import steps
from holdfast.checkpoint.loading.reader import load_state
from holdfast.checkpoint.place.storage import open_storage
from holdfast.config.load import from_mapping
from holdfast.config.verbs.training import SFTConfig
from holdfast.data.batches.assembly import assemble
from holdfast.data.batches.candidates import Candidates, SequenceInfo
from holdfast.features.plan.counting.memory import plain_tensors
from holdfast.features.plan.execution.steps import sequence
from holdfast.parallel.mesh import World
from holdfast.parallel.shards import sharded_parameters
from holdfast.training.directory import checkpoint_place
from holdfast.training.engines import layout_of
from holdfast.training.setup.begin import build_run
from holdfast.training.step import train_step


def peaks(world: World, values: dict[str, Any]) -> tuple[int, int]:
    """Return the most bytes of tensors in a step that comes after others: those that lie there before it, and in all.

    Every rank calls this; rows are as long as they may be, as in a plan.
    """
    training = build_run(from_mapping(values, SFTConfig), Path(), world)
    model, config = training.model, training.run.config
    examples = {(number, 0): sequence(config.data.max_length) for number in range(config.data.batch_size)}
    known = [
        SequenceInfo(number, 0, example.tokens.size, example.trained_tokens, number % world.size)
        for (number, _), example in examples.items()
    ]
    own = {place: example for place, example in examples.items() if place[0] % world.size == world.rank}
    mini_batch = assemble(Candidates(own, known), training.run.ranks, config.data, layout_of(model))
    for _ in range(2):
        train_step(model, mini_batch, training.evaluation.objective).read()
    states = [value for state in model.optimizer.state.values() for value in state.values()]
    tensors = [*sharded_parameters(model.module).values(), *model.module.buffers(), *states]
    parts = [part for each in tensors if isinstance(each, torch.Tensor) for part in plain_tensors(each)]
    before = sum(part.untyped_storage().nbytes() for part in parts)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train_step(model, mini_batch, training.evaluation.objective).read()
    return before, before + _most(profiler)


def resume_peak(world: World, values: dict[str, Any]) -> int:
    """Return the most bytes of tensors while a run's newest checkpoint is loaded, those of its model among them."""
    training = build_run(from_mapping(values, SFTConfig), Path(), world)
    model = training.model
    ranks = training.run.ranks
    beside = {} if model.averages is None else model.averages.tensors
    lying = [*sharded_parameters(model.module).values(), *model.module.buffers(), *beside.values()]
    before = sum(part.untyped_storage().nbytes() for each in lying for part in plain_tensors(each))
    storage = open_storage(checkpoint_place(training.run.directory, training.run.config))
    name = max(steps(storage).values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        load_state(storage, name, model.module, model.optimizer, ranks, averages=beside)
    return before + _most(profiler)


def _most(profiler: Any) -> int:
    """Return the most that was out at one moment, beside what lay there when the profile began."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return int(most)
