"""Turns a request into a plan, in a process that has the device guard. Where a step cannot be executed, formulas
estimate it.

Where the run does not fit, a plan says what to turn: a closed list, the cheapest first, each on top of those before it,
with what formulas say that it saves. None of them changes what a run computes beyond rounding: a turn that would, such
as a shorter `data.max_length`, is the user's to think of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import DynamicOutputShapeException

from holdfast import registry
from holdfast.config.load import from_mapping
from holdfast.config.sections.optim import AdamW8bitConfig, AdamWConfig
from holdfast.config.sections.parallel import FullRecompute
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.verbs.training import TrainingConfig
from holdfast.features.plan.counting.kinds import PARAMETERS
from holdfast.features.plan.counting.memory import Peak
from holdfast.features.plan.execution.execute import execute, import_first
from holdfast.features.plan.execution.origin import size_of_plan, without_files
from holdfast.features.plan.execution.saved import ahead_bytes, export_bytes, small_bytes
from holdfast.features.plan.formulas import (
    ModelSize,
    checkpoint_by_formulas,
    largest_tokens,
    parts_by_formulas,
    sequences_of_row,
    uncounted,
)
from holdfast.features.plan.records import Execution, RankSpec, allowance, plain_plan
from holdfast.models.setup.model import blueprint, set_storage, storage_of
from holdfast.training.policy.run import moves_nothing
from holdfast.training.setup.model import policy_model
from holdfast.training.setup.shard_plan import make_plan


def planned(request: dict[str, Any], no_guard: str = "") -> dict[str, Any]:
    """Return a plan, JSON-ready.

    Args:
        request: verb, config, base, ranks, device (a name of `features/plan/devices.py`, or cpu) and memory in bytes.
        no_guard: Why nothing can be executed; "" where it can.

    Raises:
        UserError: The run could not start.
    """
    warnings.simplefilter("ignore")  # other packages' talk of a machine that is not there
    config = from_mapping(request["config"], ROOTS[request["verb"]], "the run")
    on_cpu = request["device"] == "cpu"
    spec = RankSpec(request["ranks"], 0, "cpu" if on_cpu else "cuda", request["memory"])
    execution = made(config, Path(request["base"]), spec, no_guard)
    if isinstance(config, GRPOConfig) and config.residency.parameters == "host" and execution.plan.whole:
        execution.notes.append(moves_nothing(execution.plan))
    plan = plain_plan(execution, None if on_cpu else request["device"], request["memory"])
    plan["servers"] = registry.load(registry.SERVER_COMMANDS)(config, spec.ranks, on_cpu=on_cpu)
    if plan["peak_bytes"] + plan["allowance_bytes"] > request["memory"]:
        plan["turns"] = list(_turns(config, execution.size, spec, plan["phases"]))
    return plan


def made(config: TrainingConfig, base: Path, spec: RankSpec, no_guard: str) -> Execution:
    """Return the numbers of a step, executed where that is possible.

    Raises:
        UserError: The run could not start.
    """
    if no_guard:
        return _by_formulas(config, base, spec, no_guard)
    try:
        return execute(config, base, spec)
    except (
        RuntimeError,
        DynamicOutputShapeException,
    ) as error:  # what an architecture asks of numbers that are not there
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        return _by_formulas(config, base, spec, f"its step cannot be executed without numbers ({reason[:160]})")


def _turns(
    config: TrainingConfig, size: ModelSize, spec: RankSpec, phases: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield what to turn until it should fit: each kind of bytes shrinks as formulas say."""
    before = parts_by_formulas(config, size, spec.ranks, spec.device)
    for turn in turns(config, spec):
        after = parts_by_formulas(turn.config, size, spec.ranks, spec.device)
        left = {kind: min(1.0, after[kind] / bytes_) for kind, bytes_ in before.items() if bytes_}
        peak = max(
            phase["total"] - int(sum(part * (1 - left.get(kind, 1)) for kind, part in phase["parts"].items()))
            for phase in phases.values()
        )
        spare = allowance(peak, spec.ranks) if spec.device == "cuda" else 0
        fits = peak + spare <= spec.memory
        yield {"key": turn.key, "value": turn.value, "cost": turn.cost, "peak_bytes": peak, "fits": fits}
        if fits:
            return


@dataclass(frozen=True)
class MemorySaving:
    """A change of one key that saves memory."""

    key: str
    value: str
    cost: str
    config: TrainingConfig
    """The configuration with this change and all changes before it in the list."""


def turns(config: TrainingConfig, spec: RankSpec) -> Iterator[MemorySaving]:
    """Yield changes of keys that save memory; each configuration includes the changes before it."""
    for key, cost, change in _LIST:
        changed = change(config, spec)
        if changed is not None:
            value, config = changed
            yield MemorySaving(key, value, cost, config)


