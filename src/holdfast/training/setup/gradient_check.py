"""Compare the gradient of every trained parameter with transformers' own on a short document, before step 1.

A correct forward pass does not imply a correct backward pass, since our head computes gradients itself, and adapters
and recomputation have backward passes of their own. Both sides use the same shards, so that each rank compares its own
rows; sums over ranks give the norms. Gradients and random generators are restored afterwards.

A difference has two limits, and is wrong beyond both. The first follows from the dtype. The second is several times the
spread of transformers' own gradient under perturbed roundings, since the effect of rounding depends on depth, weights
and the parameter (the exact gradient of a key's bias may be 0). The spread is measured only where a difference is
beyond the first limit. Both are asked of the whole difference and of its component along transformers' gradient:
rounding rarely scales a gradient as a whole, and a wrong factor does nothing else.

Sensitivity: in float32 a factor of 1.01 is detected, however small the gradient is compared with others. In bfloat16
rounding changes gradients by 1 to 3 %: a factor of 1.1 and a wrong sign are detected almost always, and less where
weights are so large that rounding decides the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

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

LIMITS = {torch.float64: 2e-3, torch.float32: 2e-3, torch.bfloat16: 0.05}
"""Largest difference of two gradients by dtype, as a part of the norm; normalisation layers compute in float32 in
float64 models too."""
TIMES_SPREAD = 5.0
"""How many times the spread a difference may be. Over 178 sound models of 40 architectures, up to 48 layers deep and
with weights up to 100 times as large as at a random start, none had a larger one; the largest was 3.5."""
_LARGEST_ALONG = 0.5
"""Largest part of a gradient by which rounding may lengthen or shorten it, unless rounding is all of it."""
_SMALLEST = 2.0**-23
"""Smallest norm by which a difference is judged, as a part of the whole gradient's. Where softmax is sure of one key,
queries and keys get what rounding leaves inside an attention, which no perturbation of a module's output shows."""
_PASSES = 2
"""How often the spread is measured."""
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
    def along(self) -> float:
        """Norm of the difference's component along their gradient."""
        if not self.theirs:
            return 0.0
        return abs(self.ours**2 - self.theirs**2 - self.difference**2) / (2 * self.theirs)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the gradients; 0 where one of them is 0."""
        if not self.ours or not self.theirs:
            return float(self.ours == self.theirs)
        return 1 - (self.difference**2 - (self.ours - self.theirs) ** 2) / (2 * self.ours * self.theirs)

    @property
    def ratio(self) -> float:
        """Ratio of our norm to theirs."""
        if not self.theirs:
            return math.inf if self.ours else 1.0
        return self.ours / self.theirs

    @property
    def relative(self) -> float:
        """Norm of the difference as a part of the larger norm; infinite where numbers are not finite."""
        if not math.isfinite(self.difference):
            return math.inf
        return self.difference / max(self.ours, self.theirs) if self.difference else 0.0

    def agrees(self, limit: float, spread: Spread) -> bool:
        """Return whether the difference is within a limit or several times the spread; False for NaN and infinity."""
        if not math.isfinite(self.difference):
            return False
        along = TIMES_SPREAD * spread.along
        if spread.whole < self.theirs:  # rounding that is not all of a gradient neither removes nor turns it
            along = min(along, _LARGEST_ALONG * self.theirs)
        whole = self.difference <= max(limit, TIMES_SPREAD * spread.whole)
        return whole and self.along <= max(limit, along)


class Spread(NamedTuple):
    """Largest differences of a gradient under perturbed roundings."""

    whole: float
    """Norm of the difference."""
    along: float
    """Norm of its component along the gradient, at least as expected of a random direction."""

    def or_larger(self, pair: GradientPair) -> Spread:
        """Return the larger of this spread and the difference of a pair."""
        if not math.isfinite(pair.difference):  # perturbed weights may overflow
            return self
        along = max(pair.along, pair.difference / math.sqrt(pair.elements))
        return Spread(max(self.whole, pair.difference), max(self.along, along))


_NO_SPREAD = Spread(0.0, 0.0)


@dataclass(frozen=True)
class Gradients:
    """Result of the comparison."""

    parameters: int
    worst: float
    """Largest relative difference within the limit of the dtype."""
    name: str
    """Its parameter, "" for none."""


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
        total = math.hypot(*(max(pair.ours, pair.theirs) for pair in pairs.values()))
        limit = {name: LIMITS[sides.dtype] * max(pair.theirs, _SMALLEST * total) for name, pair in pairs.items()}
        beyond = [name for name, pair in pairs.items() if not pair.agrees(limit[name], _NO_SPREAD)]
        ours.clear()  # what is measured next needs the memory
        theirs = {name: theirs[name] for name in beyond}
        spread = _spread(sides, trained, theirs) if beyond else {}
    _raise_if_wrong(sides, pairs, [name for name in beyond if not pairs[name].agrees(limit[name], spread[name])])
    worst = max((name for name in names if name not in beyond), key=lambda name: pairs[name].relative, default="")
    return Gradients(len(names), pairs[worst].relative if worst else 0.0, worst)


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


def _spread(sides: Sides, example: Example, theirs: dict[str, Tensor | None]) -> dict[str, Spread]:
    """Return the spread of transformers' gradients of some parameters over several passes."""
    spread = dict.fromkeys(theirs, _NO_SPREAD)
    relative_change = 2.0**-8 if sides.dtype == torch.bfloat16 else 2.0**-23
    for seed in range(_PASSES):
        torch.manual_seed(seed)
        with rounded_otherwise(sides.policy.language_model, relative_change):
            _form_theirs(sides, example)
        for name, pair in _gradient_pairs(sides, _take_gradients(sides.policy, theirs), theirs).items():
            spread[name] = spread[name].or_larger(pair)
    return spread


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


def _raise_if_wrong(sides: Sides, pairs: dict[str, GradientPair], wrong: list[str]) -> None:
    if not wrong:
        return
    family = sides.policy.family.name
    worst = max(wrong, key=lambda name: pairs[name].relative)
    pair = pairs[worst]
    if not math.isfinite(pair.theirs):
        raise ModelError(
            f"The gradient of {worst} is not finite in the backward pass of transformers' {family} on "
            "a short text, so that no step could be made. Look at the weights: some are too large, or not finite."
        )
    more = f" and of {len(wrong) - 1} more of {len(pairs)} parameters" if len(wrong) > 1 else ""
    raise ModelError(
        f"Gradients of {family} differ from transformers' own on the same tokens, most of {worst} "
        f"({pair.ratio:.4g} times as long, cosine {pair.cosine:.6f}){more}, while log-probabilities agree. It would "
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
