"""Executes steps of a run as one of its ranks, on devices that compute nothing, and records memory."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.snapshot import RandomState, like, staged
from holdfast.checkpoint.loading.matching import Declared
from holdfast.checkpoint.loading.parts import live_parts
from holdfast.checkpoint.loading.plan import execute as execute_load
from holdfast.checkpoint.loading.plan import plan_load, states_read
from holdfast.config.quiet import broken
from holdfast.config.sections.engine import LocalEngineConfig
from holdfast.config.sections.optim import AdamW8bitConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import ConfigError
from holdfast.features.plan.counting.kinds import CHECKPOINT, OPTIMIZER, RESUME
from holdfast.features.plan.counting.memory import Ledger, watched_storages
from holdfast.features.plan.counting.observer import TensorObserver
from holdfast.features.plan.execution.fake_devices import fake_devices
from holdfast.features.plan.execution.origin import size_of_plan, without_files
from holdfast.features.plan.execution.saved import (
    ahead_bytes,
    checkpoint_bytes,
    export_bytes,
    host_random_state,
    manifest_of,
    saved_snapshot,
    small_bytes,
)
from holdfast.features.plan.execution.steps import PlannedStep, planned_step
from holdfast.features.plan.records import Execution, HostValue, RankSpec, room_for_tensors
from holdfast.models.files.four_bit import check_library
from holdfast.models.setup.model import blueprint
from holdfast.parallel.collectives import RankGroup
from holdfast.parallel.failure.channel import FailureChannel
from holdfast.parallel.mesh import World, forget_meshes
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.rollout.local.recurrent import why_not_in_process
from holdfast.training.phases import PhaseClock
from holdfast.training.run import Logbook, Model, Run
from holdfast.training.setup.optimizers import build_optimizer
from holdfast.types import host_values_from

T = TypeVar("T")


class _Phases(PhaseClock):
    """A phase clock that tells the memory ledger which phase of a step has begun."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what the block takes towards a phase."""
        if name == "optimizer":
            gc.collect()  # what the compiler was called with lies in cycles, beside what a later step takes
        before, self._ledger.phase = self._ledger.phase, name
        try:
            yield
        finally:
            self._ledger.phase = before


def execute(config: TrainingConfig, base: Path, spec: RankSpec) -> Execution:
    """Build the run's models, optimizers and batches; load a checkpoint, make a step or two and a save.

    Nothing is read but shapes.

    Args:
        config: The user's own.
        base: The directory of its YAML.
        spec: Which rank, among how many, on what.

    Raises:
        UserError: The run could not start.
    """
    shapes, notes = without_files(config, base, spec.device)
    _refuse_more_ranks_than_rows(shapes, spec.ranks)
    import_first(shapes)
    _try_decoding(shapes, base)
    if reason := shapes.left_uncompiled(spec.device):
        notes.append(f"blocks: planned uncompiled, since {reason}")
    try:
        execution = _executed_on_devices(shapes, base, spec)
    except (RuntimeError, DynamicOutputShapeException) as error:
        if not shapes.compiles_blocks(spec.device):
            raise
        # A compiler raises errors of many kinds, and those of the step are among them: without it those come again.
        off = shapes.parallel.model_copy(update={"compile": "off"})
        execution = _executed_on_devices(shapes.model_copy(update={"parallel": off}), base, spec)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        notes.append(f"blocks: planned uncompiled, since they fail compiled ({' '.join(lines[:2])[:160]})")
    execution.notes[:0] = notes
    return execution


def _executed_on_devices(config: TrainingConfig, base: Path, spec: RankSpec) -> Execution:
    """Execute a run whose models are shapes."""
    counts = _StepCounts(spec)
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(_alone_among(spec.ranks, spec.rank, spec.torch_device))
        if config.compiles_blocks(spec.device):
            _prepare_compiler()
        free = lambda: max(0, spec.memory - counts.ledger.totals["cuda"])  # noqa: E731 - as short as what it asks
        mode = stack.enter_context(fake_devices(spec.device, free, spec.memory))
        run = Run(
            config=config,
            base=base,
            world=world,
            ranks=_AlikeRanks(spec.rank, spec.ranks),
            log=Logbook(clock=_Phases(counts.ledger)),
        )
        stack.enter_context(host_values_from(counts.answer))
        stack.enter_context(watched_storages(counts.ledger))
        stack.enter_context(contextlib.redirect_stdout(_NullWriter()))
        step = planned_step(run, counts.ledger, partial(counts.without_numbers, mode))
        step.room = room_for_tensors(spec.memory, spec.ranks)
        with counts.without_numbers(mode):
            execution = _executed(counts, step)
            execution.export_bytes = export_bytes(config, step.model.module, step.model.blueprint, execution.notes)
    small = small_bytes(config, step.model.blueprint)
    execution.checkpoint_bytes += small + ahead_bytes(config)
    execution.export_bytes += small
    return execution


