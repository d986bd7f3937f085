"""Compare the gradient of every trained parameter with transformers' own on a short document, before step 1.

A correct forward pass does not imply a correct backward pass, since our head computes gradients itself, and adapters
and recomputation have backward passes of their own. Both sides use the same shards, so that each rank compares its own
rows; sums over ranks give the angle between two gradients and the ratio of their norms. Gradients and random generators
are restored afterwards.

The effect of rounding on a gradient depends on depth, weights and the parameter (the exact gradient of a key's bias may
be 0). If two gradients differ by more than the limits, transformers' side is therefore computed again with perturbed
roundings, and the model is refused if the difference is several times the effect of these. A gradient that is a
multiple of the other one is not explained by rounding, unless rounding accounts for all of it. Gradients with a norm
below a millionth of the whole gradient's (a thousandth in bfloat16) are only checked for being a multiple.

Sensitivity: in float32 a factor of 1.01 is detected, however small the gradient is compared with others. In bfloat16
rounding changes gradients by 1 to 3 %; a factor below 1.05 is never detected, 1.2 and a wrong sign almost always. In
mixtures of experts in bfloat16, rounding sends tokens to other experts: factors are detected from 1.1 to 1.3 on, other
mistakes where gradients differ by more than half. Parameters with fewer than 32 elements allow less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.data.batches.packing import Share, pack, to_device
from holdfast.errors import ModelError
from holdfast.models.check.forward import Sides, documents, upstream
from holdfast.models.check.rounding import rounded_otherwise
from holdfast.models.check.witness import as_files_say
from holdfast.models.heads.policy import PolicyModel
from holdfast.objectives.supervised import NegativeLogLikelihood
from holdfast.parallel.collectives import add_over_ranks
from holdfast.parallel.plan import ShardPlan
from holdfast.parallel.shards import local_part, set_last_micro_batch, sharded_parameters
from holdfast.types import Example, LossSum


@dataclass(frozen=True)
class GradientLimits:
    """Limits of the difference of two gradients of a parameter, beyond which the effect of rounding is measured."""

    angle: float
    """1 - cosine."""
    length: float
    """Largest deviation of the ratio of their norms from 1."""
    factor: float
    """The same, where one gradient is a multiple of the other."""
    across: float
    """For which the part of the difference along theirs must be as many times as large as the part across."""
    relative_change: float
    """How much a number is moved to measure rounding, as a part of it."""
    floor: float
    """A part of the norm of the whole gradient: below it, only multiples are judged. Where softmax is sure of one key,
    queries and keys get what rounding leaves inside an attention; moving what modules give does not show that."""
    nothing: float = 1e-12
    """Another one: below it, squares are lost in float32, and nothing is judged."""


_LIMITS = {
    # Normalisation layers compute in float32 in float64 models too.
    torch.float64: GradientLimits(1e-5, 2e-3, 2e-3, 100, 2.0**-23, 1e-6),
    torch.float32: GradientLimits(1e-5, 2e-3, 2e-3, 100, 2.0**-23, 1e-6),
    torch.bfloat16: GradientLimits(0.01, 0.05, 0.05, 10, 2.0**-8, 1e-3),
}
_ROUTED = GradientLimits(0.5, 0.5, 0.1, 10, 2.0**-6, 1e-2)
"""In bfloat16, where rounding sends tokens to other experts, whose gradients then differ as a whole; below the floor,
one may be a single token's."""
_MANY = 32
"""Fewer elements may be multiples of each other by chance."""
_PASSES = 2
"""How often rounding is measured, if anything is beyond the limits."""
_TIMES_ROUNDING = 5.0
"""How many times the largest of these a difference may be. Over 47 sound models of 17 architectures, up to 48 layers
deep and with weights up to 100 times as large as at a random start, it was at most 3.8 times the first of them, and 1.8
times where the exact gradient is 0."""
_PIECE = 2**16
"""Elements whose products are added up in float32."""


