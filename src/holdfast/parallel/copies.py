"""Mixed precision on one rank without FSDP2: float32 parameters, and copies of them that the passes read.

The parameters of the modules are the float32 tensors, except from the start of a forward pass to the end of its
backward pass: then the modules have copies in the compute dtype. Gradients of the copies are added to float32 gradients
of the parameters block by block, as soon as all of a block's are there, so that those in the compute dtype never exist
for the whole model at once. The numbers are those of FSDP2 on one rank, to the bit, but for the head's matrix on a GPU:
kernels sum its gradient in float32, which is given to the parameter as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from holdfast.models.names import canonical_name
from holdfast.models.scores import keep_gradients, take_wide_gradients

_ATTRIBUTE = "_holdfast_compute_copies"


@dataclass(eq=False, slots=True)
class _Pair:
    """A parameter and its copy."""

    parameter: nn.Parameter
    copy: nn.Parameter
    numbers: Tensor
    """The copy's, behind its version counter: what is written there does not count as a change of the copy."""


@dataclass(eq=False, slots=True)
class _Unit:
    """The pairs whose gradients are added together."""

    pairs: list[_Pair] = field(default_factory=list)
    ready: list[_Pair] = field(default_factory=list)
    """Those whose gradient is whole, and not added yet where it is the copy's."""
    taken: list[_Pair] = field(default_factory=list)
    """Those whose parameter has got a part of its gradient in its own dtype."""

    @property
    def trained(self) -> int:
        return sum(pair.copy.requires_grad for pair in self.pairs)


