"""Turns a request into a plan, in a process that has the device guard. Where a step cannot be executed, formulas
estimate it.

Formulas hold to a tenth or so for language models of blocks; a plan says when it is made of them. Where the run does
not fit, it says what to turn: a closed list, the cheapest first, each tried on top of those before it. None of them
changes what a run computes beyond rounding: a turn that would, such as a shorter `data.max_length`, is the user's to
think of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from holdfast import registry
from holdfast.config.load import from_mapping
from holdfast.config.sections.optim import AdamW8bitConfig, AdamWConfig
from holdfast.config.sections.parallel import FullRecompute, NoRecompute, SelectiveRecompute
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.dpo import DPOConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import ROOTS
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import HoldfastError
from holdfast.features.plan.counting.kinds import ACTIVATIONS, GATHERED, GRADIENTS, HEAD, OPTIMIZER, PARAMETERS
from holdfast.features.plan.counting.memory import Peak
from holdfast.features.plan.devices import GIB, Device, device_named
from holdfast.features.plan.execution.execute import execute, import_first
from holdfast.features.plan.execution.origin import without_files
from holdfast.features.plan.execution.process import tell
from holdfast.features.plan.execution.saved import (
    ahead_bytes,
    checkpoint_bytes,
    export_bytes,
    host_random_state,
    learned_states,
    saved_weights,
    small_bytes,
)
from holdfast.features.plan.records import Execution, RankSpec, plain_plan
from holdfast.models.check.shrink import layers_in
from holdfast.models.setup.model import Blueprint, blueprint, set_storage, storage_of
from holdfast.parallel.plan import ShardPlan
from holdfast.training.policy.run import moves_nothing
from holdfast.training.setup.model import policy_model
from holdfast.training.setup.shard_plan import make_plan

_NO_FORMULA = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What formulas raise of a model whose configuration they do not know."""
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
    spec = RankSpec(request["ranks"], 0, "cpu" if on_cpu else "cuda", request["memory"])
    base = Path(request["base"])
    if not no_guard:
        _tell_formulas(config, base, spec)
    execution = made(config, base, spec, no_guard)
    if isinstance(config, GRPOConfig) and config.residency.parameters == "host" and execution.plan.whole:
        execution.notes.append(moves_nothing(execution.plan))
    plan = plain_plan(execution, device, request["memory"])
    plan["servers"] = registry.load(registry.SERVER_COMMANDS)(config, spec.ranks, on_cpu=on_cpu)
    if plan["peak_bytes"] + plan["allowance_bytes"] > request["memory"]:
        plan["turns"] = list(_turns(config, base, spec, device, no_guard))
    return plan


def _tell_formulas(config: TrainingConfig, base: Path, spec: RankSpec) -> None:
    """Tell what formulas say, which takes seconds where an execution takes a minute."""
    try:
        plan = plain_plan(_by_formulas(config, base, spec, ""), None, spec.memory)
    except (HoldfastError, *_NO_FORMULA):
        return
    rest = f", without {plan['uncounted']}" if plan["uncounted"] else ""
    sizes = f"{plan['peak_bytes'] / GIB:.2f} of {spec.memory / GIB:.2f} GiB"
    tell(f"by formulas {sizes} at the peak{rest}; the execution follows")


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
    config: TrainingConfig, base: Path, spec: RankSpec, device: Device | None, no_guard: str
) -> list[dict[str, Any]]:
    records = []
    for turn in turns(config, spec):
        tell(f"it does not fit; {turn.key}: {turn.value} is executed")
        plan = plain_plan(made(turn.config, base, spec, no_guard), device, spec.memory)
        record = {"key": turn.key, "value": turn.value, "cost": turn.cost}
        records.append({**record, "peak_bytes": plan["peak_bytes"], "fits": plan["fits"]})
        if plan["fits"]:
            break
    return records


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


def sequences_of_row(config: TrainingConfig) -> int:
    """Return how many sequences a row has, which no micro-batch splits: two of a pair, one of KTO and all others."""
    return 2 if isinstance(config, DPOConfig) and config.preference.takes_pairs else 1


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
    longest = shapes.data.batch_size * sequences_of_row(shapes) * shapes.data.max_length
    tokens = min(shapes.data.tokens_per_micro_batch, longest)
    is_full = shapes.checkpoint.contents == "full"
    states = learned_states(shapes, policy)
    if states is None:
        states = {"moments": torch.empty(2 * plan.trainable, device="meta")}
        notes.append("optim.path: its states are taken as two moments in float32, since nothing was executed")
    bytes_by_kind = _parts(shapes, origin, plan, tokens, sum(tensor.nbytes for tensor in states.values()))
    loaded = {PARAMETERS: bytes_by_kind[PARAMETERS]}
    peaks = {
        ("load", spec.device): Peak(sum(loaded.values()), loaded),
        ("backward", spec.device): Peak(sum(bytes_by_kind.values()), bytes_by_kind),
    }
    saved = [*saved_weights(shapes, policy).values(), *(states.values() if is_full else ())]
    small = small_bytes(shapes, origin)
    return Execution(
        spec=spec,
        plan=plan,
        loaded=peaks,
        steady=peaks,
        resumed=peaks if is_full else {},
        checkpoint_bytes=checkpoint_bytes(saved, spec.ranks, host_random_state()) + small + ahead_bytes(shapes),
        export_bytes=export_bytes(shapes, policy, origin, notes) + small,
        tokens=tokens,
        parameters=plan.parameters,
        flops={"backward": (6 * plan.trainable + 4 * (plan.parameters - plan.trainable)) * tokens},
        executed=False,
        uncounted=_uncounted(config),
        notes=[*notes, f"by formulas, for this reason: {reason}"],
    )


def _uncounted(config: TrainingConfig) -> str:
    """Return the parts of a run that the formulas do not count; "" if they count everything."""
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
    # Of offloaded blocks the one at work and a neighbour, which is copied, are on the device.
    layers = min(layers, 2) if plan.offload_blocks else layers
    match config.parallel.recompute:
        case NoRecompute():
            activations = _KEPT["none"] * layers
        case SelectiveRecompute():
            activations = _KEPT["selective"] * layers
        case _:
            activations = _KEPT["full"] * layers + _KEPT["none"]
    head = 8 * vocabulary * width if plan.trainable == plan.parameters else 2 * vocabulary * width
    return {
        PARAMETERS: plan.shard_bytes,
        GATHERED: _copies(origin, plan) if plan.copied else computed * sum(units[:3]) if plan.shard > 1 else 0,
        GRADIENTS: max(stored, 4) * trained + (computed + 4) * units[0] * bool(plan.trainable),
        OPTIMIZER: 0 if "optimizer" in config.parallel.offloads else states // plan.shard,
        ACTIVATIONS: int(activations * tokens * width),
        HEAD: head,
    }


def _copies(origin: Blueprint, plan: ShardPlan) -> int:
    """Return the bytes of the copies that the passes of one rank read; what is stored in their dtype has none."""
    dtype: torch.dtype = getattr(torch, plan.compute_dtype)
    parameters = [value for value in origin.model.parameters() if value.ndim and value.dtype != dtype]
    return sum(value.numel() * int(dtype.itemsize) for value in parameters if value.is_floating_point())
