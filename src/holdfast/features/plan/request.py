"""From a request to a plan, in a process that has the guard: executed, or by formulas where that cannot be.

Formulas hold to a tenth or so for language models of blocks; a plan says when it is made of them. Where the run does
not fit, it says what to turn: a closed list, the cheapest first, each tried on top of those before it. None of them
changes what a run computes beyond rounding: a turn that would, such as a shorter `data.max_length`, is the user's to
think of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from holdfast.config.load import from_mapping
from holdfast.config.sections.optim import AdamW8bitConfig, AdamWConfig
from holdfast.config.sections.parallel import FullRecompute, NoRecompute, SelectiveRecompute
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.verbs.training import TrainingConfig
from holdfast.features.plan.devices import Device, device_named
from holdfast.features.plan.execute import execute, import_first
from holdfast.features.plan.kinds import ACTIVATIONS, GATHERED, GRADIENTS, HEAD, OPTIMIZER, PARAMETERS
from holdfast.features.plan.memory import Peak
from holdfast.features.plan.origin import without_files
from holdfast.features.plan.records import Execution, Place, plain_plan
from holdfast.features.plan.saved import (
    checkpoint_bytes,
    export_bytes,
    host_random_state,
    learned_states,
    saved_weights,
    small_bytes,
)
from holdfast.models.check.shrink import layers_in
from holdfast.models.setup.model import Blueprint, blueprint, set_storage, storage_of
from holdfast.parallel.plan import ShardPlan
from holdfast.training.setup.model import make_plan, policy_model

_KEPT = {"none": 34.0, "selective": 18.0, "full": 2.0}
"""Bytes that a block keeps for each number of the hidden state of a token (Korthikanti et al., arXiv:2205.05198)."""


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
    device = None if on_cpu else device_named(request["device"])
    place = Place(request["ranks"], 0, "cpu" if on_cpu else "cuda", request["memory"])
    base = Path(request["base"])
    plan = plain_plan(_made(config, base, place, no_guard), device, request["memory"])
    if plan["peak_bytes"] + plan["allowance_bytes"] > request["memory"]:
        plan["turns"] = list(_turns(config, base, place, device, no_guard))
    return plan


def _made(config: TrainingConfig, base: Path, place: Place, no_guard: str) -> Execution:
    if no_guard:
        return _by_formulas(config, base, place, no_guard)
    try:
        return execute(config, base, place)
    except (
        RuntimeError,
        DynamicOutputShapeException,
    ) as error:  # what an architecture asks of numbers that are not there
        words = (str(error).strip() or "no reason given").splitlines()[0]
        return _by_formulas(config, base, place, f"its step cannot be executed without numbers ({words[:160]})")


def _turns(
    config: TrainingConfig, base: Path, place: Place, device: Device | None, no_guard: str
) -> list[dict[str, Any]]:
    made = []
    for turn in turns(config, place):
        plan = plain_plan(_made(turn.config, base, place, no_guard), device, place.memory)
        told = {"key": turn.key, "value": turn.value, "cost": turn.cost}
        made.append({**told, "peak_bytes": plan["peak_bytes"], "fits": plan["fits"]})
        if plan["fits"]:
            break
    return made


@dataclass(frozen=True)
class Turn:
    """One key that takes less memory."""

    key: str
    value: str
    cost: str
    config: TrainingConfig
    """With it, and with those before."""


def turns(config: TrainingConfig, place: Place) -> Iterator[Turn]:
    """Yield what can be turned, each on top of those before it."""
    for key, cost, change in _LIST:
        changed = change(config, place)
        if changed is not None:
            value, config = changed
            yield Turn(key, value, cost, config)


Change = Callable[[TrainingConfig, Place], tuple[str, Any] | None]


def _fewer_tokens(config: TrainingConfig, _: Place) -> tuple[str, TrainingConfig] | None:
    least = config.data.max_length * (2 if isinstance(config, DPOConfig) else 1)
    if config.data.tokens_per_micro_batch <= least:
        return None
    return str(least), _with(config, "data", tokens_per_micro_batch=least)


def _recompute(config: TrainingConfig, _: Place) -> tuple[str, TrainingConfig] | None:
    if isinstance(config.parallel.recompute, FullRecompute):
        return None
    return "full", _with(config, "parallel", recompute=FullRecompute())


def _shard(config: TrainingConfig, place: Place) -> tuple[str, TrainingConfig] | None:
    if config.parallel.replicate == 1 or place.ranks == 1:
        return None
    return "1", _with(config, "parallel", replicate=1, shard="auto")


def _small_states(config: TrainingConfig, _: Place) -> tuple[str, TrainingConfig] | None:
    section = config.optim
    if not isinstance(section, AdamWConfig):
        return None
    shared = {
        name: getattr(section, name) for name in AdamW8bitConfig.model_fields if name in type(section).model_fields
    }
    made = AdamW8bitConfig(**{name: value for name, value in shared.items() if name != "kind"})
    return made.kind, config.model_copy(update={"optim": made})


def _offload(config: TrainingConfig, place: Place) -> tuple[str, TrainingConfig] | None:
    if place.device == "cpu" or config.parallel.cpu_offload or config.optim.kind == "muon":
        return None
    return "true", _with(config, "parallel", cpu_offload=True)


def _with(config: TrainingConfig, section: str, **values: Any) -> TrainingConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


_LIST: tuple[tuple[str, str, Change], ...] = (
    ("data.tokens_per_micro_batch", "more and shorter passes", _fewer_tokens),
    ("parallel.recompute", "about a third more work", _recompute),
    ("parallel.replicate", "messages between more ranks", _shard),
    ("optim.kind", "its states are rounded; needs torchao", _small_states),
    ("parallel.cpu_offload", "states travel to the host in every update, where the optimizer runs", _offload),
)


def _by_formulas(config: TrainingConfig, base: Path, place: Place, reason: str) -> Execution:
    """Return an execution's numbers without executing; `reason` says why.

    Raises:
        UserError: The model cannot be planned.
    """
    shapes, notes = without_files(config, base)
    import_first(shapes)
    origin = blueprint(shapes.model, base, seed=shapes.seed, scorer=shapes.scores)
    set_storage(origin.model, *storage_of(shapes.model))
    policy = policy_model(shapes, origin, None)
    plan = make_plan(shapes, policy, max(1, place.ranks // shapes.parallel.replicate), place.torch_device.type)
    tokens = min(shapes.data.tokens_per_micro_batch, shapes.data.batch_size * shapes.data.max_length)
    is_full = shapes.checkpoint.contents == "full"
    states = learned_states(shapes, policy)
    if states is None:
        states = {"moments": torch.empty(2 * plan.trainable, device="meta")}
        notes.append("optim.path: its states are taken as two moments in float32, since nothing was executed")
    parts = _parts(shapes, origin, plan, tokens, sum(each.nbytes for each in states.values()))
    loaded = {PARAMETERS: parts[PARAMETERS]}
    peaks = {
        ("load", place.device): Peak(sum(loaded.values()), loaded),
        ("backward", place.device): Peak(sum(parts.values()), parts),
    }
    saved = [*saved_weights(shapes, policy).values(), *(states.values() if is_full else ())]
    small = small_bytes(shapes, origin)
    return Execution(
        place=place,
        plan=plan,
        loaded=peaks,
        steady=peaks,
        resumed=peaks if is_full else {},
        checkpoint_bytes=checkpoint_bytes(saved, place.ranks, host_random_state()) + small,
        export_bytes=export_bytes(shapes, policy, origin, notes) + small,
        tokens=tokens,
        parameters=plan.parameters,
        flops={"backward": (6 * plan.trainable + 4 * (plan.parameters - plan.trainable)) * tokens},
        executed=False,
        uncounted=_uncounted(config),
        notes=[*notes, f"by formulas, for this reason: {reason}"],
    )


def _uncounted(config: TrainingConfig) -> str:
    """Return what of a run formulas leave out; "" if nothing."""
    match config:
        case GRPOConfig():
            return "rollouts, a reference and a critic"
        case DPOConfig() | DistillConfig():
            return "the reference or the teacher"
        case _:
            return ""


def _parts(config: TrainingConfig, origin: Blueprint, plan: ShardPlan, tokens: int, states: int) -> dict[str, int]:
    """Return bytes by kind at the peak of a backward pass; `states` are those of all ranks."""
    text: Any = origin.skeleton.config.get_text_config()
    width, layers, vocabulary = int(text.hidden_size), layers_in(origin.skeleton), int(text.vocab_size)
    computed, stored = (2 if plan.compute_dtype == "bfloat16" else 4), storage_of(config.model)[0].itemsize
    units = sorted((unit.bytes_ // stored for unit in plan.units), reverse=True)
    trained = plan.trainable // plan.shard
    match config.parallel.recompute:
        case NoRecompute():
            kept = _KEPT["none"] * layers
        case SelectiveRecompute():
            kept = _KEPT["selective"] * layers
        case _:
            kept = _KEPT["full"] * layers + _KEPT["none"]
    head = 8 * vocabulary * width if plan.trainable == plan.parameters else 2 * vocabulary * width
    return {
        PARAMETERS: plan.shard_bytes,
        GATHERED: computed * sum(units[:3]) if plan.sharded and plan.shard > 1 else 0,
        GRADIENTS: max(stored, 4) * trained + (computed + 4) * units[0] * bool(plan.trainable),
        OPTIMIZER: 0 if plan.cpu_offload else states // plan.shard,
        ACTIVATIONS: int(kept * tokens * width),
        HEAD: head,
    }