class ComputeCopies:
    """The copies of a policy's parameters in its compute dtype.

    Args:
        policy: The root; it may still be on the meta device.
        dtype: Of the copies.
        units: Names of the parameters whose gradients are added together, unit by unit.
    """

    def __init__(self, policy: nn.Module, dtype: torch.dtype, units: Iterable[tuple[str, ...]]) -> None:
        self._policy, self._dtype = policy, dtype
        self._unit_names = list(units)
        self._units: list[_Unit] = []
        self._slots: list[tuple[nn.Module, str, _Pair]] = []
        self._hooks: list[RemovableHandle] = []
        self._depth = 0
        self._in_place = False
        self._same_weights = False
        self._in_backward = False

    @property
    def tensors(self) -> list[Tensor]:
        """The copies that exist."""
        return [pair.copy for unit in self._units for pair in unit.pairs]

    def enter(self) -> None:
        """Put copies of the present weights in the places of the parameters, before a pass."""
        self._depth += 1
        if self._depth > 1:
            return
        for pair in self._present():
            if pair.copy.requires_grad != pair.parameter.requires_grad:
                pair.copy.requires_grad_(pair.parameter.requires_grad)
        for module, name, pair in self._slots:
            module._parameters[name] = pair.copy
        self._in_place = True

    def of_parameters(self) -> dict[int, Tensor]:
        """Return copies of the present weights by the identity of their parameter; later passes write them anew."""
        return {id(pair.parameter): pair.copy.detach() for pair in self._present()}

    def _present(self) -> list[_Pair]:
        """Let copies be of the present weights."""
        self.leave()  # a forward pass whose backward pass never came has left the copies in place
        if not self._slots or any(module._parameters[name] is not pair.parameter for module, name, pair in self._slots):
            self._make()  # parameters are other objects once they have left the meta device
            self._same_weights = False
        pairs = [pair for unit in self._units for pair in unit.pairs]
        if not self._same_weights:
            self.cast(pairs)
        self._same_weights = False
        return pairs

    def exit(self, result: object) -> None:
        """Put the parameters back after a pass, unless a backward pass through its result is to come."""
        self._depth -= 1
        waits = any(leaf.requires_grad for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        if self._depth == 0 and not waits:
            self.leave()

    def leave(self) -> None:
        """Put the parameters back, if copies are in their places."""
        if not self._in_place:
            return
        for module, name, pair in self._slots:
            module._parameters[name] = pair.parameter
        for unit in self._units:
            unit.ready.clear()
            unit.taken.clear()
            for pair in unit.pairs:
                pair.copy.grad = None  # only a backward pass that failed has left any
        self._in_place = self._in_backward = False

    def keep(self) -> None:
        """Declare that the next pass reads the same weights as the last one."""
        self._same_weights = True

    def free(self) -> None:
        """Free the memory of the copies until the next pass."""
        self.leave()
        # A copy's hook knows the copy, by references of C++ that the collector does not see.
        for hook in self._hooks:
            hook.remove()
        for copy in self.tensors:
            keep_gradients(copy)
        self._slots, self._units, self._hooks = [], [], []

    @torch.no_grad()
    def cast(self, pairs: list[_Pair]) -> None:
        """Write the weights into their copies."""
        # The version counters of the copies stay: two forward passes may come before the first of their backward
        # passes, and the weights are the same in both. A model that recomputes cannot do so: the end of the first
        # backward pass puts the parameters back, from which the second one would recompute.
        torch._foreach_copy_([pair.numbers for pair in pairs], [pair.parameter for pair in pairs])

    @torch.no_grad()
    def add(self, unit: _Unit) -> None:
        """Add the gradients of a unit's copies to those of the parameters, and free them."""
        narrow = [pair for pair in unit.ready if pair.copy.grad is not None]
        new = [pair for pair in narrow if pair.parameter.grad is None]
        old = [pair for pair in narrow if pair.parameter.grad is not None]
        for pair in new:
            pair.parameter.grad = torch.empty_like(pair.parameter)
        if new:
            torch._foreach_copy_(*_gradients(new))
        if old:
            torch._foreach_add_(*_gradients(old))
        for pair in unit.ready:
            pair.copy.grad = None
            # Autograd calls a leaf's hooks when it has added a gradient; nothing else would, of one that is added here.
            for hook in (pair.parameter._post_accumulate_grad_hooks or {}).values():
                hook(pair.parameter)
        unit.taken = [pair for pair in unit.taken if pair not in unit.ready]
        unit.ready.clear()

    def _make(self) -> None:
        self.free()
        unit_of = {name: index for index, names in enumerate(self._unit_names) for name in names}
        self._units = [_Unit() for _ in self._unit_names]
        pairs: dict[int, _Pair] = {}
        for name, parameter in self._policy.named_parameters():
            if parameter.is_floating_point() and parameter.ndim and parameter.dtype != self._dtype:
                copy = nn.Parameter(torch.empty_like(parameter, dtype=self._dtype))
                pair = _Pair(parameter, copy, copy.data)
                unit = self._units[unit_of[canonical_name(name)]]
                unit.pairs.append(pair)
                pairs[id(parameter)] = pair
                hook = pair.copy.register_post_accumulate_grad_hook(partial(self._arrived, unit, pair))  # type: ignore[no-untyped-call]  # torch has no types for it
                self._hooks.append(hook)
                if parameter.dtype == torch.float32:
                    take_wide_gradients(copy, partial(self.take, unit, pair))
        self._slots = [
            (module, name, pairs[id(parameter)])
            for module in self._policy.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in pairs
        ]

    def take(self, unit: _Unit, pair: _Pair, gradient: Tensor) -> None:
        """Take a gradient in float32 that is nobody else's, in place of one of the copy, whose hooks follow."""
        self._start_backward()
        if pair.parameter.grad is None:
            pair.parameter.grad = gradient
        else:
            pair.parameter.grad += gradient
        if pair not in unit.taken:
            unit.taken.append(pair)

    def _arrived(self, unit: _Unit, pair: _Pair, _: Tensor) -> None:
        self._start_backward()
        unit.ready.append(pair)
        if len(unit.ready) == unit.trained:
            self.add(unit)

    def _start_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            # FSDP2 learns by the same private call of the end of a backward pass; there is no public one.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        for unit in self._units:
            # torch calls a leaf's hooks also for a gradient that is absent, which it does not promise.
            unit.ready += [pair for pair in unit.taken if pair not in unit.ready]
            if unit.ready:  # the pass did not reach all of its parameters
                self.add(unit)
        self.leave()


def attach_copies(
    policy: nn.Module, dtype: torch.dtype, units: Iterable[tuple[str, ...]], methods: Iterable[str]
) -> None:
    """Let the passes of a policy read copies of its parameters; arguments as of `ComputeCopies`.

    Args:
        methods: Those besides `forward` that run the model or read its parameters.
    """
    copies = ComputeCopies(policy, dtype, units)
    object.__setattr__(policy, _ATTRIBUTE, copies)
    policy.register_forward_pre_hook(lambda *_: copies.enter())
    # Without `always_call` a pass that raises would leave the copies in place.
    policy.register_forward_hook(lambda _, __, result: copies.exit(result), always_call=True)
    for name in methods:
        setattr(policy, name, _reading_copies(copies, getattr(policy, name)))


def copies_of(policy: nn.Module) -> ComputeCopies | None:
    """Return the copies that the passes of a policy read; None where they read the parameters themselves, or shards."""
    copies: ComputeCopies | None = getattr(policy, _ATTRIBUTE, None)
    return copies


def _reading_copies(copies: ComputeCopies, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        result = None
        try:
            copies.enter()  # whatever it raises, such as for want of memory, `exit` undoes it
            result = method(*args, **options)
        finally:
            copies.exit(result)
        return result

    return call


def _gradients(pairs: list[_Pair]) -> tuple[list[Tensor], list[Tensor]]:
    wide = [pair.parameter.grad for pair in pairs]
    narrow = [pair.copy.grad for pair in pairs]
    return [value for value in wide if value is not None], [value for value in narrow if value is not None]