@dataclass(frozen=True)
class GradientPair:
    """Norms of two gradients of one parameter, and of their difference."""

    ours: float
    theirs: float
    difference: float
    elements: int

    @property
    def angle(self) -> float:
        """1 - cosine, to all digits; 1 where one of them is 0."""
        if not self.ours or not self.theirs:
            return float(self.ours != self.theirs)
        return (self.difference**2 - (self.ours - self.theirs) ** 2) / (2 * self.ours * self.theirs)

    @property
    def ratio(self) -> float:
        """How many times as long ours is."""
        if not self.theirs:
            return math.inf if self.ours else 1.0
        return self.ours / self.theirs

    @property
    def apart(self) -> float:
        """The larger of two differences, by angle and by length; infinite where numbers are not finite."""
        return max(self.angle, abs(self.ratio - 1)) if self.finite else math.inf

    @property
    def finite(self) -> bool:
        """Whether all numbers of both gradients are."""
        return math.isfinite(self.difference)

    def within(self, limits: GradientLimits, total: float) -> bool:
        """Whether the gradients agree before rounding is considered; gradients that are not finite never do."""
        longest = max(self.ours, self.theirs)
        if not self.finite:
            return False
        if longest <= limits.nothing * total:
            return True
        if self.multiple(limits):
            return False
        if longest <= limits.floor * total:
            return True
        return self.angle <= limits.angle and abs(self.ratio - 1) <= limits.length

    def multiple(self, limits: GradientLimits) -> bool:
        """Whether our gradient is a multiple of theirs beyond the limits and otherwise differs little."""
        if self.elements < _MANY or not self.theirs:
            return False
        along = (self.ours**2 - self.theirs**2 - self.difference**2) / (2 * self.theirs)
        across = math.sqrt(max(0.0, self.difference**2 - along**2))
        return abs(along) > max(limits.factor * self.theirs, limits.across * across)

    def explained_by(self, rounding: float, limits: GradientLimits) -> bool:
        """Whether rounding makes the difference, as measured; of multiples, whether it makes all of the gradient.

        That is so where softmax is nearly sure of one key, and one number, what is left to the others, scales it all.
        """
        most = max(self.ours, self.theirs) if self.multiple(limits) else self.difference / _TIMES_ROUNDING
        return self.finite and most <= rounding


@dataclass(frozen=True)
class Gradients:
    """Result of the comparison."""

    parameters: int
    worst: float
    """The largest difference of a parameter's gradient, by angle or length, of those that are more than rounding."""
    name: str
    """The parameter that has it, "" for none."""


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
    trained, untrained = (second, first) if sides.images is None else (first, second)
    names = [name for name, value in sharded_parameters(policy).items() if value.requires_grad]
    if not names:
        return Gradients(0, 0.0, "")
    with restoring_gradients(policy, sides.device):
        examples = [replace(untrained, loss_mask=np.zeros_like(untrained.loss_mask)), trained]
        form_gradients(policy, sides.device, plan, examples, dropout=dropout)
        ours = _take_gradients(policy, names)
        _form_theirs(sides, trained)
        theirs = _take_gradients(policy, names)
        pairs = _gradient_pairs(sides, ours, theirs)
        limits = _limits_of(sides)
        total = math.hypot(*(max(pair.ours, pair.theirs) for pair in pairs.values()))
        beyond = [name for name, pair in pairs.items() if not pair.within(limits, total)]
        ours.clear()  # what is measured next needs the memory
        theirs = {name: theirs[name] for name in beyond}
        rounding = _rounding(sides, trained, theirs, limits.relative_change) if beyond else {}
    _raise_if_wrong(sides, pairs, [name for name in beyond if not pairs[name].explained_by(rounding[name], limits)])
    worst = max((name for name in names if name not in beyond), key=lambda name: pairs[name].apart, default="")
    return Gradients(len(names), pairs[worst].apart if worst else 0.0, worst)


def form_gradients(
    policy: PolicyModel, device: torch.device, plan: ShardPlan, examples: list[Example], *, dropout: bool
) -> float:
    """Form the gradients of a micro-batch as training would, without dropout, and return its loss.

    All ranks call this together.

    Args:
        policy: The model.
        device: Its device.
        plan: How it is sharded.
        examples: The micro-batch.
        dropout: Whether it trains with dropout.
    """
    if dropout:
        policy.eval()
    else:
        policy.train()
        for module in policy.modules():
            if isinstance(module, nn.Dropout):  # of adapters, whose rate is not the model's
                module.eval()
    set_last_micro_batch(policy, plan, last=True)
    batch = pack(examples, [Share(1.0, 1.0)] * len(examples), padded=policy.padded)
    output = policy(to_device(batch, device), NegativeLogLikelihood())
    assert isinstance(output, LossSum)
    torch.autograd.backward(output.loss)
    return float(output.loss.detach())


def _form_theirs(sides: Sides, example: Example) -> None:
    policy = sides.policy
    policy.eval()
    with as_files_say(policy.language_model, sides.witness, sides.device):
        torch.autograd.backward(-upstream(sides, example).sum())


