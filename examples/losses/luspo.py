"""Length-unbiased sequence policy optimization, as a loss of one's own.

Liu et al., "Length-Unbiased Sequence Policy Optimization" (arXiv:2602.05261): GSPO's loss of a sequence times its
length, so that a long completion counts as much per token as a short one. Use it with

    objective: {kind: path, path: losses/luspo.py:luspo}
    data: {average: sequence_mean}
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from holdfast.objectives.base import sequence_lengths
from holdfast.objectives.policy import PolicyGradient
from holdfast.objectives.surrogates import GSPO, Actions


@dataclass(frozen=True)
class LUSPO:
    """|y| times GSPO's term, in every token of the sequence y."""

    gspo: GSPO
    needs_whole_sequences: bool = True

    def terms(self, actions: Actions) -> Tensor:
        """Return [N] terms."""
        return self.gspo.terms(actions) * sequence_lengths(actions.tokens, actions.advantages)

    def sums(self, actions: Actions) -> dict[str, Tensor]:
        """Return the clipped shares, in tokens."""
        return self.gspo.sums(actions)


def luspo(low: float = 3e-4, high: float = 4e-4) -> PolicyGradient:
    """Return the loss. The bounds are those of the ratio per sequence, 1 - low and 1 + high."""
    return PolicyGradient(LUSPO(GSPO(low, high)))
