"""The `reference` section where the reference policy is not in this run's memory, and where it is asked only once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from holdfast.config.base import ByKind, Mistake, Positive, PublicStr, Section
from holdfast.config.sections.rollout import ReferenceConfig, ReferenceSyncConfig
from holdfast.config.sections.server import ServerConfig


class ServerReferenceConfig(ServerConfig):
    """A model behind an OpenAI-compatible endpoint, such as vLLM's, that tells the log-probabilities of given tokens.

    Before step 1 its tokenizer is compared with the policy's, and what it says of a text with what the policy says.
    """

    bound: Positive | None = 0.1
    """Largest difference in nats, over the tokens of a text, from what the policy says before step 1; null: the server
    has another model by intent, and the difference is only printed."""


class _PrecomputedReference(Section):
    precompute: bool = False
    """Score all rows once before the first step, keep the numbers in a file, and train without the reference in
    memory. A later start finds the file. Not for kto, which compares with answers of
    other rows of a batch."""
    cache: PublicStr | None = None
    """File of the precomputed scores; default: `.NAME.reference` beside the run's directory. A file that was made from
    other rows, or by another model or tokenizer, is refused.
    """

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a file that nothing is kept in."""
        yield from super().mistakes()
        if self.cache is not None and not self.precompute:
            yield "cache", "nothing is kept there unless reference.precompute is true; set it, or leave cache out"


class PairReferenceConfig(_PrecomputedReference, ReferenceConfig):
    """Where the reference policy lives, and whether it is asked once for all."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield a reference that follows the policy, and was asked before the policy moved."""
        yield from super().mistakes()
        if self.sync is not None and self.precompute:
            yield "sync", "reference.precompute asks the reference once, before it follows; leave one of them out"


def sync_of(section: ReferenceConfig | ServerReferenceConfig) -> ReferenceSyncConfig | None:
    """Return how a reference follows the policy; None where it stays."""
    return section.sync if isinstance(section, ReferenceConfig) else None


class PairServerReferenceConfig(_PrecomputedReference, ServerReferenceConfig):
    """A model behind an OpenAI-compatible endpoint, such as vLLM's, that tells the log-probabilities of given tokens.

    Before step 1 its tokenizer is compared with the policy's, and what it says of a text with what the policy says.
    """


ReferenceSection = Annotated[ReferenceConfig | ServerReferenceConfig, ByKind("auto")]
PairReference = Annotated[PairReferenceConfig | PairServerReferenceConfig, ByKind("auto")]
