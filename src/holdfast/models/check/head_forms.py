"""The Triton kernels of the head against torch's operations, on the device that trains, before step 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.models.chunks.logits import HeadWeights
from holdfast.models.heads.policy import PolicyModel
from holdfast.models.layers.family import HeadSpec
from holdfast.models.scores import separable_loss
from holdfast.types import Batch

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6}
"""Of a difference in relative norm, by the dtype of hidden states: the products' rounding is in it."""
_DIRECTIONS = 8
"""Along which the gradient of the matrix is compared: two of them whole would need memory that no step needs."""


Act = Callable[[], object]


class HeadComparison(NamedTuple):
    """What a comparison has found."""

    reason: str
    """What differs beyond the limits or failed; "" for nothing."""
    difference: float
    """The largest one."""
    times: Sequence[tuple[float, float]] = ()
    """Seconds of the kernels and of torch's operations, by round."""


def compare_forms(
    policy: PolicyModel,
    batch: Batch,
    tokens: int = 0,
    time: Callable[[Act, Act], Sequence[tuple[float, float]]] | None = None,
) -> HeadComparison:
    """Compare a loss and its gradients at the head by the kernels and by torch's operations.

    All ranks call this together; whatever fails in a kernel, on one rank or all, is returned and not raised.

    Args:
        policy: Whose head takes the kernels.
        batch: On its device.
        tokens: About how many the loss has: those of the batch, again and again.
        time: Times two actions; None where time does not matter.
    """
    results: list[HeadComparison] = []
    targets = batch.tokens.flatten()[batch.scored]

    def look(hidden: Tensor, head: HeadWeights) -> None:
        # Triton, its compiler and the driver raise errors of many kinds; ranks are within a collective call here.
        try:
            times = max(1, tokens // len(targets))
            states, labels = hidden.repeat(times, 1), targets.repeat(times)
            found = _compared(states, head, labels, policy.head_spec)
            if not found.reason and time is not None:
                forms = [partial(_numbers, states, head, labels, spec) for spec in _specs(policy.head_spec)]
                found = found._replace(times=time(*forms))
            results.append(found)
        except Exception as error:  # noqa: BLE001 - as the comment says
            lines = str(error).strip().splitlines() or [""]
            results.append(HeadComparison(f"they failed ({type(error).__name__}: {lines[0]})", float("inf")))

    policy.show_predictors(batch, look)
    return results[0]


def _specs(spec: HeadSpec) -> tuple[HeadSpec, HeadSpec]:
    """Return the specifications of the kernels and of torch's operations."""
    return spec, replace(spec, kernel_tokens=None)


def _compared(hidden: Tensor, head: HeadWeights, targets: Tensor, spec: HeadSpec) -> HeadComparison:
    ours = _numbers(hidden, head, targets, spec)
    theirs = _numbers(hidden, head, targets, _specs(spec)[1])
    differences = {name: _difference(ours[name], theirs[name]) for name in theirs}
    name = max(differences, key=lambda name: differences[name])
    largest = differences[name]
    limit = LIMITS[hidden.dtype]
    reason = "" if largest <= limit else f"{name} differ from those of torch's operations by {largest:.1e}"
    return HeadComparison(reason, largest)


def _numbers(hidden: Tensor, head: HeadWeights, targets: Tensor, spec: HeadSpec) -> dict[str, Tensor]:
    """Return what a training step would take from the head, by name."""
    states = hidden.detach().requires_grad_()
    live = HeadWeights(*(None if tensor is None else _leaf(tensor) for tensor in head))  # type: ignore[arg-type]  # a head has a matrix
    with torch.enable_grad():
        loss, scores = separable_loss(states, live, targets, _terms, spec, entropy=True)
    assert scores.entropy is not None
    leaves = {"states": states, "matrix": live.weight, "bias": live.bias}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
    gradients = torch.autograd.grad(loss, list(wanted.values()))
    numbers = {"log-probabilities": scores.logprobs, "entropies": scores.entropy, "greedy matches": scores.accuracy}
    for name, gradient in zip(wanted, gradients, strict=True):
        numbers[f"gradients of the {name}"] = gradient @ _directions(gradient) if name == "matrix" else gradient
    return {name: value.detach().double() for name, value in numbers.items()}


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _terms(logprobs: Tensor, entropy: Tensor | None, start: int, end: int) -> Tensor:
    weights = 1 + torch.arange(start, end, device=logprobs.device) % 3
    assert entropy is not None
    return -weights * (logprobs + 0.1 * entropy)


def _directions(gradient: Tensor) -> Tensor:
    """Return [H, 8] numbers of both signs, always the same."""
    size = gradient.shape[1]
    grid = torch.arange(size * _DIRECTIONS, device=gradient.device, dtype=torch.float32)
    return torch.sin(grid * 12.9898).reshape(size, _DIRECTIONS).to(gradient.dtype)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the difference in relative norm, infinite where numbers are not finite."""
    difference = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
    return difference if difference == difference else float("inf")  # noqa: PLR0124 - NaN alone differs from itself