def _prepare_compiler() -> None:
    """Drop programs of an earlier execution, and let dynamo find torch's functions before one stand-in is several.

    It looks them up by identity, once, and forgets them where a process group begins.
    """
    torch._dynamo.reset()
    torch._dynamo.trace_rules.get_torch_obj_rule_map()


class _AlikeRanks(RankGroup):
    """A group of ranks in which all other ranks are assumed to send what this rank sends."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group = None

    def gather(self, item: T) -> list[T]:
        """Return the item as often as there are ranks."""
        return [item] * self.size

    def swap(self, outgoing: Sequence[T]) -> list[T]:
        """Return what this rank would send itself; in a plan every sequence is its own."""
        return [outgoing[self.rank]] * self.size

    def agree(self, value: T) -> T:
        """Return the value: the first rank's is the same."""
        return value

    def on_first_rank(self, act: Callable[[], T]) -> T:
        """Return what `act` returns."""
        return act()


class _NoFailureChannel:
    """Replaces the channel through which ranks learn of failures; a plan has no other ranks that could fail."""

    @contextlib.contextmanager
    def phase(self, _: str) -> Iterator[None]:
        """Enter a phase that nobody hears of."""
        yield


@contextlib.contextmanager
def _alone_among(size: int, rank: int, device: torch.device) -> Iterator[World]:
    """Join a fake process group of many ranks within the block; its collectives return at once and change nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        local_size = min(size, 8)
        failure = cast("FailureChannel", _NoFailureChannel())
        yield World(rank, size, rank % local_size, device, failure, local_size)
    finally:
        dist.destroy_process_group()
        forget_meshes()


class _StepCounts:
    """Counters of memory and of waits of the host while a step runs."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec, self.ledger = spec, Ledger()
        self.values: list[HostValue] = []
        self.random: RandomState = host_random_state()
        self._observer = TensorObserver(self.ledger, self.answer)

    @contextlib.contextmanager
    def without_numbers(self, mode: FakeTensorMode) -> Iterator[None]:
        """Create tensors without data within the block, and count their bytes."""
        with mode, self._observer:
            yield

    def answer(self, tensor: Tensor, reason: str) -> NDArray[Any]:
        """Record that the host waits for a tensor, and return numbers in place of the absent data."""
        if tensor.device.type != "cpu" or self.spec.device == "cpu":
            self.values.append(HostValue(self.ledger.moment, reason, tensor.numel()))
        kind = np.dtype(str(tensor.dtype).removeprefix("torch."))
        return (np.zeros if kind.kind in "iub" else np.ones)(tuple(tensor.shape), kind)


def _executed(counts: _StepCounts, step: PlannedStep) -> Execution:
    """Load a checkpoint, make a step and a save; record what each of them takes.

    Of a sharded model the first step takes what a later one does. Elsewhere it leaves copies for passes, keys and
    values, or states that no checkpoint holds, beside which a second step is made.
    """
    ledger = counts.ledger
    loaded = dict(ledger.peaks)
    manifest = _learned(counts, step)
    ledger.restart()
    is_full = manifest.optimizer is not None  # weights alone cannot be resumed from
    if is_full:
        ledger.phase = RESUME
        _load(ledger, step, manifest)
        _name_states(ledger, step)
    ledger.phase = "step"
    counts.values.clear()
    _make(step)
    _name_states(ledger, step)
    resumed = dict(ledger.peaks) if is_full else {}
    if not (is_full and step.model.plan.sharded):
        outside = {key: peak for key, peak in ledger.peaks.items() if key[0] not in {"rollout", RESUME}}
        step.training_peak = max(peak.total for (_, device), peak in outside.items() if device == counts.spec.device)
        ledger.restart()
        counts.values.clear()
        _make(step)
    size = _save(counts, step)
    return Execution(
        spec=counts.spec,
        plan=step.model.plan,
        size=size_of_plan(step.run.config, step.model.plan, step.model.blueprint),
        loaded=loaded,
        resumed=resumed,
        steady={key: peak for key, peak in ledger.peaks.items() if key[0] != RESUME},
        host_values=counts.values,
        checkpoint_bytes=size,
        micro_batches=step.micro_batches,
        tokens=step.tokens,
        parameters=step.model.plan.parameters,
        allocated={key: made for key, made in ledger.allocated.items() if key[0] != RESUME},
        notes=[*step.notes],
    )