def _take_gradients(policy: PolicyModel, names: Collection[str]) -> dict[str, Tensor | None]:
    """Return this rank's part of the gradients of parameters, and leave no gradient behind."""
    gradients = {}
    for name, value in sharded_parameters(policy).items():
        if name in names:
            gradients[name] = None if value.grad is None else local_part(value.grad).detach()
        value.grad = None
    return gradients


def _rounding(
    sides: Sides, example: Example, theirs: dict[str, Tensor | None], relative_change: float
) -> dict[str, float]:
    """Return how far rounding moves transformers' gradients of some parameters: the largest of several passes."""
    largest = dict.fromkeys(theirs, 0.0)
    for seed in range(_PASSES):
        torch.manual_seed(seed)
        with rounded_otherwise(sides.policy.language_model, relative_change):
            _form_theirs(sides, example)
        for name, pair in _gradient_pairs(sides, _take_gradients(sides.policy, theirs), theirs).items():
            largest[name] = max(largest[name], pair.difference)
    return largest


def _gradient_pairs(
    sides: Sides, ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]
) -> dict[str, GradientPair]:
    """Return norms over all ranks, by parameter."""
    squares = torch.stack([_squares(ours[name], theirs[name]).to(sides.device) for name in theirs])  # [P, 3]
    norms = add_over_ranks(squares).sqrt().tolist()
    parameters = sharded_parameters(sides.policy)
    return {
        name: GradientPair(ours_norm, theirs_norm, difference, parameters[name].numel())
        for name, (ours_norm, theirs_norm, difference) in zip(theirs, norms, strict=True)
    }


def _squares(ours: Tensor | None, theirs: Tensor | None) -> Tensor:
    """Return [3] sums of squares in float64: of ours, of theirs, of the difference.

    They are added up in float32 over pieces: quick, and exact enough for long vectors.
    """
    either = theirs if ours is None else ours
    if either is None or not either.numel():
        return torch.zeros(3, dtype=torch.float64)
    wide = torch.promote_types(either.dtype, torch.float32)
    zero = torch.zeros_like(either) if ours is None or theirs is None else either
    pieces = [torch.split((zero if side is None else side).flatten(), _PIECE) for side in (ours, theirs)]
    sums = []
    for a, b in zip(*pieces, strict=True):
        ours_chunk, theirs_chunk = a.to(wide), b.to(wide)
        difference = ours_chunk - theirs_chunk
        sums.append(
            torch.stack(
                [
                    torch.dot(ours_chunk, ours_chunk),
                    torch.dot(theirs_chunk, theirs_chunk),
                    torch.dot(difference, difference),
                ]
            )
        )
    return torch.stack(sums).sum(0, dtype=torch.float64)


def _limits_of(sides: Sides) -> GradientLimits:
    routed = sides.policy.routers is not None and sides.dtype == torch.bfloat16
    return _ROUTED if routed else _LIMITS[sides.dtype]


def _raise_if_wrong(sides: Sides, pairs: dict[str, GradientPair], wrong: list[str]) -> None:
    if not wrong:
        return
    family = sides.policy.family.name
    worst = max(wrong, key=lambda name: pairs[name].apart)
    pair = pairs[worst]
    if not math.isfinite(pair.theirs):
        raise ModelError(
            f"The gradient of {worst} is not finite in the backward pass of transformers' {family} on "
            "a short text, so that no step could be made. Look at the weights: some are too large, or not finite."
        )
    more = f" and of {len(wrong) - 1} more of {len(pairs)} parameters" if len(wrong) > 1 else ""
    raise ModelError(
        f"Gradients of {family} differ from transformers' own on the same tokens, most of {worst} "
        f"({pair.ratio:.4g} times as long, cosine {1 - pair.angle:.6f}){more}, while log-probabilities agree. It would "
        "train in a wrong direction; please report the architecture. model.check_gradients: false leaves this "
        "comparison out."
    )


@contextmanager
def restoring_gradients(policy: PolicyModel, device: torch.device) -> Iterator[None]:
    """Put back what a backward pass leaves behind: gradients, draws, and whether modules are in training."""
    router_loss, policy.router_loss = policy.router_loss, None  # it is ours alone
    # Without a list, `fork_rng` initialises and copies the generator of every GPU of the machine.
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        policy.router_loss = router_loss
        for value in sharded_parameters(policy).values():
            value.grad = None
        policy.train()