Change = Callable[[TrainingConfig, RankSpec], tuple[str, Any] | None]


def _fewer_tokens(config: TrainingConfig, _: RankSpec) -> tuple[str, TrainingConfig] | None:
    least = -(-config.data.max_length * sequences_of_row(config) // config.parallel.context)
    if config.data.tokens_per_micro_batch <= least:
        return None
    return str(least), _with(config, "data", tokens_per_micro_batch=least)


def _recompute(config: TrainingConfig, _: RankSpec) -> tuple[str, TrainingConfig] | None:
    if isinstance(config.parallel.recompute, FullRecompute):
        return None
    return "full", _with(config, "parallel", recompute=FullRecompute())


def _shard(config: TrainingConfig, spec: RankSpec) -> tuple[str, TrainingConfig] | None:
    if config.parallel.replicate == 1 or spec.ranks == 1:
        return None
    return "1", _with(config, "parallel", replicate=1, shard="auto")


def _small_states(config: TrainingConfig, _: RankSpec) -> tuple[str, TrainingConfig] | None:
    section = config.optim
    if not isinstance(section, AdamWConfig) or "optimizer" in config.parallel.offloads:
        return None
    shared = {
        name: getattr(section, name) for name in AdamW8bitConfig.model_fields if name in type(section).model_fields
    }
    low_bit = AdamW8bitConfig(**{name: value for name, value in shared.items() if name != "kind"})
    return low_bit.kind, config.model_copy(update={"optim": low_bit})


def _offload(config: TrainingConfig, spec: RankSpec) -> tuple[str, TrainingConfig] | None:
    offloads = {*config.parallel.offloads, "optimizer", "parameters"}
    if spec.device == "cpu" or offloads == config.parallel.offloads or config.optim.kind == "muon":
        return None
    return _listed(config, offloads)


def _offload_activations(config: TrainingConfig, spec: RankSpec) -> tuple[str, TrainingConfig] | None:
    offloads = {*config.parallel.offloads, "activations"}
    if spec.device == "cpu" or offloads == config.parallel.offloads or config.parallel.recompute.kind == "selective":
        return None
    return _listed(config, offloads)


def _listed(config: TrainingConfig, offloads: Set[str]) -> tuple[str, TrainingConfig]:
    value = sorted(offloads)
    return f"[{', '.join(value)}]", _with(config, "parallel", offload=value)


def _with(config: TrainingConfig, section: str, **values: Any) -> TrainingConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


_LIST: tuple[tuple[str, str, Change], ...] = (
    ("data.tokens_per_micro_batch", "more and shorter passes", _fewer_tokens),
    ("parallel.recompute", "about a third more work", _recompute),
    ("parallel.replicate", "messages between more ranks", _shard),
    ("optim.kind", "its states are rounded; needs torchao", _small_states),
    ("parallel.offload", "activations travel to the host and back beside the passes", _offload_activations),
    ("parallel.offload", "states travel to the host in every update, where the optimizer runs", _offload),
)


def _by_formulas(config: TrainingConfig, base: Path, spec: RankSpec, reason: str) -> Execution:
    """Return an execution's numbers without executing; `reason` says why.

    Raises:
        UserError: The model cannot be planned.
    """
    shapes, notes = without_files(config, base, spec.device)
    import_first(shapes)
    origin = blueprint(shapes.model, base, seed=shapes.seed, scorer=shapes.scores)
    set_storage(origin.model, *storage_of(shapes.model))
    policy = policy_model(shapes, origin, None)
    plan = make_plan(shapes, policy, max(1, spec.ranks // shapes.parallel.replicate), spec.torch_device.type)
    size = size_of_plan(shapes, plan, origin)
    by_kind = parts_by_formulas(shapes, size, spec.ranks, spec.device)
    loaded = {PARAMETERS: by_kind[PARAMETERS]}
    peaks = {
        ("load", spec.device): Peak(sum(loaded.values()), loaded),
        ("backward", spec.device): Peak(sum(by_kind.values()), by_kind),
    }
    is_full = shapes.checkpoint.contents == "full"
    small = small_bytes(shapes, origin)
    return Execution(
        spec=spec,
        plan=plan,
        size=size,
        loaded=peaks,
        steady=peaks,
        resumed=peaks if is_full else {},
        checkpoint_bytes=checkpoint_by_formulas(shapes, size, spec.device) + small + ahead_bytes(shapes),
        export_bytes=export_bytes(shapes, policy, origin, notes) + small,
        tokens=largest_tokens(shapes),
        parameters=plan.parameters,
        executed=False,
        uncounted=uncounted(config),
        notes=[*notes, f"by formulas, for this reason: {reason}"],
    )
