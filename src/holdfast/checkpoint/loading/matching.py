"""Match a checkpoint with the model and optimizer that it is loaded into.

Names, shapes, dtypes, trained parameters, the optimizer's class and its parameters must agree. Each deviation must be
declared by a pattern of names, and is recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.checkpoint.format.manifest import Manifest, TensorEntry
from holdfast.checkpoint.format.snapshot import (
    AVERAGE,
    MODEL,
    OPTIM,
    TRAINED,
    model_tensors,
)
from holdfast.checkpoint.format.unsupported_tensors import refuse_odd
from holdfast.optim.state import (
    GroupState,
    groups_of,
    names_of,
    qualified_name,
)
from holdfast.optim.state_template import inert_state
from holdfast.optim.wrapped import BETWEEN


@dataclass(frozen=True)
class Declared:
    """Differences that a load allows, as regular expressions that are searched in canonical parameter names."""

    add: Sequence[str] = ()
    """Parameters that the checkpoint lacks; they keep their present values."""
    drop: Sequence[str] = ()
    """Parameters that the model lacks; they are not read."""
    cast: Sequence[str] = ()
    """Parameters stored in another dtype; they are converted."""
    freeze: Sequence[str] = ()
    """Parameters that were trained and are frozen now, or that left the optimizer; their optimizer state is dropped."""
    unfreeze: Sequence[str] = ()
    """Parameters that were frozen and are trained now, or that are new in the optimizer; they start without state."""


class Target(NamedTuple):
    """One stored tensor, and a live tensor with the sharding in which to read it."""

    live: Tensor
    entry: TensorEntry

    @property
    def dtype(self) -> torch.dtype:
        """Stored dtype."""
        stored: torch.dtype = getattr(torch, self.entry.dtype)
        return stored


@dataclass(frozen=True)
class Match:
    """The tensors to read for some names, and the differences between checkpoint and live state in them."""

    targets: Mapping[str, Target] = field(default_factory=dict)
    """Tensors to read, by their stored names."""
    deviations: tuple[str, ...] = ()
    """Sentences about deviations that were declared."""
    refused: tuple[str, ...] = ()
    """Sentences about deviations that were not declared."""
    unsaved: int = 0
    """Number of frozen tensors that the checkpoint does not hold."""


def merged(matches: Iterable[Match]) -> Match:
    """Return one match of many, in order."""
    targets: dict[str, Target] = {}
    deviations, refused = list[str](), list[str]()
    unsaved = 0
    for match in matches:
        targets |= match.targets
        deviations += match.deviations
        refused += match.refused
        unsaved += match.unsaved
    return Match(targets, tuple(deviations), tuple(refused), unsaved)


def allowed(patterns: Sequence[str], name: str, difference: str, flag: str) -> Match:
    """Return a deviation: declared if a pattern matches the name, else refused."""
    if any(re.search(pattern, name) for pattern in patterns):
        return Match(deviations=(f"{difference} ({flag})",))
    return Match(refused=(f"{difference} (allow it with {flag})",))


def match_model(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], manifest: Manifest, declared: Declared
) -> Iterator[Match]:
    """Yield the matches of a model's parameters and buffers."""
    stored = {key: entry for key, entry in manifest.tensors.items() if key.startswith(MODEL)}
    live = model_tensors(model)
    refuse_odd(live)
    partial = TRAINED in manifest.contents
    for key in sorted({*stored, *live}):
        name = key.removeprefix(MODEL)
        if key not in stored:
            yield _missing(name, parameters.get(name), partial, declared)
        elif key not in live:
            yield allowed(declared.drop, name, f"{name} is in the checkpoint and not in the model", "resume.drop")
        elif tuple(live[key].shape) != stored[key].shape:
            yield Match(refused=(f"{name} is {list(stored[key].shape)} there and {list(live[key].shape)} here",))
        else:
            yield from _match_tensor(key, live[key], stored[key], declared)
            trained = name in parameters and parameters[name].requires_grad
            if name in parameters and trained != stored[key].requires_grad:
                patterns, flag = (declared.unfreeze, "unfreeze") if trained else (declared.freeze, "freeze")
                change = "frozen then and is trained now" if trained else "trained then and is frozen now"
                yield allowed(patterns, name, f"{name} was {change}", f"resume.{flag}")


def _missing(name: str, parameter: nn.Parameter | None, partial: bool, declared: Declared) -> Match:
    """Return the match of a tensor that the checkpoint lacks.

    A frozen one keeps its value if only trained ones were saved.
    """
    if partial and parameter is not None and not parameter.requires_grad:
        return Match(unsaved=1)
    return allowed(declared.add, name, f"{name} is in the model and not in the checkpoint", "resume.add")


def _match_tensor(key: str, live: Tensor, entry: TensorEntry, declared: Declared) -> Iterator[Match]:
    target, name = Target(live, entry), key.removeprefix(MODEL)
    yield Match({key: target})
    if target.dtype != live.dtype:
        here = str(live.dtype).removeprefix("torch.")
        yield allowed(declared.cast, name, f"{name} is {entry.dtype} there and {here} here", "resume.cast")


