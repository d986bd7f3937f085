"""Make an optimizer's steps in host memory, while parameters stay on the device (ZeRO-Offload, arXiv:2101.06840).

Each trained parameter has a twin in host memory. In the backward pass of an update's last micro-batch, a gradient is
copied to the host as soon as it is whole, and freed on the device. The norm is taken and the step is made on the twins,
and the new weights are copied back. Weights are copied to the host only where something else has written them since:
a load, an average, a trial step. Between updates the optimizer holds the parameters themselves, and its state, which
stays in host memory, is theirs: a save, a load and a metric read both as without this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.optim.state import keep_state_on_host
from holdfast.parallel.shards import local_part
from holdfast.types import host_value

_CHUNK = 2**22
"""Words that a fingerprint widens at a time."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Words that a fingerprint adds up, by the bytes of a number. In words of 64 bits, a change of signs or exponents alone
would vanish modulo 2^64."""
_ODD = 6_364_136_223_846_793_005
"""Multiplier of a word's place, from a linear congruential generator (Knuth, MMIX)."""


@dataclass(eq=False, slots=True)
class _Pair:
    parameter: nn.Parameter
    twin: nn.Parameter
    """In host memory, and sharded like the parameter."""
    gradient: Tensor
    """Host memory of the twin's gradient."""
    arrived: bool = False
    """Whether the gradient of this update is there, or on its way."""
    addends: list[Tensor] = field(default_factory=list)
    """What was reduced of it later: FSDP2 reduces a unit that a pass runs twice each time."""


class HostSteps:
    """The twins of an optimizer's parameters.

    Args:
        optimizer: Over parameters on a device; it has no state yet.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        keep_state_on_host(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._pairs = {
            id(parameter): _Pair(parameter, nn.Parameter(_on_host(parameter)), _on_host(parameter))
            for parameter in parameters
        }
        self._on_device = any(local_part(parameter.data).device.type == "cuda" for parameter in parameters)
        self._stream: torch.cuda.Stream | None = None
        self._last = False
        """Whether gradients that a backward pass completes are those of an update."""
        self._written: Tensor | None = None
        """[parameters] fingerprints of the weights that the twins hold; None if they may hold others."""
        for pair in self._pairs.values():
            # FSDP2 calls these hooks when it has reduced a gradient, and `ComputeCopies` when it has added one.
            pair.parameter.register_post_accumulate_grad_hook(partial(self._completed, pair))  # type: ignore[no-untyped-call]  # same

    def start_micro_batch(self, *, first: bool, last: bool) -> None:
        """Declare which micro-batch of an update the next passes are about."""
        if first:
            self._forget()  # what a pass that failed has left
        self._last = last

    @contextmanager
    def in_place(self, optimizer: Optimizer) -> Iterator[None]:
        """Let the twins stand for an optimizer's parameters within the block, with weights and gradients.

        A gradient that is missing is one that no backward pass of the update has made.
        """
        for pair in self._pairs.values():
            if pair.parameter.grad is not None:  # of an earlier micro-batch than the last
                self._fetch_gradient(pair)
        self._fetch_weights()
        if self._stream is not None:
            self._stream.synchronize()
        for pair in self._pairs.values():
            for addend in pair.addends:
                local_part(pair.gradient).add_(local_part(addend))
            pair.twin.grad = pair.gradient if pair.arrived else None
        _exchange(optimizer, {key: pair.twin for key, pair in self._pairs.items()})
        try:
            yield
        finally:
            _exchange(optimizer, {id(pair.twin): pair.parameter for pair in self._pairs.values()})
            self._forget()

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the weights of the twins into the parameters."""
        # On the stream that computes: the next pass reads them, and the next copy to the host waits for it.
        for pair in self._pairs.values():
            local_part(pair.parameter.data).copy_(local_part(pair.twin.data), non_blocking=True)
        self._written = self._fingerprints()

    def _forget(self) -> None:
        self._last = False
        for pair in self._pairs.values():
            pair.twin.grad, pair.arrived = None, False
            pair.addends.clear()

    def _completed(self, pair: _Pair, _: Tensor) -> None:
        if self._last:
            self._fetch_gradient(pair)

    def _fetch_gradient(self, pair: _Pair) -> None:
        gradient = pair.parameter.grad
        assert gradient is not None
        if pair.arrived:
            pair.addends.append(_on_host(pair.parameter))
            self._copy(pair.addends[-1], gradient)
        else:
            self._copy(pair.gradient, gradient)
        if self._stream is not None:
            # It is freed here, before the copy has read it.
            local_part(gradient).record_stream(self._stream)
        pair.parameter.grad, pair.arrived = None, True

    def _fetch_weights(self) -> None:
        """Copy to the twins the weights that they do not hold."""
        written, self._written = self._written, None  # a step that fails leaves the twins in between
        changed = (
            [True] * len(self._pairs)
            if written is None
            else host_value(written != self._fingerprints(), "weights that a step on the host finds changed")
        )
        for pair, is_changed in zip(self._pairs.values(), changed, strict=True):
            if is_changed:
                self._copy(pair.twin, pair.parameter)

    @torch.no_grad()
    def _fingerprints(self) -> Tensor:
        # Version counters of parameters do not count writes through `data`.
        return torch.stack([_fingerprint(local_part(pair.parameter.data)) for pair in self._pairs.values()])

    @torch.no_grad()
    def _copy(self, target: Tensor, source: Tensor) -> None:
        to, of = local_part(target.detach()), local_part(source.detach())
        if not self._on_device:
            to.copy_(of)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._stream.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._stream):
            to.copy_(of, non_blocking=True)


def _fingerprint(shard: Tensor) -> Tensor:
    """Return a sum of a shard's words [] (int64), modulo 2^64, each times an odd number of its place."""
    words = shard.reshape(-1).view(_WORDS[shard.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    factors = torch.arange(min(_CHUNK, words.numel()), device=shard.device).mul_(_ODD - 1).add_(1)
    for chunk in torch.split(words, _CHUNK):
        total = total * _ODD + (chunk * factors[: chunk.numel()]).sum()
    return total


def _on_host(parameter: nn.Parameter) -> Tensor:
    """Return uninitialised host memory for a parameter's shard, sharded like it."""
    local = local_part(parameter.data)
    host = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.device.type == "cuda")
    if not isinstance(parameter.data, DTensor):
        return host
    # `from_local` would move it to the mesh's device.
    return DTensor(host, parameter.data._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _exchange(optimizer: Optimizer, others: dict[int, nn.Parameter]) -> None:
    """Put other parameters in the places of an optimizer's, with their state; the keys are identities."""
    for group in optimizer.param_groups:
        group["params"][:] = [others[id(parameter)] for parameter in group["params"]]
    # In place and in the same order: an optimizer that wraps another one shares its `state` dictionary.
    state = {others.get(id(parameter), parameter): values for parameter, values in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(state)
