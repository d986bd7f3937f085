"""How a model's logits follow from what its output layer gives: measured, and compared with what a run computes.

`PolicyModel.upstream_head` sends a ramp through the model's own head. A scale, a soft cap and an addition each leave
their mark on it, whatever the weights are; names of fields say none of that for sure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.errors import ModelError
from holdfast.models.scores import HeadSpec

_LIMITS = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
"""Of the largest logit."""
_LINEAR = 1.0
"""Below it a cap changes what a scale makes of a number by less than its square over three squares of the cap."""


@dataclass(frozen=True)
class Rule:
    """`softcap * tanh(scale * y / softcap) + offset`, as measured."""

    scale: float
    softcap: float | None
    offset: float
    error: float
    """What it leaves unexplained, as a part of the largest logit."""

    def words(self) -> str:
        """Describe the rule."""
        if self.error > 1e-2:
            return "by no scale, soft cap or addition"
        parts = [f"times {self.scale:.4g}"] if abs(self.scale - 1) > 1e-3 else []
        parts += [] if self.softcap is None else [f"with a soft cap of {self.softcap:.4g}"]
        parts += [f"plus {self.offset:.4g}"] if abs(self.offset) > 1e-3 else []
        return ", ".join(parts) or "unchanged"


def check_head(name: str, sent: Tensor, returned: Tensor, spec: HeadSpec, dtype: torch.dtype) -> None:
    """Compare a model's head with ours.

    Args:
        name: Of the architecture.
        sent: [W], what the output layer gave.
        returned: [V], the logits that the model made of it.
        spec: What a run makes of it.
        dtype: What the model computes in.

    Raises:
        ModelError: The heads differ. The message names the rule that was measured.
    """
    if sent.shape != returned.shape:
        raise ModelError(
            f"The output layer of {name} gives {sent.numel()} numbers for a token and the model returns "
            f"{returned.numel()} logits, so probabilities would be taken over others than its own. Please report the "
            "architecture."
        )
    outputs, logits = sent.double(), returned.double()
    ours = _applied(outputs, spec.scale, spec.softcap)
    if float((ours - logits).abs().max()) > _LIMITS[dtype] * float(logits.abs().max()):
        rule = Rule(spec.scale, spec.softcap, 0.0, 0.0)
        raise ModelError(
            f"The logits of {name} follow from its output layer by another rule than Holdfast reads from its "
            f"configuration: measured, what the layer gives is returned {measured_rule(outputs, logits).words()}; "
            f"read, {rule.words()}. It would train on wrong probabilities; please report the architecture."
        )


def measured_rule(outputs: Tensor, logits: Tensor) -> Rule:
    """Return the scale, soft cap and addition that come closest; [V] each, float64, `outputs` rising."""
    middle = outputs.abs() <= _LINEAR
    if int(middle.sum()) < 2:  # a small vocabulary
        middle = outputs.abs() <= outputs.abs().sort().values[1]
    y, z = outputs[middle], logits[middle]
    offset = float(z.mean() - y.mean() * ((y - y.mean()) * (z - z.mean())).sum() / ((y - y.mean()) ** 2).sum())
    scale = float(((y - y.mean()) * (z - z.mean())).sum() / ((y - y.mean()) ** 2).sum())
    softcap = _softcap(scale, float(outputs[-1]), float(logits[-1]) - offset)
    if softcap is not None:  # the middle is bent a little too
        scale *= 1 + float((y * y).mean()) * (scale / softcap) ** 2 / 3
        softcap = _softcap(scale, float(outputs[-1]), float(logits[-1]) - offset) or softcap
    error = float(
        (_applied(outputs, scale, softcap) + offset - logits).abs().max() / logits.abs().max().clamp(min=1e-30)
    )
    return Rule(scale, softcap, offset, error)


def _applied(outputs: Tensor, scale: float, softcap: float | None) -> Tensor:
    return outputs * scale if softcap is None else softcap * (outputs * scale / softcap).tanh()


def _softcap(scale: float, output: float, logit: float) -> float | None:
    """Return the cap c for which c tanh(scale * output / c) is a logit, None where nothing bends."""
    straight = abs(scale * output)
    if not 0 < abs(logit) < 0.999 * straight:
        return None
    low, high = abs(logit), 1e4 * straight
    for _ in range(200):
        cap = math.sqrt(low * high)
        low, high = (cap, high) if cap * math.tanh(straight / cap) < abs(logit) else (low, cap)
    return math.sqrt(low * high)