def match_averages(averages: Mapping[str, Tensor], manifest: Manifest, declared: Declared) -> Iterator[Match]:
    """Yield the matches of averages of weights, but for deviations that the parameters themselves have."""
    stored = {key for key in manifest.tensors if key.startswith(AVERAGE)}
    live = {AVERAGE + name: average for name, average in averages.items()}
    if bool(stored) != bool(live):
        difference, patterns, flag = (
            ("the checkpoint has averages of the weights, and this run keeps none (optim.ema)", declared.drop, "drop")
            if stored
            else ("the checkpoint has no averages of the weights, and this run keeps some", declared.add, "add")
        )
        yield allowed(patterns, AVERAGE, difference, f"resume.{flag}: ['^ema']")
        return
    for key in sorted(stored & live.keys()):
        if tuple(live[key].shape) == tuple(manifest.tensors[key].shape):  # another shape is refused with its parameter
            yield from _match_tensor(key, live[key], manifest.tensors[key], declared)


_GONE = frozenset({"holdfast.optim.lowbit.AdamW4bit", "holdfast.optim.lowbit.AdamWFP8"})
"""Classes of optimizers that earlier versions had."""


def optimizer_difference(optimizer: Optimizer, manifest: Manifest) -> str | None:
    """Return how the optimizer of a checkpoint differs from this one; None if they are of one class."""
    if manifest.optimizer is None:
        return f"the checkpoint has no optimizer state (it holds {', '.join(manifest.contents)})"
    kind = manifest.optimizer["kind"]
    own = qualified_name(optimizer)
    return None if kind == own else f"its optimizer is {kind}, this run's is {own}"


def optimizer_misfit(optimizer: Optimizer, manifest: Manifest) -> str | None:
    """Return why no state of a checkpoint can be an optimizer's; None if some can."""
    difference = optimizer_difference(optimizer, manifest)
    if difference is None:
        return None
    if manifest.optimizer is None:
        return f"{difference}. To start a new run from its weights, set init_from instead of resuming"
    if manifest.optimizer["kind"] in _GONE:
        way = "This version has no such optimizer. Start a new run from these weights, with optim.kind: adamw_8bit,"
    else:
        way = "Put optim back, or start a new run from these weights with"
    return f"{difference}. {way} another run.name and checkpoint.init_from"


def match_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], manifest: Manifest, declared: Declared
) -> Iterator[Match]:
    """Yield the matches of the state of an optimizer, whose class is the checkpoint's; not of quantised state.

    Args:
        optimizer: The live optimizer.
        parameters: All parameters of the model by canonical name.
        manifest: Manifest of the checkpoint.
        declared: Allowed deviations.
    """
    assert manifest.optimizer is not None
    live, saved = groups_of(optimizer, names_of(optimizer, parameters)), saved_groups(manifest)
    updated_names = {name for group in live for name in group.parameters}
    saved_names = {name for group in saved for name in group.parameters}
    yield from _match_members(updated_names, saved_names, parameters, manifest, declared)
    layouts = _StateLayouts(optimizer, parameters)
    wrapped = manifest.optimizer.get("wrapped", {})
    for key, entry in manifest.tensors.items():
        name, _, slot = key.removeprefix(OPTIM).rpartition(".")
        if not key.startswith(OPTIM) or name not in updated_names:
            continue  # the parameter's own deviation was declared, or refused above
        if slot.rpartition(BETWEEN)[0] in wrapped.get(name, {}):
            continue  # a part of a tensor that is matched as a whole
        yield Match({key: Target(layouts.of(key, name, entry), entry)})


@dataclass
class _StateLayouts:
    """Finds the sharding in which this run's optimizer keeps a state tensor."""

    optimizer: Optimizer
    parameters: Mapping[str, nn.Parameter]
    learned: Mapping[str, Mapping[str, Tensor]] | None = None

    def of(self, key: str, name: str, entry: TensorEntry) -> Tensor:
        """Return a tensor with the sharding for a stored one: the parameter, or state that the optimizer creates."""
        parameter, slot = self.parameters[name], key.rpartition(".")[2]
        if entry.shape == tuple(parameter.shape):
            return parameter.data
        unsharded = torch.empty(entry.shape)
        if not entry.shape or not isinstance(parameter.data, DTensor):
            return unsharded
        live = self.optimizer.state.get(parameter, {}).get(slot)
        if live is None and self.learned is None:
            self.learned = inert_state(self.optimizer, self.parameters).tensors
        template = live if live is not None else (self.learned or {}).get(name, {}).get(slot)
        return template if template is not None and tuple(template.shape) == tuple(entry.shape) else unsharded


def saved_groups(manifest: Manifest) -> tuple[GroupState, ...]:
    """Return a checkpoint's param groups."""
    assert manifest.optimizer is not None
    return tuple(
        GroupState(tuple(group["parameters"]), group["hyperparameters"]) for group in manifest.optimizer["groups"]
    )


def _match_members(
    live: set[str],
    saved: set[str],
    parameters: Mapping[str, nn.Parameter],
    manifest: Manifest,
    declared: Declared,
) -> Iterator[Match]:
    """Compare which parameters the optimizers update, unless the comparison of models has reported it already."""
    for name in sorted(live ^ saved):
        entry = manifest.tensors.get(MODEL + name)
        if name not in parameters or entry is None or parameters[name].requires_grad != entry.requires_grad:
            continue
        if name in saved:
            difference = f"{name} was updated by the checkpoint's optimizer and is not by this one"
            yield allowed(declared.freeze, name, difference, "resume.freeze")
        else:
            difference = f"{name} is updated by this optimizer and was not by the checkpoint's"
            yield allowed(declared.unfreeze, name, difference, "resume.unfreeze")


def refusal(path: str, refused: Sequence[str]) -> str:
    """Return the error message about a checkpoint that does not match."""
    more = f"; and {len(refused) - 4} more" if len(refused) > 4 else ""
    return f"{path} does not fit this run: {'; '.join(refused[:4])}{more}. Nothing was changed."
