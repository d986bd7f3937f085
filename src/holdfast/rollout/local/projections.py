"""Projections of one input as one product, for steps that are recorded: query, key and value; gate and up.

A few rows leave a device waiting for the weights of each product, and for each launch. The joined product is computed
where the first of the projections is called; the others hand out what it found. What is not called on the same input is
computed by itself, so a model that this does not fit is right, and gains nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own short name
from torch import Tensor, nn

_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Children of a module that have one input, in the order in which they are called."""


class _Joint:
    """Projections of a module, and their joined product.

    Args:
        module: Whose children they are.
        names: Of the children.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.module, self.names = module, names
        self.parts: list[nn.Linear] = [getattr(module, name) for name in names]
        self.sizes = [part.out_features for part in self.parts]
        self.has_bias = any(name == "bias" for name, _ in self.parts[0].named_parameters())
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.states: Tensor | None = None
        """What the product was computed of, as long as not all of it is handed out."""
        self.values: tuple[Tensor, ...] = ()
        self.stand_ins = [_First(self), *(_Next(self, part, number) for number, part in enumerate(self.parts[1:]))]

    def fill(self, owned: Collection[int]) -> bool:
        """Take over the present weights; see `JoinedProjections.fill`."""
        moved, like = self.weight is None, self.parts[0]
        if self.weight is None:
            self.weight = like.weight.new_empty(sum(self.sizes), like.in_features)
            self.bias = like.weight.new_empty(sum(self.sizes)) if self.has_bias else None
        _join(self.weight, [part.weight for part in self.parts], owned)
        if self.bias is not None:
            _join(self.bias, [part.bias for part in self.parts], owned)
        return moved


def _join(joined: Tensor, parts: Sequence[Tensor], owned: Collection[int]) -> None:
    """Write parts side by side, and let those that are owned lie there from then on."""
    for target, part in zip(joined.split_with_sizes([len(part) for part in parts]), parts, strict=True):
        if part.data_ptr() != target.data_ptr():
            target.copy_(part)
            if id(part) in owned:
                part.data = target


class _First(nn.Module):
    """Computes the joined product.

    Args:
        joint: The projections.
    """

    def __init__(self, joint: _Joint) -> None:
        super().__init__()
        self._joint = joint

    def forward(self, states: Tensor) -> Tensor:
        """Return the first projection's part."""
        joint = self._joint
        assert joint.weight is not None
        own, *others = F.linear(states, joint.weight, joint.bias).split_with_sizes(joint.sizes, -1)
        joint.states, joint.values = states, tuple(others)
        return own


class _Next(nn.Module):
    """Hands out a part of the joined product.

    Args:
        joint: The projections.
        part: Stands for this one.
        number: Of it among those behind the first.
    """

    def __init__(self, joint: _Joint, part: nn.Linear, number: int) -> None:
        super().__init__()
        self._joint, self._number, self._is_last = joint, number, number == len(joint.parts) - 2
        self.part = part

    def forward(self, states: Tensor) -> Tensor:
        """Return what the projection gives."""
        joint = self._joint
        if joint.states is not states:
            return F.linear(states, self.part.weight, self.part.bias)
        value = joint.values[self._number]
        if self._is_last:
            joint.states, joint.values = None, ()
        return value


class JoinedProjections:
    """The projections of a model that may be joined, which are joined while a step is recorded and never else.

    Args:
        model: Whose weights may change in place and be replaced.
    """

    name = "projections"

    def __init__(self, model: nn.Module) -> None:
        self._joints = [
            _Joint(module, names) for module in model.modules() for names in _NAMES if _can_join(module, names)
        ]
        self.are_possible = self.are_sound = bool(self._joints)

    def use(self, value: int) -> None:
        """Let steps be recorded with joined projections, or for 0 with each by itself."""
        self.are_sound = bool(value)
        if not value:
            self.free()

    @torch.no_grad()
    def fill(self, owned: Collection[int]) -> bool:
        """Take over the model's present weights, if projections are joined.

        Args:
            owned: Identities of parameters that nothing shares: their memory becomes a part of the joined one.

        Returns:
            Whether memory was taken.
        """
        return sum(joint.fill(owned) for joint in self._joints) > 0 if self.are_sound else False

    def missing_bytes(self, owned: Collection[int]) -> int:
        """Return the bytes that `fill` would take beside those that it gives back."""
        if not self.are_sound:
            return 0
        parts = [part for joint in self._joints if joint.weight is None for part in joint.parts]
        return sum(part.weight.nbytes for part in parts if id(part.weight) not in owned)

    def free(self) -> None:
        """Give the memory of joined weights back."""
        for joint in self._joints:
            joint.weight = joint.bias = None

    @property
    def nbytes(self) -> int:
        """Bytes of joined weights."""
        return sum(joint.weight.nbytes for joint in self._joints if joint.weight is not None)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the model compute joined products within the block."""
        for joint in self._joints:
            joint.module._modules.update(zip(joint.names, joint.stand_ins, strict=True))
        try:
            yield
        finally:
            for joint in self._joints:
                joint.module._modules.update(zip(joint.names, joint.parts, strict=True))
                joint.states, joint.values = None, ()


def _can_join(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether a module has these projections, all plain and of inputs of one size."""
    parts = [module._modules.get(name) for name in names]
    linear = [part for part in parts if type(part) is nn.Linear]
    kinds = {(part.in_features, part.bias is None) for part in linear}
    return len(linear) == len(names) and len(kinds) == 1