def _learned(counts: _StepCounts, step: PlannedStep) -> Manifest:
    """Return the manifest of a checkpoint; optimizers are left as they were built.

    What an optimizer keeps is learned from a step of its own: a step on tensors without numbers changes none.
    """
    counts.ledger.phase = "optimizer"
    built = [set(model.updater.state) for model in step.all_trained]
    for model in step.all_trained:
        for value in sharded_parameters(model.module).values():
            value.grad = torch.zeros_like(value) if value.requires_grad else None
        model.updater.step()
        model.updater.zero_grad(set_to_none=True)
    manifest = manifest_of(saved_snapshot(step.training, counts.random))
    for model, earlier_keys in zip(step.all_trained, built, strict=True):
        for parameter in [state_key for state_key in model.updater.state if state_key not in earlier_keys]:
            del model.updater.state[parameter]
    return manifest


def _load(ledger: Ledger, step: PlannedStep, manifest: Manifest) -> None:
    """Do what `load_state` does with what it has read; this rank's part of all tensors is in host memory then."""
    model, companions = step.model, step.training.saved_companions
    averages = {} if model.averages is None else model.averages.tensors
    parts = live_parts(model.module, model.optimizer, averages, companions)
    plan = plan_load(parts, manifest, Declared(), "live", "a planned checkpoint", companions=companions is not None)
    with ledger.scope(CHECKPOINT):
        read = {
            key: like(target.live, torch.empty(local_part(target.live).shape, dtype=target.dtype))
            for key, target in plan.targets.items()
        }
    with ledger.scope(OPTIMIZER):
        execute_load(plan, read, states_read(plan, read))


def _make(step: PlannedStep) -> None:
    step.make()
    step.run.log.batches.clear()  # as the journal does once a step is written down


def import_first(config: TrainingConfig) -> None:
    """Let other packages look for a GPU, and compute their tables, while tensors have numbers and nothing is pretended.

    What they would find later are stand-ins: kernels of theirs are not there. transformers imports torchao where it is
    installed, which asks each device for its name.
    """
    importlib.import_module("transformers.modeling_utils")
    if config.model.lora is not None:
        if config.model.lora.quantize:
            check_library(config.model.lora.quantize)
        broken("bitsandbytes")  # peft imports it
        importlib.import_module("peft")
    if isinstance(config.optim, AdamW8bitConfig):
        weight = nn.Parameter(torch.zeros(64, 64))
        weight.grad = torch.zeros_like(weight)
        build_optimizer(config.optim, {"weight": weight}).step()


def _try_decoding(config: TrainingConfig, base: Path) -> None:
    """Try our own decoding on a policy with recurrent layers while tensors have numbers; the verdict is kept."""
    rollout = getattr(config, "rollout", None)
    engine = getattr(rollout, "engine", None)
    if isinstance(engine, LocalEngineConfig) and engine.kind != "transformers":
        why_not_in_process(blueprint(config.model, base, seed=config.seed), padded=False)


class _NullWriter:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def _refuse_more_ranks_than_rows(config: TrainingConfig, ranks: int) -> None:
    rows = config.data.batch_size
    served = rows * config.parallel.context  # the ranks of a context group share their rows
    if ranks > served:
        raise ConfigError(
            f"{ranks} ranks share data.batch_size={rows} rows of an update, so {ranks - served} of them would have "
            "none and wait for the others. Raise data.batch_size, or plan for fewer ranks."
        )


def _name_states(ledger: Ledger, step: PlannedStep) -> None:
    for model in step.all_trained:
        ledger.name(states_of(model), OPTIMIZER)


def states_of(model: Model) -> list[Tensor]:
    """Return the tensors of a model's optimizer, and the averages of its weights."""
    states = [value for state in model.updater.state.values() for value in state.values()]
    averages = [] if model.averages is None else [*model.averages.tensors.values()]
    return [value for value in (*states, *averages) if isinstance(value, Tensor)]


def _save(counts: _StepCounts, step: PlannedStep) -> int:
    """Copy a snapshot of every model to the host, as a save does before training goes on; return its bytes on disk."""
    ledger = counts.ledger
    before, ledger.phase = ledger.phase, "save"
    snapshot = saved_snapshot(step.training, counts.random)
    if step.run.config.checkpoint.background:
        with ledger.scope(CHECKPOINT):
            staged(snapshot, {})
    ledger.phase = before
    return checkpoint_bytes(snapshot.tensors.values(), counts.spec.ranks, counts.random)
