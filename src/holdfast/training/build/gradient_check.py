"""Before step 1: the gradient of every trained parameter against transformers' own, on a short document.

A right forward pass says nothing of the backward pass: our head forms gradients itself, adapters and recomputation have
theirs. Both sides go through the same shards, so a rank compares its own rows, and sums over ranks tell the angle
between two gradients and how much longer one is. Nothing stays: neither gradients nor draws from generators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.data.batches.packing import pack, to_device
from holdfast.data.batches.weights import Share
from holdfast.errors import ModelError
from holdfast.models.policy import PolicyModel
from holdfast.models.selfcheck import Sides, documents, upstream
from holdfast.models.witness import as_files_say
from holdfast.objectives.supervised import NegativeLogLikelihood
from holdfast.parallel.apply import set_last_micro_batch
from holdfast.parallel.collectives import add_over_ranks
from holdfast.parallel.shards import local_part, sharded_parameters
from holdfast.parallel.plan import ShardPlan
from holdfast.types import Example, LossSum


@dataclass(frozen=True)
class Limits:
    """How far two gradients of one parameter may differ."""

    angle: float
    """1 - cosine."""
    length: float
    """Of the ratio of their norms from 1."""
    floor: float
    """A part of the norm of the whole gradient, below which a parameter's is rounding: keys need no bias."""


_LIMITS = {
    torch.float64: Limits(1e-4, 2e-3, 1e-6),
    torch.float32: Limits(1e-4, 2e-3, 1e-6),
    torch.bfloat16: Limits(0.1, 0.1, 1e-3),
}
_ROUTED = Limits(0.5, 0.5, 1e-2)
"""In bfloat16, where rounding sends tokens to other experts, whose gradients then differ as a whole."""
_PIECE = 2**16
"""Elements whose products are added up in float32."""


@dataclass(frozen=True)
class Gradients:
    """What was compared."""

    parameters: int
    worst: float
    """The largest difference of a parameter's gradient, by angle or length."""
    name: str
    """The parameter that has it."""


def check_gradients(sides: Sides, plan: ShardPlan, *, dropout: bool) -> Gradients:
    """Compare the gradient that training would form with transformers', parameter by parameter.

    One document is trained; beside it lies another one, which must leave no trace.

    All ranks call this together, with the same documents, and find the same.

    Args:
        sides: The policy, checked forwards already, and what its files say.
        plan: How it is sharded.
        dropout: Whether it trains with dropout; it is left out of the comparison.

    Raises:
        ModelError: The gradient of a parameter differs.
    """
    policy = sides.policy
    first, _, second = documents(policy, sides.images)
    trained, other = (second, first) if sides.images is None else (first, second)
    with _nothing_kept(policy, sides.device):
        _form_ours(sides, plan, [replace(other, loss_mask=np.zeros_like(other.loss_mask)), trained], dropout=dropout)
        ours = _taken(policy)
        _form_theirs(sides, trained)
        theirs = _taken(policy)
        # [P, 3]: the product of both, and the square of each
        sums = [torch.stack([_dot(a, b), _dot(a, a), _dot(b, b)]).to(sides.device) for a, b in _pairs(ours, theirs)]
        products = add_over_ranks(torch.stack(sums)).cpu()
    return _judged(sides, list(ours), products)


def _form_ours(sides: Sides, plan: ShardPlan, examples: list[Example], *, dropout: bool) -> None:
    policy = sides.policy
    if dropout:
        policy.eval()
    else:
        policy.train()
        for module in policy.modules():
            if isinstance(module, nn.Dropout):  # of adapters, whose rate is not the model's
                module.eval()
    set_last_micro_batch(policy, plan, last=True)
    batch = pack(examples, [Share(1.0, 1.0)] * len(examples), padded=policy.padded)
    output = policy(to_device(batch, sides.device), NegativeLogLikelihood())
    assert isinstance(output, LossSum)
    torch.autograd.backward(output.loss)


def _form_theirs(sides: Sides, example: Example) -> None:
    policy = sides.policy
    policy.eval()
    with as_files_say(policy.language_model, sides.witness, sides.device):
        torch.autograd.backward(-upstream(sides, example).sum())


def _taken(policy: PolicyModel) -> dict[str, Tensor | None]:
    """Return this rank's part of every trained parameter's gradient, and leave none behind."""
    taken = {}
    for name, value in sharded_parameters(policy).items():
        if value.requires_grad:
            taken[name] = None if value.grad is None else local_part(value.grad).detach()
            value.grad = None
    return taken


def _pairs(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
    for name, mine in ours.items():
        other = theirs[name]
        like = mine if mine is not None else other
        if like is None:
            yield torch.zeros(1), torch.zeros(1)
            continue
        zero = torch.zeros_like(like)
        yield zero if mine is None else mine, zero if other is None else other


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of products in float64, of float32 sums over pieces: quick, and exact enough for long vectors."""
    wide = torch.promote_types(one.dtype, torch.float32)
    pieces = zip(torch.split(one.flatten(), _PIECE), torch.split(other.flatten(), _PIECE), strict=True)
    found = [torch.dot(a.to(wide), b.to(wide)) for a, b in pieces]
    return torch.stack(found).sum(dtype=torch.float64) if found else torch.zeros((), dtype=torch.float64)


def _judged(sides: Sides, names: list[str], products: Tensor) -> Gradients:
    routed = sides.policy.routers is not None and sides.dtype == torch.bfloat16
    limits = _ROUTED if routed else _LIMITS[sides.dtype]
    floor = limits.floor * math.sqrt(float(products[:, 1:].sum(0).max()))
    worst, where = 0.0, names[0]
    wrong: list[tuple[float, str]] = []
    for name, (product, square, other) in zip(names, products.tolist(), strict=True):
        cosine, ratio = _angle_and_length(product, math.sqrt(square), math.sqrt(other), floor)
        off = max(1 - cosine, abs(ratio - 1))
        worst, where = max((worst, where), (off, name))
        if not (1 - cosine <= limits.angle and abs(ratio - 1) <= limits.length):
            wrong.append((off, f"{name} ({ratio:.4g} times as long, cosine {cosine:.6f})"))
    if wrong:
        more = f" and of {len(wrong) - 1} more of {len(names)} parameters" if len(wrong) > 1 else ""
        raise ModelError(
            f"Gradients of {sides.policy.family.name} differ from transformers' own on the same tokens, most of "
            f"{max(wrong)[1]}{more}, while log-probabilities agree. It would train in a wrong direction; please report "
            "the architecture. model.check_gradients: false leaves this comparison out."
        )
    return Gradients(len(names), worst, where)


def _angle_and_length(product: float, mine: float, theirs: float, floor: float) -> tuple[float, float]:
    """Return the cosine of two gradients and how many times as long the first is; alike where both are rounding."""
    if math.isnan(product) or math.isnan(mine + theirs):
        return -1.0, math.inf
    if max(mine, theirs) <= floor:
        return 1.0, 1.0
    return (product / (mine * theirs), mine / theirs) if mine and theirs else (0.0, 0.0 if theirs else math.inf)


@contextmanager
def _nothing_kept(policy: PolicyModel, device: torch.device) -> Iterator[None]:
    """Put back what a backward pass leaves behind: gradients, draws, and whether modules are in training."""
    router_loss, policy.router_loss = policy.router_loss, None  # it is ours alone
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        policy.router_loss = router_loss
        for value in sharded_parameters(policy).values():
            value.grad = None
        policy.train()
